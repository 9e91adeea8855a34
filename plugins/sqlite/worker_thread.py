# SPDX-License-Identifier: Apache-2.0
"""Where SQLite is called: a thread each for the writer and the reader, one call at a time."""

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

Answer = TypeVar("Answer")

_log = logging.getLogger("engage.sqlite")


class Lane:
    """A thread that makes calls in the order in which they were asked for.

    A call whose caller gave up before its turn is not made; one that is under way goes on, and what
    becomes of it is nobody's: every call may be made again.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout: float,
        after: Callable[[], None] | None = None,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        """
        :param timeout: seconds that a caller waits, its turn included.
        :param after: called in the thread after each call, when its answer is on its way.
        :param interrupt: called to end a call that takes longer; without it, it goes on.
        """
        self._timeout = timeout
        self._after = after
        self._interrupt = interrupt
        self._current: _Call | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    async def call(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """:return: what the function returned, called in the thread.

        :raises StorageUnavailable: not within the time.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        deadline = time.monotonic() + self._timeout
        call = _Call(loop, future, function, arguments, deadline)
        self._calls.put(call)
        try:
            async with asyncio.timeout(self._timeout):
                return await future
        except TimeoutError:
            if self._interrupt is not None and self._current is call:
                self._interrupt()
            raise StorageUnavailable(f"no answer within {self._timeout:g} s") from None

    async def end(self, last: Callable[[], None]) -> None:
        """Make the calls that are waiting, then ``last``, and end the thread."""
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
            # Or what it returned would live until the next call.
            self._current = call = None
            if self._after is not None:
                try:
                    self._after()
                except Exception:
                    _log.exception("SQLite: the work between two calls failed")


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
            answer, error = self.function(*self.arguments), None
        except Exception as raised:
            answer, error = None, raised
        # The loop may have been closed meanwhile; then nobody waits.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._settle, answer, error)

    def _settle(self, answer: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(answer)
        else:
            self.future.set_exception(error)
