# SPDX-License-Identifier: Apache-2.0
"""The interface that the core calls: each method is one call of the writer or the reader."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from engage.api import (
    Backup,
    BackupStore,
    Helper,
    OnBytes,
    StorageContext,
    StorageUnavailable,
    StoreProblem,
)
from engage.store import events
from engage.store.facade import Storage
from engage.store.tables import Plan

from . import backup, verification
from .connection import Settings
from .reader import Reader
from .steps import execute
from .worker_thread import WorkerThread
from .writer import operations
from .writer.writer import Writer

Item = TypeVar("Item")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Default of ``min_free_bytes``.
MIN_FREE_BYTES: Final = 512 * 1024 * 1024


class SqliteStorage(Storage, BackupStore):
    """The storage that keeps everything in one SQLite file."""

    isolated = True

    def __init__(
        self, settings: Settings, *, had_store: bool = False, supervised: bool = False
    ) -> None:
        """:param had_store: see :class:`StorageContext`, also for ``supervised``."""
        self._settings = settings
        self._writer = Writer(settings, had_store=had_store, supervised=supervised)
        self._reader = Reader(settings)
        self._reader_thread: WorkerThread | None = None

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
        gauges: dict[str, float] = {}
        with contextlib.suppress(OSError):
            gauges["free_bytes"] = shutil.disk_usage(os.path.dirname(path)).free
            gauges["database_bytes"] = os.stat(path).st_size
            gauges["wal_bytes"] = os.stat(path + "-wal").st_size
        gauges.update(self._writer.gauges())
        return gauges

    async def run(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        assert not kwargs
        if plan is events.write:
            return await self._writer.write(*args)  # type: ignore[arg-type,return-value]
        return await self._writer.call(operations.of(plan), *args)

    async def read(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        if plan is events.find and self._writer.is_connected:
            # It has the newest keys in memory, and a reader has to read them.
            return await self.run(plan, *args, **kwargs)
        return await self._read(execute, plan(*args, **kwargs), self._settings.context)

    async def _read(self, function: Callable[..., Item], *arguments: Any) -> Item:
        if self._reader_thread is None:
            raise StorageUnavailable("the storage is not open")
        return await self._reader_thread.call(self._reader.call, function, *arguments)

    async def settle(self) -> bool:
        return await self._writer.call(operations.EMPTY_LOG)

    # --------------------------------------------------------------------------- backups
    def back_up(self, target: Path, *, without: Collection[str], on_bytes: OnBytes) -> Backup:
        return backup.back_up(self._settings, target, without, on_bytes)

    def restore(
        self,
        source: Path,
        *,
        prepare: Callable[[Any, Backup], Awaitable[None]],
        on_bytes: OnBytes,
    ) -> Backup:
        async def change(path: Path, restored: Backup) -> None:
            settings = dataclasses.replace(self._settings, path=str(path), writer="thread")
            store = SqliteStorage(settings)
            try:
                await store.open(create=True)
                await prepare(store, restored)
            finally:
                await store.close()

        with backup.restoring(self._settings, source, on_bytes) as (path, restored):
            asyncio.run(change(path, restored))
        return restored

    # ---------------------------------------------------------------------- verification
    def problems(self) -> AsyncIterator[StoreProblem | int]:
        return verification.problems(self._read, self._writer)
