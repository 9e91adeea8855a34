# SPDX-License-Identifier: Apache-2.0
"""The loader, on a log in memory: what it writes, keeps, repeats and commits."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from engage.api import (
    CONFLICT,
    MAX_TIME,
    Batch,
    DeadLetter,
    Event,
    LogRecord,
    Outcome,
    StorageUnavailable,
    record_of,
    render_time,
    unpack,
)
from engage.config import DEFAULT_LIMITS
from engage.log import loading as load_module
from engage.log.letters import DAMAGED
from engage.pipeline.explain import STAMP
from engage.pipeline.replay import is_delivery, obstacle_of
from engage.reading.export import RecordKind, Selection, export
from engage.store.events import EVENTS
from engage.store.tables import Delete
from engage.testing import event as bare_event
from engage.testing.factories import letter
from support.each import each
from support.loaders import Loading, caught_up, load_all, loading, put
from support.memory_log import MemoryBroker, MemoryReader, damaged_record, unknown_record
from support.memory_store import MemoryEvents, MemoryStore, run_steps
from support.traffic import expected_users
from support.waiting import eventually

pytestmark = pytest.mark.virtual_time


def ids(store: MemoryEvents) -> list[str]:
    return sorted(event.message_id for event in store.events.values())


def dead(broker: MemoryBroker) -> list[DeadLetter]:
    """Return the letters in the log of dead letters."""
    found = [unpack(record) for record in broker.dead]
    assert all(isinstance(one, DeadLetter) for one in found)
    return [one for one in found if isinstance(one, DeadLetter)]


def event(message_id: str, **fields: Any) -> Event:
    """Return an event as a server appends it."""
    made = bare_event(message_id, **fields)
    times = {"timestamp": render_time(made.timestamp), "receivedAt": render_time(made.received_at)}
    return dataclasses.replace(made, body=orjson.dumps({**made.document(), **times}))


def events(*names: str, **fields: Any) -> list[Event]:
    return [event(name, user_id=f"u {name}", **fields) for name in names]


async def test_events_and_letters_are_stored_and_then_committed() -> None:
    broker, store = MemoryBroker(), MemoryStore()
    put(broker, *events(*"abcdefgh"), letter("refused"))
    async with loading(broker, store) as running:
        await caught_up(broker)
        put(broker, *events("later"))
        await caught_up(broker)
    assert ids(store) == [*"abcdefgh", "later"]
    assert len(store.letters) == 1
    assert sorted(running.observed) == ids(store)
    assert running.metrics.loads == {"stored": 9, "letter": 1}
    assert not broker.dead


async def test_nothing_is_committed_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    seen: list[dict[int, int]] = []
    store.before = lambda _: seen.append(broker.committed("engage"))
    put(broker, *events("a", "b"))
    monkeypatch.setattr(load_module, "PORTION_RECORDS", 1)
    await load_all(broker, store)
    assert seen == [{}, {0: 1}]
    assert broker.commits == [("engage", {0: 1}), ("engage", {0: 2})]


@pytest.mark.parametrize("with_stored", [True, False])
async def test_a_conflict_is_a_letter_in_both_offsets(with_stored: bool) -> None:
    broker, store = MemoryBroker(), MemoryStore()
    store.with_stored = with_stored
    put(broker, *events("a", properties={"n": 1}), *events("a", properties={"n": 2}))
    async with loading(broker, store) as running:
        await caught_up(broker)
        [kept] = store.letters.values()
        [durable] = dead(broker)
        assert kept.id == durable.id
        assert (kept.reason, kept.message_id, kept.user_id) == (CONFLICT, "a", "u a")
        assert orjson.loads(kept.item)["properties"] == {"n": 2}
        assert "receivedAt" not in orjson.loads(kept.item)
        assert running.metrics.loads == {"stored": 1, "conflict": 1}
        assert running.metrics.letters == {CONFLICT: 1}


async def test_a_letter_has_the_same_id_whenever_the_event_was_received() -> None:
    broker, store = MemoryBroker(), MemoryStore()
    store.refuse["r"] = "too long"
    first = events("a", properties={"n": 1})
    other = [event("a", user_id="u a", properties={"n": 2}, at=5), event("r", user_id="r", at=5)]
    again = [event("a", user_id="u a", properties={"n": 2}, at=7), event("r", user_id="r", at=7)]
    put(broker, *first, *other, *again)
    await load_all(broker, store)
    assert sorted(one.reason for one in store.letters.values()) == ["event_refused", CONFLICT]
    assert len(broker.dead) == 4


async def test_a_restated_event_is_a_duplicate() -> None:
    broker, store = MemoryBroker(), MemoryStore()
    put(broker, *events("a", properties={"n": 1}))
    put(broker, *events("a", properties={"n": 2}), restated=True)
    running = await load_all(broker, store)
    assert running.metrics.loads == {"stored": 1, "duplicate": 1}
    assert not store.letters


async def test_a_refused_event_does_not_stop_its_partition() -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    store.refuse["b"] = "it is too long"
    put(broker, *events("a", "b", "c"))
    put(broker, dataclasses.replace(events("b")[0], origin="stripe"))
    running = await load_all(broker, store)
    assert ids(store) == ["a", "c"]
    api, delivered = sorted(store.letters.values(), key=lambda one: one.origin)
    assert (api.reason, api.message, api.operation) == ("event_refused", "it is too long", "batch")
    assert api.id != delivered.id
    # It is one event, not the delivery: it can be edited and replayed as an event.
    assert not is_delivery(delivered)
    assert obstacle_of(delivered) is None
    assert len(broker.dead) == 2
    assert running.metrics.loads["refused"] == 2


async def test_no_budget_drops_the_letter_of_an_acknowledged_event() -> None:
    broker, store = MemoryBroker(), MemoryStore()
    store.full = {"api", "conflict"}
    store.refuse["a"] = "no"
    put(broker, *events("a", "b"), *events("b", properties={"n": 2}), letter("refused"))
    running = await load_all(broker, store)
    assert {one.reason for one in dead(broker)} == {"event_refused", CONFLICT}
    assert ids(store) == ["b"]
    # The letter of the server is dropped, as it would be without a log.
    assert running.metrics.lost == {"dead_letter": 2, "conflict": 1}


async def test_no_budget_drops_the_letter_of_a_delivery() -> None:
    """The provider got a 200 when a server had appended the letter."""
    broker, store = MemoryBroker(), MemoryStore()
    store.full = {"api", "webhook"}
    put(broker, letter("refused"), letter("delivery", origin="stripe"))
    running = await load_all(broker, store)
    assert [one.origin for one in dead(broker)] == ["stripe"]
    assert running.metrics.loads == {"letter": 2}


async def test_the_letters_are_durable_before_the_offsets_move() -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    store.refuse["a"] = "no"
    broker.failing.add("append_dead")
    put(broker, *events("a"))
    async with loading(broker, store):
        await eventually(lambda: broker.calls["append_dead"] >= 2)
        assert not broker.committed("engage")
        broker.failing.clear()
        await caught_up(broker)
    assert len(broker.dead) == 1


async def test_a_damaged_record_is_a_letter() -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    broker.inject(damaged_record())
    broker.inject(LogRecord(key=b"\xff", value=b"\xfe", headers={"engage": b"letter/1"}))
    put(broker, *events("a"))
    running = await load_all(broker, store)
    assert ids(store) == ["a"]
    one, other = dead(broker)
    assert (one.reason, one.workspace_id, one.item) == (DAMAGED, "acme", b"{}")
    assert dict(one.headers) == {"engage": "event/1", "meta": "{"}
    assert other.item == b"\xfe"
    assert len(store.letters) == 2
    assert running.metrics.loads == {"stored": 1, "damaged": 2}


@pytest.mark.parametrize("of_a_server", [False, True])
async def test_a_letter_that_is_too_large_for_the_log_of_dead_letters_is_shortened(
    of_a_server: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops no partition. What is kept names the record that has the rest."""
    broker, store = MemoryBroker(1), MemoryStore()
    store.full = {"api", "webhook", "conflict"}
    broker.max_dead = 3000
    large = b"x" * 20_000
    put(broker, *events("a"))
    if of_a_server:
        put(broker, letter("large", origin="stripe", item=large))
    else:
        broker.inject(dataclasses.replace(damaged_record(), value=large))
    store.refuse["b"] = "no"
    put(broker, *events("b", "c"))
    running = await load_all(broker, store)
    assert ids(store) == ["a", "c"]
    letters = {one.reason: one for one in dead(broker)}
    assert len(letters) == len(broker.dead) == 2
    assert letters.pop("event_refused").truncated is False
    [cut] = letters.values()
    assert cut.truncated
    assert 500 < len(cut.item) < 3000
    assert large.startswith(cut.item)
    assert "partition 0 of the log has all of it at offset 1)" in cut.message
    assert "the letter of offset 1 in partition 0 is too large" in caplog.text
    assert "and is shortened: the record is too large" in caplog.text
    assert running.metrics.log_errors == 0


