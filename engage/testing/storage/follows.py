# SPDX-License-Identifier: Apache-2.0
"""The promises of every storage whose events can be followed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import time
from typing import Any, Final

import pytest

from engage.api import Event, ForeignCursor
from engage.store.facade import Storage

from ..factories import TIME, event, identify
from .harness import Bench, on_store
from .processes import children_of

#: Seconds after which another process must have entered what a killed one had acknowledged, on a
#: busy machine.
_PATIENCE: Final = 90.0


class FollowTests:
    """Events are followed: see :meth:`Storage.follow`."""

    @on_store
    async def test_each_event_is_followed_once_in_order(self, bench: Bench) -> None:
        store = await _followable(bench)
        await store.write([event(f"a{number}") for number in range(25)])
        follower = _Follower(store)
        await follower.until({f"a{number}" for number in range(25)})
        assert follower.names == [f"a{number}" for number in range(25)]
        assert follower.cursor is not None
        # Another process goes on, later.
        later = _Follower(await bench.open(), follower.cursor)
        await later.read()
        assert later.names == []
        await store.write([identify("b", "u", traits={"n": 1}), event("c")])
        await later.until({"b", "c"})
        assert later.names == ["b", "c"]

    @on_store
    async def test_old_events_are_behind_the_cursor_when_they_arrive(self, bench: Bench) -> None:
        """The time of receipt of an event that a log or a copy brings may be long ago."""
        store = await _followable(bench)
        follower = _Follower(store)
        for number, at in enumerate((TIME, TIME - 10**9, TIME + 10**9, 1)):
            old = dataclasses.replace(event(f"m{number}"), received_at=at)
            await store.write([old])
            await follower.until({f"m{number}"})
        assert follower.names == ["m0", "m1", "m2", "m3"]

    @on_store
    async def test_a_large_write_is_followed_in_small_pages(self, bench: Bench) -> None:
        store = await _followable(bench)
        names = [f"m{number}" for number in range(300)]
        # Not in the order of their times.
        times = [TIME + (number * 7919) % 300 for number in range(300)]
        events = [
            dataclasses.replace(event(name), received_at=at)
            for name, at in zip(names, times, strict=True)
        ]
        await store.write(events)
        follower = _Follower(store, limit=17)
        await follower.until({*names})
        assert sorted(follower.names) == sorted(names)

    @on_store
    async def test_nothing_is_missed_while_processes_are_stopped_and_killed(
        self, bench: Bench
    ) -> None:
        """Several processes write; some are stopped in the middle of a write, and some are killed.
        What one has acknowledged is behind the place of a follower, or before it and was seen."""
        bench.require("several-processes")
        bench.require("durable")
        store = await _followable(bench)
        chance = random.Random(36)
        follower = _Follower(store, limit=40)
        acknowledged: set[str] = set()
        following = asyncio.ensure_future(follower.forever())
        for turn in range(4):
            jobs = [
                {"kind": "own ids", "count": 10**6, "name": f"{turn}{name}"} for name in ("a", "b")
            ]
            async with children_of(bench, *jobs) as children:
                for child in children:
                    assert child.stdout is not None
                    acknowledged.add((await child.stdout.readline()).decode().strip())
                reading = [asyncio.ensure_future(_read(child, acknowledged)) for child in children]
                for _ in range(5):
                    await asyncio.sleep(chance.random() / 5)
                    stopped = chance.choice(children)
                    stopped.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(chance.random() / 5)
                    stopped.send_signal(signal.SIGCONT)
                await asyncio.sleep(chance.random())
                for child in children:
                    child.kill()
                await asyncio.gather(*reading)
            assert not following.done(), following.exception()
        await store.write([event("last")])
        following.cancel()
        await follower.until(acknowledged | {"last"})
        everything = _Follower(store)
        await everything.until(acknowledged | {"last"})

    @on_store
    async def test_expired_and_erased_events_are_left_out(self, bench: Bench) -> None:
        store: Any = await _followable(bench)
        bench.require("expire")
        old = [dataclasses.replace(event(f"o{n}"), received_at=TIME - 1000) for n in range(4)]
        new = [event(f"n{number}") for number in range(6)]
        await store.write([*old, *new])
        follower = _Follower(store, limit=3)
        await follower.until({"o0"})
        await store.expire(TIME - 500, limit=100)
        if hasattr(store, "erase_events"):
            await store.erase_events([new[2]], [b"hmac-sha256:x"])
        await store.write([event("after")])
        await follower.until({"after"})
        assert {"n0", "n5", "after"} <= {*follower.names}
        again = _Follower(store)
        await again.until({"after"})
        gone = {"o0", "o1", "o2", "o3"} | ({"n2"} if hasattr(store, "erase_events") else set())
        assert not gone & {*again.names}

    @on_store
    async def test_the_cursor_of_another_store_is_refused(self, bench: Bench) -> None:
        store = await _followable(bench)
        await store.write([event("m")])
        follower = _Follower(store)
        await follower.until({"m"})
        folder = bench.context.base_dir / "another"
        folder.mkdir()
        other = bench.elsewhere(folder)()
        await other.open(create=True)
        with pytest.raises(ForeignCursor):
            await other.follow(after=follower.cursor, limit=10)
        for wrong in ("", "x", "{}", "[]", "[1]", '["a"]'):
            with pytest.raises(ValueError, match=r"."):
                await store.follow(after=wrong, limit=10)


class _Follower:
    """Follows the events of a store."""

    def __init__(self, store: Storage, cursor: str | None = None, limit: int = 100) -> None:
        self._store = store
        self.cursor = cursor
        self._limit = limit
        self.events: list[Event] = []

    @property
    def names(self) -> list[str]:
        """The message ids, in order."""
        return [event.message_id for event in self.events]

    async def read(self) -> None:
        """Read until there are no more events now."""
        while True:
            page = await self._store.follow(after=self.cursor, limit=self._limit)
            assert page is not None
            assert page.cursor is not None
            assert len(page.items) <= self._limit
            self.events += page.items
            if not page.items and page.cursor == self.cursor:
                return
            self.cursor = page.cursor

    async def until(self, names: set[str]) -> None:
        """Read until there are these events."""
        end = time.monotonic() + _PATIENCE
        while True:
            await self.read()
            if names <= {*self.names}:
                return
            missing = names - {*self.names}
            assert time.monotonic() < end, f"{len(missing)} missing: {sorted(missing)[:5]}"
            await asyncio.sleep(0.05)

    async def forever(self) -> None:
        """Read until the task is cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(0.01)


async def _followable(bench: Bench) -> Storage:
    """Return an opened storage, or skip the test if its events cannot be followed."""
    store = await bench.open()
    if await store.follow(after=None, limit=1) is None:
        pytest.skip("the events of this storage cannot be followed")
    return store


async def _read(child: asyncio.subprocess.Process, lines: set[str]) -> None:
    """Add the whole lines that a process writes before it ends."""
    assert child.stdout is not None
    async for line in child.stdout:
        if line.endswith(b"\n"):
            lines.add(line.decode().strip())
