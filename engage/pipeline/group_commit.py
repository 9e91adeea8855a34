# SPDX-License-Identifier: Apache-2.0
"""Group commit: stores the items of concurrent requests in few calls of the storage.

Requests that arrive during a call wait and share the next call; a request that arrives alone is
written at once. A storage may take several calls at the same time. Then the next call begins beside
the others as soon as enough requests wait (:attr:`WriteQueue.is_due`), so that the store works on
one call while this process prepares another. A call takes requests of all write keys in rotation,
so one busy key does not delay the others. A large request is submitted in parts
(:mod:`engage.pipeline.ingest`); while other keys wait, a call takes one of them, not all that fit.

The waiting requests are limited in weight and bytes, in total and for each key. The limit is asked
for before a request is decoded (:mod:`engage.pipeline.admission`): :meth:`GroupCommit.submit`
accepts everything.

- **A call that fails** is repeated for each of its requests alone, and for the halves of one that
  fails again, until only poisonous items are not written. An item with which the storage fails in
  an unexpected way is refused; one with which it is unavailable fails its request, so that the
  client sends it again.
- **A call that does not return in time** fails for all of its requests, and the store is opened
  again. The repetitions after a failure are part of that time.
- **A request that waits too long** for its call fails without one.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final, Generic, TypeVar

from engage.api import StorageUnavailable
from engage.errors import shutting_down
from engage.pipeline.admission import Room, WriteRequest

__all__ = [
    "CALL_SECONDS",
    "GROUP_BYTES",
    "GROUP_WEIGHT",
    "LEAST_WEIGHT",
    "PART_BYTES",
    "PART_WEIGHT",
    "GroupCommit",
    "WriteQueue",
]

_log = logging.getLogger(__name__)

#: Calls in a row for which the storage is unavailable, with requests of a call that failed or with
#: parts of them, after which it is down. An item that it cannot store fails with the last part of a
#: size and with the first of the next, and then the storage takes another part.
_DOWN: Final = 3

#: Calls with parts of the requests of a call. They find one poisonous item of 1000 ten times, and
#: all of 100 items. Single items instead of halves would take 1000 calls for one, which is more
#: than the time of a write if the disk takes 8 ms.
_DIVIDING_CALLS: Final = 200
#: Poisonous items without a good one between them, after which the storage fails with everything:
#: these are the most that are refused because of that.
_REFUSED_IN_A_ROW: Final = 10

#: Maximum weight and bytes of the writes that run at the same time, except for a single request
#: that is larger. Every request in a write waits for all of it, and so do those that arrive
#: meanwhile, in every process. With twice as much, SQLite stores no more under a flood, but an
#: event of another key takes twice as long.
GROUP_WEIGHT: Final = 2000
GROUP_BYTES: Final = 16 * 1024 * 1024
#: The same for a part of a large request. The requests of other keys wait for about two parts.
PART_WEIGHT: Final = 1000
PART_BYTES: Final = 1024 * 1024
#: A call that takes more seconds halves the weight of the next ones, down to the least one; a call
#: that takes less than half of them doubles it again. A request of another key waits for about two
#: calls, also in front of a slow storage: with SQLite on a disk that takes 0.1 s longer for each
#: sync, 99 % of single events beside a flood took 1 s, and without this 1.9 s. A call may always
#: take four times as long as a small one: on a slow network, smaller calls would only store less.
CALL_SECONDS: Final = 0.1
LEAST_WEIGHT: Final = 100

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class GroupCommit(Generic[_Item, _Result]):
    """Calls ``call`` with the items of all waiting requests, one call or a few at a time.

    :param call: returns one result per item. Raises :class:`StorageUnavailable` if the items cannot
        be stored now.
    :param queue: an empty one, for the requests that wait or are being written.
    :param timeout: seconds that a call may take, and that a request may wait for it.
    :param done: called after each successful call with its seconds, items and results.
    :param failed: called after each failed call.
    :param recover: called after a call that did not return in time. No call begins until it
        returns.
    :param refuse: called with an item with which the call raises an unexpected error, and with that
        error; returns the result of the item. ``None``: the whole request fails.
    """

    def __init__(
        self,
        call: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result]]],
        queue: WriteQueue[_Item, _Result],
        *,
        timeout: float,
        done: Callable[[float, Sequence[_Item], Sequence[_Result]], None],
        failed: Callable[[], None],
        recover: Callable[[], Awaitable[None]],
        refuse: Callable[[_Item, Exception], _Result] | None = None,
    ) -> None:
        self._call = call
        self.queue = queue
        self._timeout = timeout
        self._done = done
        self._failed = failed
        self._recover = recover
        self._refuse = refuse
        #: Items that were refused since the last call that was successful.
        self._refused = 0
        #: Called when there may be room again.
        self.freed: Callable[[], None] = lambda: None
        #: The tasks that make the calls, each one call at a time.
        self._tasks: set[asyncio.Task[None]] = set()
        #: Whether a task was made that has not begun yet.
        self._starting = False
        #: Whether the store recovers from a call that did not return in time.
        self._recovering = False
        #: When a call was successful last.
        self._answered = -math.inf
        # Set by the first request. ``get_running_loop`` costs a system call (getpid) each time.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._healthy = True

    def submit(
        self,
        items: Sequence[_Item],
        size: int,
        *,
        weight: int | None = None,
        key: str = "",
        part: bool = False,
    ) -> asyncio.Future[Sequence[_Result]]:
        """Queue items to be written together with those of other callers.

        Cancelling a caller does not cancel the write.

        :param size: bytes of all items together.
        :param weight: the cost of the items for the storage; ``None`` for one each.
        :param key: the write key, or another name for who sends them.
        :param part: whether they are part of a large request.
        :return: one result per item, in their order. It raises :class:`StorageUnavailable` if not
            all items are durable; its cause is the error of the storage, if there is one.
        :raises ApiError: 503 ``shutting_down``; nothing was written.
        """
        if self._closed:
            raise shutting_down()
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[_Result]] = loop.create_future()
        weight = len(items) if weight is None else weight
        deadline = loop.time() + self._timeout
        request = WriteRequest(key, items, weight, size, deadline, future, part)
        if self._recovering:
            _fail([request])
            return future
        self.queue.add(request)
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

    # ---------------------------------------------------------------------------------- internals
    def _start_if_due(self) -> None:
        """Start another task if a call is due that no task will make, and the limit allows it."""
        queue = self.queue
        if self._starting or len(self._tasks) >= queue.writes or not queue.is_due:
            return
        # In a separate task, so that cancelling the first caller does not harm the others. The
        # task starts in the next turn of the loop, with all requests that arrived in this one.
        assert self._loop is not None
        self._starting = True
        task = self._loop.create_task(self._run())
        self._tasks.add(task)

    async def _run(self) -> None:
        """Make one call after the other while one is due.

        There is no await after the last look at the queue, so no request is missed.
        """
        loop, queue = self._loop, self.queue
        assert loop is not None
        self._starting = False
        try:
            while queue.is_due:
                group = queue.next_group()
                self._start_if_due()
                try:
                    await self._write(group)
                except BaseException as error:
                    # No caller may wait indefinitely, even after an unexpected error.
                    _fail(group, error)
                    if not isinstance(error, Exception):
                        raise
                    _log.exception("a group commit failed unexpectedly")
                finally:
                    queue.free(group)
                    self.freed()
                if queue.waiting and (late := queue.drop(late_at=loop.time())):
                    self._failed()
                    self._fail_waiting(late)
        finally:
            self._tasks.discard(asyncio.current_task())

    async def _write(self, group: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Write requests within the time limit; recover if the storage does not answer."""
        assert self._loop is not None
        started = self._loop.time()
        try:
            async with asyncio.timeout(self._timeout):
                results = await self._attempt([item for request in group for item in request.items])
                if isinstance(results, Exception):
                    await self._write_each(group, results)
                    return
                self.queue.adapt(self._answered - started, sum(each.weight for each in group))
                left = iter(results)
                for request in group:
                    own = list(islice(left, len(request.items)))
                    if not request.future.done():  # It is done if the caller was cancelled.
                        request.future.set_result(own)
        except TimeoutError:
            self._failed()
            _fail(group)
            # If another call was successful since then, the store is slow, but it answers.
            if self._recovering or self._answered > started:
                return
            _log.error("the storage did not answer within %.1f s", self._timeout)
            self._recovering = True
            try:
                self._fail_waiting(self.queue.drop())
                await self._recover()
            finally:
                self._recovering = False

    async def _write_each(
        self, group: Sequence[WriteRequest[_Item, _Result]], error: Exception
    ) -> None:
        """Write the requests of a call that failed one by one, and halves of one that fails again.

        All parts of a size come before the smaller ones: no request waits until another is divided,
        and a good part shows that the storage is up.

        :param error: why the call failed.
        """
        refuse = self._refuse
        alone = len(group) == 1 and (
            refuse is None or (len(group[0].items) == 1 and isinstance(error, StorageUnavailable))
        )
        if alone or self._recovering:
            _fail(group, error)
            return
        written = {request: dict[int, _Result]() for request in group}
        parts = collections.deque((request, range(len(request.items))) for request in group)
        unavailable = 0
        for _ in range(len(group) + _DIVIDING_CALLS):
            if not parts:
                return
            request, part = parts.popleft()
            items = request.items[part.start : part.stop]
            results = await self._attempt(items, quiet=len(part) < len(request.items))
            down = isinstance(results, StorageUnavailable)
            unavailable = unavailable + 1 if down else 0
            if not isinstance(results, Exception):
                written[request].update(zip(part, results, strict=True))
            elif unavailable == _DOWN:
                error = results
                break
            elif refuse is None or self._refused == _REFUSED_IN_A_ROW or (down and len(part) == 1):
                _fail((request,), results)
            elif len(part) > 1:
                half = len(part) // 2
                parts += (request, part[:half]), (request, part[half:])
            else:
                self._refused += 1
                written[request][part.start] = refuse(items[0], results)
            own = written[request]
            if len(own) == len(request.items) and not request.future.done():
                request.future.set_result([own[index] for index in range(len(own))])
        _fail(group, error)

    async def _attempt(
        self, items: Sequence[_Item], *, quiet: bool = False
    ) -> Sequence[_Result] | Exception:
        """Make one call of the storage.

        :param quiet: log no error.
        :return: one result per item, or the error of the storage.
        """
        loop = self._loop
        assert loop is not None
        started = loop.time()
        try:
            results = await self._call(items)
            if len(results) != len(items):
                raise TypeError(f"{len(results)} results for {len(items)} items")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error: Exception = StorageUnavailable("the storage cancelled the write")
        except Exception as raised:
            error = raised
        else:
            if not self._healthy:
                self._healthy = True
                _log.warning("the storage is available again")
            self._answered = loop.time()
            self._refused = 0
            self._done(self._answered - started, items, results)
            return results
        self._failed()
        if quiet:
            return error
        if not isinstance(error, StorageUnavailable):
            _log.error("the storage raised an unexpected error", exc_info=error)
        elif self._healthy:
            self._healthy = False
            shown = f" ({type(error.__cause__).__name__})" if error.__cause__ is not None else ""
            _log.error("the storage is unavailable: %s%s", error, shown)
        return error

    def _fail_waiting(self, requests: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Fail requests that were removed from the queue."""
        _fail(requests)
        self.freed()


def _fail(
    requests: Sequence[WriteRequest[_Item, _Result]], cause: BaseException | None = None
) -> None:
    """Fail those requests that have no result yet."""
    for request in requests:
        if not request.future.done():
            error = StorageUnavailable("not all events are durable")
            error.__cause__ = cause
            request.future.set_exception(error)


class WriteQueue(Room[_Item, _Result]):
    """The requests that wait for a group commit or are being written.

    :param max_weight: the weight at which there is no more room.
    :param max_bytes: the same in bytes.
    :param share: the part of both that one write key may have.
    :param group_weight: the maximum weight of the writes that run at the same time.
    :param writes: how many these may be; they share the weight and :data:`GROUP_BYTES`.
    """

    def __init__(
        self,
        *,
        max_weight: int,
        max_bytes: int,
        share: float = 1.0,
        group_weight: int = GROUP_WEIGHT,
        writes: int = 1,
    ) -> None:
        super().__init__(max_weight=max_weight, max_bytes=max_bytes, share=share)
        self.writes = writes
        self._most_weight = group_weight // writes
        #: The maximum weight of the next write, see :meth:`adapt`.
        self._write_weight = self._most_weight
        #: The maximum weight of a part of a large request.
        self.part_weight = min(PART_WEIGHT, self._write_weight)
        #: About how long a small write takes; 0: there was none.
        self._small_seconds = 0.0
        #: By write key, in the order of rotation; never empty.
        self._queues: dict[str, collections.deque[WriteRequest[_Item, _Result]]] = {}
        #: The weight of the requests that are being written.
        self._writing = 0
        #: How many items wait.
        self.waiting = 0

    def adapt(self, seconds: float, weight: int) -> None:
        """Adapt the weight of the next writes to the time that one took."""
        if weight <= LEAST_WEIGHT:
            # A single one that waited for something else says little.
            self._small_seconds = min(seconds, 1.1 * self._small_seconds or seconds)
        if 2 * weight < self._write_weight:
            return
        longest = max(CALL_SECONDS, 4 * self._small_seconds)
        if seconds > longest:
            self._write_weight = max(self._write_weight // 2, min(LEAST_WEIGHT, self._most_weight))
        elif 2 * seconds < longest:
            self._write_weight = min(self._write_weight * 2, self._most_weight)
        self.part_weight = min(PART_WEIGHT, self._write_weight)

    @property
    def is_due(self) -> bool:
        """Whether a write should begin: requests wait, and no write runs, or they weigh as much as
        each of the other writes.

        With a smaller part, a write beside others would cost more than the wait that it saves: each
        write has a fixed cost, however small it is.
        """
        writing = self._writing
        return bool(self._queues) and (self._weight - writing) * (self.writes - 1) >= writing

    def add(self, request: WriteRequest[_Item, _Result]) -> None:
        """Queue a request, and count it until :meth:`free`."""
        self._queues.setdefault(request.key, collections.deque()).append(request)
        self.waiting += len(request.items)
        super().add(request)

    def next_group(self) -> list[WriteRequest[_Item, _Result]]:
        """Remove the requests of the next write from the queues, one of each key in turn."""
        queues = self._queues
        contested = len(queues) > 1
        group: list[WriteRequest[_Item, _Result]] = []
        weight = size = 0
        max_weight = self._write_weight
        max_size = GROUP_BYTES // self.writes
        keys = list(queues)
        while keys:
            left = []
            for key in keys:
                waiting = queues[key]
                request = waiting[0]
                # The first one always fits.
                if group and (
                    weight + request.weight > max_weight or size + request.size > max_size
                ):
                    continue
                waiting.popleft()
                weight += request.weight
                size += request.size
                group.append(request)
                self.waiting -= len(request.items)
                # Served, so it goes to the end of the rotation.
                del queues[key]
                if waiting:
                    queues[key] = waiting
                    if not (contested and request.part):
                        left.append(key)
            keys = left
        self._writing += weight
        return group

    def drop(self, late_at: float = math.inf) -> list[WriteRequest[_Item, _Result]]:
        """Remove requests from the queues and return them.

        :param late_at: remove only those whose deadline is not later. Each queue is in the order of
            deadlines.
        """
        dropped = []
        for key, waiting in list(self._queues.items()):
            while waiting and waiting[0].deadline <= late_at:
                dropped.append(waiting.popleft())
            if not waiting:
                del self._queues[key]
        self.waiting -= sum(len(request.items) for request in dropped)
        super().free(dropped)
        return dropped

    def free(self, requests: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Stop counting requests that :meth:`next_group` returned: they are written, or failed."""
        self._writing -= sum(request.weight for request in requests)
        super().free(requests)
