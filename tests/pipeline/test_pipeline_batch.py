# SPDX-License-Identifier: Apache-2.0
"""The steps together: a batch."""

from __future__ import annotations

import asyncio
import gc
import gzip
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from engage.api import Event, StorageUnavailable
from engage.api.times import parse_time
from engage.handlers.calls import batch_answer
from engage.pipeline import items as steps
from engage.pipeline.items import Items
from engage.pipeline.pipeline import ENVELOPE_BYTES
from support.each import each
from support.pipeline import BAD, GOOD, error_of, make_core, send_batch, send_event

if TYPE_CHECKING:
    from engage.pipeline.decode import Encoding


async def test_a_batch_is_stored() -> None:
    core = make_core()
    items = [
        *({**GOOD, "messageId": "a"}, BAD, 5, {**GOOD, "messageId": "a"}),
        *({**GOOD, "type": "identify", "messageId": "b"}, {**GOOD, "type": "Track"}),
        *({**GOOD, "type": {}}, {"userId": "u"}),
    ]
    result = await send_batch(core, items)
    answer = orjson.loads(batch_answer(result))
    assert answer == {
        "success": True,
        "accepted": 2,
        "duplicates": 1,
        "rejected": [
            {
                "index": 1,
                "messageId": "bad",
                "code": "invalid_payload",
                "message": "event: is required",
                "errors": [{"pointer": "/event", "message": "is required"}],
            },
            *[
                {
                    "index": index,
                    "messageId": None,
                    "code": "invalid_payload",
                    "message": message if pointer == "" else f"type: {message}",
                    "errors": [{"pointer": pointer, "message": message}],
                }
                for index, pointer, message in (
                    (2, "", "must be an object, not 5"),
                    (5, "/type", TYPES + ', not "Track"'),
                    (6, "/type", TYPES),
                    (7, "/type", "is required"),
                )
            ],
        ],
    }
    assert [document["messageId"] for document in core.documents] == ["a", "b"]
    assert len(core.letters) == 5
    assert core.metrics.events == {
        ("track", "stored"): 1,
        ("identify", "stored"): 1,
        ("track", "duplicate"): 1,
        ("track", "invalid_payload"): 1,
        ("other", "invalid_payload"): 4,
    }


TYPES = "must be one of identify, track, page, screen, group, alias"


@each("error", [OverflowError("too large"), ZeroDivisionError(), KeyError("_id")])
async def test_an_event_with_which_the_storage_fails_costs_itself_only(error: Exception) -> None:
    """All others of the batch are stored; it is a rejected item, and a dead letter."""

    def fails(events: Sequence[Event]) -> None:
        if any(event.message_id in ("7", "31") for event in events):
            raise error

    core = make_core()
    core.store.before = fails
    items = [{**GOOD, "messageId": str(number)} for number in range(50)]
    result = await send_batch(core, items)
    assert [rejected.index for rejected in result.rejected] == [7, 31]
    assert {rejected.error.code for rejected in result.rejected} == {"event_refused"}
    assert result.accepted == len(core.documents) == 48
    assert [orjson.loads(letter.item) for letter in core.letters] == [items[7], items[31]]
    # One that is sent alone, too.
    assert (await error_of(send_event(core, items[7]))).code == "event_refused"


async def test_an_event_that_would_change_a_subscription_elsewhere_is_stored_and_counted() -> None:
    core = make_core()
    change = {**GOOD, "event": "DFSubscriptionChange", "properties": {"action": "Unsubscribe"}}
    await send_event(core, {**change, "messageId": "a"})
    page = {"type": "page", "userId": "u", "name": "DFSubscriptionChange"}
    await send_batch(core, [{**change, "messageId": "b"}, page])
    assert core.metrics.events["subscription", "ignored"] == 2
    assert core.metrics.events["track", "stored"] == 2
    assert core.store.changes == []


