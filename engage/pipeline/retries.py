# SPDX-License-Identifier: Apache-2.0
"""Calls the storage or the log again until it answers, for a loader.

A loader has nobody to answer: what it has read is acknowledged, so it never skips a record because
of an outage.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from engage.api import StorageError, StorageUnavailable

__all__ = ["Retries", "Stopped"]

_log = logging.getLogger(__name__)

#: Seconds before the first repetition. Each failure doubles the pause, up to the maximum.
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0
#: Seconds between two log lines about outages: a slow service fails often, and works between.
LINE_PAUSE: Final = 60.0

_Result = TypeVar("_Result")


class Stopped(Exception):
    """The process drains, so the call is not repeated."""


class Retries:
    """Calls one service, with a time limit, until it answers.

    :param what: its name in the log.
    :param timeout: seconds of a call. The service should end a call after this time itself.
    :param grace: seconds that it has in addition before the call is abandoned.
    :param stopping: set when the process drains: then a call that fails is not repeated.
    :param failed: called after each failure.
    :param recover: called after a call that was abandoned: its connection may be dead.
    :param any_error: whether every exception means that the service is away.
    """

    def __init__(
        self,
        what: str,
        *,
        timeout: float,
        grace: float = 0.0,
        stopping: asyncio.Event,
        failed: Callable[[], None] = lambda: None,
        recover: Callable[[], None] = lambda: None,
        any_error: bool = False,
    ) -> None:
        self._what = what
        #: Seconds of a call.
        self.timeout = timeout
        self._grace = grace
        self._stopping = stopping
        self._failed = failed
        self._recover = recover
        self._any_error = any_error
        #: Whether the last call failed.
        self.failing = False
        self._logged_at: float | None = None
        #: Whether a line about the current outage was logged.
        self._announced = False
        self._pause = FIRST_PAUSE

    async def call(
        self,
        work: Callable[[], Awaitable[_Result]],
        *,
        repeat: bool = True,
        interruptible: bool = False,
        longer: float = 0.0,
    ) -> _Result:
        """Call ``work`` until it succeeds.

        :param repeat: if false, make one call; if the service is away, pause, and raise its error.
        :param interruptible: whether a drain cancels the call.
        :param longer: seconds that a call may take in addition.
        :raises Stopped: if the process drains.
        :raises StorageError: if the service is away, and the call is not repeated.
        :raises Exception: what the call raises, unless it means that the service is away.
        """
        while True:
            try:
                return await self.once(work, interruptible=interruptible, longer=longer)
            except StorageError:
                await self.pause()
                if not repeat:
                    raise
            except Stopped:
                raise
            except Exception:
                if not self._any_error:
                    raise
                await self.pause()

    async def once(
        self,
        work: Callable[[], Awaitable[_Result]],
        *,
        interruptible: bool = False,
        longer: float = 0.0,
    ) -> _Result:
        """Call ``work`` once.

        :raises StorageError: if the service is away.
        :raises Stopped: if the call was interruptible, and the process drains.
        """
        longest = self.timeout + self._grace + longer
        call = asyncio.ensure_future(work())
        waiting: set[asyncio.Future[Any]] = {call}
        stop = asyncio.ensure_future(self._stopping.wait()) if interruptible else None
        if stop is not None:
            waiting.add(stop)
        try:
            await asyncio.wait(waiting, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
            late = not call.done()
        finally:
            if stop is not None:
                stop.cancel()
            if not call.done():
                # Not awaited: a call that overruns its time may ignore the cancellation as well.
                call.cancel()
                call.add_done_callback(_retrieve_exception)
        try:
            if late:
                if interruptible and self._stopping.is_set():
                    raise Stopped
                self._recover()
                raise StorageUnavailable(f"no answer within {longest:g} s")
            if call.cancelled():
                raise StorageUnavailable(f"the {self._what} cancelled the call")
            result = call.result()
        except Stopped:
            raise
        except Exception as error:
            self._note(error)
            raise
        self.failing = False
        if self._announced:
            self._announced = False
            _log.warning("the %s answers again", self._what)
        self._pause = FIRST_PAUSE
        return result

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
        expected = isinstance(error, StorageError)
        if not expected and not self._any_error:
            return  # the caller decides what it means
        self.failing = True
        now = asyncio.get_running_loop().time()
        if self._logged_at is None or now >= self._logged_at + LINE_PAUSE:
            self._logged_at = now
            self._announced = True
            _log.error(
                "the %s is unavailable; retrying: %s",
                self._what,
                error if expected else type(error).__name__,
                exc_info=None if expected else error,
            )


def _retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
