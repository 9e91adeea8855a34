# SPDX-License-Identifier: Apache-2.0
"""The letters of what a loader cannot store: what they keep, and that they fit."""

from __future__ import annotations

import dataclasses

import orjson
import pytest

from engage.api import DeadLetter, LogRecord, ReadRecord, render_time, unpack
from engage.errors import ApiError
from engage.log.letters import letter_of_damage, letter_of_event, shortened_record
from engage.testing import event
from engage.testing.factories import letter
from support.each import each


@pytest.mark.parametrize("sent", [None, "2025-01-01T00:00:03Z"])
def test_a_letter_has_the_time_that_the_client_sent_and_none_of_the_server(
    sent: str | None,
) -> None:
    fields = {} if sent is None else {"originalTimestamp": sent}
    made = event("a", user_id="u", at=5, writeKeyId="website", sentAt="2025-01-01T00:00:04Z")
    times = {"timestamp": render_time(made.timestamp), "receivedAt": render_time(made.received_at)}
    body = orjson.dumps({**made.document(), **times, **fields})
    found = letter_of_event(
        dataclasses.replace(made, body=body), ApiError("event_refused", "it is too long")
    )
    item = orjson.loads(found.item)
    assert item.get("originalTimestamp") == sent
    assert not item.keys() & {"timestamp", "receivedAt", "sentAt"}
    assert found.envelope is not None
    assert orjson.loads(found.envelope) == {"sentAt": "2025-01-01T00:00:04Z"}
    assert (found.reason, found.message) == ("event_refused", "it is too long")
    assert (found.write_key_id, found.user_id, found.message_id) == ("website", "u", "a")


READ = ReadRecord(
    partition=3, offset=5, appended_at=7, record=LogRecord(key=b"k", value=b"v", headers={})
)


@each("size", [0, 1, 2, 3, 1000, 1001, 1002, 1003, 50_000])
@each("limit", [1200, 1201, 1202, 1203, 1500])
def test_a_letter_is_cut_so_that_it_fits(size: int, limit: int) -> None:
    whole = letter("a", item=b"x" * size, operation="batch", envelope=b"{}")
    record = shortened_record(whole, READ, limit)
    assert len(record.value) <= limit
    found = unpack(record)
    assert isinstance(found, DeadLetter)
    assert found.truncated
    assert "partition 3 of the log has all of it at offset 5" in found.message
    assert whole.item.startswith(found.item)
    assert found.item == whole.item[: len(found.item)]


def test_long_headers_and_envelopes_are_left_out_of_a_letter_that_does_not_fit() -> None:
    whole = letter("a", headers=[("h", "v" * 900)], envelope=b"x" * 900)
    found = unpack(shortened_record(whole, READ, 1000))
    assert isinstance(found, DeadLetter)
    assert (found.item, list(found.headers), list(found.errors)) == (b"", [], [])
    assert found.envelope is None


def test_the_letters_of_two_damaged_records_differ() -> None:
    def made(value: bytes, **headers: bytes) -> DeadLetter:
        record = LogRecord(key=b"acme:u", value=value, headers=headers)
        read = ReadRecord(partition=0, offset=5, appended_at=7, record=record)
        return letter_of_damage(read, ValueError("no JSON"))

    first = made(b"{", engage=b"event/1", meta=b"{}")
    assert first.id == made(b"{", meta=b"{}", engage=b"event/1").id
    assert first.id != made(b"[", engage=b"event/1", meta=b"{}").id
    assert first.id != made(b"{", engage=b"event/1", meta=b"[]").id
    assert first.workspace_id == "acme"
    assert first.received_at == 7
