# SPDX-License-Identifier: Apache-2.0
"""Normalising: the event that is stored of a valid payload."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.api import Event, render_time
from engage.api.times import parse_time
from engage.errors import ApiError
from engage.pipeline.normalise import Arrival, Envelope, apply_transformed, normalise
from engage.times import rfc3339
from support.each import each
from support.pipeline import NOW, SCHEMAS, limit

LIMIT = limit(65536)
RECEIVED = "2026-11-21T09:30:00.000Z"
#: The times that are stored as they are, or with the T and the Z that they do not have.
TIME_PATTERN = SCHEMAS.documents["common"]["$defs"]["time"]["pattern"].partition("(?!")[0]


def arrival(**fields: Any) -> Arrival:
    values = {
        "workspace_id": "acme",
        "write_key_id": "website",
        "received_at": NOW,
        "event_limit": LIMIT,
    }
    return Arrival(**{**values, **fields})


def make(kind: str, item: dict[str, Any], index: int = 0, **fields: Any) -> Event:
    """Return the event of a valid item."""
    assert SCHEMAS.problems(kind, item) == []
    before = orjson.dumps(item)
    event = normalise(item, kind, arrival(**fields), index)
    assert orjson.dumps(item) == before, "the item was changed"
    return event


def track(**fields: Any) -> Event:
    return make("track", {"userId": "u", "event": "e", **fields})


# ------------------------------------------------------------------------------------------ fields
def test_an_event_is_stored_with_the_fields_of_the_server() -> None:
    event = track(messageId="m", properties={"a": [1, None]}, extra={"x": 1}, writeKey="key-1")
    assert event.document() == {
        "type": "track",
        "userId": "u",
        "event": "e",
        "messageId": "m",
        "properties": {"a": [1, None]},
        "extra": {"x": 1},
        "timestamp": RECEIVED,
        "receivedAt": RECEIVED,
        "workspaceId": "acme",
        "writeKeyId": "website",
        "source": "api",
    }
    assert event.identity == ("acme", "api", "m")
    assert (event.type, event.user_id, event.anonymous_id, event.name) == ("track", "u", None, "e")
    assert (event.received_at, event.timestamp) == (NOW, NOW)
    assert b"key-1" not in event.body


@each("field", ["userId", "anonymousId", "groupId", "previousId"])
def test_float_ids_are_refused(field: str) -> None:
    """JSON Schema accepts 1.0 as an integer."""
    own = {"groupId": "group", "previousId": "alias"}.get(field, "track")
    item = {"userId": "u", "anonymousId": "a", "event": "e", field: 1.0}
    for kind in (own, "track"):
        assert SCHEMAS.is_valid(kind, item)
        with pytest.raises(ApiError) as caught:
            normalise(item, kind, arrival())
        assert caught.value.code == "invalid_payload"
        assert caught.value.errors[0].pointer == f"/{field}"


def test_an_empty_id_counts_as_absent() -> None:
    """RudderStack's browser SDK sends it for an unknown user."""
    event = make("track", {"userId": "", "anonymousId": "a", "event": "e"})
    assert event.user_id is None
    assert "userId" not in event.document()


def test_the_name_is_that_of_the_type() -> None:
    assert make("page", {"userId": "u", "name": "Home", "event": "x"}).name == "Home"
    assert make("screen", {"userId": "u"}).name is None
    assert make("identify", {"userId": "u", "name": "Ada", "event": "x"}).name is None


# ------------------------------------------------------------------------------------------ traits
def test_identify_takes_traits_from_the_context() -> None:
    item = {"userId": "u", "traits": {"a": 1}, "context": {"traits": {"a": 2, "b": 3}}}
    document = make("identify", item).document()
    assert document["traits"] == {"a": 1, "b": 3}
    assert document["context"] == item["context"]
    item = {"userId": "u", "context": {"traits": {"b": 3}}}
    assert make("identify", item).document()["traits"] == {"b": 3}
    item = {"userId": "u", "traits": {"a": 1}, "context": {"traits": ["b"]}}
    assert make("identify", item).document()["traits"] == {"a": 1}


