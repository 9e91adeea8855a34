# SPDX-License-Identifier: Apache-2.0
"""Where writes run: in a thread of this process and, under load, in a separate process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from engage.api import Event, Outcome, Status, StorageUnavailable

from .connection import Settings
from .engine import Engine
from .events import Row, UnstorableError, row_of
from .worker_thread import WorkerThread
from .writer_process import AVAILABLE, WriterGoneError, WriterProcess

Result = TypeVar("Result")

#: Writes in one second from which a separate process pays. Measured: it takes a quarter of the work
#: of single events off the worker, and half of the work of batches.
BUSY_WRITES: Final = 50
#: The same for large writes: this number of events in one second, in at least this number of
#: writes.
BUSY_EVENTS: Final = 2000
BUSY_EVENTS_MIN_WRITES: Final = 10
#: Seconds until a process that ended is started again: the first pause, which is doubled each time,
#: and the longest.
_BACK_OFF: Final = (1.0, 60.0)
#: Maximum number of threads that hang; when it is reached, no more threads are started.
_MAX_ABANDONED: Final = 4

_log = logging.getLogger("engage.storage.sqlite")


class Writer:
    """Takes everything that changes the store.

    The thread is always there: it opens the store, makes the rare calls, and writes events while
    there is no process.
    """

    def __init__(self, settings: Settings, *, had_store: bool = False) -> None:
        """:param had_store: see :attr:`StorageContext.had_store`."""
        self._settings = settings
        self._engine = Engine(settings)
        self._thread: WorkerThread | None = None
        self._process: WriterProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._second = 0
        self._writes = 0
        self._events = 0
        self._pause = _BACK_OFF[0]
        self._not_before = 0.0
        self._had_store = had_store
        #: Threads that are to end, and may hang.
        self._abandoned: list[WorkerThread] = []

    async def open(self, create: bool) -> None:
        """Open the store; see :meth:`EventStore.open`.

        A store that was open before is not created again: if it is missing, it was moved away, and
        what is written to another one in its place would be lost when it comes back.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.alive]
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise StorageUnavailable(f"{self._settings.path}: earlier calls have not ended yet")
        self._thread = WorkerThread(
            "engage-sqlite-writer", timeout=self._settings.timeout, after=self._engine.maintain
        )
        try:
            await self._open(self._thread, create and not self._had_store, create)
            self._had_store |= create
            if self._settings.writer == "process" and AVAILABLE and create:
                self._process = await WriterProcess.start(self._settings)
        except BaseException:
            await self.close()
            raise

    async def _open(self, thread: WorkerThread, create: bool, serving: bool) -> None:
        """Call the engine's ``open``. Only while it changes the tables, it may take long."""
        call = thread.call(self._engine.open, create, serving, seconds=float("inf"))
        opening = asyncio.create_task(call)
        try:
            while not opening.done():
                done, _ = await asyncio.wait({opening}, timeout=self._settings.timeout)
                if not done and not self._engine.is_migrating:
                    raise StorageUnavailable(f"no answer within {self._settings.timeout:g} s")
            opening.result()
        finally:
            opening.cancel()

    async def close(self) -> None:
        """Finish the calls that were requested, and close the store."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            engine = self._engine
            # If the thread hangs, it keeps its engine; opening the store again uses a new one.
            self._engine = Engine(self._settings)
            self._abandoned.append(thread)
            await thread.stop(engine.close)

    async def call(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """Call a method of the engine in the thread: ``await writer.call(Engine.check)``."""
        if self._thread is None:
            raise StorageUnavailable("the storage is not open")
        return await self._thread.call(method, self._engine, *arguments)

    async def write(self, events: Sequence[Event]) -> tuple[Sequence[Outcome], int]:
        """Store events; see :meth:`Engine.write`."""
        rows, refused = _rows(events)
        outcomes, dropped = await self._write(rows) if rows else ([], 0)
        self._count(len(events))
        if refused:
            stored = iter(outcomes)
            outcomes = [refused.get(index) or next(stored) for index in range(len(events))]
        return outcomes, dropped

    async def _write(self, rows: list[Row]) -> tuple[Sequence[Outcome], int]:
        process = self._process
        if process is not None:
            try:
                return await process.write(rows)
            except WriterGoneError:
                await self._process_ended(process)
        return await self.call(Engine.write, rows)

    def _count(self, events: int) -> None:
        """Start a process if the writes of this second are many. The thread writes until then."""
        now = time.monotonic()
        if int(now) != self._second:
            self._second, self._writes, self._events = int(now), 0, 0
        self._writes += 1
        self._events += events
        busy = self._writes >= BUSY_WRITES or (
            self._events >= BUSY_EVENTS and self._writes >= BUSY_EVENTS_MIN_WRITES
        )
        if (
            busy
            and self._settings.writer != "thread"
            and AVAILABLE
            and self._process is None
            and self._starting is None
            and now >= self._not_before
        ):
            self._starting = asyncio.create_task(self._start_process())

    async def _start_process(self) -> None:
        try:
            self._process = await WriterProcess.start(self._settings)
            _log.info("SQLite: a separate process now writes the events")
        except StorageUnavailable as error:
            _log.warning("SQLite: no writer process; a thread continues to write: %s", error)
            self._back_off()
        finally:
            self._starting = None

    async def _process_ended(self, process: WriterProcess) -> None:
        """Continue in the thread. What the process acknowledged is durable, but it may have ended
        because of an I/O error."""
        if self._process is process:
            self._process = None
            self._engine.require_checkpoint()
            self._back_off()
            _log.warning("SQLite: the writer process ended; a thread continues to write")
            await process.stop()

    def _back_off(self) -> None:
        self._not_before = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _BACK_OFF[1])


def _rows(events: Sequence[Event]) -> tuple[list[Row], dict[int, Outcome]]:
    """Return the rows of events, and the outcomes of those that can never be stored.

    :return: rows in the order of the events, and index → outcome of the events without a row.
    """
    rows: list[Row] = []
    refused: dict[int, Outcome] = {}
    for index, event in enumerate(events):
        try:
            rows.append(row_of(event))
        except UnstorableError as reason:
            refused[index] = Outcome(Status.REFUSED, str(reason))
    return rows, refused
