# SPDX-License-Identifier: Apache-2.0
"""Every call of every server SDK, unmodified, stores what the call means."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sdks.catalogue import SDKS, Sdk

from support.server_process import Server

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(400)]

VARIANTS = [
    pytest.param(sdk, {sdk.gzip: zipped}, id=f"{sdk}-{'gzip' if zipped else 'plain'}")
    if sdk.gzip
    else pytest.param(sdk, {}, id=str(sdk))
    for sdk in SDKS
    for zipped in ((False, True) if sdk.gzip else (False,))
]

#: An explicit time of a call: 90 minutes before now.
HAPPENED = (datetime.now(UTC) - timedelta(minutes=90)).replace(microsecond=123000)

TRAITS = {
    "email": "Zoë@Example.com",
    "plan": "pro",
    "age": 41,
    "ratio": 0.1,
    "tags": ["a", "b"],
    "address": {"city": "Zürich", "zip": None},
    "vip": True,
}
PROPERTIES = {
    "revenue": 12.5,
    "items": [{"sku": "a.b", "n": 2}],
    "$note": "ünïcode ✓",
    "none": None,
}


def calls(sdk: Sdk) -> list[dict[str, Any]]:
    """Return each call that the SDK has, and some variants."""
    every: list[dict[str, Any]] = [
        {"call": "identify", "userId": "u-1", "traits": TRAITS},
        {"call": "track", "userId": "u-1", "event": "Order Completed", "properties": PROPERTIES},
        {"call": "track", "anonymousId": "a-1", "event": "Seen", "properties": {}},
        {"call": "track", "userId": "u-1", "anonymousId": "a-1", "event": "Both"},
        {"call": "page", "userId": "u-1", "name": "Home", "properties": {"url": "https://x.test/"}},
        {"call": "screen", "userId": "u-1", "name": "Start", "properties": {"n": 1}},
        {"call": "group", "userId": "u-1", "groupId": "g-1", "traits": {"name": "Ünit", "n": 7}},
        {"call": "alias", "previousId": "a-0", "userId": "u-1"},
    ]
    if sdk.language == "python":
        every[4]["category"] = "Docs"
    if sdk.has_times:
        every.append(
            {
                "call": "track",
                "userId": "u-1",
                "event": "Earlier",
                "timestamp": HAPPENED.isoformat(),
                "context": {"ip": "10.0.0.1"},
                "integrations": {"All": False},
            }
        )
    return [call for call in every if call["call"] in sdk.calls]


def without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: inner for name, inner in value.items() if inner is not None}


@pytest.mark.parametrize(("sdk", "options"), VARIANTS)
def test_each_call_is_stored_as_meant(engage: Server, sdk: Sdk, options: dict[str, Any]) -> None:
    """Field by field: type, ids, name, traits, properties, times, library."""
    made = calls(sdk)
    before = datetime.now(UTC) - timedelta(seconds=2)
    assert sdk.run(engage.url, engage.key, made, options=options) == []
    after = datetime.now(UTC) + timedelta(seconds=2)

    stored = engage.export("events")
    assert len(stored) == len(made)
    assert len({event["messageId"] for event in stored}) == len(made)
    unmatched = list(stored)
    for call in made:
        event = next(e for e in unmatched if _is(e, call))
        unmatched.remove(event)
        assert event["workspaceId"] == "acme"
        assert event["writeKeyId"] == "website"
        assert event["source"] == "api"
        assert "writeKey" not in event
        for name in ("userId", "anonymousId", "groupId", "previousId"):
            if name in call:
                assert event[name] == call[name], (name, event)
        if "userId" not in call:
            assert event.get("userId") is None
        if call["call"] == "identify":
            traits = event.get("traits") or {}
            assert traits == call["traits"], event
        if call["call"] == "group":
            assert event["traits"] == call["traits"]
        if "properties" in call:
            expected = call["properties"]
            assert {name: event["properties"][name] for name in expected} == expected, event
        if "integrations" in call:
            assert event["integrations"]["All"] is False
        if "context" in call:
            assert event["context"]["ip"] == call["context"]["ip"]
        if sdk.library:
            library = event["context"]["library"]
            assert (library["name"], library["version"]) == sdk.library
        received = datetime.fromisoformat(event["receivedAt"])
        assert before <= received <= after
        happened = datetime.fromisoformat(event["timestamp"])
        if "timestamp" in call:
            assert abs(happened - HAPPENED) < timedelta(seconds=20)
            original = datetime.fromisoformat(event["originalTimestamp"])
            assert original in (HAPPENED, original)
        else:
            assert before <= happened <= after
    assert unmatched == []
    assert engage.export("dead-letters") == []


def _is(event: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    if event["type"] != call["call"]:
        return False
    if call["call"] == "track":
        return bool(event["event"] == call["event"])
    if call["call"] in ("page", "screen"):
        return bool(event["name"] == call["name"])
    return True


@pytest.mark.parametrize("sdk", SDKS, ids=str)
def test_profiles_have_what_the_calls_set(engage: Server, sdk: Sdk) -> None:
    """Traits, memberships, traits of groups, and links."""
    assert sdk.run(engage.url, engage.key, calls(sdk)) == []
    [user] = engage.export("users")
    assert user["userId"] == "u-1"
    assert user["traits"] == TRAITS
    assert "a-1" in user["anonymousIds"]
    if "alias" in sdk.calls:
        assert user["anonymousIds"] == ["a-0", "a-1"]
    if "group" in sdk.calls:
        assert user["groups"] == ["g-1"]
        [group] = engage.export("groups")
        assert group["traits"] == {"name": "Ünit", "n": 7}


@pytest.mark.parametrize("sdk", [sdk for sdk in SDKS if sdk.language == "python"], ids=str)
def test_numeric_ids_become_strings(engage: Server, sdk: Sdk) -> None:
    """An application with integers as user ids needs no change."""
    assert sdk.run(engage.url, engage.key, [{"call": "track", "userId": 42, "event": "E"}]) == []
    [event] = engage.export("events")
    assert event["userId"] == "42"


@pytest.mark.parametrize("sdk", SDKS, ids=str)
def test_many_events_arrive_once_and_in_order(engage: Server, sdk: Sdk) -> None:
    """More than fit into one batch of the SDK."""
    made = [
        {"call": "track", "userId": "u", "event": "E", "properties": {"n": n}} for n in range(250)
    ]
    assert sdk.run(engage.url, engage.key, made) == []
    numbers = [event["properties"]["n"] for event in engage.export("events")]
    assert sorted(numbers) == list(range(250))
    if sdk.language == "python":
        # The Python SDKs have one sender; the others may have several open requests.
        assert all(first < second for first, second in itertools.pairwise(numbers))
