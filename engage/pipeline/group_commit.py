# SPDX-License-Identifier: Apache-2.0
"""Group commit: gathers what concurrent requests bring into one call at a time.

What arrives while a call is under way waits together and goes in the next; what is alone waits for
nobody. Bounded by items and bytes (503 ``overloaded``) and by time, the wait included.

Poison is isolated: after a call that failed for an unknown cause, the requests that were in it are
tried one by one, so that one of them cannot stop the others.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from engage.api import StorageUnavailable
from engage.errors import overloaded, shutting_down

__all__ = ["Gatherer"]

_log = logging.getLogger(__name__)

#: One write is at most so large (one request alone may be larger): longer ones do not get faster,
#: but everybody in them waits for the last.
GROUP_EVENTS: Final = 4000
GROUP_BYTES: Final = 16 * 1024 * 1024

#: Seconds. A store that took longer to fail is not retried at once: it is down, not poisoned.
_QUICK: Final = 1.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Request(Generic[_Item, _Result]):
    """What one caller waits for."""

    __slots__ = ("deadline", "future", "items", "size")

    def __init__(
        self,
        items: Sequence[_Item],
        size: int,
        deadline: float,
        future: asyncio.Future[Sequence[_Result]],
    ) -> None:
        self.items = items
        self.size = size
        self.deadline = deadline
        self.future = future

    def fail(self, error: BaseException) -> None:
        if not self.future.done():  # its caller may have been cancelled
            self.future.set_exception(error)


class Gatherer(Generic[_Item, _Result]):
    """Calls ``call`` with the items of all requests that wait, one call at a time.

    :param call: returns one result per item; :class:`StorageUnavailable` when it cannot now.
    :param max_items: waiting and in the call, of all requests together.
    :param max_bytes: likewise.
    :param timeout: seconds that a request may take, its wait included.
    :param done: told of each successful call: seconds, items, results.
    :param failed: told of each failed call.
    :param recover: called after a call that did not end in time.
    """

    def __init__(
        self,
        call: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result]]],
        *,
        max_items: int,
        max_bytes: int,
        timeout: float,
        done: Callable[[float, Sequence[_Item], Sequence[_Result]], None],
        failed: Callable[[], None],
        recover: Callable[[], Awaitable[None]],
    ) -> None:
        self._call = call
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._done = done
        self._failed = failed
        self._recover = recover
        self._waiting: collections.deque[_Request[_Item, _Result]] = collections.deque()
        self._items = 0
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        # Known from the first request on. Asking costs a system call (getpid) each time.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._healthy = True

    @property
    def items(self) -> int:
        """How many items wait or are being written."""
        return self._items

    async def submit(self, items: Sequence[_Item], size: int) -> Sequence[_Result]:
        """Have items written with whatever else is there.

        A caller that is cancelled gives up its result, not the write.

        :param size: bytes.
        :raises ApiError: 503 ``overloaded`` or ``shutting_down``.
        :raises StorageUnavailable: not all items are durable.
        """
        if self._closed:
            raise shutting_down()
        # What is there alone is always taken: no limit may refuse it for ever.
        if self._items and (
            self._items + len(items) > self._max_items or self._bytes + size > self._max_bytes
        ):
            raise overloaded()
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[_Result]] = loop.create_future()
        self._waiting.append(_Request(items, size, loop.time() + self._timeout, future))
        self._items += len(items)
        self._bytes += size
        if self._task is None:
            # A task of its own: whoever came first may be cancelled without harm to the others. It
            # begins in the next turn of the loop, with all that arrived in this one.
            self._task = loop.create_task(self._run())
        return await future

    async def drain(self) -> None:
        """Wait until nothing waits."""
        while self._task is not None:
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """Take nothing more, finish what is there."""
        self._closed = True
        await self.drain()

    async def _run(self) -> None:
        try:
            while self._waiting:
                group, size = self._take()
                try:
                    await self._write(group)
                except BaseException as error:
                    # A fault of ours, or the loop is being closed: nobody may wait for ever.
                    for request in group:
                        request.fail(StorageUnavailable("the write was abandoned"))
                    if not isinstance(error, Exception):
                        raise
                    _log.exception("gathering requests failed")
                finally:
                    self._items -= sum(len(request.items) for request in group)
                    self._bytes -= size
        finally:
            # Nothing is awaited between the last look at the queue and here: nobody is forgotten.
            self._task = None
            if self._waiting:
                self._fail(self._drop_waiting())

    def _take(self) -> tuple[list[_Request[_Item, _Result]], int]:
        """:return: the requests of the next write, and their bytes."""
        waiting = self._waiting
        first = waiting.popleft()
        group = [first]
        count, size = len(first.items), first.size
        while waiting:
            request = waiting[0]
            count += len(request.items)
            if count > GROUP_EVENTS or size + request.size > GROUP_BYTES:
                break
            size += request.size
            group.append(waiting.popleft())
        return group, size

    async def _write(self, group: list[_Request[_Item, _Result]]) -> None:
        loop = self._loop
        assert loop is not None
        started = loop.time()
        try:
            await self._attempt(group)
        except TimeoutError:
            await self._late(group, loop.time() - started)
        except StorageUnavailable as error:
            self._unavailable(error)
            if len(group) > 1 and loop.time() - started < _QUICK:
                await self._one_by_one(group)
            else:
                self._fail(group)
        except Exception:
            _log.exception("the storage failed for an unknown cause")
            if len(group) > 1:
                await self._one_by_one(group)
            else:
                self._fail(group)

    async def _late(self, group: Sequence[_Request[_Item, _Result]], seconds: float) -> None:
        """Give up requests whose time is over, after a call that took so many seconds."""
        self._fail(group)
        if seconds < self._timeout / 2:
            return  # they had waited too long before: the store is slow, but it answers
        _log.error("the storage did not answer within %.1f s", seconds)
        # All that arrived meanwhile waits for the same store.
        self._fail(self._drop_waiting())
        await self._wait_for_recovery()

    async def _wait_for_recovery(self) -> None:
        """Recover. Who comes meanwhile waits for it, but no longer than anybody."""
        loop = self._loop
        assert loop is not None
        recovering = asyncio.ensure_future(self._recover())
        while not recovering.done():
            now = loop.time()
            until = self._waiting[0].deadline if self._waiting else now + self._timeout
            await asyncio.wait((recovering,), timeout=max(until - now, 0))
            self._fail(self._drop_waiting(late_at=loop.time()))
        await recovering

    async def _attempt(self, group: Sequence[_Request[_Item, _Result]]) -> None:
        """Write once and give everybody their results.

        :raises TimeoutError: the time of every request is over.
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
            # In order of arrival, so of their deadlines: each is answered in its own time, and the
            # call may go on for those that came later.
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
                # Not awaited: what does not end in time may not heed this either.
                call.cancel()
                call.add_done_callback(_forget)
        try:
            results = call.result()
            if len(results) != len(items):
                raise TypeError(f"{len(results)} results for {len(items)} items")
        except asyncio.CancelledError:
            self._failed()
            raise StorageUnavailable("the storage gave up") from None
        except Exception:
            self._failed()
            raise
        if not self._healthy:
            self._healthy = True
            _log.warning("the storage answers again")
        self._done(loop.time() - started, items, results)
        start = 0
        for request in group:
            end = start + len(request.items)
            if not request.future.done():
                whole = start == 0 and end == len(results)
                request.future.set_result(results if whole else results[start:end])
            start = end

    async def _one_by_one(self, group: Sequence[_Request[_Item, _Result]]) -> None:
        """Give each request a write of its own.

        Two in a row for which the storage is unavailable: it is down, nobody else has to try.
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
                await self._late(group[index:], loop.time() - started)
                return
            except StorageUnavailable as error:
                self._fail((request,))
                self._unavailable(error)
                in_a_row += 1
                if in_a_row == 2:
                    self._fail(group[index:])
                    return
            except Exception:
                _log.exception("the storage failed for an unknown cause, on one request alone")
                self._fail((request,))
                in_a_row = 0

    def _unavailable(self, error: StorageUnavailable) -> None:
        if self._healthy:
            self._healthy = False
            cause = error.__cause__
            _log.error(
                "the storage is unavailable: %s%s",
                error,
                f" ({type(cause).__name__})" if cause is not None else "",
            )

    def _drop_waiting(self, late_at: float = math.inf) -> list[_Request[_Item, _Result]]:
        """:param late_at: only those whose time is over then; they stand in that order."""
        dropped = []
        while self._waiting and self._waiting[0].deadline <= late_at:
            dropped.append(self._waiting.popleft())
        self._items -= sum(len(request.items) for request in dropped)
        self._bytes -= sum(request.size for request in dropped)
        return dropped

    def _fail(self, requests: Sequence[_Request[_Item, _Result]]) -> None:
        for request in requests:
            request.fail(StorageUnavailable("not all events are durable"))


def _forget(task: asyncio.Future[Any]) -> None:
    """Take an abandoned call's error, so that asyncio does not complain that nobody did."""
    if not task.cancelled():
        task.exception()