async def test_the_items_of_a_batch_are_freed_while_its_events_are_written() -> None:
    core = make_core()
    found: list[dict[str, Any]] = []

    def look(_: object) -> None:
        found.extend(one for one in gc.get_objects() if type(one) is dict and "freed?" in one)

    core.store.before = look
    body = orjson.dumps({"batch": [{**GOOD, "freed?": {}}, {**BAD, "freed?": {}}]})
    result = await core.pipeline.batch(body, principal=core.principal)
    assert (result.accepted, len(result.rejected), found) == (1, 1, [])


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_what_is_refused_by_the_storage_is_kept_as_it_was_sent(encoding: Encoding) -> None:
    core = make_core()
    core.store.refuse["no"] = "never"
    await send_event(core, {**GOOD, "messageId": "a", "event": "first"})
    items: list[dict[str, Any]] = [
        {**GOOD, "messageId": "a", "timestamp": "2026-01-01T00:00:00+01:00"},
        BAD,
        {**GOOD, "messageId": "no", "sentAt": None, "number": 1.0},
        {**GOOD, "messageId": "b"},
    ]
    body = orjson.dumps({"writeKey": "key-1", "batch": items})
    raw = gzip.compress(body) if encoding == "gzip" else body
    for result in await asyncio.gather(*(core.pipeline.batch(raw, encoding) for _ in range(3))):
        assert result.accepted + result.duplicates == 2
        assert [item.index for item in result.rejected] == [1, 2]
    kept = {letter.reason: orjson.loads(letter.item) for letter in core.letters}
    assert len(core.letters) == len(kept) == 3
    assert kept["invalid_payload"] == BAD
    assert kept["event_refused"] == items[2]
    assert kept["message_id_conflict"]["timestamp"] == items[0]["timestamp"]


@pytest.mark.parametrize("items", [1, 2])
async def test_a_strict_batch_without_a_valid_item_is_refused(items: int) -> None:
    """Also if only the storage refuses its items, whose dead letters are kept."""
    core = make_core()
    core.store.refuse |= {"no": "never", "nor": "never"}
    events = [{**GOOD, "messageId": "no"}, {**GOOD, "messageId": "nor"}][:items]
    result = await send_batch(core, events)
    assert (result.accepted, len(result.rejected)) == (0, items)
    error = await error_of(send_batch(core, events, strict=True))
    assert (error.status, error.code) == (400, "event_refused")
    assert error.errors[0].pointer == "/batch/0"
    assert len(core.letters) == items
    error = await error_of(send_batch(core, [BAD], strict=True))
    assert (error.status, error.code) == (400, "invalid_payload")
    assert len(core.letters) == items


