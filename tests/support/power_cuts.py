# SPDX-License-Identifier: Apache-2.0
"""``python -m support.power_cuts FOLDER SCENE``: clients of a store whose disk is recorded.

The writer is a process of its own, which is started again when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from engage.api import Event, StorageUnavailable
from engage.server.keepers import HelperKeeper
from engage.testing import event
from engage.testing.factories import ids
from support.recorded_disk import Fault, Recorder
from support.writer import helper, make, opened, until

#: Events that are acknowledged before the first error, and after the last.
BEFORE, AFTER = 250, 250
#: Between two pauses in which all of the log is copied.
BURST = 120
CLIENTS = 4
#: Seconds.
LIMIT = 120
#: Otherwise the log hardly grows while the thread copies it.
SLOW = Fault("database write", thread="other", times=0, delay=1000)


class Scene(NamedTuple):
    """What happens to a store."""

    faults: list[Fault]
    #: How many calls have to fail before the scene ends.
    errors: int = 1
    #: Whether they fail when the store is closed.
    at_end: bool = False
    #: Whether another program holds a read transaction when a call fails, and for some time after.
    reader: bool = False
    #: Whether another writer takes over from one that dies.
    restart: bool = True


def sample(name: str) -> Event:
    """Return the event of a name."""
    size = zlib.crc32(name.encode()) % 6000
    if size % 4 == 0:
        return event(name, type="identify", user_id=f"u{size % 50}", traits={"size": size})
    return event(name, properties={"text": "x" * size})


class _Clients:
    def __init__(self, folder: Path, scene: Scene) -> None:
        self._scene, self._recorder, self._path = scene, Recorder(folder), folder / "engage.db"
        self._store = make(folder, supervised=True, timeout=4)
        self._count = 0
        self._ended = False
        self._running = asyncio.Event()
        self._running.set()

    async def run(self, folder: Path) -> None:
        self._recorder.set(3, SLOW)
        with contextlib.ExitStack() as last:
            async with helper(folder, write_timeout=4), opened(self._store):
                # The connection of a reader keeps SQLite's index of the log alive.
                await ids(self._store)
                tasks = [asyncio.create_task(self._write(number)) for number in range(CLIENTS)]
                if self._scene.reader:
                    tasks.append(asyncio.create_task(self._read()))
                tasks.append(asyncio.create_task(self._end()))
                await asyncio.gather(*tasks)
                if self._scene.reader:
                    # The last connection to the store is that of another program. After a writer
                    # that died of an error, it can only read: SQLite would delete the log.
                    mode = "rw" if self._scene.restart else "ro"
                    other = sqlite3.connect(f"{self._path.as_uri()}?mode={mode}", uri=True)
                    db = last.enter_context(contextlib.closing(other))
                    db.execute("SELECT count(*) FROM events").fetchone()
                if self._scene.at_end:
                    self._fail()
        if self._recorder.failed < self._scene.errors:
            sys.exit(f"only {self._recorder.failed} calls failed")

    def _fail(self) -> None:
        for number, fault in enumerate(self._scene.faults):
            self._recorder.set(number, Fault(*fault))

    async def _end(self) -> None:
        await until(lambda: self._count >= BEFORE, LIMIT)
        if not self._scene.at_end:
            self._fail()
            await until(lambda: self._recorder.failed >= self._scene.errors, LIMIT)
            if self._scene.restart:
                last = self._count + AFTER
                await until(lambda: self._count >= last, LIMIT)
        self._ended = True
        self._running.set()

    async def _write(self, client: int) -> None:
        step = 0
        while not self._ended:
            names = [f"{client}-{step}-{number}" for number in range(3)]
            await self._running.wait()
            try:
                await self._store.write([sample(name) for name in names])
            except StorageUnavailable:
                await asyncio.sleep(0.02)
                continue
            self._recorder.acknowledge(names)
            step += 1
            self._count += len(names)
            if self._count % BURST < len(names):
                self._running.clear()
                asyncio.get_running_loop().call_later(0.15, self._running.set)

    async def _read(self) -> None:
        chance = random.Random(0)
        while not self._ended:
            # A reader of an older state would keep the log from being copied completely.
            await until(lambda: self._ended or not self._running.is_set(), LIMIT)
            with contextlib.closing(sqlite3.connect(self._path)) as db:
                db.execute("BEGIN")
                db.execute("SELECT count(*) FROM events").fetchone()
                failed, last = self._recorder.failed, self._count + BURST * 0.7
                await until(
                    lambda: self._ended or self._recorder.failed > failed or self._count > last,  # noqa: B023
                    LIMIT,
                )
                # A checkpoint waits for a reader for less than the last of these.
                await asyncio.sleep(chance.choice((0.05, 0.3, 1.3)) * (not self._ended))


if __name__ == "__main__":
    arguments = Scene(*json.loads(sys.argv[2]))
    if not arguments.restart:
        HelperKeeper.restart_pause = HelperKeeper.max_restart_pause = 60
    asyncio.run(_Clients(Path(sys.argv[1]), arguments).run(Path(sys.argv[1])))
