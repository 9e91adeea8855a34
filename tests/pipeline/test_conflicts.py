# SPDX-License-Identifier: Apache-2.0
"""Nothing is acknowledged that is kept nowhere.

An event with the message id of another is acknowledged only if its dead letter is durable. Refused
items, of which anyone with a write key can send any number, cannot prevent that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import DeadLetterBudget, EventFilter, StorageUnavailable
from engage.config import Limits
from engage.store.erasures import mark_of
from engage.testing.factories import all_pages, event
from support.memory_store import MemoryStore
from support.people import KEY
from support.pipeline import (
    BAD,
    GOOD,
    NOW,
    Core,
    deliver,
    error_of,
    make_core,
    send_batch,
    send_event,
)
from support.sqlite import make

FIRST = {**GOOD, "messageId": "m"}
OTHER = {**GOOD, "messageId": "m", "properties": {"a": 1}}
CODE = "message_id_conflict"
#: What the server adds to an event, except its times.
SET_BY_SERVER = {"workspaceId": "acme", "writeKeyId": "website", "source": "api"}


def conflict(number: int, size: int = 0) -> dict[str, Any]:
    """Return an event that conflicts with FIRST, each with another content."""
    return {**FIRST, "properties": {"n": number, "x": "x" * size}}


@pytest.mark.parametrize("with_stored", [True, False])
async def test_a_conflict_that_is_kept_is_acknowledged(with_stored: bool) -> None:
    core = make_core()
    core.store.with_stored = with_stored
    await send_event(core, FIRST)
    core.store.full = {"api", "webhook"}
    await send_event(core, OTHER)
    assert core.metrics.events["track", "conflict"] == 1
    assert len(core.documents) == 1
    core.store.full = {"api", "webhook", "conflict"}
    # A retry, whose letter is kept already.
    await send_event(core, OTHER)
    result = await send_batch(core, [OTHER, FIRST])
    assert (result.accepted, result.duplicates, result.rejected) == (0, 2, [])
    (letter,) = core.letters
    assert (letter.reason, letter.message_id) == (CODE, "m")
    assert orjson.loads(letter.item)["properties"] == OTHER["properties"]


async def test_a_single_conflict_that_cannot_be_kept_is_refused() -> None:
    core = make_core()
    await send_event(core, FIRST)
    core.store.full = {"conflict"}
    for strict in (False, True):
        error = await error_of(send_event(core, OTHER, strict=strict))
        assert (error.status, error.code) == (400, CODE)
        assert [problem.pointer for problem in error.errors] == ["/properties"]
        assert "send it with a different messageId" in error.message
    assert core.letters == []
    assert core.metrics.events["track", "conflict"] == 0
    assert core.metrics.events["track", CODE] == 2
    # The same event with a different id is stored.
    await send_event(core, {**OTHER, "messageId": "n"})
    assert len(core.documents) == 2


async def test_an_item_of_a_batch_whose_conflict_cannot_be_kept_is_rejected() -> None:
    core = make_core()
    await send_event(core, FIRST)
    core.store.full = {"conflict"}
    result = await send_batch(core, [OTHER, GOOD, FIRST, BAD, conflict(2)])
    assert (result.accepted, result.duplicates) == (1, 1)
    rejected = [(item.index, item.error.code) for item in result.rejected]
    assert rejected == [(0, CODE), (3, "invalid_payload"), (4, CODE)]
    assert result.rejected[0].message_id == "m"
    assert [letter.reason for letter in core.letters] == ["invalid_payload"]
    assert core.metrics.events["track", CODE] == 2
    result = await send_batch(core, [OTHER, conflict(2)])
    assert [item.error.code for item in result.rejected] == [CODE, CODE]
    error = await error_of(send_batch(core, [OTHER, conflict(2)], strict=True))
    assert (error.status, error.code) == (400, CODE)


async def test_the_second_of_two_events_of_one_batch_is_kept_or_rejected() -> None:
    core = make_core()
    result = await send_batch(core, [FIRST, OTHER])
    assert (result.accepted, result.duplicates, len(core.letters)) == (1, 1, 1)
    core = make_core()
    core.store.full = {"conflict"}
    result = await send_batch(core, [FIRST, OTHER])
    assert [item.error.code for item in result.rejected] == [CODE]


async def test_a_delivery_whose_conflict_cannot_be_kept_is_sent_again() -> None:
    core = make_core()
    core.store.full = {"conflict", "api"}
    result = await deliver(core, [FIRST, conflict(1, 50_000), BAD])
    assert (result.accepted, result.duplicates, len(result.rejected)) == (1, 1, 1)
    (letter,) = core.letters
    assert (letter.reason, letter.truncated) == (CODE, False)
    assert (letter.origin, letter.write_key_id) == ("stripe", None)
    assert len(letter.item) > 50_000
    core.store.full = {"webhook"}
    error = await error_of(deliver(core, [conflict(2)]))
    assert (error.status, error.code) == (503, "overloaded")


async def test_an_event_is_not_acknowledged_when_the_stored_one_has_just_expired() -> None:
    class Expiring(MemoryStore):
        async def find(self, *identity: str) -> None:
            return None

    store = Expiring()
    store.with_stored = False
    core = make_core(store)
    await send_event(core, FIRST)
    with pytest.raises(StorageUnavailable):
        await send_event(core, OTHER)


def named(user: str | None = None, visitor: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return an event of a user or a visitor."""
    ids = {"userId": user, "anonymousId": visitor}
    return {"type": "track", "event": "e", **{k: v for k, v in ids.items() if v}, **fields}