async def test_other_tasks_run_while_a_bad_batch_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop turns after about 5 ms of processor time, of which each item takes one here."""
    core = make_core()
    handled = 0
    prepare = Items.prepare

    def counted(self: Items, *arguments: Any) -> Any:
        nonlocal handled
        handled += 1
        return prepare(self, *arguments)

    monkeypatch.setattr(Items, "prepare", counted)
    monkeypatch.setattr(steps, "time", SimpleNamespace(thread_time=lambda: handled / 1000))
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(handled)
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count())
    await asyncio.sleep(0)
    await send_batch(core, [{"type": "track", "userId": 1.5}] * 500)
    other.cancel()
    assert handled == 500
    # The turn may be over at any moment since the last look at the clock.
    most = steps.TURN_SECONDS * 1000 + 2
    assert max(after - before for before, after in pairwise([*turns, handled])) <= most


def fails(_document: dict[str, Any]) -> dict[str, Any]:
    """A transform that always fails."""
    raise RuntimeError


async def test_a_strict_batch_keeps_no_dead_letter_when_a_transform_fails() -> None:
    core = make_core(transforms=[("broken", fails)])
    error = await error_of(send_batch(core, [GOOD, GOOD], strict=True))
    assert error.status == 400
    assert "the transform broken failed" in error.message
    assert (core.store.writes, core.letters) == ([], [])
    assert core.metrics.events["track", "transform_failed"] == 2
    await send_batch(core, [GOOD])
    assert [letter.reason for letter in core.letters] == ["transform_failed"]


@each(
    "sent_at",
    [
        *("yesterday", "2026-02-30T00:00:00Z", "2026-02-30", "20260101", {}, "", "1767225610"),
        *(-5, -0.5, True, 10**14, 1e14, [1_767_225_610], "2026-W01-1", "2026-01-01T24:00:00Z"),
    ],
)
async def test_an_unparsable_time_of_the_envelope_is_ignored(sent_at: Any) -> None:
    core = make_core()
    await send_batch(core, [{**GOOD, "timestamp": "2026-01-01T00:00:00Z"}], {"sentAt": sent_at})
    (document,) = core.documents
    assert document["timestamp"] == "2026-01-01T00:00:00.000Z"
    assert "sentAt" not in document


@pytest.mark.parametrize(
    "sent_at",
    [
        *(1_767_225_610, 1_767_225_610_000, "2026-01-01T00:00:10", "2026-01-01 00:00:10"),
        *(1_767_225_610.0, "2026-01-01T01:00:10+01", "20260101T000010Z", "٢٠٢٦-٠١-٠١T٠٠:٠٠:١٠Z"),
    ],
)
async def test_a_time_of_the_envelope_may_have_all_forms(sent_at: Any) -> None:
    core = make_core()
    await send_batch(
        core, [{**GOOD, "timestamp": 1_767_225_600}, {**BAD, "timestamp": 5}], {"sentAt": sent_at}
    )
    (document,) = core.documents
    assert document["timestamp"] == "2026-11-21T09:29:50.000Z"
    assert parse_time(document["sentAt"]) == 1_767_225_610_000
    (letter,) = core.letters
    assert orjson.loads(letter.item) == {**BAD, "timestamp": 5}
    assert orjson.loads(letter.envelope or b"") == {"sentAt": document["sentAt"]}


@pytest.mark.parametrize("time", [1_767_225_600, 1_767_225_600_000, "2026-01-01 00:00:00.5"])
async def test_a_repeated_time_of_another_form_is_a_duplicate(time: Any) -> None:
    core = make_core()
    item = {**GOOD, "messageId": "m", "timestamp": time}
    assert (await send_batch(core, [item])).accepted == 1
    await send_event(core, item)
    result = await send_batch(core, [item, {**item, "timestamp": time}])
    assert (result.duplicates, core.letters) == (2, [])
    # A time of another day is a conflict, whose letter has the time as it was sent.
    for _ in range(2):
        await send_event(core, {**item, "timestamp": 1_767_312_001})
    (letter,) = core.letters
    assert letter.reason == "message_id_conflict"
    assert orjson.loads(letter.item)["timestamp"] == 1_767_312_001


async def test_the_number_and_the_size_of_the_events_are_limited() -> None:
    """Measured as stored, with the envelope: a small body must not become a large write."""
    core = make_core(batch_events=3)
    items = [{**GOOD, "messageId": name} for name in "abcd"]
    more = {"context": {"x": "y" * 1000}}
    await send_batch(core, items[:3], more)
    error = await error_of(send_batch(core, items, more))
    assert (error.status, error.code) == (413, "batch_too_large")
    assert "limits.batch_events" in error.message
    size = sum(len(event.body) for event in core.store.events.values())
    await send_batch(make_core(decompressed_bytes=size), items[:3], more)
    error = await error_of(send_batch(make_core(decompressed_bytes=size - 1), items[:3], more))
    assert (error.status, error.code) == (413, "batch_too_large")
    assert "limits.decompressed_bytes" in error.message


async def test_the_size_of_the_envelope_is_limited() -> None:
    core = make_core()
    room = ENVELOPE_BYTES - len(b'{"x":""}') - len(b"{}")
    await send_batch(core, [GOOD], {"context": {"x": "y" * room}})
    error = await error_of(send_batch(core, [GOOD], {"context": {"x": "y" * (room + 1)}}))
    assert (error.status, error.code) == (413, "batch_too_large")
    half = {"x": "y" * (room // 2 + 10)}
    error = await error_of(send_batch(core, [GOOD], {"context": half, "integrations": half}))
    assert error.code == "batch_too_large"


async def test_the_key_may_be_in_the_envelope() -> None:
    core = make_core()
    await send_batch(core, [GOOD], {"writeKey": "key-2"}, principal=None)
    assert core.documents[0]["workspaceId"] == "other"
    # a key in an item does not count
    error = await error_of(send_batch(core, [{**GOOD, "writeKey": "key-1"}], principal=None))
    assert error.code == "missing_write_key"
    assert (await error_of(core.pipeline.batch(b"[]"))).code == "missing_write_key"


async def test_batch_and_dead_letters_are_one_acknowledgement() -> None:
    core = make_core()

    def down() -> None:
        raise StorageUnavailable("no")

    core.store.before_put = down
    with pytest.raises(StorageUnavailable):
        await send_batch(core, [{**GOOD, "messageId": "a"}, BAD])
    core.store.before_put = None
    again = await send_batch(core, [{**GOOD, "messageId": "a"}, BAD])
    assert (again.accepted, again.duplicates, len(again.rejected)) == (0, 1, 1)
