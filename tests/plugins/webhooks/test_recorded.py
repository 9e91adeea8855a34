# SPDX-License-Identifier: Apache-2.0
"""Recorded deliveries of every provider, signed and forged, and recorded translations."""

from __future__ import annotations

from typing import Any

from engage.api import Fetch, NothingSigned, SignatureMismatch
from engage.deliveries.fetcher import Fetcher, FetchError
from engage.deliveries.receive import translate, verify
from engage.subscriptions.recipients import without_lookup
from support.provider_cases import CASES
from support.providers import MAPPINGS, VECTORS, assert_matches, delivery_of, make, request_of


class Offline(Fetcher):
    """A fetcher that reaches nothing."""

    async def get(self, fetch: Fetch, hosts: Any) -> bytes:
        raise FetchError("there is no network")


def test_all_recordings_are_there() -> None:
    assert (len(VECTORS), len(MAPPINGS)) == (146, 52)


async def status_of(vector: dict[str, Any]) -> tuple[int, bool]:
    """Return the status of a server's answer, and whether it can translate the delivery."""
    provider = make(vector["provider"], vector["config"], url=vector["url"])
    request = request_of(vector)
    try:
        if await verify(provider, request, Offline()) is not None:
            return 200, True
    except NothingSigned:
        return 400, False
    except SignatureMismatch:
        return 401, False
    return 200, not translate(provider, request, 64)[1]


async def test_a_recorded_delivery_is_answered_as_recorded() -> None:
    wrong = []
    for vector in VECTORS:
        status, readable = await status_of(vector)
        expected = 401 if vector["expected"] == "invalid" else 200
        if status != vector.get("expected_status", expected):
            wrong.append(f"{vector['id']}: {status}")
        if vector["expected"] == "unreadable" and readable:
            wrong.append(f"{vector['id']} is translated")
    assert wrong == []


def test_a_recorded_payload_becomes_the_recorded_events() -> None:
    # The first case of a provider is the last that is set.
    cases = {
        name.partition("-")[0].replace("_", "-"): case for name, case in [*CASES.items()][::-1]
    }
    cases["segment"] = CASES["segment-SegmentBatch"]
    wrong = []
    for mapping in MAPPINGS:
        provider = make(mapping["provider"], cases[mapping["provider"]].options)
        request = delivery_of(mapping["provider"], mapping["input"])
        translation, problems = translate(provider, request, 64)
        documents = [without_lookup(event) for event in translation.events]
        try:
            assert not problems
            for document, expected in zip(documents, mapping["expected_events"], strict=True):
                assert_matches(document, {"userId": None, "anonymousId": None, **expected})
        except (AssertionError, ValueError) as error:
            wrong.append((mapping["provider"], mapping["description"], str(error)))
    assert wrong == []