#: Whose the erased events were: a user's, a visitor's, and those of a user with a visitor.
ERASED = [named("ann"), named(None, "a-1"), named("ann", "a-1"), named("a-1", "ann")]


@contextlib.asynccontextmanager
async def with_erased(
    folder: Path, *, mark: bytes | None = None, key: str | None = KEY
) -> AsyncIterator[Core]:
    """Open an SQLite store with the erased events ``m0``, ``m1`` …

    :param mark: what they left, instead of the usual.
    :param key: of the server.
    """
    store = make(folder)
    await store.open(create=True)
    try:
        core = make_core(store, erasures_key=key)
        items = [{**one, "messageId": f"m{number}"} for number, one in enumerate(ERASED)]
        assert (await send_batch(core, items)).accepted == len(ERASED)
        events = await all_pages(store.scan, EventFilter())
        marks = [mark_of(one, KEY) if mark is None else mark for one in events]
        assert await store.erase_events(events, marks) == len(ERASED)
        yield core
    finally:
        await store.close()


async def test_a_late_retry_of_an_erased_event_is_stored_nowhere(tmp_path: Path) -> None:
    """Whatever else it contains."""
    async with with_erased(tmp_path) as core:
        late = [
            {**one, "messageId": f"m{number}", "event": event, "properties": {"a": 1}}
            for number, one in enumerate(ERASED)
            for event in "ef"
        ]
        for item in late:
            await send_event(core, item)
        assert (await send_batch(core, late)).duplicates == len(late)
        assert core.metrics.events["track", "duplicate"] == 2 * len(late)
        assert await all_pages(core.store.scan, EventFilter()) == []
        assert await all_pages(core.store.scan_dead_letters, "acme") == []


async def test_an_event_of_another_with_an_erased_identity_is_a_conflict(tmp_path: Path) -> None:
    async with with_erased(tmp_path) as core:
        others = [
            {**named(*ids), "messageId": f"m{number}"}
            for number, one in enumerate(ERASED)
            for user in ("ann", "a-1", "bob", None)
            for visitor in ("ann", "a-1", "bob", None)
            if (ids := (user, visitor))
            not in ((None, None), (one.get("userId"), one.get("anonymousId")))
        ]
        assert len(others) == 4 * 14
        await send_event(core, others[0])
        result = await send_batch(core, [*others, {**ERASED[0], "messageId": "m0"}, GOOD])
        assert (result.accepted, result.duplicates) == (1, len(others) + 1)
        assert core.metrics.events["track", "conflict"] == len(others) + 1
        letters = await all_pages(core.store.scan_dead_letters, "acme")
        kept = [orjson.loads(letter.item) for letter in letters]
        assert [(one.get("userId"), one.get("anonymousId"), one["messageId"]) for one in kept] == [
            (one.get("userId"), one.get("anonymousId"), one["messageId"]) for one in others
        ]
        assert {letter.reason for letter in letters} == {CODE}
        assert {letter.message for letter in letters} == {
            "another user's or visitor's event had this messageId until it was erased"
        }
        assert [letter.errors for letter in letters] == [[]] * len(others)


