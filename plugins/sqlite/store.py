# SPDX-License-Identifier: Apache-2.0
"""The interface that the core calls: each method is one call of the writer or the reader."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from engage.api import (
    Backup,
    BackupStore,
    ErasureStore,
    Event,
    EventFilter,
    EventStore,
    Helper,
    OnBytes,
    Outcome,
    Page,
    StorageContext,
    StorageUnavailable,
    StoreProblem,
    VerifiableStore,
)
from engage.store.facade import (
    PlannedChoices,
    PlannedCounts,
    PlannedLetters,
    PlannedProfiles,
    PlannedRecords,
    PlannedSuppressions,
)
from engage.store.keys import is_text, key_of
from engage.store.tables import Plan

from . import backup, verification
from .connection import Settings
from .reader import Reader
from .steps import execute
from .tables import events
from .tables.events import row_of
from .worker_thread import WorkerThread
from .writer import operations
from .writer.writer import Writer

Item = TypeVar("Item")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Default of ``min_free_bytes``.
MIN_FREE_BYTES: Final = 512 * 1024 * 1024


class SqliteStorage(
    EventStore,
    PlannedProfiles,
    PlannedChoices,
    PlannedSuppressions,
    PlannedLetters,
    PlannedRecords,
    PlannedCounts,
    BackupStore,
    VerifiableStore,
    ErasureStore,
):
    """The storage that keeps everything in one SQLite file."""

    def __init__(
        self, settings: Settings, *, had_store: bool = False, supervised: bool = False
    ) -> None:
        """:param had_store: see :class:`StorageContext`, also for ``supervised``."""
        self._settings = settings
        self._writer = Writer(settings, had_store=had_store, supervised=supervised)
        self._reader = Reader(settings)
        self._reader_thread: WorkerThread | None = None
        self.dropped_changes = 0

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: StorageContext) -> SqliteStorage:
        """Make the storage.

        :param options: valid according to ``schemas/plugins/sqlite.json``.
        """
        return cls(
            Settings(
                # SQLite keeps the log beside the file itself, not beside a link to it.
                path=os.path.realpath(context.base_dir / options.get("path", "engage.db")),
                min_free_bytes=options.get("min_free_bytes", MIN_FREE_BYTES),
                max_bytes=options.get("max_bytes", 0),
                context=context,
                writer=options.get("writer", "auto"),
            ),
            had_store=context.had_store,
            supervised=context.supervised,
        )

    # ------------------------------------------------------------------------------ life
    async def open(self, *, create: bool) -> None:
        if self._reader_thread is not None:
            return
        await self._writer.open(create)
        self._reader_thread = WorkerThread(
            "engage-sqlite-reader",
            timeout=self._settings.timeout,
            interrupt=self._reader.interrupt,
        )
        if not create:
            try:
                await self._reader_thread.call(self._reader.open)
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        thread, self._reader_thread = self._reader_thread, None
        if thread is not None:
            # If the thread hangs, it keeps its reader; opening the store again uses a new one.
            reader, self._reader = self._reader, Reader(self._settings)
            await thread.stop(reader.drop)
        await self._writer.close()

    def helper(self) -> Helper | None:
        return self._writer.helper()

    async def check(self) -> None:
        await self._writer.call(operations.CHECK)

    def versions(self) -> Mapping[str, str]:
        return {"SQLite": self._writer.version}

    gauge_texts = {  # noqa: RUF012 (typed by the base class)
        "free_bytes": "Free space of the disk that has the store",
        "database_bytes": "Size of the file of the store, without its log",
        "wal_bytes": "Size of the write-ahead log beside the store",
        "writer_memory_bytes": "Resident memory of the process that writes the store",
        "writer_cpu_seconds": "Processor time of the process that writes the store",
        "writer_process_pid": "Id of the process that writes the store",
    }

    def gauges(self) -> Mapping[str, float]:
        path = self._settings.path
        found: dict[str, float] = {}
        with contextlib.suppress(OSError):
            found["free_bytes"] = shutil.disk_usage(os.path.dirname(path)).free
            found["database_bytes"] = os.stat(path).st_size
            found["wal_bytes"] = os.stat(path + "-wal").st_size
        found.update(self._writer.gauges())
        return found

    async def run(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        assert not kwargs
        return await self._writer.call(operations.of(plan), *args)

    async def read(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        return await self._read(execute, plan(*args, **kwargs), self._settings.context)

    async def _read(self, function: Callable[..., Item], *arguments: Any) -> Item:
        if self._reader_thread is None:
            raise StorageUnavailable("the storage is not open")
        return await self._reader_thread.call(self._reader.call, function, *arguments)

    async def _page(
        self,
        function: Callable[..., tuple[Sequence[Item], int | None]],
        *arguments: Any,
        after: str | None,
        limit: int,
    ) -> Page[Item]:
        number = None if after is None else _number(after)
        items, cursor = await self._read(function, *arguments, number, limit)
        return Page(items, None if cursor is None else str(cursor))

    # ---------------------------------------------------------------------------- events
    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes, dropped = await self._writer.write(events)
        self.dropped_changes += dropped
        return outcomes

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        if not is_text(workspace_id + origin + message_id):
            return None
        if self._writer.is_connected:
            # It has the newest keys in memory, and a reader has to read them.
            return await self._writer.call(operations.FIND, workspace_id, origin, message_id)
        return await self._read(events.find, key_of(workspace_id, origin, message_id))

    async def scan(
        self,
        wanted: EventFilter,
        *,
        after: str | None,
        limit: int,
    ) -> Page[Event]:
        return await self._page(events.scan, wanted, after=after, limit=limit)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        return await self._writer.call(operations.EXPIRE, before, limit, force)

    async def recent(
        self, wanted: EventFilter, *, before: str | None = None, limit: int
    ) -> Page[Event]:
        return await self._page(events.recent, wanted, after=before, limit=limit)

    # --------------------------------------------------------------------------- erasing
    async def erase_events(self, events: Sequence[Event], marks: Sequence[bytes]) -> int:
        keys = [key_of(*event.identity) for event in events]
        return await self._writer.call(operations.MARK_ERASED, dict(zip(keys, marks, strict=True)))

    async def reapply(self, events: Sequence[Event]) -> None:
        await self._writer.call(operations.REAPPLY, [*map(row_of, events)])

    async def settle(self) -> bool:
        return await self._writer.call(operations.EMPTY_LOG)

    # --------------------------------------------------------------------------- backups
    def back_up(self, target: Path, *, without: Collection[str], on_bytes: OnBytes) -> Backup:
        return backup.back_up(self._settings, target, without, on_bytes)

    def restore(
        self,
        source: Path,
        *,
        prepare: Callable[[EventStore, Backup], Awaitable[None]],
        on_bytes: OnBytes,
    ) -> Backup:
        async def change(path: Path, found: Backup) -> None:
            settings = dataclasses.replace(self._settings, path=str(path), writer="thread")
            store = SqliteStorage(settings)
            try:
                await store.open(create=True)
                await prepare(store, found)
            finally:
                await store.close()

        with backup.restoring(self._settings, source, on_bytes) as (path, found):
            asyncio.run(change(path, found))
        return found

    # ---------------------------------------------------------------------- verification
    def problems(self) -> AsyncIterator[StoreProblem | int]:
        return verification.problems(self._read, self._writer)


def _number(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise ValueError("not a cursor of the SQLite storage")
    return int(cursor)