def test_traits_in_the_context_of_a_group_belong_to_the_user() -> None:
    item = {"userId": "u", "groupId": "g", "context": {"traits": {"email": "a@b.c"}}}
    assert "traits" not in make("group", item).document()


def test_the_envelope_has_defaults_for_each_item() -> None:
    envelope = Envelope(
        context={"locale": "de", "page": {"a": 1}, "traits": {"plan": "x"}},
        integrations={"All": False},
        sent_at="2026-11-21T09:30:00Z",
    )
    item = {"userId": "u", "context": {"page": {"b": 2}}, "integrations": {"X": True}}
    document = make("identify", item, envelope=envelope).document()
    assert document["context"] == {"locale": "de", "page": {"b": 2}, "traits": {"plan": "x"}}
    assert document["integrations"] == {"All": False, "X": True}
    assert document["traits"] == {"plan": "x"}
    assert document["sentAt"] == "2026-11-21T09:30:00Z"
    bare = make("identify", {"userId": "u"}, envelope=envelope).document()
    assert bare["context"] == envelope.context
    assert make("identify", {"userId": "u"}, envelope=Envelope()).document().keys() == (
        make("identify", {"userId": "u"}).document().keys()
    )


# --------------------------------------------------------------------------------------- size, ids
def test_an_event_that_is_too_large_because_of_its_files_says_so() -> None:
    file = {"type": "Base64Encoded", "name": "a.pdf", "mimeType": "application/pdf"}
    item = {"userId": "u", "event": "e", "files": [{**file, "data": "QUJD"}]}
    small = track(**item)
    assert small.document()["files"] == item["files"]
    large = {**item, "files": [{**file, "data": "QUJD" * 20_000}]}
    size = len(orjson.dumps(large["files"]))
    changed = {**small.document(), "files": large["files"]}
    for transformed in (False, True):
        with pytest.raises(ApiError) as caught:
            apply_transformed(small, changed, LIMIT) if transformed else track(**large)
        assert caught.value.code == "event_too_large"
        assert f"; files has {size} of them" in caught.value.message
    # Without its files, this one is too large as well.
    with pytest.raises(ApiError) as caught:
        track(**large, properties={"x": "y" * 70_000})
    assert "files" not in caught.value.message


@pytest.mark.parametrize("message_id", [None, ""])
def test_the_server_sets_a_missing_message_id(message_id: str | None) -> None:
    first, second = (track(messageId=message_id).message_id for _ in range(2))
    assert first != second
    for text in (first, second):
        parsed = uuid.UUID(text)
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert str(parsed) == text
        assert parsed.int >> 80 >= NOW


def test_an_idempotency_key_makes_message_ids() -> None:
    def message_id(key: str | None, index: int = 0, workspace: str = "acme") -> str:
        item = {"userId": "u", "event": "e"}
        fields = {"idempotency_key": key, "workspace_id": workspace}
        return make("track", item, index, **fields).message_id

    assert message_id("k") == message_id("k")
    assert uuid.UUID(message_id("k")).version == 5
    ids = [
        *(message_id("k"), message_id("k", 1), message_id("l"), message_id("k", workspace="other")),
        *(message_id("k1"), message_id("k", 11), message_id("k1", 1), message_id(None)),
    ]
    assert len(set(ids)) == len(ids)
    own = make("track", {"userId": "u", "event": "e", "messageId": "m"}, idempotency_key="k")
    assert own.message_id == "m"


# ------------------------------------------------------------------------------------------- times
def stamped(**fields: Any) -> str:
    """Return the corrected time."""
    event = track(**fields)
    text: str = event.document()["timestamp"]
    assert render_time(event.timestamp) == text
    return text


