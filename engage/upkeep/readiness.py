# SPDX-License-Identifier: Apache-2.0
"""Decide whether this process is ready for requests: the answer of ``/readyz``.

A load balancer polls often and stops sending requests to a server that is not ready. So the storage
is checked at most once a second, a stored event counts as a successful check, and the process stays
ready until no check has succeeded for :data:`PATIENCE` seconds, or for :data:`WRITE_PATIENCE`
seconds if a write has failed as well. Before the first success it is not ready.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from engage.reading.time_limit import within

__all__ = ["Readiness"]

_log = logging.getLogger(__name__)

#: Seconds after a success during which the storage is not checked again.
FRESH: Final = 1.0
#: Seconds after the last success during which the process stays ready.
PATIENCE: Final = 10.0
#: The same when a write has failed since: clients already get errors.
WRITE_PATIENCE: Final = 2.0
#: Seconds that a request waits for a check. The check goes on; later requests see its result.
WAIT: Final = 2.0


class Readiness:
    """Checks whether the storage can store events, and remembers when it last could.

    :param check: raises if it cannot; see :meth:`engage.store.facade.Storage.check`.
    :param timeout: seconds after which an unanswered check fails.
    :param clock: a monotonic clock in seconds.
    :param what: the checked part, for the log.
    """

    def __init__(
        self,
        check: Callable[[], Awaitable[None]],
        *,
        timeout: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        what: str = "storage",
    ) -> None:
        self._check = check
        self._timeout = timeout
        self._clock = clock
        self._what = what
        self._success_at: float | None = None
        self._write_failed = False
        self._checking: asyncio.Task[None] | None = None
        self._failing = False
        self._check_failed_at = -math.inf

    def alive(self) -> None:
        """Record a success: the storage has just stored something."""
        self._success_at = self._clock()
        self._write_failed = False

    def write_failed(self) -> None:
        """Record that the storage could not store something."""
        self._write_failed = True

    async def ready(self) -> bool:
        """Return whether the storage can probably store an event now."""
        if self._within(FRESH) and not self._write_failed:
            return True
        # After a failed write, a success does not stand for a second; a failed check does.
        recent = self._write_failed and self._clock() - self._check_failed_at <= FRESH
        if not recent:
            self._begin_check()
        assert self._checking is not None
        # asyncio.wait does not cancel the check: concurrent requests wait for the same one.
        await asyncio.wait([self._checking], timeout=WAIT)
        return self._within(WRITE_PATIENCE if self._write_failed else PATIENCE)

    def latest(self) -> bool:
        """Return the result of the last check, and begin another one if it is not fresh."""
        if not self._within(FRESH) and self._clock() - self._check_failed_at > FRESH:
            self._begin_check()
        return self._success_at is not None and not self._failing

    async def close(self) -> None:
        """Cancel a running check."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])

    def _begin_check(self) -> None:
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._run_check())

    def _within(self, seconds: float) -> bool:
        return self._success_at is not None and self._clock() - self._success_at <= seconds

    async def _run_check(self) -> None:
        try:
            async with within(self._timeout, self._what):
                await self._check()
        except Exception as error:
            # Log the first failure only. Any error means that the storage cannot store.
            if not self._failing:
                _log.warning("the %s does not answer: %s", self._what, error)
            self._failing = True
            self._check_failed_at = self._clock()
        else:
            if self._failing:
                _log.warning("the %s answers again", self._what)
            self._failing = False
            self.alive()
