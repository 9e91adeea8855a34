# SPDX-License-Identifier: Apache-2.0
"""What is kept of a refused event, and when an event with a stored message id is a conflict."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson

from engage.api import DeadLetter
from engage.errors import ApiError, Problem
from engage.pipeline.dead_letters import (
    MAX_ITEM,
    Conflict,
    envelope_of,
    find_conflict,
    letter_id,
    letter_of,
)
from engage.pipeline.normalise import Arrival, Envelope
from support.each import each
from support.pipeline import NOW, limit, make_event

ERROR = ApiError("invalid_payload", "event: is required", errors=[Problem("/event", "is required")])


def arrival(workspace: str = "acme", origin: str = "api", now: int = NOW) -> Arrival:
    return Arrival(
        workspace_id=workspace,
        origin=origin,
        write_key_id="website",
        received_at=now,
        event_limit=limit(65536),
    )


def refused(item: Any, problem: ApiError, at: Arrival) -> DeadLetter:
    return letter_of(item, problem, at, "track", b"{}")


def test_a_dead_letter_has_the_refused_event() -> None:
    item = {"userId": 7, "anonymousId": "a", "messageId": "m", "writeKey": "key-1", "x": [1]}
    letter = refused(item, ERROR, arrival())
    assert orjson.loads(letter.item) == {
        "userId": 7,
        "anonymousId": "a",
        "messageId": "m",
        "x": [1],
    }
    assert (letter.workspace_id, letter.origin, letter.write_key_id) == ("acme", "api", "website")
    assert (letter.user_id, letter.anonymous_id, letter.message_id) == ("7", "a", "m")
    assert (letter.reason, letter.message) == ("invalid_payload", "event: is required")
    assert letter.errors == [{"pointer": "/event", "message": "is required"}]
    assert letter.received_at == NOW
    assert not letter.truncated
    assert item["writeKey"] == "key-1"


def test_the_id_of_a_letter_does_not_depend_on_its_envelope() -> None:
    """Stores have letters without an envelope; an SDK may send an item in another batch."""
    item = {"userId": "u"}
    envelope = Envelope(context={"a": 1})
    at = dataclasses.replace(arrival(), envelope=envelope, idempotency_key="k")
    letter = letter_of(item, ERROR, at, "batch", envelope_of(at), 3)
    assert letter.id == refused(item, ERROR, arrival()).id


@each(
    "item", [5, None, [], "x", {"userId": [], "anonymousId": True, "messageId": {}}, {"userId": ""}]
)
def test_an_item_that_is_not_an_event_has_no_ids(item: Any) -> None:
    letter = refused(item, ERROR, arrival())
    assert letter.user_id is letter.anonymous_id is letter.message_id is None
    assert orjson.loads(letter.item) == item


def test_a_retry_is_the_same_letter() -> None:
    item = {"userId": "u", "sentAt": "2026-11-21T09:30:00Z"}
    letter = refused(item, ERROR, arrival())
    again = refused({**item, "sentAt": "2026-11-21T09:31:00Z"}, ERROR, arrival(now=NOW + 1))
    assert again.id == letter.id
    others = [
        refused(item, ERROR, arrival("other")),
        refused(item, ERROR, arrival(origin="stripe")),
        refused({"userId": "v"}, ERROR, arrival()),
        refused([item], ERROR, arrival()),
    ]
    assert len({letter.id, *(other.id for other in others)}) == 5


def test_the_id_of_a_letter_is_a_hash_of_length_prefixed_parts() -> None:
    assert letter_id("ab", "c", b"d") != letter_id("a", "bc", b"d")
    assert letter_id("a", "b", b"cd") != letter_id("a", "bc", b"d")
    assert letter_id("a", "b", b"c", b"d") != letter_id("a", "b", b"cd")


def test_the_letters_of_refused_items_keep_their_ids() -> None:
    """Stores have letters with these ids."""
    letter = refused({"userId": "u", "sentAt": "2026-11-21T09:30:00Z"}, ERROR, arrival())
    assert letter.id == "bc8a70221170d0e2729a172986bf66d7"


def test_a_long_item_is_cut_between_characters() -> None:
    item = {"a": "é" * MAX_ITEM}
    letter = refused(item, ERROR, arrival())
    assert letter.truncated
    assert MAX_ITEM - 3 < len(letter.item) <= MAX_ITEM
    letter.item.decode()
    refused({"ab": "é" * MAX_ITEM}, ERROR, arrival()).item.decode()
    # two that differ only after the cut are two letters
    assert refused({"a": "é" * MAX_ITEM + "x"}, ERROR, arrival()).id != letter.id
    exact = {"a": "x" * (MAX_ITEM - 8)}
    assert len(refused(exact, ERROR, arrival()).item) == MAX_ITEM
    assert not refused(exact, ERROR, arrival()).truncated


def test_long_ids_are_cut() -> None:
    letter = refused({"userId": "u" * 1000, "messageId": "m" * 1000}, ERROR, arrival())
    assert letter.user_id == "u" * 512
    assert letter.message_id == "m" * 256


def test_an_item_that_is_not_json_is_kept_as_text() -> None:
    assert b"object" in refused({"a": object()}, ERROR, arrival()).item


STORED = {
    "type": "track",
    "userId": "u",
    "event": "e",
    "properties": {"a": 1, "b": [1.5]},
    "originalTimestamp": "2026-11-21T09:30:00Z",
    "context": {"x": 1},
    "receivedAt": "2026-11-21T09:30:00.000Z",
}


def compare(new: dict[str, Any], old: dict[str, Any] = STORED) -> list[str]:
    conflict = find_conflict(make_event("m", body=orjson.dumps(new)), orjson.dumps(old))
    return [] if conflict is None else list(conflict.fields)


def marked(traits: Any, *dropped: Any) -> dict[str, Any]:
    return {**STORED, "traits": traits, "context": {"engage": {"droppedTraits": [*dropped]}}}


@each(
    "new, old, fields",
    [
        ({**STORED, "traits": {"plan": "pro"}}, marked({}, "plan"), []),
        (marked({}, "plan"), {**STORED, "traits": {"plan": "pro"}}, []),
        (marked({}, "plan"), STORED, []),
        (marked({"a": 1}, "plan"), marked({"a": 1, "plan": 2}, "email"), []),
        (marked({"a": 1}, "plan"), {**STORED, "traits": {"a": 2, "plan": 1}}, ["traits"]),
        (marked({}, "plan"), {**STORED, "traits": {"Plan": 1}}, ["traits"]),
        (marked({"a": 1}, "plan"), STORED, ["traits"]),
        # What a client of an earlier version may have sent there.
        (marked({"a": 1}, 5, None), marked({"a": 2}), ["traits"]),
        ({**STORED, "context": {"engage": 1}}, {**STORED, "context": None}, []),
    ],
)
def test_a_removed_trait_is_not_compared(
    new: dict[str, Any], old: dict[str, Any], fields: list[str]
) -> None:
    assert compare(new, old) == fields


@each(
    "changed",
    [
        *({}, {"receivedAt": "2027-01-01T00:00:00.000Z", "timestamp": "x"}),
        {"context": {"x": 2}, "sentAt": "x", "integrations": {"A": True}},
        {"properties": {"b": [1.5], "a": 1}},
        {"traits": {}},
        {"traits": None},
        # A time that differs by at most a day, in either direction.
        {"originalTimestamp": "2026-11-21T09:30:00.001Z"},
        {"originalTimestamp": "2026-11-22T09:30:00Z"},
        {"originalTimestamp": "2026-11-20T10:30:00+01:00"},
    ],
)
def test_the_same_event_again_is_a_duplicate(changed: dict[str, Any]) -> None:
    assert compare({**STORED, **changed}) == []
    assert compare(STORED, {**STORED, **changed}) == []


@each(
    "received, fields",
    [
        ("2026-11-22T09:30:00.000Z", []),
        ("2026-11-22T09:30:00.001Z", ["originalTimestamp"]),
    ],
)
def test_an_event_without_a_time_has_that_of_its_arrival(received: str, fields: list[str]) -> None:
    undated = {name: STORED[name] for name in STORED if name != "originalTimestamp"}
    undated |= {"receivedAt": received, "timestamp": received}
    assert compare(undated) == compare(STORED, undated) == fields


@each(
    "changed, fields",
    [
        *(({"type": "page"}, ["type"]), ({"userId": "v"}, ["userId"])),
        *(({"anonymousId": "a"}, ["anonymousId"]), ({"groupId": "g"}, ["groupId"])),
        *(({"previousId": "p"}, ["previousId"]), ({"event": "f", "name": "n"}, ["event", "name"])),
        ({"traits": {"a": 1}}, ["traits"]),
        ({"properties": {"a": True, "b": [1.5]}}, ["properties"]),
        ({"properties": {"a": 1.0, "b": [1.5]}}, ["properties"]),
        ({"properties": {"a": 1}}, ["properties"]),
        ({"originalTimestamp": "2026-11-22T09:30:00.001Z"}, ["originalTimestamp"]),
        ({"originalTimestamp": "2026-11-20T09:29:59.999Z"}, ["originalTimestamp"]),
        ({"originalTimestamp": "soon"}, ["originalTimestamp"]),
        (
            {"originalTimestamp": "2026-11-21T09:30:01Z", "properties": {}},
            ["properties", "originalTimestamp"],
        ),
    ],
)
def test_another_event_under_the_same_id_is_a_conflict(
    changed: dict[str, Any], fields: list[str]
) -> None:
    assert compare({**STORED, **changed}) == fields
    assert compare(STORED, {**STORED, **changed}) == fields
    conflict = Conflict(fields)
    assert conflict.code == "message_id_conflict"
    assert fields[0] in conflict.message
    assert [problem.pointer for problem in conflict.errors] == [f"/{field}" for field in fields]
