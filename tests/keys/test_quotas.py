# SPDX-License-Identifier: Apache-2.0
"""What write keys and workspaces may store in a day."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engage.api import DAY_MS, StorageUnavailable
from engage.config import Config, Limits, Quota, Workspace, WriteKey
from engage.errors import ApiError
from engage.keys.effective import Key, effective_keys
from engage.keys.quotas import Quotas, used_up
from engage.monitoring.history import History
from engage.monitoring.metrics import Metrics
from support.each import each
from support.memory_store import MemoryStore

#: 00:00 UTC.
MIDNIGHT = 20_000 * DAY_MS
KEYS = (
    WriteKey(id="web", key="w"),
    WriteKey(id="ios", key="i"),
    WriteKey(id="backend", sha256="0" * 64, kind="server"),
)


class Process:
    """A process of a server, with the clock of the test."""

    def __init__(self, config: Config, store: MemoryStore, now: int = MIDNIGHT) -> None:
        self.now = now
        self.metrics = Metrics()
        self.history = History(self.metrics)
        self.store = store
        keys: list[Key] = list(effective_keys(config.workspaces, ()).keys)
        self.quotas = Quotas(config, store, lambda: keys, lambda: self.now)

    def stores(self, key: str, events: int, size: int = 100, workspace: str = "acme") -> None:
        self.metrics.event("track", "stored", events, workspace, key)
        self.metrics.stored(events * size, workspace, key)

    async def passes(self, seconds: int, *, write: bool = True) -> None:
        """Do what a process does every second."""
        for _ in range(seconds):
            self.now += 1000
            self.history.turn(self.now)
            if write and self.now % 5000 == 0:
                await self.history.write_to(self.store)
            await self.quotas.look(self.history, logs=True)

    def refused(self) -> dict[str, str]:
        found = {}
        for key in ("web", "ios", "backend"):
            try:
                self.quotas.check(("acme", key))
            except ApiError as error:
                found[key] = error.headers["Retry-After"]
        return found


def config(limits: dict[str, int] | None = None, workspace: dict[str, int] | None = None) -> Config:
    acme = Workspace(id="acme", name="Acme", write_keys=KEYS, quota=Quota(**(workspace or {})))
    other = dataclasses.replace(acme, id="other", quota=Quota())
    return Config(
        path=Path("engage.toml"),
        base_dir=Path(),
        limits=Limits(quota=Quota(**(limits or {}))),
        workspaces=(acme, other),
    )


@pytest.mark.parametrize("kind", ["events", "bytes"])
async def test_a_key_is_refused_from_its_quota_to_midnight(kind: str) -> None:
    quota = {"events_per_day": 50} if kind == "events" else {"bytes_per_day": 5000}
    process = Process(config(quota), MemoryStore(), now=MIDNIGHT + 3_600_000)
    process.stores("web", 49)
    process.stores("web", 50, workspace="other")
    await process.passes(3)
    assert process.refused() == {}
    process.stores("web", 1)
    await process.passes(3)
    left = (MIDNIGHT + DAY_MS - process.now) // 1000
    assert process.refused() == {"web": str(left)}
    process.now = MIDNIGHT + DAY_MS - 1
    assert process.refused() == {"web": "1"}
    with pytest.raises(ApiError) as caught:
        process.quotas.check(("acme", "web"))
    assert (caught.value.status, caught.value.code) == (429, "quota_exceeded")
    # At once, before the counters are read again.
    process.now += 1
    assert process.refused() == {}
    await process.passes(20)
    assert process.refused() == {}
    process.stores("web", 50)
    await process.passes(3)
    assert list(process.refused()) == ["web"]


async def test_a_workspace_counts_its_public_keys_and_refuses_only_them() -> None:
    process = Process(config(workspace={"events_per_day": 100}), MemoryStore())
    process.stores("backend", 1000)
    process.stores("web", 60)
    process.stores("ios", 39)
    await process.passes(3)
    assert process.refused() == {}
    assert process.metrics.numbers["quota_used_ratio"] == {(): 0.99}
    process.stores("ios", 1)
    await process.passes(3)
    assert list(process.refused()) == ["web", "ios"]


async def test_all_processes_count_together_also_those_that_ended() -> None:
    store = MemoryStore()
    one, other = (Process(config({"events_per_day": 100}), store) for _ in range(2))
    one.stores("web", 50)
    await one.passes(5)
    # It ends, and another takes its place.
    one = Process(config({"events_per_day": 100}), store, now=one.now)
    one.stores("web", 30)
    other.stores("web", 20)
    for _ in range(8):
        await one.passes(1)
        await other.passes(1)
    assert list(one.refused()) == list(other.refused()) == ["web"]


async def test_nothing_is_counted_twice_or_lost_while_counters_are_written() -> None:
    process = Process(config({"events_per_day": 10_000}), MemoryStore())
    for count in range(200):
        process.stores("web", 49)
        await process.passes(1)
        assert (process.refused() != {}) == (49 * (count + 1) >= 10_000)
    process.stores("web", 200)
    await process.passes(3)
    assert list(process.refused()) == ["web"]


async def test_the_last_sum_holds_while_the_counters_cannot_be_read() -> None:
    class Away(MemoryStore):
        away = False

        async def counts(self, *args: Any, **options: Any) -> Any:
            if self.away:
                raise StorageUnavailable("away")
            return await super().counts(*args, **options)

    store = Away()
    one, other = (Process(config({"events_per_day": 100}), store) for _ in range(2))
    one.stores("web", 90)
    await one.passes(6)
    await other.passes(6)
    store.away = True
    other.stores("web", 9)
    await other.passes(20, write=False)
    assert other.refused() == {}
    other.stores("web", 1)
    await other.passes(3, write=False)
    assert list(other.refused()) == ["web"]
    # Of the next day nothing is known but what this process has counted.
    other.now = MIDNIGHT + DAY_MS
    await other.passes(3, write=False)
    assert other.refused() == {}


async def test_a_quota_that_is_used_up_is_logged_once_a_day(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    quotas = config({"events_per_day": 10}, {"bytes_per_day": 1500})
    process = Process(quotas, MemoryStore())
    process.stores("web", 10)
    await process.passes(10)
    assert caplog.messages == [
        "the write key 'web' of the workspace 'acme' has used up 10 events a day"
        " (limits.quota.events_per_day); it is refused until 2024-10-05T00:00:00+00:00"
    ]
    caplog.clear()
    process.stores("ios", 5)
    await process.passes(10)
    assert caplog.messages == [
        "the workspace 'acme' with its public write keys has used up 1500 bytes a day"
        " (workspaces.quota.bytes_per_day); it is refused until 2024-10-05T00:00:00+00:00"
    ]


async def test_a_clock_that_is_set_back_counts_for_the_day_that_it_shows() -> None:
    process = Process(config({"events_per_day": 10}), MemoryStore(), now=MIDNIGHT + 5000)
    process.stores("web", 10)
    await process.passes(3)
    assert list(process.refused()) == ["web"]
    process.now = MIDNIGHT - 3_600_000
    await process.passes(1)
    process.stores("web", 9)
    await process.passes(20)
    assert "web" not in process.refused()


@each("step", [DAY_MS, 3 * 3_600_000, 300_000])
async def test_a_clock_that_was_wrong_for_a_while_loses_nothing(step: int) -> None:
    process = Process(config({"events_per_day": 100}), MemoryStore(), now=MIDNIGHT + 5000)
    process.stores("web", 60)
    await process.passes(10)
    process.now += step
    await process.passes(10)
    process.now -= step
    await process.passes(1)
    process.stores("web", 39)
    await process.passes(10)
    assert process.refused() == {}
    process.stores("web", 1)
    await process.passes(10)
    assert list(process.refused()) == ["web"]


class Keys(list[Key]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[Key]:
        self.times += 1
        return super().__iter__()


def test_many_workspaces_do_not_hold_the_event_loop() -> None:
    acme = config({"events_per_day": 1})
    keys = Keys(effective_keys(acme.workspaces, ()).keys)
    assert used_up(acme, keys, {("other", "stored", "ios"): 1})[0].keys() == {("other", "ios")}
    assert keys.times == 1