async def test_a_conflict_with_an_erased_event_that_cannot_be_kept_is_refused() -> None:
    core = make_core(erasures_key=KEY)
    await send_event(core, FIRST)
    (event,) = core.store.events.values()
    await core.store.erase_events([event], [mark_of(event, KEY)])
    core.store.full = {"conflict"}
    error = await error_of(send_event(core, {**FIRST, "userId": "v"}))
    assert (error.status, error.code) == (400, CODE)
    assert "send it with a different messageId" in error.message


@pytest.mark.parametrize(
    ("mark", "key"), [(b"", KEY), (None, None), (None, KEY[::-1])], ids=["older", "no key", "other"]
)
async def test_what_cannot_be_compared_with_an_erased_event_is_a_duplicate(
    mark: bytes | None, key: str | None, tmp_path: Path
) -> None:
    """An earlier version of engage erased it, or the server has not the key of the erasure."""
    async with with_erased(tmp_path, mark=mark, key=key) as core:
        await send_event(core, {**named("bob"), "messageId": "m0"})
        assert (await send_batch(core, [{**named("bob"), "messageId": "m1"}])).duplicates == 1
        assert await all_pages(core.store.scan_dead_letters, "acme") == []


def test_a_mark_tells_nothing_without_the_key() -> None:
    """Not even which erased events were of one person."""
    events = [
        event(name, user_id="ann", anonymous_id="a-1", workspace=workspace, origin=origin)
        for name in ("m1", "m2")
        for workspace in ("acme", "other")
        for origin in ("api", "segment")
    ]
    marks = [mark_of(one, KEY) for one in events]
    assert len({*marks, mark_of(events[0], KEY[::-1])}) == len(events) + 1
    for mark in marks:
        assert re.fullmatch(rb"hmac-sha256:[0-9a-f]{8}:[0-9a-f]{64}", mark)


FOUND: dict[str, Any] = {"context": {"engage": {"foundBy": "email:ann@x.org"}}}
MADE = named(None, "email:ann@x.org")


@pytest.mark.parametrize(
    ("first", "later", "kept"),
    [
        (named("ann"), named("ann"), False),
        (named("ann"), named("bob"), True),
        (named("ann", **FOUND), named("cus_1"), False),
        (named("cus_1"), named("bob", **FOUND), False),
        (named("ann", **FOUND), MADE, False),
        (named("cus_1"), MADE, False),
        (MADE, MADE, False),
        (MADE, named("bob", **FOUND), False),
        (MADE, named("bob"), True),
    ],
)
async def test_a_delivery_whose_user_was_looked_up_is_no_conflict_with_an_erased_one(
    first: dict[str, Any], later: dict[str, Any], kept: bool
) -> None:
    """The provider repeats a delivery, and nobody, or somebody else, has the address now."""
    core = make_core(erasures_key=KEY)
    await deliver(core, [{**first, "messageId": "m"}])
    (stored,) = core.store.events.values()
    await core.store.erase_events([stored], [mark_of(stored, KEY)])
    result = await deliver(core, [{**later, "messageId": "m"}])
    assert (result.accepted, result.duplicates) == (0, 1)
    assert len(core.letters) == kept
    assert core.documents == []


async def test_a_conflict_is_kept_whole() -> None:
    core = make_core()
    await send_event(core, FIRST)
    item = conflict(1, 60_000)
    await send_event(core, item)
    await send_batch(core, [conflict(2, 60_000)])
    assert [letter.truncated for letter in core.letters] == [False, False]
    assert orjson.loads(core.letters[0].item) == {**item, **SET_BY_SERVER}


async def test_the_letter_of_a_refused_item_does_not_stand_for_its_conflict() -> None:
    core = make_core()
    await send_event(core, FIRST)
    item = {"messageId": "m", "userId": "u", "event": "e", "properties": {"x": "x" * 20_000}}
    assert (await error_of(send_event(core, item, operation="alias"))).code == "invalid_payload"
    await send_event(core, item)
    refused, kept = core.letters
    assert (refused.reason, refused.truncated) == ("invalid_payload", True)
    assert (kept.reason, kept.truncated) == (CODE, False)
    assert orjson.loads(kept.item) == {**item, "type": "track", **SET_BY_SERVER}


async def test_the_letter_of_a_conflict_has_the_type_of_the_route() -> None:
    core = make_core()
    await send_event(core, {**FIRST, "messageId": "m2"})
    item = {"messageId": "m2", "userId": "v"}
    await send_event(core, item, operation="page")
    await send_event(core, item, operation="screen")
    assert [orjson.loads(letter.item)["type"] for letter in core.letters] == ["page", "screen"]
    # In a batch the item has its type, and the same letter.
    await send_batch(core, [{"type": "page", **item}, {**item, "type": "screen"}])
    assert len(core.letters) == 2


