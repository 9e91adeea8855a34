# SPDX-License-Identifier: Apache-2.0
"""engage.upkeep.retention deletes what is old, in slices, and survives a failing storage."""

from __future__ import annotations

import asyncio

import pytest

from engage.api import Event, EventFilter, Page, Record, StorageUnavailable
from engage.config import Retention
from engage.pipeline.clock import Clock
from engage.store.facade import Storage
from engage.testing.factories import TIME, event, letter
from engage.upkeep.retention import expire, expire_audit, expire_periodically, gap
from support.memory_store import MemoryEvents, MemoryStore
from support.times import DAY, HOUR, Times
from support.waiting import eventually

pytestmark = pytest.mark.virtual_time

NOW = TIME + 100 * DAY


class Broken(MemoryEvents):
    """Fails to expire until :attr:`broken` is false."""

    broken = True

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        if self.broken:
            raise StorageUnavailable("not now")
        return await super().expire(before, limit=limit, force=force)


async def fill(store: MemoryEvents, *, days: int) -> None:
    """Store 25 events of ``days`` ago and one of today.

    Without the last one nothing would expire: the clock could have jumped.
    """
    at = NOW - TIME - days * DAY
    await store.write([event(f"old {number}", at=at) for number in range(25)])
    await store.write([event("young", at=NOW - TIME)])


async def test_what_is_old_is_deleted_in_slices() -> None:
    store = MemoryStore()
    await fill(store, days=3)
    old = [letter(f"old {n}", received_at=NOW - 14 * DAY - 1) for n in range(25)]
    await store.put([*old, letter("young", received_at=NOW - 14 * DAY)])
    retention = Retention(events_days=2, dead_letters_days=14)
    assert await expire(store, retention, now=NOW, slice_=10) == (25, 25, 0)
    assert store.expired == [10, 10, 5]
    assert [one.message_id for one in store.events.values()] == ["young"]
    assert [one.id for one in store.letters.values()] == ["young"]


async def test_what_is_young_stays() -> None:
    store = MemoryEvents()
    await fill(store, days=3)
    assert await expire(store, Retention(events_days=4), now=NOW) == (0, 0, 0)
    assert len(store.events) == 26


async def test_without_a_limit_of_days_nothing_is_deleted() -> None:
    store = MemoryStore()
    await fill(store, days=3)
    retention = Retention(events_days=None, dead_letters_days=None, visitors_days=None)
    assert await expire(store, retention, now=NOW) == (0, 0, 0)
    assert store.expired == []


async def test_visitors_that_no_event_changed_are_deleted() -> None:
    store = MemoryStore()
    old = [
        event(f"{n}", type="identify", anonymous_id=f"old{n}", received=NOW - 9 * DAY - 1 - TIME)
        for n in range(25)
    ]
    young = event("y", type="identify", anonymous_id="young", received=NOW - 9 * DAY - TIME)
    await store.write([*old, young])
    assert await expire(store, Retention(visitors_days=9), now=NOW, slice_=10) == (0, 0, 25)
    assert [
        item.anonymous_id for item in (await store.scan_visitors(None, after=None, limit=9)).items
    ] == ["young"]
    assert len(store.events) == 26


async def test_the_audit_is_kept_for_400_days() -> None:
    """Also if the config keeps events and dead letters indefinitely."""
    retention = Retention(events_days=None, dead_letters_days=None, visitors_days=None)
    store = MemoryStore()
    for kind in ("audit", "key"):
        for number in range(3):
            await store.put_record(record(kind, f"old {number}", NOW - 400 * DAY - 1))
        await store.put_record(record(kind, "young", NOW - 400 * DAY))
    assert await expire_audit(store, now=NOW - 1, slice_=2) == 0
    running = asyncio.create_task(expire_periodically(store, retention, lambda: NOW, first=0))
    await eventually(lambda: len(store.records) < 6)
    assert sorted(name for kind, _, name in store.records if kind == "audit") == ["young"]
    assert len(store.records) == 5
    running.cancel()


def record(kind: str, name: str, at: int) -> Record:
    return Record(kind=kind, workspace_id="", id=name, body=b"{}", at=at)


async def test_a_failure_is_logged_and_the_next_round_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Broken()
    await fill(store, days=3)
    task = asyncio.create_task(
        expire_periodically(
            store, Retention(events_days=1), lambda: NOW, first=0, every=1, doubtful=0
        )
    )
    await eventually(
        lambda: "records could not be expired; the next round tries again: not now" in caplog.text
    )
    store.broken = False
    await eventually(lambda: len(store.events) == 1)
    assert not task.done()
    task.cancel()