@each(
    "fields, timestamp, original",
    [
        ({}, RECEIVED, None),
        (
            {"timestamp": "2026-11-21T09:29:00+00:00"},
            "2026-11-21T09:29:00.000Z",
            "2026-11-21T09:29:00+00:00",
        ),
        (
            {"originalTimestamp": "2026-11-21T08:29:00Z"},
            "2026-11-21T08:29:00.000Z",
            "2026-11-21T08:29:00Z",
        ),
        (  # the client's clock is a year late
            {"timestamp": "2025-11-21T09:29:50Z", "sentAt": "2025-11-21T09:29:55.250Z"},
            "2026-11-21T09:29:54.750Z",
            "2025-11-21T09:29:50Z",
        ),
        (  # the client's clock is a year early
            {"timestamp": "2027-11-21T09:29:50Z", "sentAt": "2027-11-21T09:29:55Z"},
            "2026-11-21T09:29:55.000Z",
            "2027-11-21T09:29:50Z",
        ),
        (  # both times are given: the earlier counts, and what was sent is kept
            {
                "timestamp": "2020-01-01T00:00:00Z",
                "originalTimestamp": "2026-11-21T09:29:50Z",
                "sentAt": "2026-11-21T09:30:00Z",
            },
            "2020-01-01T00:00:00.000Z",
            "2026-11-21T09:29:50Z",
        ),
        (
            {
                "timestamp": "2026-11-21T09:29:50Z",
                "originalTimestamp": "2026-11-21T09:29:40Z",
                "sentAt": "2026-11-21T09:30:00Z",
            },
            "2026-11-21T09:29:40.000Z",
            "2026-11-21T09:29:40Z",
        ),
        # sent before it happened: the result is never later than now
        (
            {"timestamp": "2026-11-21T09:29:50Z", "sentAt": "2026-11-21T09:29:40Z"},
            RECEIVED,
            "2026-11-21T09:29:50Z",
        ),
        ({"timestamp": "2126-11-21T09:29:50Z"}, RECEIVED, "2126-11-21T09:29:50Z"),
        ({"timestamp": "1970-01-01T00:00:00Z"}, "1970-01-01T00:00:00.000Z", "1970-01-01T00:00:00Z"),
        # if the result is outside 1970 to 9999, the original counts
        (
            {"timestamp": "1980-01-01T00:00:00Z", "sentAt": "2060-01-01T00:00:00Z"},
            "1980-01-01T00:00:00.000Z",
            "1980-01-01T00:00:00Z",
        ),
        (
            {"timestamp": "2000-01-01T00:00:00Z", "sentAt": "9999-12-31T23:59:59Z"},
            "2000-01-01T00:00:00.000Z",
            "2000-01-01T00:00:00Z",
        ),
        # if that is outside, too, the server's clock counts
        ({"timestamp": "1969-12-31T23:59:59Z"}, RECEIVED, "1969-12-31T23:59:59Z"),
        ({"timestamp": "0001-01-01T00:00:00Z"}, RECEIVED, "0001-01-01T00:00:00Z"),
    ],
)
def test_the_time_of_a_client_is_corrected(
    fields: dict[str, str], timestamp: str, original: str | None
) -> None:
    assert stamped(**fields) == timestamp
    assert track(**fields).document().get("originalTimestamp") == original


def test_sent_at_of_the_envelope_is_used() -> None:
    envelope = Envelope(sent_at="2025-11-21T09:30:00Z")
    item = {"userId": "u", "event": "e", "timestamp": "2025-11-21T09:29:59Z"}
    event = make("track", item, envelope=envelope)
    assert event.document()["timestamp"] == "2026-11-21T09:29:59.000Z"
    item["sentAt"] = "2025-11-21T09:29:59Z"  # that of the item comes first
    event = make("track", item, envelope=envelope)
    assert event.document()["timestamp"] == RECEIVED