async def test_a_log_of_dead_letters_that_takes_nothing_stops_no_partition(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    broker.max_dead = 10
    store.refuse["b"] = "no"
    put(broker, *events("a", "b", "c"))
    await load_all(broker, store)
    assert ids(store) == ["a", "c"]
    assert not broker.dead
    # The store has room for it.
    assert len(store.letters) == 1
    assert "and is not in it: the record is too large" in caplog.text


async def test_an_unknown_version_stops_its_partition_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, store = MemoryBroker(2), MemoryStore()
    one = [item for item in events(*map(str, range(20))) if _partition(broker, item) == 1]
    put(broker, one[0])
    broker.inject(unknown_record(), partition=1)
    put(broker, *one[1:])
    others = [item for item in events(*map(str, range(20))) if _partition(broker, item) == 0]
    put(broker, *others)
    async with loading(broker, store) as running:
        await eventually(lambda: broker.committed("engage") == {0: len(others), 1: 1})
        assert list(running.loader.paused) == [1]
        assert running.metrics.paused_partitions == 1
        await eventually(lambda: "are not loaded" in caplog.text)
        assert "event/99" in caplog.text
        put(broker, *events("more"), *others)
        await asyncio.sleep(0.1)
        assert broker.committed("engage")[1] == 1
    expected = [item.message_id for item in (one[0], *others)]
    assert set(expected) <= set(ids(store)) <= {*expected, "more"}
    # The next process begins at the same record.
    async with loading(broker, store) as running:
        await eventually(lambda: list(running.loader.paused) == [1])


def _partition(broker: MemoryBroker, item: Event) -> int:
    return broker.partition_of(f"{item.workspace_id}:{item.user_id}".encode())


async def test_a_gap_is_logged_counted_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    put(broker, *events(*"abcdef"))
    broker.commit("engage", {0: 1})
    broker.expire(0, 4)
    running = await load_all(broker, store)
    assert ids(store) == ["e", "f"]
    assert running.metrics.gap_records == running.loader.lost == 3
    assert "3 records from 1 on were deleted before they were loaded" in caplog.text
    [record] = (one for key, one in store.records.items() if key[0] == "log_gap")
    assert orjson.loads(record.body) == {"partition": 0, "expected": 1, "first": 4}


class Fails:
    """Makes a store raise an unexpected error for some events."""

    def __init__(self, store: MemoryStore, *names: str) -> None:
        self.names = set(names)
        self.sizes: list[int] = []
        store.before = self

    def __call__(self, written: Sequence[Event]) -> None:
        self.sizes.append(len(written))
        if any(record.message_id in self.names for record in written):
            raise ZeroDivisionError("a bug")


async def test_what_the_store_fails_with_is_found_by_halving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    fails = Fails(store, "7", "60")
    put(broker, *events(*map(str, range(100))))
    running = await load_all(broker, store)
    assert len(store.events) == 98
    assert {one.message_id for one in store.letters.values()} == {"7", "60"}
    assert {one.message for one in dead(broker)} == {
        "the storage failed with this event (ZeroDivisionError)"
    }
    assert len(fails.sizes) < 40
    assert len(running.observed) == 98
    assert "ZeroDivisionError" in caplog.text


async def test_a_broken_store_does_not_turn_events_into_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It raises unexpected errors for all of them, and its check fails as well."""
    broker, store = MemoryBroker(1), MemoryStore()
    Fails(store, "a", "b")
    checks = 0

    async def check() -> None:
        nonlocal checks
        checks += 1
        raise ZeroDivisionError

    monkeypatch.setattr(store, "check", check)
    put(broker, *events("a", "b"))
    async with loading(broker, store):
        await eventually(lambda: checks >= 2)
        monkeypatch.undo()
        store.before = None
        await caught_up(broker)
    assert ids(store) == ["a", "b"]
    assert not broker.dead


@pytest.mark.parametrize("origin", ["api", "stripe"])
async def test_a_letter_that_the_store_fails_with_is_in_the_log_of_dead_letters(
    origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    bad, good = letter("bad", origin=origin), letter("good")
    keep = store.keep

    async def failing(letters: Sequence[DeadLetter]) -> Sequence[bool]:
        if any(one.id == bad.id for one in letters):
            raise ZeroDivisionError
        return await keep(letters)

    monkeypatch.setattr(store, "keep", failing)
    put(broker, bad, good)
    await load_all(broker, store)
    assert list(store.letters.values()) == [good]
    assert dead(broker) == [bad]


async def test_offsets_without_records_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of the markers of transactions, but not beyond a record that stops."""
    broker, store = MemoryBroker(2), MemoryStore()
    read = MemoryReader.read

    async def marked(self: MemoryReader, **options: Any) -> Batch:
        batch = await read(self, **options)
        return dataclasses.replace(batch, passed=dict.fromkeys(self.partitions, 5))

    monkeypatch.setattr(MemoryReader, "read", marked)
    broker.inject(unknown_record(), partition=1)
    async with loading(broker, store):
        await eventually(lambda: 0 in broker.committed("engage"))
        await asyncio.sleep(0.05)
        assert broker.committed("engage") == {0: 5}


async def test_nothing_is_skipped_while_the_store_is_down(caplog: pytest.LogCaptureFixture) -> None:
    broker, store = MemoryBroker(), MemoryStore()
    down = True

    def before(_: Sequence[Event]) -> None:
        if down:
            raise StorageUnavailable("the disk is full")

    store.before = before
    put(broker, *events(*map(str, range(50))))
    async with loading(broker, store) as running:
        await eventually(lambda: len(store.writes) >= 3)
        assert not broker.commits
        # It reads no further meanwhile.
        assert broker.calls["reader.read"] == 1
        down = False
        await caught_up(broker)
    assert len(store.events) == 50
    assert not broker.dead
    assert caplog.text.count("the storage is unavailable: the disk is full") == 1
    assert caplog.text.count("the storage is available again") == 1
    assert running.metrics.errors >= 3


async def test_a_store_that_fails_with_large_writes_gets_smaller_ones() -> None:
    """It ends each call itself when its time is over, so it is not opened again."""
    broker, store = MemoryBroker(1), MemoryStore()

    def before(written: Sequence[Event]) -> None:
        if len(written) > 100:
            raise StorageUnavailable("no answer in time")

    store.before = before
    put(broker, *events(*map(str, range(400))))
    running = await load_all(broker, store)
    assert len(store.events) == 400
    # The offsets of each part are committed, not only those of the whole batch.
    assert len(broker.commits) == 4
    assert not broker.dead
    assert not store.opened
    assert running.metrics.errors < 20


async def test_a_storage_that_recovers_gets_large_writes_again() -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    overloaded = True

    def before(written: Sequence[Event]) -> None:
        if overloaded and len(written) > 1:
            raise StorageUnavailable("no answer in time")

    store.before = before
    put(broker, *events(*map(str, range(30))))
    async with loading(broker, store):
        await caught_up(broker)
        overloaded = False
        put(broker, *events(*map(str, range(30, 3000))))
        await caught_up(broker)
    assert len(store.events) == 3000
    assert max(len(written) for written in store.writes) > 500


async def test_what_was_stored_although_the_write_failed_is_found() -> None:
    broker = MemoryBroker(1)

    class LosesAnswers(MemoryStore):
        async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
            outcomes = await super().write(events)
            if len(events) > 5:
                raise StorageUnavailable("no answer in time")
            return outcomes

    store = LosesAnswers()
    put(broker, *events(*map(str, range(20))))
    running = await load_all(broker, store)
    assert len(store.events) == 20
    assert not broker.dead
    assert running.metrics.loads == {"duplicate": 20}


async def test_a_store_that_is_slow_with_letters_gets_fewer_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    keep = store.keep

    async def slow(letters: Sequence[DeadLetter]) -> Sequence[bool]:
        if len(letters) > 2:
            raise StorageUnavailable("no answer in time")
        return await keep(letters)

    monkeypatch.setattr(store, "keep", slow)
    put(broker, *(letter(str(number)) for number in range(10)))
    await load_all(broker, store)
    assert len(store.letters) == 10
    assert not broker.dead


async def test_a_write_is_not_larger_than_one_of_a_server() -> None:
    """The weight of an event is not in its record."""
    broker, store = MemoryBroker(1), MemoryStore()
    traits = {f"t{number}": number for number in range(99)}
    put(broker, *(event(str(n), type="identify", user_id="u", traits=traits) for n in range(155)))
    await load_all(broker, store)
    assert [len(written) for written in store.writes] == [40, 40, 40, 35]


async def test_an_event_that_expires_between_two_looks_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    store.with_stored = False
    put(broker, *events("a"))
    await store.write(events("a"))
    find, looks = store.find, 0

    async def expired(*identity: str) -> Event | None:
        nonlocal looks
        looks += 1
        run_steps(store, Delete(EVENTS, store.events))
        return await find(*identity)

    monkeypatch.setattr(store, "find", expired)
    running = await load_all(broker, store)
    assert looks == 1
    assert ids(store) == ["a"]
    assert running.metrics.loads == {"stored": 1}


@pytest.mark.parametrize("call", ["reader.open", "reader.read", "reader.commit"])
async def test_the_log_may_be_down(call: str, caplog: pytest.LogCaptureFixture) -> None:
    broker, store = MemoryBroker(), MemoryStore()
    broker.failing.add(call)
    put(broker, *events(*"abcdef"))
    async with loading(broker, store) as running:
        await eventually(lambda: broker.calls[call] >= 3)
        assert running.loader.log_calls.failing
        assert not broker.commits
        broker.failing.clear()
        await caught_up(broker)
    assert ids(store) == [*"abcdef"]
    assert running.metrics.log_errors >= 2
    assert "the log is unavailable; retrying" in caplog.text


async def test_an_unexpected_error_of_the_log_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    broker, store = MemoryBroker(), MemoryStore()

    def before(name: str) -> None:
        if name == "reader.read" and broker.calls[name] == 1:
            raise ZeroDivisionError

    broker.before = before
    put(broker, *events("a"))
    await load_all(broker, store)
    assert "ZeroDivisionError" in caplog.text


async def test_a_drain_does_not_wait_for_a_store_that_is_down() -> None:
    broker, store = MemoryBroker(), MemoryStore()

    def before(_: Sequence[Event]) -> None:
        raise StorageUnavailable

    store.before = before
    put(broker, *events("a"))
    async with loading(broker, store, timeout=25) as running:
        await eventually(lambda: store.writes)
        began = asyncio.get_running_loop().time()
        await running.stop()
        assert asyncio.get_running_loop().time() - began < 15
    assert not broker.commits


async def test_a_drain_finishes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    go = asyncio.Event()
    store.before = lambda _: go.wait()
    put(broker, *events("a", "b"))
    monkeypatch.setattr(load_module, "PORTION_RECORDS", 1)
    async with loading(broker, store) as running:
        await eventually(lambda: store.writes)
        running.loader.stop()
        await asyncio.sleep(0.05)
        go.set()
        await running.stop()
    assert ids(store) == ["a"]
    assert broker.committed("engage") == {0: 1}


async def test_loaders_that_die_anywhere_store_everything_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a time; they are killed while they write, leave and come back."""
    chance = random.Random(7)
    broker = MemoryBroker(4)
    sent: list[Event] = []
    store = MemoryStore()
    store.before = lambda _: asyncio.sleep(chance.random() * 0.02)
    running: list[Any] = []
    for turn in range(30):
        new = [
            event(
                f"{turn}-{number}",
                type="identify",
                user_id=f"u{number % 7}",
                traits={f"t{number % 5}": f"{turn}-{number}"},
                at=1000 + turn,
            )
            for number in range(40)
        ]
        sent += new
        put(broker, *new, *chance.sample(sent, 5))
        if len(running) < 2:
            monkeypatch.setattr(load_module, "PORTION_RECORDS", chance.randrange(1, 60))
            stack = loading(broker, store)
            running.append((stack, await stack.__aenter__()))
        await asyncio.sleep(chance.random() * 0.05)
        if chance.random() < 0.6:
            stack, victim = running.pop(0)
            await _end(stack, victim, kill=chance.random() < 0.7)
    for stack, victim in running:
        await _end(stack, victim, kill=False)
    await load_all(broker, store)

    async def read(kind: RecordKind) -> list[Any]:
        return [orjson.loads(one.json) async for one in export(store, kind, Selection())]

    stored, users = await read("events"), await read("users")
    assert sorted(one["messageId"] for one in stored) == sorted(one.message_id for one in sent)
    users.sort(key=lambda user: str(user["userId"]))
    assert [(user["userId"], user["traits"]) for user in users] == [
        (user["userId"], user["traits"]) for user in expected_users(stored)
    ]
    assert not broker.dead


async def _end(stack: Any, victim: Loading, *, kill: bool) -> None:
    if kill:
        await victim.kill()
        with pytest.raises(asyncio.CancelledError):
            await stack.__aexit__(None, None, None)
    else:
        await stack.__aexit__(None, None, None)


async def test_an_event_that_no_server_wrote_is_a_letter() -> None:
    broker, store = MemoryBroker(1), MemoryStore()
    store.refuse["a"] = "no"
    put(broker, bare_event("a"), bare_event("b", type="identify", traits=5), *events("c"))
    await load_all(broker, store)
    assert [one.reason for one in dead(broker)] == [DAMAGED] * 2
    assert ids(store) == ["c"]


async def test_an_outcome_is_missing() -> None:
    """A store that returns too few outcomes has a bug, and nothing is lost by it."""
    broker = MemoryBroker(1)

    class Forgets(MemoryStore):
        async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
            outcomes = await super().write(events)
            return outcomes[:-1] if len(events) > 1 else outcomes

    store = Forgets()
    put(broker, *events("a", "b", "c"))
    await load_all(broker, store)
    assert ids(store) == ["a", "b", "c"]
    assert not broker.dead


def nested(levels: int) -> dict[str, Any]:
    """Return the properties of an event that is so many levels deep."""
    value: dict[str, Any] = {}
    for _ in range(levels - 2):
        value = {"a": value}
    return value


def of_size(size: int, **fields: Any) -> Event:
    """Return an event of so many bytes."""
    plain = event("m", properties={"x": ""}, **fields)
    return event("m", properties={"x": "y" * (size - len(plain.body))}, **fields)


LIMITS = DEFAULT_LIMITS
WITHIN = [
    *(event("m", properties=nested(LIMITS.json_depth)), of_size(LIMITS.event_bytes)),
    of_size(LIMITS.event_bytes + 1, origin="stripe"),
    of_size(LIMITS.webhook_event_bytes, origin="stripe"),
    dataclasses.replace(event("m"), received_at=MAX_TIME, timestamp=0),
    letter("l", received_at=MAX_TIME),
    letter("l", envelope=b'{"context":{"a":1},"integrations":{},"sentAt":"x","messageId":"m"}'),
    letter("l", item=b"[" * 100_000),
]
BEYOND = [
    *(event("m", properties=nested(LIMITS.json_depth + 1)), event("m", properties=nested(250))),
    dataclasses.replace(event("m"), body=b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    of_size(LIMITS.event_bytes + STAMP + 1),
    of_size(LIMITS.webhook_event_bytes + STAMP + 1, origin="stripe"),
    dataclasses.replace(event("m"), received_at=MAX_TIME + 1),
    dataclasses.replace(event("m"), received_at=9 * 10**15),
    *(dataclasses.replace(event("m"), timestamp=-1), letter("l", received_at=9 * 10**15)),
    letter("l", received_at=-1),
]


@each("item", WITHIN)
async def test_a_record_within_the_limits_of_requests_is_stored(item: Event | DeadLetter) -> None:
    broker, store = MemoryBroker(), MemoryStore()
    put(broker, item, *events("last"))
    await load_all(broker, store)
    assert not broker.dead
    found = store.letters if isinstance(item, DeadLetter) else store.events
    assert item in found.values()


@each("item", BEYOND)
@each("appended_at", [1, 9 * 10**15])
async def test_a_record_beyond_the_limits_of_requests_is_damaged(
    item: Event | DeadLetter, appended_at: int
) -> None:
    """Its letter can be exported, whatever time the record has."""
    broker, store = MemoryBroker(clock=lambda: appended_at), MemoryStore()
    put(broker, item, *events("last"))
    running = await load_all(broker, store)
    assert ids(store) == ["last"]
    assert running.metrics.loads == {"stored": 1, "damaged": 1}
    (kept,) = store.letters.values()
    assert (kept.reason, kept.item) == (DAMAGED, record_of(item).value)
    assert [one.id for one in dead(broker)] == [kept.id]
    assert len([one async for one in export(store, "dead-letters", Selection())]) == 1
