# SPDX-License-Identifier: Apache-2.0
"""engage.storage.retention deletes what is old, in slices, and survives a failing storage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engage.api import EventStore, Record, StorageUnavailable
from engage.config import Retention
from engage.pipeline.clock import Clock
from engage.storage.retention import Guard, expire, expire_audit, expire_periodically
from engage.testing.factories import TIME, event, letter
from support.memory_store import MemoryEvents, MemoryStore
from support.sqlite import make
from support.times import DAY, HOUR, MINUTE, Times
from support.waiting import eventually

NOW = TIME + 100 * DAY


def stopped(now: int) -> Clock:
    """Return a clock that shows the same time always, and is trusted."""
    times = Times(now - DAY)
    clock = times.clock()
    times.pass_(DAY)
    return clock


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
    assert await expire(store, retention, now=NOW, slice_=10) == (25, 25)
    assert store.expired == [10, 10, 5]
    assert [one.message_id for one in store.events.values()] == ["young"]
    assert [one.id for one in store.letters.values()] == ["young"]


async def test_what_is_young_stays() -> None:
    store = MemoryEvents()
    await fill(store, days=3)
    assert await expire(store, Retention(events_days=4), now=NOW) == (0, 0)
    assert len(store.events) == 26


async def test_without_a_limit_of_days_nothing_is_deleted() -> None:
    store = MemoryStore()
    await fill(store, days=3)
    retention = Retention(events_days=None, dead_letters_days=None)
    assert await expire(store, retention, now=NOW) == (0, 0)
    assert store.expired == []
    # Returns at once if there is no audit either.
    await expire_periodically(MemoryEvents(), retention, Clock())


async def test_the_audit_is_kept_for_400_days(tmp_path: Path) -> None:
    """Also if the config keeps events and dead letters indefinitely."""
    retention = Retention(events_days=None, dead_letters_days=None)
    store = make(tmp_path)
    await store.open(create=True)
    try:
        for kind in ("audit", "job", "key"):
            for number in range(3):
                old = record(kind, f"old {number}", NOW - 400 * DAY - 1)
                await store.put_record(old)
            await store.put_record(record(kind, "young", NOW - 400 * DAY))
        assert await expire_audit(store, now=NOW - 1, slice_=2) == 0
        running = asyncio.create_task(
            expire_periodically(store, retention, stopped(NOW), first=0, every=0.01)
        )

        async def left() -> list[str]:
            page = await store.list_records(None, limit=20)
            return [one.id for one in page.items if one.kind != "key"]

        async with asyncio.timeout(30):
            while await left() != ["young", "young"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len((await store.list_records("key", limit=20)).items) == 4
        running.cancel()
    finally:
        await store.close()


def record(kind: str, name: str, at: int) -> Record:
    return Record(kind=kind, workspace_id="", id=name, body=b"{}", at=at)


async def test_a_storage_without_dead_letters_can_expire_events() -> None:
    assert await expire(MemoryEvents(), Retention(events_days=1), now=NOW) == (0, 0)


async def test_a_failure_is_logged_and_the_next_round_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Broken()
    await fill(store, days=3)
    task = asyncio.create_task(
        expire_periodically(store, Retention(events_days=1), stopped(NOW), first=0, every=0.01)
    )
    await eventually(
        lambda: "records could not be expired; the next round tries again: not now" in caplog.text
    )
    store.broken = False
    await eventually(lambda: len(store.events) == 1)
    assert not task.done()
    task.cancel()


# ------------------------------------------------------------------------------------- the clock
class Rounds:
    """A store with an event a day for 100 days, and the rounds of retention on it."""

    def __init__(self, retention: Retention, now: int = NOW) -> None:
        self.store = MemoryStore()
        self.times = Times(now)
        self.clock = self.times.clock()
        self.guard = Guard(self.clock)
        self.retention = retention

    async def fill(self) -> None:
        """Store the events, and a dead letter of each day."""
        days = range(100, -1, -1)
        await self.store.write([event(f"e{day}", at=NOW - TIME - day * DAY) for day in days])
        await self.store.put([letter(f"l{day}", received_at=NOW - day * DAY) for day in days])

    async def receive(self) -> None:
        """Store an event that arrives now."""
        await self.store.write([event(f"now {self.times.elapsed}", at=self.clock() - TIME)])

    async def round(self) -> tuple[int, int]:
        """Expire what is due, as the server does."""
        now = self.clock()
        trusted = Retention(
            events_days=await self.guard.trusted(self.store, self.retention.events_days, now),
            dead_letters_days=await self.guard.trusted(
                self.store, self.retention.dead_letters_days, now
            ),
        )
        return await expire(self.store, trusted, now=now)


BOTH = Retention(events_days=30, dead_letters_days=14)


async def test_a_server_that_just_started_expires_what_is_old() -> None:
    rounds = Rounds(BOTH)
    await rounds.fill()
    assert await rounds.round() == (70, 86)


YEARS = 2 * 365 * DAY


async def test_a_clock_that_runs_ahead_for_a_while_deletes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Finding 7: one event received meanwhile, and everything older was deleted."""
    rounds = Rounds(BOTH)
    await rounds.fill()
    assert await rounds.round() == (70, 86)
    rounds.times.step(YEARS)
    await rounds.receive()
    assert await rounds.round() == (0, 0)
    # It is ahead for so long that it is believed.
    rounds.times.pass_(10 * MINUTE)
    await rounds.receive()
    assert await rounds.round() == (0, 0)
    rounds.times.pass_(12 * HOUR)
    assert await rounds.round() == (0, 0)
    rounds.times.step(-YEARS)
    assert await rounds.round() == (0, 0)
    assert caplog.text.count("nothing is expired") == 1
    # A day after the last step, retention goes on.
    rounds.times.pass_(DAY - 1)
    assert await rounds.round() == (0, 0)
    rounds.times.pass_(1)
    assert await rounds.round() == (2, 2)