@each("field", ["timestamp", "originalTimestamp", "sentAt"])
@each(
    "text",
    [
        *("2026-02-30T00:00:00Z", "2025-02-29T12:00:00Z", "2026-04-31T00:00:00Z"),
        *("0000-01-01T00:00:00Z", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+00:01"),
        *("2026-02-30", "2026-02-30T00:00:00", "2026-02-30 00:00:00", "0000-01-01"),
        "0000-01-01T00:00:00",
    ],
)
def test_a_time_that_does_not_exist_is_refused(field: str, text: str) -> None:
    item = {"userId": "u", "event": "e", field: text}
    assert SCHEMAS.is_valid("track", item)
    with pytest.raises(ApiError) as caught:
        normalise(item, "track", arrival())
    assert (caught.value.status, caught.value.code) == (400, "invalid_payload")
    assert caught.value.message == (
        f'{field}: must be an existing time in the years 1 to 9999 (UTC), not "{text}"'
    )


@each(
    "text, same",
    [
        ("2026-11-21t09:30:00z", "2026-11-21T09:30:00.000Z"),
        ("2026-11-21T09:30:00.1Z", "2026-11-21T09:30:00.100Z"),
        ("2026-11-21T09:30:00.123Z", "2026-11-21T09:30:00.123Z"),
        ("2026-11-21T09:30:00.123456Z", "2026-11-21T09:30:00.123Z"),
        ("2026-11-21T09:30:00.123999999z", "2026-11-21T09:30:00.123Z"),
        ("2026-11-21T09:30:60Z", "2026-11-21T09:30:59.999Z"),
        ("2026-11-21T09:30:60.5+14:00", "2026-11-20T19:30:59.999Z"),
        ("2026-11-21t09:30:60.123456789z", "2026-11-21T09:30:59.999Z"),
        ("2026-11-21T09:30:00+14:00", "2026-11-20T19:30:00.000Z"),
        ("2026-11-21T09:30:00-00:00", "2026-11-21T09:30:00.000Z"),
        ("2026-11-21T09:30:00-23:59", "2026-11-22T09:29:00.000Z"),
        ("2024-02-29T23:59:59.999+05:45", "2024-02-29T18:14:59.999Z"),
        ("1969-12-31T23:59:59.9999Z", "1969-12-31T23:59:59.999Z"),
        ("9999-12-31T23:59:59.999999999Z", "9999-12-31T23:59:59.999Z"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00.000Z"),
    ],
)
def test_a_time_may_be_written_in_several_ways(text: str, same: str) -> None:
    assert SCHEMAS.is_valid("track", {"userId": "u", "event": "e", "timestamp": text})
    milliseconds = parse_time(text)
    assert milliseconds is not None
    assert render_time(milliseconds) == same


@each("field", ["timestamp", "originalTimestamp", "sentAt"])
@each(
    "sent, stored",
    [
        ("2026-01-02T03:04:05", "2026-01-02T03:04:05Z"),
        ("2026-01-02t03:04:05", "2026-01-02t03:04:05Z"),
        ("2026-01-02 03:04:05", "2026-01-02T03:04:05Z"),
        ("2026-01-02 03:04:05.123456789", "2026-01-02T03:04:05.123456789Z"),
        ("2026-01-02T03:04:60.5", "2026-01-02T03:04:60.5Z"),
        *(("2026-01-02", "2026-01-02T00:00:00Z"), ("0001-01-01", "0001-01-01T00:00:00Z")),
        *(("9999-12-31T23:59:59", "9999-12-31T23:59:59Z"), (0, "1970-01-01T00:00:00.000Z")),
        (1_767_323_045, "2026-01-02T03:04:05.000Z"),
        (1_767_323_045_678, "2026-01-02T03:04:05.678Z"),
        (99_999_999_999, "5138-11-16T09:46:39.000Z"),
        (100_000_000_000, "1973-03-03T09:46:40.000Z"),
        (99_999_999_999_999, "5138-11-16T09:46:39.999Z"),
    ],
)
def test_another_form_of_a_time_is_stored_as_rfc_3339(
    field: str, sent: str | int, stored: str
) -> None:
    item = {"userId": "u", "event": "e", "messageId": "m", field: sent}
    assert SCHEMAS.is_valid("track", item)
    event = normalise(item, "track", arrival())
    assert event.document()["originalTimestamp" if field == "timestamp" else field] == stored
    assert event == normalise({**item, field: stored}, "track", arrival())
    assert item[field] == sent


def test_times_below_the_fields_of_an_event_stay_as_sent() -> None:
    values = {"timestamp": 1_767_323_045, "sentAt": "2026-01-02", "originalTimestamp": [1.0]}
    document = track(context=values, properties=values).document()
    assert document["context"] == document["properties"] == values


@pytest.mark.parametrize("field", ["timestamp", "originalTimestamp", "sentAt"])
@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        # Digits of Arabic, Persian, Hindi, Thai, Bengali and full width.
        ("٢٠٢٦-١١-٢٨T٠٤:٣٠:٢٩.٥٠٠Z", "2026-11-28T04:30:29.500Z"),
        ("۲۰۲۶-۱۱-۲۸T۰۴:۳۰:۲۹.۵۰۰Z", "2026-11-28T04:30:29.500Z"),
        ("२०२६-११-२८T०४:३०:२९.५००+०१:००", "2026-11-28T04:30:29.500+01:00"),
        ("๒๐๒๖-๑๑-๒๘ ๐๔:๓๐:๒๙", "2026-11-28T04:30:29Z"),
        ("২০২৬-১১-২৮", "2026-11-28T00:00:00Z"),
        ("２０２６１１２８T０４３０２９Z", "2026-11-28T04:30:29Z"),
        # Offsets.
        ("2026-11-28T04:30:29+0100", "2026-11-28T04:30:29+01:00"),
        ("2026-11-28T04:30:29.5-01", "2026-11-28T04:30:29.5-01:00"),
        ("2026-11-28T04:30:29 +01:00", "2026-11-28T04:30:29+01:00"),
        ("2026-11-28 04:30:29 +0100", "2026-11-28T04:30:29+01:00"),
        ("2026-11-28 04:30:29+00", "2026-11-28T04:30:29+00:00"),
        ("2026-11-28 04:30:29Z", "2026-11-28T04:30:29Z"),
        ("2026-11-28 04:30:29 UTC", "2026-11-28T04:30:29Z"),
        ("2026-11-28T04:30:29.500GMT", "2026-11-28T04:30:29.500Z"),
        ("2026-11-28t04:30:29 gmt", "2026-11-28t04:30:29Z"),
        # Seconds.
        ("2026-11-28T04:30Z", "2026-11-28T04:30:00Z"),
        ("2026-11-28T04:30", "2026-11-28T04:30:00Z"),
        ("2026-11-28 04:30 +0530", "2026-11-28T04:30:00+05:30"),
        ("2026-11-28T04:30:29,5Z", "2026-11-28T04:30:29.5Z"),
        ("2026-11-28T04:30:60,5Z", "2026-11-28T04:30:60.5Z"),
        ("2026-11-28T04:30:29.123456789012Z", "2026-11-28T04:30:29.123456789Z"),
        ("2026-11-28 04:30:29.1234567891", "2026-11-28T04:30:29.123456789Z"),
        # The basic format.
        ("20261128T043029Z", "2026-11-28T04:30:29Z"),
        ("20261128T043029.5+0100", "2026-11-28T04:30:29.5+01:00"),
        # Numbers.
        (1764304229.512, "2025-11-28T04:30:29.512Z"),
        (1764304229.5127, "2025-11-28T04:30:29.513Z"),
        (1_767_323_045.0, "2026-01-02T03:04:05.000Z"),
        (0.5, "1970-01-01T00:00:00.500Z"),
        (-0.0, "1970-01-01T00:00:00.000Z"),
        (1764304229512.25, "2025-11-28T04:30:29.512Z"),
    ],
)
def test_a_time_that_is_no_rfc_3339_is_stored_as_it(
    field: str, sent: str | float, stored: str
) -> None:
    item = {"userId": "u", "event": "e", "messageId": "m", field: sent}
    event = normalise(SCHEMAS.read("track", item), "track", arrival())
    assert event.document()["originalTimestamp" if field == "timestamp" else field] == stored
    assert event == normalise({**item, field: stored}, "track", arrival())
    assert item[field] == sent
    assert rfc3339(sent) == rfc3339(stored) == stored


