# SPDX-License-Identifier: Apache-2.0
"""A thread in which SQLite is called, one call at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from engage.api import StorageUnavailable

Result = TypeVar("Result")

_log = logging.getLogger("engage.storage.sqlite")


class WorkerThread:
    """A thread that makes calls in the order in which they were requested.

    A call whose caller no longer waits for it is not made. A call that is running when its caller
    stops waiting continues, and its result is discarded: every call can be made again.
    """

    def __init__(self, name: str, *, timeout: float, interrupt: Callable[[], None]) -> None:
        """
        :param timeout: seconds that a caller waits, including the time until its call is made.
        :param interrupt: called to end a call that takes too long.
        """
        self._timeout = timeout
        self._interrupt = interrupt
        self._current: _Call | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # A daemon thread: a disk that hangs must not prevent the process from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in the thread, and return its result.

        :raises StorageUnavailable: if there is no result in time.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        call = _Call(loop, future, function, arguments, time.monotonic() + self._timeout)
        self._calls.put(call)
        try:
            async with asyncio.timeout(self._timeout):
                return await future
        except TimeoutError:
            if self._current is call:
                self._interrupt()
            raise StorageUnavailable(f"no answer within {self._timeout:g} s") from None

    async def stop(self, last: Callable[[], None]) -> None:
        """Make the calls that are waiting, then ``last``, and end the thread, if it does so in
        time."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._calls.put(_Call(loop, future, last, (), float("inf")))
        self._calls.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._current = call
            call.make()
            # Otherwise the result would stay in memory until the next call.
            self._current = call = None


class _Call:
    __slots__ = ("arguments", "deadline", "function", "future", "loop")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        deadline: float,
    ) -> None:
        self.loop = loop
        self.future = future
        self.function = function
        self.arguments = arguments
        self.deadline = deadline

    def make(self) -> None:
        if self.future.cancelled() or time.monotonic() > self.deadline:
            return
        try:
            result, error = self.function(*self.arguments), None
        except Exception as raised:
            result, error = None, raised
        # The loop may have been closed since; then the result is not needed.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
