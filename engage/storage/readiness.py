# SPDX-License-Identifier: Apache-2.0
"""Decide whether this process is ready for requests: the answer of ``/readyz``.

A load balancer polls often and stops sending requests to a server that is not ready. So the storage
is checked at most once a second, a stored event counts as a successful check, and the process stays
ready until no check has succeeded for :data:`PATIENCE` seconds. Before the first success it is not
ready.
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

#: Seconds after a success during which the storage is not checked again.
FRESH: Final = 1.0
#: Seconds after the last success during which the process stays ready.
PATIENCE: Final = 10.0
#: Seconds that a request waits for a check. The check goes on; later requests see its result.
WAIT: Final = 2.0


class Readiness:
    """Checks whether the storage can store events, and remembers when it last could.

    :param check: raises if it cannot; see :meth:`engage.api.EventStore.check`.
    :param timeout: seconds after which an unanswered check fails.
    :param clock: a monotonic clock in seconds.
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
        self._success_at: float | None = None
        self._checking: asyncio.Task[None] | None = None
        self._failing = False

    def alive(self) -> None:
        """Record a success: the storage has just stored something."""
        self._success_at = self._clock()

    async def ready(self) -> bool:
        """Return whether the storage can probably store an event now."""
        if self._within(FRESH):
            return True
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._run_check())
        # asyncio.wait does not cancel the check: concurrent requests wait for the same one.
        await asyncio.wait([self._checking], timeout=WAIT)
        return self._within(PATIENCE)

    async def close(self) -> None:
        """Cancel a running check."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])

    def _within(self, seconds: float) -> bool:
        return self._success_at is not None and self._clock() - self._success_at <= seconds

    async def _run_check(self) -> None:
        try:
            async with within(self._timeout):
                await self._check()
        except Exception as error:
            # Log the first failure only. Any error means that the storage cannot store.
            if not self._failing:
                _log.warning("the storage does not answer: %s", error)
            self._failing = True
        else:
            if self._failing:
                _log.warning("the storage answers again")
            self._failing = False
            self.alive()