@pytest.mark.parametrize("field", ["timestamp", "originalTimestamp", "sentAt"])
def test_an_empty_time_is_absent(field: str) -> None:
    item = {"userId": "u", "event": "e", "messageId": "m"}
    event = normalise(SCHEMAS.read("track", {**item, field: ""}), "track", arrival())
    assert event == normalise(item, "track", arrival())


@pytest.mark.parametrize("field", ["timestamp", "originalTimestamp", "sentAt"])
@pytest.mark.parametrize(
    "sent",
    [
        *("1764304229", "1764304229.512", "20261128", "20261128043029", "20261128 043029Z"),
        *("2026-W48-6", "2026-W48-6T04:30:29Z", "2026-332", "2026-11", "2026-11-28T04Z"),
        *("28 Nov 2026", "Sat, 28 Nov 2026 04:30:29 GMT", "28.11.2026", "28-11-2026T04:30:29Z"),
        *("11/28/2026 04:30:29", "2026/11/28", "2026-11-28T4:30:29 PM.500Z", "2026-11-28 4:30"),
        *("2026-11-28T04:30:29 PM", "2026-11-28T04:30:29 CET", "2026-11-27T24:00:00Z"),
        *("2026-11-28T04:30:29+01:00[Europe/Berlin]", "2026-11-28T04:30:29GMT+01:00"),
        *("2026-11-28T04:30:29Z+01:00", "2026-11-28T04:30:29+1", "2026-11-28T04:30:29+01:0"),
        *("2026-11-28T04:30:29  +0100", " 2026-11-28T04:30:29Z", "2026-11-28T04:30:29Z "),
        *("2026-11-28T04:30:29.Z", "2026-11-28T04:30,5Z", "2026-11-28Z", "2026-1128T04:30:29Z"),
        *("2026-11-28T043029Z", "20261128T04:30:29Z", "20261128T0430Z", "2026-11-28T04:30:61Z"),
        *(
            "٢٠٢٦-11-28T04:30:29Z",
            "٢٠٢٦-١١-٢٨T۰۴:۳۰:۲۹Z",
            "２０２６-11-28",
            "²⁰²⁶-¹¹-²⁸",
            "二〇二六-一一-二八",
        ),
        *("2026-02-30T04:30:29+0100", "2026-13-01 04:30:29 UTC", "20260230T043029Z"),
        *("0000-01-01 00:00:00 UTC", "9999-12-31T23:59:59-0100", "12026-11-28T04:30:29 UTC"),
        *(" ", "now", "-1", "2026-11-28T04:30:29." + "1" * 60 + "Z"),
        *(-1, -0.5, 10**14, 1e14, 1e300, True, False, [], {}, ["2026-11-28"]),
    ],
)
def test_what_is_no_time_is_refused(field: str, sent: Any) -> None:
    item = {"userId": "u", "event": "e", field: sent}
    assert rfc3339(sent) is None
    with pytest.raises(ApiError) as caught:
        normalise(SCHEMAS.read("track", item), "track", arrival())
    assert caught.value.code == "invalid_payload"
    assert [problem.pointer for problem in caught.value.errors] == [f"/{field}"]


