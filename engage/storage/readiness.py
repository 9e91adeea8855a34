# SPDX-License-Identifier: Apache-2.0
"""Whether this process should be sent requests: what ``/readyz`` answers.

A load balancer asks often and takes a server out on a "no". So the storage is asked at most once a
second, a stored event counts as an answer, and one hiccup is not yet a "no": only
:data:`PATIENCE` seconds without any sign of life are. Before the first sign there is no patience.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from engage.storage.time_limit import within

__all__ = ["Readiness"]

_log = logging.getLogger(__name__)

#: Seconds for which a sign of life counts without another question.
FRESH: Final = 1.0
#: Seconds without a sign of life after which the answer is no.
PATIENCE: Final = 10.0
#: Seconds that one asker waits for the storage; the next finds out how it ended.
WAIT: Final = 2.0


class Readiness:
    """Knows when the storage last showed that it can store.

    :param check: proves it, or raises; see :meth:`engage.api.EventStore.check`.
    :param timeout: seconds after which a question that was not answered is asked again.
    :param clock: seconds, never going back.
    """

    def __init__(
        self,
        check: Callable[[], Awaitable[None]],
        *,
        timeout: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check = check
        self._timeout = timeout
        self._clock = clock
        self._alive_at: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._failing = False

    def alive(self) -> None:
        """Note a sign of life: something was stored just now."""
        self._alive_at = self._clock()

    async def ready(self) -> bool:
        """:return: whether an event could be stored, as far as one can tell."""
        if self._within(FRESH):
            return True
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        # Waits without cancelling: who else asks meanwhile waits for the same answer.
        await asyncio.wait([self._asking], timeout=WAIT)
        return self._within(PATIENCE)

    async def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    def _within(self, seconds: float) -> bool:
        return self._alive_at is not None and self._clock() - self._alive_at <= seconds

    async def _ask(self) -> None:
        try:
            async with within(self._timeout):
                await self._check()
        except Exception as error:
            # Once, not at every question; whatever it was, the answer is no.
            if not self._failing:
                _log.warning("the storage does not answer: %s", error)
            self._failing = True
        else:
            if self._failing:
                _log.warning("the storage answers again")
            self._failing = False
            self.alive()
