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

Length: one state machine. A call, its time limits and what follows its failure change the same
state.
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


class _Call(Generic[_Item, _Result]):
    """A task that calls the storage with one group of requests after the other."""

    __slots__ = ("given_up", "group", "late", "started", "task", "timer")

    #: The task; assigned before it begins.
    task: asyncio.Task[None]

    def __init__(self) -> None:
        #: The requests of the current call, in the order of their deadlines …
        self.group: Sequence[WriteRequest[_Item, _Result]] = ()
        #: … how many of them failed because their time is over …
        self.late = 0
        #: … when it began, and what fails the next request at its deadline.
        self.started = 0.0
        self.timer: asyncio.Handle | None = None
        #: Whether the call did not return in time. Its requests have failed, and its result is
        #: ignored.
        self.given_up = False


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
        #: The tasks that make the calls, each one call at a time, and the one that recovers.
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
        """Start another task if a call is due that no task will make, and the limit allows it."""
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
        call: _Call[_Item, _Result] = _Call()
        call.task = self._loop.create_task(self._run(call))
        self._tasks.add(call.task)

    async def _run(self, call: _Call[_Item, _Result]) -> None:
        self._starting = False
        ended = False
        try:
            # What is not due is written after one of the calls that run now.
            while not self._recovering and self._queue.is_due:
                group = self._queue.next_group()
                self._start_if_due()
                try:
                    await self._write(call, group)
                except BaseException as error:
                    if call.given_up:
                        raise
                    # A bug here, or the loop is closing: no caller may wait indefinitely.
                    for request in group:
                        request.fail(StorageUnavailable("the write was abandoned"))
                    if not isinstance(error, Exception):
                        raise
                    _log.exception("a group commit failed unexpectedly")
                finally:
                    if not call.given_up:
                        self._free(group)
                if call.given_up:
                    return
            ended = True
        finally:
            if not call.given_up:
                # There is no await since the last look at the queue, so no request was missed.
                self._end(call.task, failed=not ended)

    def _end(self, task: asyncio.Task[None], *, failed: bool) -> None:
        """Forget a task.

        :param failed: whether the task ended unexpectedly. Then the waiting requests fail, because
            no other task may follow.
        """
        self._tasks.discard(task)
        if failed:
            self._fail(self._drop())

    async def _write(
        self, call: _Call[_Item, _Result], group: Sequence[WriteRequest[_Item, _Result]]
    ) -> None:
        loop = self._loop
        assert loop is not None
        started = loop.time()
        try:
            await self._attempt_group(call, group)
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

    # ------------------------------------------------------------------------------ a usual call
    # The task awaits the storage itself, and a timer watches its time. With another task for the
    # call, a request that is alone took three more turns of the event loop.
    async def _attempt_group(
        self, call: _Call[_Item, _Result], group: Sequence[WriteRequest[_Item, _Result]]
    ) -> None:
        """Make one call of the storage and hand each request its results.

        If the call does not return in time, it is given up, and whatever follows does nothing.

        :raises TimeoutError: if the time of every request was over before.
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
        call.group, call.started, call.late = group, started, 0
        call.timer = loop.call_at(group[0].deadline, self._due, call)
        try:
            results = await self._call(items)
            if call.given_up:
                return
            _check_number(results, items)
        except asyncio.CancelledError:
            if call.given_up or call.task.cancelling():
                raise
            self._failed()
            raise StorageUnavailable("the storage cancelled the write") from None
        except Exception:
            if call.given_up:
                return
            self._failed()
            raise
        finally:
            if call.timer is not None:
                call.timer.cancel()
        self._hand_out(group, items, results, started)

    def _due(self, call: _Call[_Item, _Result]) -> None:
        """Call :meth:`_overdue` in the next turn, so that a result that has arrived is used."""
        assert self._loop is not None
        call.timer = self._loop.call_soon(self._overdue, call)

    def _overdue(self, call: _Call[_Item, _Result]) -> None:
        """Fail the requests of a call whose time is over. If there are no others, give it up."""
        loop, group = self._loop, call.group
        assert loop is not None
        # In the order of arrival, which is that of the deadlines: each request fails at its
        # deadline, and the call goes on for those that arrived later.
        late = call.late + 1
        while late < len(group) and group[late].deadline <= loop.time():
            late += 1
        self._fail(group[call.late : late])
        call.late = late
        if late < len(group):
            call.timer = loop.call_at(group[late].deadline, self._due, call)
            return
        call.timer = None
        call.given_up = True
        self._failed()
        # Not awaited: a call that overruns its time may ignore the cancellation as well.
        call.task.cancel()
        self._tasks.discard(call.task)
        if self._note_time_out(group, loop.time() - call.started):
            self._tasks.add(loop.create_task(self._recover_after(group)))
        else:
            self._free(group)
            self._start_if_due()

    def _hand_out(
        self,
        group: Sequence[WriteRequest[_Item, _Result]],
        items: Sequence[_Item],
        results: Sequence[_Result],
        started: float,
    ) -> None:
        """Hand each request its results."""
        assert self._loop is not None
        if not self._healthy:
            self._healthy = True
            _log.warning("the storage is available again")
        self._answered = self._loop.time()
        self._done(self._answered - started, items, results)
        start = 0
        for request in group:
            end = start + len(request.items)
            if not request.future.done():
                whole = start == 0 and end == len(results)
                request.future.set_result(results if whole else results[start:end])
            start = end

    # ---------------------------------------------------------------------------- a failed call
    async def _time_out(
        self, group: Sequence[WriteRequest[_Item, _Result]], seconds: float
    ) -> None:
        """Fail requests whose time is over, and recover if the store does not answer."""
        if self._note_time_out(group, seconds):
            await self._wait_for_recovery()

    def _note_time_out(self, group: Sequence[WriteRequest[_Item, _Result]], seconds: float) -> bool:
        """Fail requests whose time is over.

        :param seconds: the duration of the call that they waited for.
        :return: whether the store has to recover. No call begins until it has.
        """
        self._fail(group)
        if self._recovering:
            return False
        assert self._loop is not None
        if min(seconds, self._loop.time() - self._answered) < self._timeout / 2:
            # Most of their time was spent waiting, or another call was successful meanwhile: the
            # store is slow, but it answers.
            return False
        _log.error("the storage did not answer within %.1f s", seconds)
        self._recovering = True
        # The requests that arrived meanwhile wait for the same store.
        self._fail(self._drop())
        return True

    async def _recover_after(self, group: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Recover after a call that was given up, then go on."""
        task = asyncio.current_task()
        assert task is not None
        ended = False
        try:
            await self._wait_for_recovery()
            ended = True
        except Exception:
            _log.exception("the storage could not recover")
            ended = True
        finally:
            self._free(group)
            self._end(task, failed=not ended)
            self._start_if_due()

    async def _wait_for_recovery(self) -> None:
        """Recover; requests that arrive meanwhile wait until their usual deadline."""
        loop = self._loop
        assert loop is not None
        try:
            recovering = asyncio.ensure_future(self._recover())
            while not recovering.done():
                now = loop.time()
                until = self._queue.earliest_deadline(now + self._timeout)
                await asyncio.wait((recovering,), timeout=max(until - now, 0))
                self._fail(self._drop(late_at=loop.time()))
            await recovering
        finally:
            self._recovering = False

    async def _attempt(self, request: WriteRequest[_Item, _Result]) -> None:
        """Make one call of the storage for one request.

        :raises TimeoutError: if the time of the request is over.
        :raises StorageUnavailable: if the storage raised it, or cancelled the call.
        """
        loop = self._loop
        assert loop is not None
        started = loop.time()
        if request.deadline <= started:
            self._failed()
            raise TimeoutError
        call = asyncio.ensure_future(self._call(request.items))
        try:
            await asyncio.wait((call,), timeout=max(request.deadline - started, 0))
            if not call.done():
                self._fail((request,))
                self._failed()
                raise TimeoutError
        finally:
            if not call.done():
                # Not awaited: a call that overruns its time may ignore the cancellation as well.
                call.cancel()
                call.add_done_callback(_retrieve_exception)
        try:
            results = call.result()
            _check_number(results, request.items)
        except asyncio.CancelledError:
            self._failed()
            raise StorageUnavailable("the storage cancelled the write") from None
        except Exception:
            self._failed()
            raise
        self._hand_out((request,), request.items, results, started)

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
                await self._attempt(request)
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


def _check_number(results: Sequence[Any], items: Sequence[Any]) -> None:
    """Check that there is one result for each item.

    :raises TypeError: if there is not.
    """
    if len(results) != len(items):
        raise TypeError(f"{len(results)} results for {len(items)} items")


def _retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