@given(st.from_regex(TIME_PATTERN, fullmatch=True))
def test_a_time_that_the_schemas_have_stays_as_it_is(text: str) -> None:
    """RFC 3339 byte for byte, also if another member of the event is read in another form."""
    item = {"userId": "u", "event": "e", "timestamp": text, "properties": []}
    assert SCHEMAS.read("track", item) == {**item, "properties": {}}
    if parse_time(text) is not None:
        assert rfc3339(text) == text


@pytest.mark.parametrize("kind", ["track", "identify", "page", "screen", "group", "alias"])
def test_an_empty_list_where_an_object_is_meant_is_an_empty_object(kind: str) -> None:
    """PHP writes an empty object as a list."""
    ids = {"userId": "u", "groupId": "g", "previousId": "p", "event": "e", "messageId": "m"}
    for names in (("integrations",), ("context", "integrations", "traits", "properties")):
        item = {**ids, **{name: [] for name in names}, "x": [], "extra": {"context": []}}
        meant = {**item, **{name: {} for name in names}}
        assert SCHEMAS.read(kind, item) == meant
        assert all(item[name] == [] for name in names)
    values: list[Any] = [[1], [[]], [None], ""]
    for value in values:
        with pytest.raises(ApiError) as caught:
            SCHEMAS.read(kind, {**ids, "context": value, "integrations": []})
        assert [problem.pointer for problem in caught.value.errors] == ["/context"]


