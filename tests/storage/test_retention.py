# SPDX-License-Identifier: Apache-2.0
"""engage.storage.retention deletes what is old, in slices, and survives a failing storage."""

from __future__ import annotations

import asyncio

import pytest

from engage.api import StorageUnavailable
from engage.config import Retention
from engage.storage.retention import expire, expire_periodically
from engage.testing.factories import TIME, event, letter
from support.memory_store import MemoryEvents, MemoryStore
from support.waiting import eventually

DAY = 24 * 60 * 60 * 1000
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
    await expire_periodically(store, retention)  # Returns at once.


async def test_a_storage_without_dead_letters_can_expire_events() -> None:
    assert await expire(MemoryEvents(), Retention(events_days=1), now=NOW) == (0, 0)


async def test_a_failure_is_logged_and_the_next_round_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engage.storage.retention.time.time", lambda: NOW / 1000)
    store = Broken()
    await fill(store, days=3)
    task = asyncio.create_task(
        expire_periodically(store, Retention(events_days=1), first=0, every=0.01)
    )
    await eventually(
        lambda: "records could not be expired; the next round tries again: not now" in caplog.text
    )
    store.broken = False
    await eventually(lambda: len(store.events) == 1)
    assert not task.done()
    task.cancel()
