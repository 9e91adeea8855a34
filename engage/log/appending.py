# SPDX-License-Identifier: Apache-2.0
"""Appends the items of each request to a log, in place of the group commit.

Each request is one call of the log. Many calls run at the same time, and the log combines them. So
a request waits only for the partitions of its own events, and one that cannot be appended fails
alone. Each call has the time limit of its request; nothing is reopened after a failure, because the
log reconnects by itself.

The items that are being appended are limited as in the group commit: in weight and bytes, in total
and for each write key.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

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
from engage.monitoring.sampler import Throttle
from engage.pipeline.admission import Room, WriteRequest

__all__ = ["Appending"]

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item", bound=Event | DeadLetter)


class Appending(Generic[_Item]):
    """Appends items to a log, a call for each request.

    :param log: an open log.
    :param max_weight: the weight, of all calls that run, at which the log is full.
    :param max_bytes: the same in bytes.
    :param share: the part of both that one write key may have.
    :param timeout: seconds that a call may take.
    :param done: called after each successful call with its seconds, items and outcomes.
    :param failed: called after each failed call.
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
    ) -> None:
        self._log = log
        self._room: Room[_Item, Outcome] = Room(
            max_weight=max_weight, max_bytes=max_bytes, share=share
        )
        #: Returns whether there is room for a request of a write key.
        self.has_room = self._room.has_room
        self._timeout = timeout
        self._done = done
        self._failed = failed
        #: Called when there may be room again.
        self.freed: Callable[[], None] = lambda: None
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False
        # Set by the first request: ``get_running_loop`` costs a system call (getpid) each time.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line = Throttle()

    @property
    def items(self) -> int:
        """The number of items that are being appended."""
        return self._room.items

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
        :param weight: the cost of the items for the storage; ``None`` for one each.
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
        weight = len(items) if weight is None else weight
        request = WriteRequest(key, items, weight, size, math.inf, future)
        self._room.add(request)
        # A task begins in the order in which it was made, so the calls do as well.
        call = loop.create_task(self._append(request, records, refused))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
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
    async def _append(
        self,
        request: WriteRequest[_Item, Outcome],
        records: Sequence[LogRecord],
        refused: Mapping[int, Outcome],
    ) -> None:
        """Append the records of a request and hand it its outcomes."""
        assert self._loop is not None
        started = self._loop.time()
        future = request.future
        try:
            async with asyncio.timeout(self._timeout):
                outcomes = await self._log.append(records)
            if len(outcomes) != len(records):
                raise TypeError(f"{len(outcomes)} outcomes for {len(records)} records")
        except BaseException as error:
            self._failed()
            self._report(error)
            if not future.done():  # it is done if the caller was cancelled
                future.set_exception(LogUnavailable("not all events are durable"))
            return
        finally:
            self._room.free((request,))
            self.freed()
        if refused:
            appended = iter(outcomes)
            outcomes = [
                refused[index] if index in refused else next(appended)
                for index in range(len(request.items))
            ]
        self._done(self._loop.time() - started, request.items, outcomes)
        if not future.done():
            future.set_result(outcomes)

    def _report(self, error: BaseException) -> None:
        """Log a failure, unless a line was logged a moment ago: with one partition down, other
        requests succeed between those that fail."""
        if (more := self._line()) is None:
            return
        expected = isinstance(error, StorageUnavailable | TimeoutError | asyncio.CancelledError)
        late = f"no acknowledgement within {self._timeout:g} s"
        _log.error(
            "a request could not be appended to the log: %s%s",
            late if isinstance(error, TimeoutError) else str(error) or type(error).__name__,
            more,
            exc_info=None if expected else error,
        )


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
