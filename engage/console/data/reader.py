# SPDX-License-Identifier: Apache-2.0
"""Calls of the store by the console.

They must not slow down the workers, which use the same store: at most :data:`AT_ONCE` run at the
same time, and each has a time limit. Those by which people sign in do not wait for the pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

from engage.api import StorageUnavailable
from engage.reading.time_limit import within
from engage.store.facade import Storage

__all__ = ["AT_ONCE", "PATIENCE", "InTurn", "Outage", "Reader", "SharedRead"]

#: Calls of the store that run at the same time: a slow one does not stop the others.
AT_ONCE: Final = 2
#: Seconds that a page waits to know who asks for it.
PATIENCE: Final = 3.0

Result = TypeVar("Result")


class Outage(NamedTuple):
    """The storage does not answer."""

    #: Why, in one line.
    reason: str
    #: When it last answered: milliseconds since 1970; ``None``: never since the console started.
    last: int | None


class Reader:
    """Calls the store, and remembers whether it answered.

    :param timeout: seconds for one call, including the time it waits for its turn.
    :param clock: the time in seconds since 1970.
    """

    def __init__(self, timeout: float, *, clock: Callable[[], float] = time.time) -> None:
        #: Seconds for one call.
        self.timeout = timeout
        self._clock = clock
        self._turns = asyncio.Semaphore(AT_ONCE)
        #: Why the last call failed; ``None``: it succeeded, or there was none yet.
        self.error: str | None = None
        #: When a call last succeeded: milliseconds since 1970; ``None``: never.
        self.last_good: int | None = None

    async def read(
        self, call: Awaitable[Result], *, within: float | None = None, waits: bool = True
    ) -> Result:
        """Wait for a turn, then await a call of the store.

        :param call: a coroutine of the store that has not begun, such as ``store.check()``. It may
            also write.
        :param within: seconds, if they are fewer than the timeout of all calls.
        :param waits: whether the call waits for its turn. One that does not is small, and its
            caller makes only a few at a time.
        :raises StorageUnavailable: if the store cannot answer, or does not answer in time.
        """
        begun = False
        seconds = self.timeout if within is None else min(within, self.timeout)
        try:
            async with asyncio.timeout(seconds), self._turns if waits else contextlib.nullcontext():
                begun = True
                result = await call
        except TimeoutError as error:
            self.error = f"the storage did not answer within {seconds:g} seconds"
            raise StorageUnavailable(self.error) from error
        except StorageUnavailable as error:
            self.error = str(error)
            raise
        finally:
            if not begun and asyncio.iscoroutine(call):
                call.close()
        self.error = None
        self.last_good = round(self._clock() * 1000)
        return result


class InTurn:
    """A store each of whose calls is one of :meth:`Reader.read`, for what makes many of them.

    It passes for the store: an interface of it is one of this object.
    """

    def __init__(self, store: Storage, reader: Reader) -> None:
        self._store = store
        self._reader = reader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._store)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)

        def call(*arguments: Any, **named: Any) -> Any:
            return self._reader.read(attribute(*arguments, **named))

        return call if inspect.iscoroutinefunction(attribute) else attribute


class SharedRead:
    """A read of the store that is shared by all who need it at the same time.

    :param read: makes the calls of the store; they are small.
    :param pause: seconds between the beginnings of two reads.
    """

    def __init__(
        self, reader: Reader, read: Callable[[], Awaitable[None]], *, pause: float = 0.0
    ) -> None:
        self._reader = reader
        self._read = read
        self._pause = pause
        #: When the last read that succeeded began, and the last one of all: the monotonic clock.
        self.began = self._tried = -math.inf
        self._task: asyncio.Task[StorageUnavailable | None] | None = None

    async def since(self, oldest: float, *, seconds: float | None = None) -> None:
        """Wait for a read that succeeds and did not begin before a time.

        :param oldest: the time, of the monotonic clock.
        :param seconds: for which the caller waits, if they are fewer than those of a call.
        :raises StorageUnavailable: if the storage cannot answer, or does not answer in time.
        """
        async with within(seconds):
            while self.began < oldest:
                if self._task is None:
                    self._task = asyncio.create_task(self._run())
                error = await asyncio.shield(self._task)
                if error is not None:
                    raise error

    async def _run(self) -> StorageUnavailable | None:
        try:
            await asyncio.sleep(max(0.0, self._tried + self._pause - time.monotonic()))
            began = self._tried = time.monotonic()
            await self._reader.read(self._read(), waits=False)
            self.began = began
        except StorageUnavailable as error:
            return error
        finally:
            self._task = None
        return None
