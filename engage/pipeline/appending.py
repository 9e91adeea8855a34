# SPDX-License-Identifier: Apache-2.0
"""Appends the items of each request to a log, in place of the group commit.

Each request is one call of the log, which is made at once: many calls run at the same time, and the
log combines them. So a request waits only for the partitions of its own events, and one that cannot
be appended fails alone. Each call has the time limit of its request; nothing is opened again after
it, because the log reconnects by itself.

What is being appended is limited as in the group commit: in weight and bytes, in total and for each
write key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, Generic, TypeVar

from engage.api import (
    DeadLetter,
    Event,
    EventLog,
    LogRecord,
    Outcome,
    Status,
    StorageUnavailable,
    UnloggableEvent,
    record_of,
)
from engage.errors import LogUnavailable, shutting_down
from engage.pipeline.write_queue import Room, WriteRequest

__all__ = ["Appending"]

_log = logging.getLogger(__name__)

#: Seconds between two log lines about calls that failed.
_LINE_PAUSE: Final = 60.0

_Item = TypeVar("_Item", bound=Event | DeadLetter)


class Appending(Generic[_Item]):
    """Appends items to a log, a call for each request.

    It has the methods of :class:`~engage.pipeline.group_commit.GroupCommit`.

    :param log: an open log.
    :param max_weight: the weight, of all calls that run, at which there is no more room.
    :param max_bytes: the same in bytes.
    :param share: the part of both that one write key may have.
    :param timeout: seconds that a call may take.
    :param done: called after each successful call with its seconds, items and outcomes.
    :param failed: called after each failed call.
    :param freed: called when there may be room again.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        max_weight: int,
        max_bytes: int,
        share: float = 1.0,
        timeout: float,
        done: Callable[[float, Sequence[_Item], Sequence[Outcome]], None],
        failed: Callable[[], None],
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._log = log
        self._room: Room[_Item, Outcome] = Room(
            max_weight=max_weight, max_bytes=max_bytes, share=share
        )
        self._timeout = timeout
        self._done = done
        self._failed = failed
        self._freed = freed
        self._calls: set[asyncio.Task[Sequence[Outcome]]] = set()
        self._closed = False
        # Set by the first request: ``get_running_loop`` costs a system call (getpid) each time.
        self._loop: asyncio.AbstractEventLoop | None = None
        # When a failure was logged last, and how many there were since.
        self._logged_at: float | None = None
        self._unlogged = 0

    @property
    def items(self) -> int:
        """The number of items that are being appended."""
        return self._room.items

    @property
    def waiting(self) -> int:
        """The number of items that wait for another call: none."""
        return 0

    def has_room(self, key: str) -> bool:
        """Return whether there is room for a request of a write key."""
        return self._room.has_room(key)

    def submit(
        self,
        items: Sequence[_Item],
        size: int,
        *,
        weight: int | None = None,
        key: str = "",
        restated: Collection[str] = (),
    ) -> asyncio.Future[Sequence[Outcome]]:
        """Begin to append items. Those of two calls with the same subject keep their order.

        Cancelling a caller does not cancel the call.

        :param size: bytes of all items together.
        :param weight: what the items cost the storage; ``None`` for one each.
        :param key: the write key, or another name for who sends the items.
        :param restated: the message ids of events that are never conflicts.
        :return: one outcome per item, in their order: ``STORED``, or ``REFUSED`` if the log can
            never take it. It raises :class:`LogUnavailable` if not all items are durable.
        :raises ApiError: 503 ``shutting_down``; nothing was appended.
        """
        if self._closed:
            raise shutting_down()
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Outcome]] = loop.create_future()
        records, refused = _records(items, restated)
        if not records:
            future.set_result([refused[index] for index in range(len(items))])
            return future
        started = loop.time()
        weight = len(items) if weight is None else weight
        request = WriteRequest(key, items, weight, size, started + self._timeout, future)
        self._room.add(request)
        # A task begins in the order in which it was made, so the calls do, too.
        call = loop.create_task(self._append(records))
        self._calls.add(call)
        timer = loop.call_at(request.deadline, self._time_out, request, call)

        def end(_: asyncio.Task[Sequence[Outcome]]) -> None:
            timer.cancel()
            self._calls.discard(call)
            self._end(request, call, refused, loop.time() - started)

        call.add_done_callback(end)
        return future

    async def drain(self) -> None:
        """Wait until all submitted items are appended or have failed."""
        while self._calls:
            await asyncio.wait(self._calls)

    async def close(self) -> None:
        """Refuse new items and finish the submitted ones."""
        self._closed = True
        await self.drain()

    # ---------------------------------------------------------------------------------- internals
    async def _append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        outcomes = await self._log.append(records)
        if len(outcomes) != len(records):
            raise TypeError(f"{len(outcomes)} outcomes for {len(records)} records")
        return outcomes

    def _time_out(
        self, request: WriteRequest[_Item, Outcome], call: asyncio.Task[Sequence[Outcome]]
    ) -> None:
        """Fail a request whose time is over. Its room is free again when the call has ended."""
        self._fail(request, TimeoutError(f"no acknowledgement within {self._timeout:g} s"))
        call.cancel()

    def _end(
        self,
        request: WriteRequest[_Item, Outcome],
        call: asyncio.Task[Sequence[Outcome]],
        refused: dict[int, Outcome],
        seconds: float,
    ) -> None:
        """Hand a request its outcomes; the call has ended."""
        self._room.free((request,))
        self._freed()
        error = asyncio.CancelledError() if call.cancelled() else call.exception()
        if error is not None:
            timed_out = request.future.done() and not request.future.cancelled()
            if not timed_out:
                self._fail(request, error)
            return
        outcomes = call.result()
        if refused:
            appended = iter(outcomes)
            outcomes = [
                refused[index] if index in refused else next(appended)
                for index in range(len(request.items))
            ]
        self._done(seconds, request.items, outcomes)
        if not request.future.done():
            request.future.set_result(outcomes)

    def _fail(self, request: WriteRequest[_Item, Outcome], error: BaseException) -> None:
        self._failed()
        self._report(error)
        request.fail(LogUnavailable("not all events are durable"))

    def _report(self, error: BaseException) -> None:
        """Log a failure, unless a line was logged a moment ago: with one partition away, other
        requests succeed between those that fail."""
        now = asyncio.get_running_loop().time()
        if self._logged_at is not None and now < self._logged_at + _LINE_PAUSE:
            self._unlogged += 1
            return
        expected = isinstance(error, StorageUnavailable | TimeoutError | asyncio.CancelledError)
        _log.error(
            "a request could not be appended to the log: %s%s",
            error if str(error) else type(error).__name__,
            f"; {self._unlogged} more since the last line" if self._unlogged else "",
            exc_info=None if expected else error,
        )
        self._logged_at = now
        self._unlogged = 0


def _records(
    items: Sequence[Event | DeadLetter], restated: Collection[str]
) -> tuple[list[LogRecord], dict[int, Outcome]]:
    """Return the records of items, and index → outcome of those that cannot be records."""
    records: list[LogRecord] = []
    refused: dict[int, Outcome] = {}
    for index, item in enumerate(items):
        try:
            again = bool(restated) and item.message_id in restated
            records.append(record_of(item, restated=again))
        except UnloggableEvent as error:
            refused[index] = Outcome(Status.REFUSED, reason=str(error))
    return records, refused
