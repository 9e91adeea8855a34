# SPDX-License-Identifier: Apache-2.0
"""Group commit: stores the items of concurrent requests in few calls of the storage.

Requests that arrive during a call wait and share the next call; a request that arrives alone is
written at once. A storage may take several calls at the same time. Then the next call begins beside
the others as soon as enough requests wait (:attr:`WriteQueue.is_due`), so that the store works on
one call while this process prepares another. A call takes requests of all write keys in rotation,
so one busy key does not delay the others. Each request has a time limit, which includes its wait.

What waits is limited in weight and bytes, in total and for each key. The limit is asked for before
a request is decoded (:mod:`engage.pipeline.admission`): :meth:`GroupCommit.submit` accepts
everything.

When a call fails quickly or unexpectedly, the requests in it are retried one by one, so that one
poisonous request cannot fail the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from engage.api import StorageUnavailable
from engage.errors import shutting_down
from engage.pipeline.write_queue import WriteQueue, WriteRequest

__all__ = ["GroupCommit"]

_log = logging.getLogger(__name__)

#: Seconds. If a store takes longer than this to fail, it is down: its requests are not retried
#: one by one.
_QUICK_FAILURE: Final = 1.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class GroupCommit(Generic[_Item, _Result]):
    """Calls ``call`` with the items of all waiting requests, one call or a few at a time.

    :param call: returns one result per item. Raises :class:`StorageUnavailable` if the items cannot
        be stored now.
    :param max_weight: the weight, waiting and in the current call, at which there is no more room.
    :param max_bytes: the same in bytes.
    :param share: the part of both that one write key may have.
    :param calls: the maximum number of calls at the same time.
    :param timeout: seconds that a request may take, including its wait.
    :param done: called after each successful call with its seconds, items and results.
    :param failed: called after each failed call.
    :param recover: called after a call that did not return in time.
    :param freed: called when there may be room again.
    """

    def __init__(
        self,
        call: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result]]],
        *,
        max_weight: int,
        max_bytes: int,
        share: float = 1.0,
        calls: int = 1,
        timeout: float,
        done: Callable[[float, Sequence[_Item], Sequence[_Result]], None],
        failed: Callable[[], None],
        recover: Callable[[], Awaitable[None]],
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._call = call
        self._queue: WriteQueue[_Item, _Result] = WriteQueue(
            max_weight=max_weight, max_bytes=max_bytes, share=share, writes=calls
        )
        self._calls = calls
        self._timeout = timeout
        self._done = done
        self._failed = failed
        self._recover = recover
        self._freed = freed
        #: The tasks that make the calls, each one call at a time.
        self._tasks: set[asyncio.Task[None]] = set()
        #: Whether a task was made that has not begun yet.
        self._starting = False
        #: Whether a call did not return in time, and the store recovers. No call begins meanwhile.
        self._recovering = False
        #: When a call was successful last.
        self._answered = -math.inf
        # Set by the first request. ``get_running_loop`` costs a system call (getpid) each time.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._healthy = True

    @property
    def items(self) -> int:
        """The number of items that wait or are being written."""
        return self._queue.items

    @property
    def waiting(self) -> int:
        """The number of items that wait."""
        return self._queue.waiting

    def has_room(self, key: str) -> bool:
        """Return whether there is room for a request of a write key."""
        return self._queue.has_room(key)

    def submit(
        self, items: Sequence[_Item], size: int, *, weight: int | None = None, key: str = ""
    ) -> asyncio.Future[Sequence[_Result]]:
        """Queue items to be written together with those of other callers.

        Cancelling a caller does not cancel the write.

        :param size: bytes of all items together.
        :param weight: what the items cost the storage; ``None`` for one each.
        :param key: the write key, or another name for who sends them.
        :return: one result per item, in their order. It raises :class:`StorageUnavailable` if not
            all items are durable.
        :raises ApiError: 503 ``shutting_down``; nothing was written.
        """
        if self._closed:
            raise shutting_down()
        if weight is None:
            weight = len(items)
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[_Result]] = loop.create_future()
        request = WriteRequest(key, items, weight, size, loop.time() + self._timeout, future)
        self._queue.add(request)
        if not self._starting and len(self._tasks) < self._calls:
            self._start_if_due()
        return future

    async def drain(self) -> None:
        """Wait until all submitted items are written or have failed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Refuse new items and finish the submitted ones."""
        self._closed = True
        await self.drain()

    def _start_if_due(self) -> None:
        """Make another task if there may be one, and a call is due that no task will make."""
        if (
            self._starting
            or self._recovering
            or len(self._tasks) >= self._calls
            or not self._queue.is_due
        ):
            return
        # In a separate task, so that cancelling the first caller does not harm the others. The
        # task starts in the next turn of the loop, with all requests that arrived in this one.
        assert self._loop is not None
        self._starting = True
        self._tasks.add(self._loop.create_task(self._run()))

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._starting = False
        ended = False
        try:
            # What is not due is written after one of the calls that run now.
            while not self._recovering and self._queue.is_due:
                group = self._queue.next_group()
                self._start_if_due()
                try:
                    await self._write(group)
                except BaseException as error:
                    # A bug here, or the loop is closing: no caller may wait indefinitely.
                    for request in group:
                        request.fail(StorageUnavailable("the write was abandoned"))
                    if not isinstance(error, Exception):
                        raise
                    _log.exception("a group commit failed unexpectedly")
                finally:
                    self._free(group)
            ended = True
        finally:
            # There is no await since the last look at the queue, so no request was missed.
            self._tasks.discard(task)
            if not ended:
                self._fail(self._drop())

    async def _write(self, group: list[WriteRequest[_Item, _Result]]) -> None:
        loop = self._loop
        assert loop is not None
        started = loop.time()
        try:
            await self._attempt(group)
        except TimeoutError:
            await self._time_out(group, loop.time() - started)
        except StorageUnavailable as error:
            self._log_unavailable(error)
            quick = loop.time() - started < _QUICK_FAILURE and not self._recovering
            if len(group) > 1 and quick:
                await self._one_by_one(group)
            else:
                self._fail(group)
        except Exception:
            _log.exception("the storage raised an unexpected error")
            if len(group) > 1:
                await self._one_by_one(group)
            else:
                self._fail(group)

    async def _time_out(
        self, group: Sequence[WriteRequest[_Item, _Result]], seconds: float
    ) -> None:
        """Fail requests whose time is over.

        :param seconds: the duration of the call that they waited for.
        """
        self._fail(group)
        if self._recovering:
            return
        assert self._loop is not None
        if min(seconds, self._loop.time() - self._answered) < self._timeout / 2:
            # Most of their time was spent waiting, or another call was successful meanwhile: the
            # store is slow, but it answers.
            return
        _log.error("the storage did not answer within %.1f s", seconds)
        # The requests that arrived meanwhile wait for the same store.
        self._fail(self._drop())
        self._recovering = True
        try:
            await self._wait_for_recovery()
        finally:
            self._recovering = False

    async def _wait_for_recovery(self) -> None:
        """Recover; requests that arrive meanwhile wait until their usual deadline."""
        loop = self._loop
        assert loop is not None
        recovering = asyncio.ensure_future(self._recover())
        while not recovering.done():
            now = loop.time()
            until = self._queue.earliest_deadline(now + self._timeout)
            await asyncio.wait((recovering,), timeout=max(until - now, 0))
            self._fail(self._drop(late_at=loop.time()))
        await recovering

    async def _attempt(self, group: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Make one call of the storage and hand each request its results.

        :raises TimeoutError: if the time of every request is over.
        :raises StorageUnavailable: if the storage raised it, or cancelled the call.
        """
        loop = self._loop
        assert loop is not None
        items = group[0].items
        if len(group) > 1:
            items = list(chain.from_iterable(request.items for request in group))
        started = loop.time()
        if group[-1].deadline <= started:
            self._failed()
            raise TimeoutError
        call = asyncio.ensure_future(self._call(items))
        try:
            # In the order of arrival, which is that of the deadlines: each request fails at its
            # deadline, and the call goes on for those that arrived later.
            for request in group:
                await asyncio.wait((call,), timeout=max(request.deadline - loop.time(), 0))
                if call.done():
                    break
                self._fail((request,))
            else:
                self._failed()
                raise TimeoutError
        finally:
            if not call.done():
                # Not awaited: a call that overruns its time may ignore the cancellation as well.
                call.cancel()
                call.add_done_callback(_retrieve_exception)
        try:
            results = call.result()
            if len(results) != len(items):
                raise TypeError(f"{len(results)} results for {len(items)} items")
        except asyncio.CancelledError:
            self._failed()
            raise StorageUnavailable("the storage cancelled the write") from None
        except Exception:
            self._failed()
            raise
        if not self._healthy:
            self._healthy = True
            _log.warning("the storage is available again")
        self._answered = loop.time()
        self._done(self._answered - started, items, results)
        start = 0
        for request in group:
            end = start + len(request.items)
            if not request.future.done():
                whole = start == 0 and end == len(results)
                request.future.set_result(results if whole else results[start:end])
            start = end

    async def _one_by_one(self, group: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Write each request in a separate call.

        If the storage is unavailable for two requests in a row, it is down, and the rest fail
        without a call.
        """
        loop = self._loop
        assert loop is not None
        in_a_row = 0
        for index, request in enumerate(group):
            started = loop.time()
            try:
                await self._attempt((request,))
                in_a_row = 0
            except TimeoutError:
                await self._time_out(group[index:], loop.time() - started)
                return
            except StorageUnavailable as error:
                self._fail((request,))
                self._log_unavailable(error)
                in_a_row += 1
                if in_a_row == 2:
                    self._fail(group[index:])
                    return
            except Exception:
                _log.exception("the storage raised an unexpected error for a single request")
                self._fail((request,))
                in_a_row = 0

    def _log_unavailable(self, error: StorageUnavailable) -> None:
        if self._healthy:
            self._healthy = False
            cause = error.__cause__
            _log.error(
                "the storage is unavailable: %s%s",
                error,
                f" ({type(cause).__name__})" if cause is not None else "",
            )

    def _drop(self, late_at: float = math.inf) -> list[WriteRequest[_Item, _Result]]:
        dropped = self._queue.drop(late_at)
        if dropped:
            self._freed()
        return dropped

    def _free(self, requests: Sequence[WriteRequest[_Item, _Result]]) -> None:
        self._queue.free(requests)
        self._freed()

    def _fail(self, requests: Sequence[WriteRequest[_Item, _Result]]) -> None:
        for request in requests:
            request.fail(StorageUnavailable("not all events are durable"))


def _retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