def test_other_members_of_the_same_names_stay() -> None:
    """Only what each schema means is read in another form."""
    choice = {"userId": "u", "groupId": "g", "subscribed": True}
    read = SCHEMAS.read("choice", {**choice, "updatedAt": "2026-11-28 04:30:29 UTC"})
    assert read == {**choice, "updatedAt": "2026-11-28T04:30:29Z"}
    item = {
        "userId": "u",
        "event": "e",
        "traits": [],
        "updatedAt": "20261128T043029Z",
        "changes": [],
    }
    assert SCHEMAS.read("track", item) == {**item, "traits": {}}


@given(st.datetimes(timezones=st.timezones()))
def test_parse_time_agrees_with_datetime(moment: datetime) -> None:
    offset = moment.utcoffset() or timedelta()
    if offset % timedelta(minutes=1):
        return  # RFC 3339 cannot express the local mean times of long ago
    milliseconds = parse_time(moment.isoformat())
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        assert milliseconds is None
        return
    assert milliseconds is not None
    expected = utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert render_time(milliseconds) == expected
    assert parse_time(expected) == milliseconds


@given(st.text(max_size=40) | st.from_regex(r"[0-9Tt:.Zz+-]{5,40}"))
def test_parse_time_never_raises(text: str) -> None:
    """Even for values that the schema refuses."""
    result = parse_time(text)
    if result is not None:
        assert re.fullmatch(r"[0-9]{4}-.*Z", render_time(result))
    rfc3339(text)


# -------------------------------------------------------------------------------- apply_transformed
def test_a_transform_cannot_change_fields_of_the_server() -> None:
    event = track(messageId="m", timestamp="2026-11-21T09:00:00Z")
    document = {
        "type": "page",
        "anonymousId": 5,
        "userId": "",
        "name": "Home",
        "messageId": "x",
        "workspaceId": "x",
        "writeKeyId": "x",
        "receivedAt": "x",
        "source": "x",
        "writeKey": "x",
        "traits": None,
    }
    new = apply_transformed(event, dict(document), LIMIT)
    assert new.identity == event.identity
    assert (new.received_at, new.timestamp) == (event.received_at, event.timestamp)
    assert (new.type, new.user_id, new.anonymous_id, new.name) == ("page", None, "5", "Home")
    stored = new.document()
    for field in ("messageId", "workspaceId", "writeKeyId", "receivedAt", "source", "timestamp"):
        assert stored[field] == event.document()[field]
    assert not {"writeKey", "traits", "userId"} & stored.keys()


def test_a_transform_may_change_the_time() -> None:
    event = track(messageId="m")
    for text, expected in (
        ("2026-11-21T08:00:00+01:00", "2026-11-21T07:00:00.000Z"),
        ("2126-11-21T08:00:00Z", RECEIVED),
        ("1960-11-21T08:00:00Z", RECEIVED),
    ):
        new = apply_transformed(event, {**event.document(), "timestamp": text}, LIMIT)
        assert new.document()["timestamp"] == render_time(new.timestamp) == expected
    for field in ("timestamp", "originalTimestamp", "sentAt"):
        for value in ("2026-02-30T00:00:00Z", "2026-02-30", -1.0):
            with pytest.raises(ApiError):
                apply_transformed(event, {**event.document(), field: value}, LIMIT)
    new = apply_transformed(
        event, {**event.document(), "originalTimestamp": 1_767_323_045, "sentAt": None}, LIMIT
    )
    assert new.document()["originalTimestamp"] == "2026-01-02T03:04:05.000Z"
    new = apply_transformed(event, {**event.document(), "sentAt": "2026-01-02"}, LIMIT)
    assert new.document()["sentAt"] == "2026-01-02T00:00:00Z"
    with pytest.raises(ApiError):
        apply_transformed(event, {**event.document(), "x": "y" * 1000}, limit(1000))


# --------------------------------------------------------------------------------- for any payload
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
            lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=3), child),
            max_leaves=5,
        ),
        max_size=6,
    )
)
def test_every_other_field_is_stored_unchanged(fields: dict[str, Any]) -> None:
    item = {**fields, "userId": "u", "event": "e"}
    if not SCHEMAS.is_valid("track", item):
        return
    stored = normalise(item, "track", arrival()).document()
    assert {name: stored[name] for name in item} == item
