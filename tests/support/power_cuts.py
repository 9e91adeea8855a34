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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from engage.api import Event, StorageUnavailable
from engage.server.keepers import HelperKeeper
from engage.testing import event
from engage.testing.factories import TIME, ids
from support.recorded_disk import Fault, Recorder
from support.sqlite import WITHOUT_VISITORS
from support.writer import helper, make, opened, until

#: The beginning of the names of backups. They are beside the store, so the disk records them.
BACKUP = "engage.db.backup"
#: Events that are received before this time are old: retention deletes them.
OLD = TIME - 1000
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
    #: What is done meanwhile: ``retention``, ``backup``, or at the start a ``migration``, in which
    #: the calls fail.
    work: str = ""
    #: Events that are acknowledged before the first error, and after the last.
    events: int = 250


def sample(name: str) -> Event:
    """Return the event of a name."""
    size = zlib.crc32(name.encode()) % 6000
    received = -2000 if is_old(name) else 0
    if size % 4 == 0:
        traits = {"size": size}
        return event(
            name, type="identify", user_id=f"u{size % 50}", received=received, traits=traits
        )
    return event(name, received=received, properties={"text": "x" * size})


def is_old(name: str) -> bool:
    """Return whether retention deletes the event of a name."""
    return zlib.crc32(name.encode()) % 3 == 0


class _Clients:
    def __init__(self, folder: Path, scene: Scene) -> None:
        self._scene, self._recorder, self._path = scene, Recorder(folder), folder / "engage.db"
        self._store = make(folder, supervised=True, timeout=4)
        self._count = 0
        self._acknowledged: list[str] = []
        self._ended = False
        self._running = asyncio.Event()
        self._running.set()

    async def run(self, folder: Path) -> None:
        if self._scene.work == "migration":
            await self._make_earlier(folder)
            self._fail()
        else:
            self._recorder.set(3, SLOW)
        with contextlib.ExitStack() as last:
            async with helper(folder, write_timeout=4, fork=False), self._opened():
                # The connection of a reader keeps SQLite's index of the log alive.
                await ids(self._store)
                tasks = [asyncio.create_task(self._write(number)) for number in range(CLIENTS)]
                if self._scene.reader:
                    tasks.append(asyncio.create_task(self._read()))
                if self._scene.work == "retention":
                    tasks.append(asyncio.create_task(self._expire()))
                if self._scene.work == "backup":
                    tasks.append(asyncio.create_task(self._back_up(folder)))
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

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """Open the store, again and again if the disk fails."""
        try:
            while True:
                with contextlib.suppress(StorageUnavailable):
                    await self._store.open(create=True)
                    break
                await asyncio.sleep(0.05)
            yield
        finally:
            await self._store.close()

    def _acknowledge(self, names: list[str]) -> None:
        self._recorder.acknowledge(names)
        self._acknowledged += names

    async def _make_earlier(self, folder: Path) -> None:
        """Make a store of an earlier version."""
        async with opened(make(folder, "thread")) as store:
            names = [f"earlier-{number}" for number in range(40)]
            await store.write([sample(name) for name in names])
        with contextlib.closing(sqlite3.connect(self._path)) as db:
            db.executescript(f"BEGIN; {WITHOUT_VISITORS} COMMIT;")
        self._acknowledge(names)
        self._recorder.note("m")

    async def _expire(self) -> None:
        """Delete the old events again and again, as retention does."""
        while not self._ended:
            await asyncio.sleep(0.1)
            names = [name for name in self._acknowledged if is_old(name)]
            with contextlib.suppress(StorageUnavailable):
                while await self._store.expire(OLD, limit=40) == 40:
                    pass
                self._recorder.note("x", "\n".join(names))

    async def _back_up(self, folder: Path) -> None:
        """Make one backup after another, as ``engage backup`` does."""
        number = 0
        while not self._ended:
            number += 1
            name, before = f"{BACKUP}{number}", "\n".join(self._acknowledged)
            with contextlib.suppress(StorageUnavailable):
                await asyncio.to_thread(
                    make(folder).back_up, folder / name, without=(), on_bytes=lambda *_: None
                )
                self._recorder.note("b", before, name)
            await asyncio.sleep(0.15)

    async def _end(self) -> None:
        await until(lambda: self._count >= self._scene.events, LIMIT)
        if not self._scene.at_end:
            if self._scene.work != "migration":
                self._fail()
            await until(lambda: self._recorder.failed >= self._scene.errors, LIMIT)
            if self._scene.restart:
                last = self._count + self._scene.events
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
            self._acknowledge(names)
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
