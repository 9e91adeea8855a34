# SPDX-License-Identifier: Apache-2.0
"""engage.storage.retention: what is old goes, in slices, and a failing storage ends nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.waiting import eventually

from engage.api import DeadLetterStore, EventStore, StorageUnavailable
from engage.config import Retention
from engage.storage.retention import expire, expire_periodically

DAY = 24 * 60 * 60 * 1000
NOW = 1_800_000_000_000


class _Events(EventStore):
    """Has as many events as asked for, all of the same time; the rest is not used."""

    def __init__(self, events: int, at: int = NOW - 3 * DAY) -> None:
        self.events, self.at = events, at
        self.calls: list[int] = []
        self.broken = False

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        assert not force
        if self.broken:
            raise StorageUnavailable("not now")
        count = min(limit, self.events) if self.at < before else 0
        self.events -= count
        self.calls.append(count)
        return count

    async def open(self, *, create: bool) -> None: ...
    async def close(self) -> None: ...
    async def check(self) -> None: ...
    async def write(self, events: Any) -> Any: ...
    async def find(self, *identity: str) -> None: ...
    async def scan(self, *filters: Any, **options: Any) -> Any: ...


class _Both(_Events, DeadLetterStore):
    letters = 25
    letters_before = 0

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        self.letters_before = before
        count = min(limit, self.letters)
        self.letters -= count
        return count

    async def put(self, letters: Any) -> int:
        return 0

    async def scan_dead_letters(self, *filters: Any, **options: Any) -> Any: ...
    async def remove(self, *names: Any) -> int:
        return 0


async def test_all_that_is_old_goes_in_slices() -> None:
    store = _Both(25)
    retention = Retention(events_days=2, dead_letters_days=14)
    assert await expire(store, retention, now=NOW, slice_=10) == (25, 25)
    assert store.calls == [10, 10, 5]
    assert store.letters_before == NOW - 14 * DAY


async def test_what_is_young_stays() -> None:
    store = _Events(25)
    assert await expire(store, Retention(events_days=4), now=NOW) == (0, 0)
    assert store.events == 25


async def test_what_is_kept_for_ever_is_not_asked_for() -> None:
    store = _Both(25)
    retention = Retention(events_days=None, dead_letters_days=None)
    assert await expire(store, retention, now=NOW) == (0, 0)
    assert store.calls == []
    await expire_periodically(store, retention)  # Returns: there is nothing to do, ever.


async def test_a_storage_without_dead_letters_is_no_error() -> None:
    assert await expire(_Events(0), Retention(events_days=1), now=NOW) == (0, 0)


async def test_a_failure_is_logged_and_the_next_round_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = _Events(3, at=0)
    store.broken = True
    task = asyncio.create_task(
        expire_periodically(store, Retention(events_days=1), first=0, every=0.01)
    )
    await eventually(
        lambda: "records could not be expired; the next round tries again: not now" in caplog.text
    )
    store.broken = False
    await eventually(lambda: not store.events)
    assert not task.done()
    task.cancel()
