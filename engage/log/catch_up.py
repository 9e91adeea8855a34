# SPDX-License-Identifier: Apache-2.0
"""Waits until the loaders have stored the events that were in the log when a request came.

If a request does not find its user, the user's events may still be in the log. Requests wait
together: a process reads the offsets of the log and of the loaders at most once every
:data:`POLL_SECONDS`, for any number of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from engage.api import EventLog
from engage.errors import ApiError, LogUnavailable, overloaded
from engage.reading.time_limit import log_within

__all__ = ["CatchUp"]

#: Seconds between two readings of the offsets.
POLL_SECONDS: Final = 0.05
#: Seconds that a request waits at most.
MAX_SECONDS: Final = 2.0
#: Requests that may wait in a process. Anyone can send one, with a wrong hash.
MAX_WAITING: Final = 1000


class CatchUp:
    """Lets requests wait for the loaders.

    :param log: an open log.
    :param group: the group of the loaders.
    :param timeout: seconds that a call of the log may take.
    """

    def __init__(self, log: EventLog, *, group: str, timeout: float) -> None:
        self._log = log
        self._group = group
        self._timeout = timeout
        #: Requests that came after the ends of the log were last asked for.
        self._new: list[asyncio.Future[None]] = []
        self._waiting = 0
        self._task: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Return when everything is stored that was in any partition when this call began.

        :raises ApiError: 503 ``overloaded`` if that takes too long.
        :raises LogUnavailable: if the log does not answer.
        """
        if self._waiting >= MAX_WAITING:
            raise _behind()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._new.append(future)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="catching up with the log")
        self._waiting += 1
        try:
            async with asyncio.timeout(MAX_SECONDS):
                await future
        except TimeoutError:
            raise _behind() from None
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Fail the requests that wait. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # ---------------------------------------------------------------------------------- internals
    async def _run(self) -> None:
        """Release requests while there are any."""
        #: Each with the offsets that the loaders must have reached.
        waiting: list[tuple[asyncio.Future[None], Mapping[int, int]]] = []
        try:
            while waiting or self._new:
                new, self._new = self._new, []
                try:
                    ends, committed = await self._offsets(bool(new))
                except LogUnavailable as error:
                    _fail([*new, *(future for future, _ in waiting)], str(error))
                    waiting = []
                    continue
                waiting += [(future, ends) for future in new]
                left = []
                for future, target in waiting:
                    if not future.done() and _passed(committed, target):
                        future.set_result(None)
                    if not future.done():
                        left.append((future, target))
                waiting = left
                if waiting or self._new:
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            # There is no await since the last look at the new requests, so none was missed.
            self._task = None
            _fail([*self._new, *(future for future, _ in waiting)], "the wait was abandoned")
            self._new = []

    async def _offsets(self, with_ends: bool) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return the ends of the log, if they are needed, and then the offsets of the loaders."""
        async with log_within(self._timeout):
            ends = await self._log.ends() if with_ends else {}
            committed = await self._log.committed(self._group)
            if any(end > 0 and number not in committed for number, end in ends.items()):
                # Without a committed offset, the loaders begin at the first record. A partition
                # whose records were all deleted has nothing to load, so they commit nothing there.
                firsts = await self._log.firsts()
                ends = {n: end for n, end in ends.items() if end > firsts.get(n, 0)}
            return ends, committed


def _passed(committed: Mapping[int, int], ends: Mapping[int, int]) -> bool:
    return all(committed.get(partition, 0) >= end for partition, end in ends.items())


def _fail(requests: Sequence[asyncio.Future[None]], reason: str) -> None:
    for future in requests:
        if not future.done():
            future.set_exception(LogUnavailable(reason))


def _behind() -> ApiError:
    return overloaded(
        "no user found yet; recent events are still being stored; send the same request again later"
    )
