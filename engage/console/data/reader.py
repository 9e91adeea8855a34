# SPDX-License-Identifier: Apache-2.0
"""Calls of the store by the console.

They must not slow down the workers, which use the same store: at most :data:`AT_ONCE` run at the
same time, and each has a time limit. Those by which people sign in do not wait for the pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from engage.api import StorageUnavailable

__all__ = ["AT_ONCE", "PATIENCE", "Outage", "Reader"]

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