async def test_the_letter_of_a_conflict_has_the_message_id_of_an_idempotency_key() -> None:
    core = make_core()
    ids = []
    for key in ("k1", "k2"):
        stored = await send_event(core, {"userId": "u", "event": "first"}, idempotency_key=key)
        ids.append(stored.message_id)
    for key in ("k1", "k2", "k1"):
        await send_event(core, {"userId": "u", "event": "second"}, idempotency_key=key)
    assert [letter.message_id for letter in core.letters] == ids
    assert [orjson.loads(letter.item)["messageId"] for letter in core.letters] == ids


async def test_the_letter_of_a_conflict_has_the_envelope_of_its_batch() -> None:
    core = make_core()
    await send_event(core, FIRST)
    for app in ("a", "b", "b"):
        await send_batch(core, [OTHER], {"context": {"app": app}, "integrations": {"All": True}})
    items = [orjson.loads(letter.item) for letter in core.letters]
    assert [item["context"] for item in items] == [{"app": "a"}, {"app": "b"}]
    assert items[0]["integrations"] == {"All": True}


@pytest.mark.parametrize(
    "time",
    # The last one is in the future, so that the stored time is that of the arrival.
    [{}, {"timestamp": "2026-11-21T09:00:00Z"}, {"timestamp": "2027-11-21T09:00:00Z"}],
)
async def test_a_retry_of_a_conflict_is_the_same_letter(time: dict[str, str]) -> None:
    now = NOW
    core = make_core(clock=lambda: now)
    await send_event(core, FIRST)
    item = {**OTHER, **time}
    await send_event(core, {**item, "sentAt": "2026-11-21T09:20:00Z"})
    now += 90_000
    await send_event(core, {**item, "sentAt": "2026-11-21T09:21:00Z"})
    await send_batch(core, [item], {"sentAt": "2026-11-21T09:22:00Z"})
    (letter,) = core.letters
    assert letter.received_at == NOW
    kept = orjson.loads(letter.item)
    assert "sentAt" not in kept
    assert "receivedAt" not in kept
    assert kept.get("timestamp") == kept.get("originalTimestamp") == time.get("timestamp")


async def test_the_letter_of_a_conflict_has_the_transformed_event() -> None:
    def redact(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "properties": {"seen": True}, "timestamp": "2026-01-01T00:00:00Z"}

    core = make_core(transforms=[("redact", redact)])
    await send_event(core, FIRST)
    await send_event(core, {**FIRST, "userId": "v"})
    kept = orjson.loads(core.letters[0].item)
    assert kept["properties"] == {"seen": True}
    assert kept["timestamp"] == "2026-01-01T00:00:00.000Z"


async def fill(core: Core, count: int) -> None:
    """Send as many different invalid events as the budget of refused items has room for."""
    for start in range(0, count, 500):
        items = [{**BAD, "messageId": str(n)} for n in range(start, min(start + 500, count))]
        assert len((await send_batch(core, items)).rejected) == len(items)


async def test_junk_of_a_public_key_does_not_use_up_the_room_for_conflicts(
    tmp_path: Path,
) -> None:
    """Finding 6: too many invalid events, then an event whose message id was guessed and used."""
    limits = Limits(dead_letter_count=3)
    store = make(tmp_path, budget=limits.dead_letter_budget)
    await store.open(create=True)
    try:
        core = make_core(store, limits=limits)
        await fill(core, 5)
        assert core.metrics.lost["dead_letter"] == 2
        await send_event(core, FIRST)
        for number in range(3):
            await send_event(core, conflict(number))
        assert (await error_of(send_event(core, conflict(4)))).code == CODE
        await send_event(core, conflict(1))
        letters = await all_pages(store.scan_dead_letters, "acme")
        assert [one.reason for one in letters[3:]] == [CODE] * 3
        assert core.metrics.lost["conflict"] == 1
    finally:
        await store.close()


def test_a_budget_has_three_parts() -> None:
    budget = DeadLetterBudget()
    assert budget.of("conflict") == (10_000, 64 * 1024 * 1024)
    assert budget.of("api") == (10_000, 64 * 1024 * 1024)
    assert budget.of("webhook") == (10_000, 256 * 1024 * 1024)
