# SPDX-License-Identifier: Apache-2.0
"""SQLite stores that are written by a writer process, that process, and writes without a pause."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from engage.api import Status, StorageContext
from engage.testing import event
from engage.testing.factories import ids
from engage_plugins.sqlite.store import SqliteStorage
from engage_plugins.sqlite.writer.client import WriterClient
from engage_plugins.sqlite.writer.lock import read_note
from support.exactly_once import check_exactly_once
from support.processes import alive


def make(
    tmp_path: Path,
    writer: str = "process",
    *,
    timeout: float = 30,
    path: str = "engage.db",
    identifiers: tuple[str, ...] = (),
) -> SqliteStorage:
    """Make a storage; open it afterwards.

    :param identifiers: traits of the workspace ``acme``: part of the settings of a writer.
    """
    context = StorageContext(
        base_dir=tmp_path,
        identifiers={"acme": identifiers},
        write_timeout=timeout,
    )
    return SqliteStorage.from_options(
        {"writer": writer, "path": path, "min_free_bytes": 0}, context
    )


@contextlib.asynccontextmanager
async def opened(store: SqliteStorage) -> AsyncIterator[SqliteStorage]:
    """Open a storage (and create its store), and close it at the end."""
    await store.open(create=True)
    try:
        yield store
    finally:
        await store.close()


def client_of(store: SqliteStorage) -> WriterClient:
    """Return what connects a storage to the writer process."""
    way = store._writer._backend
    assert isinstance(way, WriterClient)
    return way


def pid_of(store: SqliteStorage) -> int:
    """Return the id of the writer process that a storage is connected to."""
    pid: int = client_of(store).pid
    assert pid
    return pid


def holder(database: Path) -> int:
    """Return the id of the process that holds the lock of a store, or held it last."""
    note = read_note(str(database))
    assert note is not None
    return int(note.pid)


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


class Load:
    """Writes events without a pause, and counts those that were acknowledged."""

    def __init__(self, store: SqliteStorage, name: str) -> None:
        self.acknowledged: list[str] = []
        self._store = store
        self._name = name
        self._stopping = False

    async def run(self) -> None:
        """Write until :meth:`stop` is called."""
        number = 0
        while not self._stopping:
            name = f"{self._name}-{number}"
            (outcome,) = await self._store.write([event(name)])
            # What a writer stored before it was killed is a duplicate when it is sent again.
            assert outcome.status in (Status.STORED, Status.DUPLICATE)
            self.acknowledged.append(name)
            number += 1

    def stop(self) -> None:
        """End after the write that is being made."""
        self._stopping = True


@contextlib.asynccontextmanager
async def load(*stores: SqliteStorage) -> AsyncIterator[None]:
    """Write to stores inside of the context. No write may fail, and none may be lost."""
    loads = [Load(store, str(number)) for number, store in enumerate(stores)]
    tasks = [asyncio.ensure_future(one.run()) for one in loads]
    try:
        yield
        # They go on after the last disturbance.
        counts = [len(one.acknowledged) for one in loads]
        await until(
            lambda: (
                any(task.done() for task in tasks)
                or all(
                    len(one.acknowledged) > count + 5
                    for one, count in zip(loads, counts, strict=True)
                )
            )
        )
    finally:
        for one in loads:
            one.stop()
        await asyncio.gather(*tasks)
    stored = await ids(stores[0], limit=1000)
    acknowledged = {name for one in loads for name in one.acknowledged}
    check_exactly_once(stored, acknowledged, acknowledged)


def disconnect(store: SqliteStorage) -> None:
    """Cut the connection of a storage, if there is one."""
    connection = client_of(store)._connection
    if connection is not None:
        connection.abort()


async def together(*stores: SqliteStorage) -> int:
    """Wait until all storages are connected to one living process, and return its id."""
    await until(
        lambda: (
            len({client_of(store).pid for store in stores}) == 1 and alive(client_of(stores[0]).pid)
        )
    )
    return pid_of(stores[0])
