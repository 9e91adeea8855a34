# SPDX-License-Identifier: Apache-2.0
"""SQLite stores that are written by a writer process, and that process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from engage.api import StorageContext
from engage_plugins.sqlite.lock import read_note
from engage_plugins.sqlite.store import SqliteStorage
from engage_plugins.sqlite.writer_client import WriterClient


def make(
    tmp_path: Path,
    writer: str = "process",
    *,
    timeout: float = 30,
    path: str = "engage.db",
    identifiers: tuple[str, ...] = (),
    started: float | None = None,
) -> SqliteStorage:
    """Make a storage; open it afterwards.

    :param identifiers: traits of the workspace ``acme``: part of the settings of a writer.
    :param started: when the server started that the storage belongs to.
    """
    context = StorageContext(
        base_dir=tmp_path,
        identifiers={"acme": identifiers},
        write_timeout=timeout,
        server_started=started,
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