@pytest.mark.parametrize("received", [0, 1])
async def test_a_server_that_starts_with_a_clock_that_is_ahead_deletes_nothing(
    caplog: pytest.LogCaptureFixture, received: int
) -> None:
    rounds = Rounds(BOTH, NOW + YEARS)
    await rounds.fill()
    for _ in range(received):
        await rounds.receive()
    assert await rounds.round() == (0, 0)
    assert "no event was received in the 730 days after" in caplog.text
    # The clock is set right: the step is seen.
    rounds.times.step(-YEARS)
    assert await rounds.round() == (0, 0)
    # The next process finds an event from the future, and waits too.
    rounds = Rounds(rounds.retention)
    await rounds.fill()
    await rounds.store.write([event("ahead", at=NOW + YEARS - TIME)])
    assert await rounds.round() == (0, 0)
    assert "the newest event was received in the future" in caplog.text
    rounds.times.pass_(DAY)
    assert (await rounds.round())[0] > 0


@pytest.mark.parametrize(("gap", "deleted"), [(30 * DAY, True), (30 * DAY + 1, False)])
async def test_a_gap_as_long_as_the_retention_is_believed(gap: int, deleted: bool) -> None:
    rounds = Rounds(Retention(events_days=30, dead_letters_days=None))
    await rounds.store.write([event("new", at=NOW - TIME - 29 * DAY)])
    await rounds.store.write([event("old", at=NOW - TIME - 29 * DAY - gap)])
    assert await rounds.round() == (int(deleted), 0)
    rounds.times.pass_(DAY - 1)
    assert (await rounds.round())[0] == 0
    rounds.times.pass_(1)
    assert (await rounds.round())[0] == int(not deleted)


async def test_a_storage_that_does_not_know_its_arrivals_can_expire() -> None:
    class Unknown(MemoryStore):
        arrivals = EventStore.arrivals  # type: ignore[assignment]

    rounds = Rounds(Retention(events_days=30))
    rounds.store = Unknown()
    await rounds.fill()
    assert await rounds.round() == (70, 86)
    rounds.times.step(YEARS)
    assert await rounds.round() == (0, 0)
