# SPDX-License-Identifier: Apache-2.0
"""Who writes: a thread of this process, and under load a process of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from engage.api import Event, Outcome, StorageUnavailable

from .connection import Settings
from .engine import Engine
from .events import values_of
from .worker_thread import Lane
from .writer_process import AVAILABLE, WriterGoneError, WriterProcess

Answer = TypeVar("Answer")

#: From so many writes in one second, or events in some of them, a process of its own pays:
#: measured, it takes a quarter of the work of single events off the worker, half that of batches.
BUSY: Final = 50
BUSY_EVENTS: Final = 2000
BUSY_SOME: Final = 10
#: Seconds until a process that ended is started again: doubled each time, up to the second.
_BACK_OFF: Final = (1.0, 60.0)
#: Threads that hang and are left behind; no more are started while there are so many.
_MOST_LEFT: Final = 4

_log = logging.getLogger("engage.sqlite")


class Writer:
    """Takes all that changes the store. The thread is always there: it opens the store, does what
    is rare, and writes events while there is no process, or no longer one.
    """

    def __init__(self, settings: Settings, *, had_store: bool = False) -> None:
        """:param had_store: see :attr:`StorageContext.had_store`."""
        self._settings = settings
        self._engine = Engine(settings)
        self._lane: Lane | None = None
        self._process: WriterProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._second = 0
        self._writes = 0
        self._events = 0
        self._pause = _BACK_OFF[0]
        self._not_before = 0.0
        self._made = had_store
        #: Closed, and perhaps not ended.
        self._left: list[Lane] = []

    async def open(self, create: bool) -> None:
        """See :meth:`EventStore.open`. What was open once is not made again: a store that is gone
        was moved away, and another in its place would take what nobody finds afterwards.
        """
        self._left = [lane for lane in self._left if lane.alive]
        if len(self._left) >= _MOST_LEFT:
            raise StorageUnavailable(f"{self._settings.path}: earlier calls have not ended yet")
        self._lane = Lane(
            "engage-sqlite-writer", timeout=self._settings.timeout, after=self._engine.maintain
        )
        try:
            await self._lane.call(self._engine.open, create and not self._made, create)
            self._made |= create
            if self._settings.writer == "process" and AVAILABLE and create:
                self._process = await WriterProcess.start(self._settings)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish what was asked for."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        lane, self._lane = self._lane, None
        if lane is not None:
            engine = self._engine
            # If it hangs, it is left behind: whoever opens the store again gets another.
            self._engine = Engine(self._settings)
            self._left.append(lane)
            await lane.end(engine.drop)

    async def call(self, method: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a method of the engine: ``await writer.call(Engine.check)``."""
        if self._lane is None:
            raise StorageUnavailable("the storage is not open")
        return await self._lane.call(method, self._engine, *arguments)

    async def write(self, events: Sequence[Event]) -> tuple[Sequence[Outcome], int]:
        """See :meth:`Engine.write`."""
        rows = [values_of(event) for event in events]
        process = self._process
        if process is not None:
            try:
                return await process.write(rows)
            except WriterGoneError:
                await self._lost(process)
        answer = await self.call(Engine.write, rows)
        self._consider(len(events))
        return answer

    def _consider(self, count: int) -> None:
        """Start a process if there is much to do. The thread goes on until it is ready."""
        now = time.monotonic()
        if int(now) != self._second:
            self._second, self._writes, self._events = int(now), 0, 0
        self._writes += 1
        self._events += count
        busy = self._writes >= BUSY or (self._events >= BUSY_EVENTS and self._writes >= BUSY_SOME)
        if (
            busy
            and self._settings.writer != "thread"
            and AVAILABLE
            and self._process is None
            and self._starting is None
            and now >= self._not_before
        ):
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            self._process = await WriterProcess.start(self._settings)
            _log.info("SQLite: events are now written by a process of their own")
        except StorageUnavailable as error:
            _log.warning("SQLite: no writer process, a thread goes on writing: %s", error)
            self._wait_longer()
        finally:
            self._starting = None

    async def _lost(self, process: WriterProcess) -> None:
        """What it acknowledged is durable; whether a disk failed under it, nobody knows now."""
        if self._process is process:
            self._process = None
            self._engine.doubt()
            self._wait_longer()
            _log.warning("SQLite: the writer process ended, a thread goes on writing")
            await process.stop()

    def _wait_longer(self) -> None:
        self._not_before = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _BACK_OFF[1])
