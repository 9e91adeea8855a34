# SPDX-License-Identifier: Apache-2.0
"""The records of a log: every event and dead letter survives them, and damage is noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.api import (
    MAX_TIME,
    DamagedRecord,
    DeadLetter,
    Event,
    LogRecord,
    UnknownRecord,
    UnloggableEvent,
    is_restated,
    record_of,
    unpack,
)
from engage.testing import event, letter
from support.each import each, variants

#: Text as it is in UTF-8: without lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
OPTIONAL = st.none() | TEXT
TIME = st.integers(0, MAX_TIME)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
EVENTS = st.builds(
    Event,
    workspace_id=TEXT,
    origin=TEXT,
    message_id=TEXT,
    type=TEXT,
    user_id=OPTIONAL,
    anonymous_id=OPTIONAL,
    name=OPTIONAL,
    received_at=TIME,
    timestamp=TIME,
    body=st.dictionaries(TEXT, JSON, max_size=5).map(orjson.dumps),
)
LETTERS = st.builds(
    DeadLetter,
    id=TEXT,
    workspace_id=TEXT,
    origin=TEXT,
    write_key_id=OPTIONAL,
    user_id=OPTIONAL,
    anonymous_id=OPTIONAL,
    message_id=OPTIONAL,
    reason=TEXT,
    message=TEXT,
    errors=st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2),
    item=st.binary(max_size=50),
    truncated=st.booleans(),
    headers=st.lists(st.tuples(TEXT, TEXT), max_size=3),
    received_at=TIME,
    operation=OPTIONAL,
    envelope=st.none() | st.binary(max_size=20),
)


@given(EVENTS | LETTERS)
def test_every_item_survives(item: Event | DeadLetter) -> None:
    record = record_of(item)
    assert unpack(record) == item
    assert not is_restated(record)
    # What another log returns may be a copy of it.
    copy = LogRecord(key=record.key, value=bytes(record.value), headers=dict(record.headers))
    assert unpack(copy) == item
    assert record.size == len(record.key) + len(record.value) + sum(
        len(name.encode()) + len(value) for name, value in record.headers.items()
    )


@given(EVENTS, st.booleans())
def test_a_record_keeps_whether_its_event_is_restated(item: Event, restated: bool) -> None:
    record = record_of(item, restated=restated)
    assert is_restated(record) is restated
    assert unpack(record) == item


def test_the_format_stays() -> None:
    """What is in a log now, and what other programs read, does not change."""
    record = record_of(event("m1", user_id="ann", at=5, received=7))
    assert record.key == b"acme:ann"
    assert record.value == (
        b'{"type":"track","messageId":"m1","userId":"ann","workspaceId":"acme","event":"Clicked"}'
    )
    assert record.headers == {
        "engage": b"event/1",
        "meta": b'{"origin":"api","receivedAt":1735689600007,"timestamp":1735689600005,'
        b'"type":"track","messageId":"m1","workspaceId":"acme","userId":"ann",'
        b'"anonymousId":null,"name":"Clicked"}',
    }
    dead = record_of(letter("l1", item=b"\xff", envelope=b"{}", headers=[("a", "b")]))
    assert dead.key == b"acme:l1"
    assert dead.headers == {"engage": b"letter/1"}
    assert orjson.loads(dead.value) == {
        "id": "l1",
        "workspace_id": "acme",
        "origin": "api",
        "write_key_id": "website",
        "user_id": None,
        "anonymous_id": "visitor",
        "message_id": "m",
        "reason": "invalid_payload",
        "message": "userId: too long",
        "errors": [{"pointer": "/userId", "message": "too long"}],
        "item": "/w==",
        "truncated": False,
        "headers": [["a", "b"]],
        "received_at": 1735689600000,
        "operation": None,
        "envelope": "e30=",
    }


def test_events_of_a_user_have_one_key() -> None:
    key = record_of(event("a", user_id="ann", anonymous_id="v1")).key
    assert record_of(event("b", user_id="ann", anonymous_id="v2", type="page")).key == key
    assert record_of(event("c", user_id="bob", anonymous_id="v1")).key != key
    assert record_of(event("d", user_id="ann", workspace="other")).key != key
    assert record_of(event("e", anonymous_id="v1")).key == b"acme:v1"


@each(
    "item",
    [
        *(
            dataclasses.replace(event("m", user_id="ann"), **fields)
            for name in "message_id user_id anonymous_id name origin workspace_id".split()
            for fields in variants(**{name: ["a\ud800"]})
        ),
        *(letter("l", **fields) for fields in variants(user_id=["a\udfff"], message=["a\udfff"])),
        *(letter("l", headers=[("a", "\ud800")]), letter("l", errors=[{"pointer": "\ud800"}])),
    ],
)
def test_a_lone_surrogate_cannot_be_in_a_record(item: Any) -> None:
    with pytest.raises(UnloggableEvent, match="lone surrogate"):
        record_of(item)


@each(
    "headers",
    [
        *({}, {"ENGAGE": b"event/1"}),
        *variants(engage=(b"", b"event/2", b"event", b"EVENT/1", b"profile/1", b"\xff")),
    ],
)
def test_a_record_of_another_kind_or_version_is_unknown(headers: dict[str, bytes]) -> None:
    known = record_of(event("m"))
    with pytest.raises(UnknownRecord):
        unpack(dataclasses.replace(known, headers={"meta": known.headers["meta"], **headers}))
    with pytest.raises(UnknownRecord):
        unpack(LogRecord(key=b"", value=b"\xff", headers=headers))


def changed(original: bytes, **members: Any) -> bytes:
    """Return a JSON object with other members; ``...`` leaves a member out."""
    document = {**orjson.loads(original), **members}
    return orjson.dumps({name: value for name, value in document.items() if value is not ...})


@each(
    "members",
    variants(
        origin=[...],
        messageId=(..., None, 1),
        workspaceId=[["acme"]],
        type=[{}],
        receivedAt=("1735689600000", 1.5, True),
        timestamp=[...],
        userId=[1],
        name=[["x"]],
    ),
)
def test_damaged_metadata_is_noticed(members: dict[str, Any]) -> None:
    record = record_of(event("m"))
    meta = changed(record.headers["meta"], **members)
    with pytest.raises(DamagedRecord):
        unpack(dataclasses.replace(record, headers={**record.headers, "meta": meta}))


@each("meta", [None, b"", b"{", b"[]", b"null", b'"origin"', b"\xff"])
def test_metadata_must_be_an_object(meta: bytes | None) -> None:
    headers = {"engage": b"event/1"} if meta is None else {"engage": b"event/1", "meta": meta}
    with pytest.raises(DamagedRecord):
        unpack(LogRecord(key=b"acme:v", value=b"{}", headers=headers))


@each("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b'{"a":"\xff"}'])
def test_a_body_must_be_an_object(body: bytes) -> None:
    """A store that has another one could not be exported."""
    with pytest.raises(DamagedRecord):
        unpack(dataclasses.replace(record_of(event("m")), value=body))
    with pytest.raises(DamagedRecord):
        unpack(dataclasses.replace(record_of(letter("l")), value=body))


@each(
    "members",
    variants(
        id=(..., 1),
        item=(..., "not Base64!", 5, None),
        envelope=("?", []),
        headers=(..., None, [["a"]], [["a", 1]], 5),
        errors=("text", ["text"], [{"pointer": 1}]),
        reason=[None],
        workspace_id=[3],
        truncated=[1],
        received_at=("now", ...),
        user_id=[5],
        operation=[[]],
    ),
)
def test_a_damaged_letter_is_noticed(members: dict[str, Any]) -> None:
    record = record_of(letter("l"))
    with pytest.raises(DamagedRecord) as raised:
        unpack(dataclasses.replace(record, value=changed(record.value, **members)))
    assert "\n" not in str(raised.value)


@given(st.sampled_from([b"event/1", b"letter/1"]), st.binary(), st.binary())
def test_no_other_error_is_raised(kind: bytes, value: bytes, meta: bytes) -> None:
    with pytest.raises(DamagedRecord):
        unpack(LogRecord(key=b"", value=value, headers={"engage": kind, "meta": meta}))


@given(JSON, JSON)
def test_no_other_error_is_raised_for_json(value: Any, meta: Any) -> None:
    for kind in (b"event/1", b"letter/1"):
        headers = {"engage": kind, "meta": orjson.dumps(meta)}
        with pytest.raises(DamagedRecord):
            unpack(LogRecord(key=b"", value=orjson.dumps(value), headers=headers))


def test_members_of_later_versions_are_ignored() -> None:
    item, dead = event("m", user_id="ann"), letter("l")
    record = record_of(item)
    meta = changed(record.headers["meta"], shard=5, tags=["x"])
    headers = {**record.headers, "meta": meta, "trace": b"1"}
    assert unpack(dataclasses.replace(record, headers=headers)) == item
    value = changed(record_of(dead).value, score=0.5)
    assert unpack(dataclasses.replace(record_of(dead), value=value)) == dead


def test_members_that_earlier_versions_did_not_have_may_be_absent() -> None:
    item, dead = event("m"), letter("l")
    record = record_of(item)
    meta = changed(record.headers["meta"], userId=..., name=...)
    assert unpack(dataclasses.replace(record, headers={**record.headers, "meta": meta})) == (
        dataclasses.replace(item, user_id=None, name=None)
    )
    value = changed(record_of(dead).value, operation=..., envelope=...)
    assert unpack(dataclasses.replace(record_of(dead), value=value)) == dead


@each(
    "meta, expected",
    [
        *((b'{"restated": true}', True), (b'{"restated": false}', False)),
        *((b'{"restated": 1}', False), (b'{"restated" : true , "later": 1e400}', True)),
        *((b'{"restated": 1e400, "name": "restated"}', False), (b'{"name": "restated"}', False)),
        (b'{"name": "\\"restated\\": true"}', False),
    ],
)
def test_an_event_is_restated_only_if_its_record_says_true(meta: bytes, expected: bool) -> None:
    record = LogRecord(key=b"", value=b"{}", headers={"engage": b"event/1", "meta": meta})
    assert is_restated(record) is expected
