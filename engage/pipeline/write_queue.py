# SPDX-License-Identifier: Apache-2.0
"""What waits to be written: counted by write key, and for the group commit in a queue for each key,
served in rotation."""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

__all__ = ["GROUP_WEIGHT", "Room", "WriteQueue", "WriteRequest"]

#: Maximum weight and bytes of the writes that run at the same time, except for a single request
#: that is larger. Beyond this, throughput does not improve, while every request in a write waits
#: for all of it.
GROUP_WEIGHT: Final = 4000
GROUP_BYTES: Final = 16 * 1024 * 1024

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WriteRequest(Generic[_Item, _Result]):
    """The items of one caller, and the future on which it waits.

    :param key: the write key, or another name for the sender.
    :param weight: what the items cost the storage, together.
    :param size: bytes of all items together.
    :param deadline: the time of the event loop at which the request fails.
    :param future: for one result per item.
    """

    __slots__ = ("deadline", "future", "items", "key", "size", "weight")

    def __init__(
        self,
        key: str,
        items: Sequence[_Item],
        weight: int,
        size: int,
        deadline: float,
        future: asyncio.Future[Sequence[_Result]],
    ) -> None:
        self.key = key
        self.items = items
        self.weight = weight
        self.size = size
        self.deadline = deadline
        self.future = future

    def fail(self, error: BaseException) -> None:
        """Let the caller get an error, if it still waits."""
        if not self.future.done():  # it is done if the caller was cancelled
            self.future.set_exception(error)


class _Usage:
    """What one write key has in the queue and in the current call."""

    __slots__ = ("size", "weight")

    def __init__(self) -> None:
        self.weight = 0
        self.size = 0


class Room(Generic[_Item, _Result]):
    """Counts the requests that wait or are being written.

    :param max_weight: the weight at which there is no more room.
    :param max_bytes: the same in bytes.
    :param share: the part of both that one write key may have.
    """

    def __init__(self, *, max_weight: int, max_bytes: int, share: float) -> None:
        self._max_weight = max_weight
        self._max_bytes = max_bytes
        self._key_weight = max_weight * share
        self._key_bytes = max_bytes * share
        self._used: dict[str, _Usage] = {}
        self._weight = 0
        self._bytes = 0
        #: How many items wait or are being written.
        self.items = 0

    def has_room(self, key: str) -> bool:
        """Return whether a request of a write key may be added.

        A key that has nothing in a full queue has room for a first request, up to twice the limit
        in total: other keys cannot shut it out.
        """
        used = self._used.get(key)
        if used is None:
            return self._weight < 2 * self._max_weight and self._bytes < 2 * self._max_bytes
        return (
            self._weight < self._max_weight
            and self._bytes < self._max_bytes
            and used.weight < self._key_weight
            and used.size < self._key_bytes
        )

    def add(self, request: WriteRequest[_Item, _Result]) -> None:
        """Count a request; :meth:`free` stops counting it."""
        used = self._used.get(request.key)
        if used is None:
            used = self._used[request.key] = _Usage()
        used.weight += request.weight
        used.size += request.size
        self.items += len(request.items)
        self._weight += request.weight
        self._bytes += request.size

    def free(self, requests: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Stop counting requests that are neither waiting nor being written any more."""
        for request in requests:
            self.items -= len(request.items)
            self._weight -= request.weight
            self._bytes -= request.size
            used = self._used[request.key]
            used.weight -= request.weight
            used.size -= request.size
            if not used.weight and not used.size:
                del self._used[request.key]


class WriteQueue(Room[_Item, _Result]):
    """The requests that wait for a group commit or are being written.

    :param max_weight: the weight at which there is no more room.
    :param max_bytes: the same in bytes.
    :param share: the part of both that one write key may have.
    :param writes: how many writes may run at the same time; they share :data:`GROUP_WEIGHT` and
        :data:`GROUP_BYTES`.
    """

    def __init__(self, *, max_weight: int, max_bytes: int, share: float, writes: int = 1) -> None:
        super().__init__(max_weight=max_weight, max_bytes=max_bytes, share=share)
        self._writes = writes
        #: By write key, in the order of rotation; never empty.
        self._queues: dict[str, collections.deque[WriteRequest[_Item, _Result]]] = {}
        #: The weight of the requests that are being written.
        self._writing = 0
        #: How many items wait.
        self.waiting = 0

    @property
    def is_due(self) -> bool:
        """Whether a write should begin: requests wait, and no write runs, or what waits is as much
        as each of the other writes may have.

        With a smaller part, a write beside others would cost more than the wait that it saves: each
        write has a fixed cost, however small it is.
        """
        if not self._queues:
            return False
        writing = self._writing
        return not writing or (self._weight - writing) * (self._writes - 1) >= writing

    def add(self, request: WriteRequest[_Item, _Result]) -> None:
        """Queue a request, and count it until :meth:`free`."""
        queue = self._queues.get(request.key)
        if queue is None:
            queue = self._queues[request.key] = collections.deque()
        queue.append(request)
        self.waiting += len(request.items)
        super().add(request)

    def earliest_deadline(self, default: float) -> float:
        """Return the earliest deadline of a waiting request."""
        return min((waiting[0].deadline for waiting in self._queues.values()), default=default)

    def next_group(self) -> list[WriteRequest[_Item, _Result]]:
        """Remove the requests of the next write from the queues, one of each key in turn.

        :return: the requests, in the order of their deadlines.
        """
        queues = self._queues
        group: list[WriteRequest[_Item, _Result]] = []
        weight = size = 0
        max_weight, max_size = GROUP_WEIGHT // self._writes, GROUP_BYTES // self._writes
        keys = list(queues)
        if len(keys) == 1:
            # The usual case, without the bookkeeping of the rotation.
            (key,) = keys
            waiting = queues[key]
            while waiting:
                request = waiting[0]
                # The first one always fits.
                if group and (
                    weight + request.weight > max_weight or size + request.size > max_size
                ):
                    break
                waiting.popleft()
                weight += request.weight
                size += request.size
                group.append(request)
            if not waiting:
                del queues[key]
            self._begin(group, weight)
            return group
        while keys:
            left = []
            for key in keys:
                waiting = queues[key]
                request = waiting[0]
                if group and (
                    weight + request.weight > max_weight or size + request.size > max_size
                ):
                    continue
                waiting.popleft()
                weight += request.weight
                size += request.size
                group.append(request)
                # Served, so it goes to the end of the rotation.
                del queues[key]
                if waiting:
                    queues[key] = waiting
                    left.append(key)
            keys = left
        group.sort(key=lambda request: request.deadline)
        self._begin(group, weight)
        return group

    def _begin(self, group: Sequence[WriteRequest[_Item, _Result]], weight: int) -> None:
        self._writing += weight
        for request in group:
            self.waiting -= len(request.items)

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
        for request in dropped:
            self.waiting -= len(request.items)
        super().free(dropped)
        return dropped

    def free(self, requests: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Stop counting requests that :meth:`next_group` returned: they are written, or failed."""
        self._writing -= sum(request.weight for request in requests)
        super().free(requests)