# ------------------------------------------------------------------------------------- the clock
BOTH = Retention(events_days=30, dead_letters_days=14)
YEARS = 2 * 365 * DAY


async def fill_100_days(store: MemoryStore) -> None:
    """Store an event and a dead letter of each day."""
    days = range(100, -1, -1)
    await store.write([event(f"e{day}", at=NOW - TIME - day * DAY) for day in days])
    await store.put([letter(f"l{day}", received_at=NOW - day * DAY) for day in days])


async def receive(store: MemoryStore, clock: Clock) -> None:
    """Store an event and a dead letter that arrive now."""
    now = clock()
    await store.write([event(f"now {now}", at=now - TIME)])
    await store.put([letter(f"now {now}", received_at=now)])


async def round_(store: MemoryStore, clock: Clock, *, doubtful: float = 600) -> int:
    """Run a round as the server does, and return how many records it deleted."""
    before = len(store.events) + len(store.letters)
    rounds = 0

    def now() -> int:
        nonlocal rounds
        rounds += 1
        return clock.without_steps_ahead()

    task = asyncio.create_task(
        expire_periodically(store, BOTH, now, first=0, every=60, doubtful=doubtful)
    )
    await eventually(lambda: rounds > 1)
    task.cancel()
    return before - len(store.events) - len(store.letters)


async def test_a_server_that_just_started_expires_what_is_old() -> None:
    store = MemoryStore()
    await fill_100_days(store)
    assert await round_(store, Times(NOW).clock()) == 70 + 86


async def test_a_clock_that_runs_ahead_for_a_while_deletes_nothing() -> None:
    """One event is received while it is ahead, and makes everything else look old."""
    store, times = MemoryStore(), Times(NOW)
    clock = times.clock()
    await fill_100_days(store)
    await round_(store, clock)
    times.step(YEARS)
    await receive(store, clock)
    assert await round_(store, clock) == 0
    assert await round_(store, clock, doubtful=0) == 0
    times.step(-YEARS)
    assert await round_(store, clock) == 0
    # It goes on where it was.
    times.pass_(HOUR)
    await receive(store, clock)
    assert await round_(store, clock) == 2


@pytest.mark.parametrize("received", [0, 1])
async def test_a_server_that_starts_with_a_clock_that_is_ahead_deletes_nothing(
    caplog: pytest.LogCaptureFixture, received: int
) -> None:
    store, times = MemoryStore(), Times(NOW + YEARS)
    clock = times.clock()
    await fill_100_days(store)
    for _ in range(received):
        await receive(store, clock)
    assert await round_(store, clock) == 0
    assert "no event was received in the 30 days after" in caplog.text
    assert caplog.text.count("nothing is expired") == 4  # events, dead letters, visitors, the audit
    # The clock is set right.
    times.step(-YEARS)
    assert await round_(store, clock) == 70 + 86


@pytest.mark.parametrize(("length", "deleted"), [(30 * DAY, True), (30 * DAY + 1, False)])
async def test_a_gap_as_long_as_the_retention_is_believed(length: int, deleted: bool) -> None:
    store, clock = MemoryStore(), Times(NOW).clock()
    await store.write([event("old", at=NOW - TIME - 29 * DAY - length)])
    await store.write([event("new", at=NOW - TIME - 29 * DAY)])
    assert await round_(store, clock) == int(deleted)
    # A server that was off for so long deletes when it has run for a day.
    assert await round_(store, clock, doubtful=0) == int(not deleted)


async def test_a_gap_is_looked_for_on_all_pages() -> None:
    class Sparse(MemoryStore):
        async def recent(
            self, wanted: EventFilter, *, before: str | None = None, limit: int
        ) -> Page[Event]:
            if before is None:
                return Page((), "first")
            return await super().recent(wanted, limit=limit)

    store = Sparse()
    await fill_100_days(store)
    assert await gap(store, 30, NOW) is None
    assert await gap(store, 30, NOW + YEARS) is not None


async def test_a_storage_without_recent_events_can_expire() -> None:
    class Unknown(MemoryStore):
        recent = Storage.recent

    store = Unknown()
    await fill_100_days(store)
    assert await round_(store, Times(NOW).clock()) == 70 + 86
