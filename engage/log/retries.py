# SPDX-License-Identifier: Apache-2.0
"""Calls the storage or the log again until it answers, for a loader.

Records are already acknowledged, so a loader never skips one because of an outage.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from engage.api import StorageError
from engage.monitoring.sampler import Throttle

__all__ = ["Retries", "Stopped"]

_log = logging.getLogger(__name__)

#: Seconds before the first repetition. Each failure doubles the pause, up to the maximum.
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0

_Result = TypeVar("_Result")


class Stopped(Exception):
    """The process drains, so the call is not repeated."""


class Retries:
    """Calls one service, with a time limit, until it answers.

    :param service: its name in the log.
    :param timeout: seconds of a call.
    :param stopping: set when the process drains: then a call that fails is not repeated.
    :param failed: called after each failure.
    """

    def __init__(
        self,
        service: str,
        *,
        timeout: float,
        stopping: asyncio.Event,
        failed: Callable[[], None],
    ) -> None:
        self._service = service
        self._timeout = timeout
        self._stopping = stopping
        self._failed = failed
        #: Whether the last call failed.
        self.failing = False
        #: Whether a line about the current outage was logged.
        self._announced = False
        self._line = Throttle()
        self._pause = FIRST_PAUSE

    async def call(
        self, work: Callable[[], Awaitable[_Result]], *, repeat: bool = True, wait: float = 0.0
    ) -> _Result:
        """Call ``work`` until it succeeds.

        :param repeat: if false, make one call. If it fails, pause, and raise its error.
        :param wait: seconds that the call may take in addition.
        :raises Stopped: if the process drains, and the call has failed.
        """
        while True:
            try:
                async with asyncio.timeout(self._timeout + wait):
                    result = await work()
            except Exception as error:
                self._note(error)
                await self.pause()
                if not repeat:
                    raise
            else:
                break
        self.failing = False
        if self._announced:
            self._announced = False
            _log.warning("the %s answers again", self._service)
        self.succeeded()
        return result

    def succeeded(self) -> None:
        """Begin with the shortest pause again."""
        self._pause = FIRST_PAUSE

    async def pause(self) -> None:
        """Wait before a repetition.

        :raises Stopped: if the process drains.
        """
        # Not all loaders at the same moment.
        seconds = self._pause * random.uniform(0.5, 1.0)  # noqa: S311
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
        raise Stopped

    def _note(self, error: Exception) -> None:
        self._failed()
        self.failing = True
        if self._line() is not None:
            self._announced = True
            expected = isinstance(error, StorageError | TimeoutError)
            _log.error(
                "the %s is unavailable; retrying: %s",
                self._service,
                str(error) or type(error).__name__,
                exc_info=None if expected else error,
            )
