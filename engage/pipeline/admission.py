# SPDX-License-Identifier: Apache-2.0
"""Admission: which request may be decoded next, decided before it costs anything.

A request is decoded only if the queue of the storage has room for its write key. A request without
room waits for a short time, undecoded, and is then refused (503 ``overloaded``). Decoded data is
always accepted by the queue, so overload never wastes the work of decoding.

Large and compressed bodies take turns: one at a time in a process, the write keys in rotation. So
the memory of one decoded body is needed at a time, and small requests are handled between two
turns. A small request with room does not take a turn.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from engage.errors import overloaded

__all__ = [
    "BRIEF_BODY",
    "KEY_SHARE",
    "LARGE_BODY",
    "QUEUE_WAIT",
    "SUBSCRIPTIONS_SHARE",
    "Admission",
    "Admitted",
    "Room",
    "WriteRequest",
]

#: Seconds that a request waits for room in the queue: longer than a short stall of the storage, and
#: shorter than the time limits of clients.
QUEUE_WAIT: Final = 3.0
#: Bytes of a body beyond which decoding it waits for a turn. A smaller one takes less time than a
#: turn of the event loop may take anyway.
LARGE_BODY: Final = 64 * 1024
#: Bytes of a body up to which it is decoded in too little time to count, if it is one event.
BRIEF_BODY: Final = 4096
#: Seconds of one turn of the event loop that small requests may take together.
PACE_SECONDS: Final = 0.02
#: Requests beyond these that are let in with each later turn of the event loop.
PACE_REQUESTS: Final = 4

#: The part of the queue that one write key may use, so that it cannot shut out the others.
KEY_SHARE: Final = 0.5
#: The share of the queue of requests that write no events.
SUBSCRIPTIONS_SHARE: Final = "subscriptions"

_Waiting = collections.deque[asyncio.Future[None]]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Admission:
    """Lets requests in, fairly by write key.

    :param has_room: whether the queue has room for a write key, and whether its request is small.
    :param wait: seconds that a request waits for room or its turn.
    """

    def __init__(self, has_room: Callable[[str, bool], bool], *, wait: float) -> None:
        self._has_room = has_room
        self._wait = wait
        #: By write key, in the order of rotation: requests that wait for a turn.
        self._turns: dict[str, _Waiting] = {}
        self._taken = False
        #: The same: small requests that wait for a turn of the event loop with time left.
        self._paced: dict[str, _Waiting] = {}
        #: Seconds that small requests have taken of this turn of the event loop.
        self.spent = 0.0
        self._next_scheduled = False

    def has_room(self, key: str) -> bool:
        """Return whether the queue has room for a write key that was found in the body."""
        return self._has_room(key, True)

    async def enter(self, key: str, *, small: bool, brief: bool = False) -> Admitted:
        """Wait until a request may be decoded.

        :param small: whether its body is small and not compressed: it needs room, but no turn.
        :param brief: whether it is so small that its time need not be counted. Otherwise it also
            waits until this turn of the event loop, or a later one, has time left.
        :return: the context in which to decode the request and submit its events.
        :raises ApiError: 503 ``overloaded`` if that takes too long.
        """
        if not small or key in self._turns or not self._has_room(key, True):
            await self.take_turn(key)
            return Admitted(self, key, has_turn=True)
        if not brief and (self.spent >= PACE_SECONDS or self._paced):
            self.schedule_next()
            await self._queue(self._paced, key)
        return Admitted(self, key, counted=not brief)

    async def take_turn(self, key: str, *, first: bool = False) -> None:
        """Wait until no other request has the turn; :meth:`end_turn` passes it on.

        :param first: wait before the other requests of the key: this one has begun.
        :raises ApiError: 503 ``overloaded`` if that takes too long.
        """
        if self._taken or self._turns or not self._has_room(key, False):
            await self._queue(self._turns, key, first=first)
        else:
            self._taken = True

    def contested(self, key: str) -> bool:
        """Return whether a request of another key waits for the turn."""
        return len(self._turns) > (key in self._turns)

    def end_turn(self) -> None:
        """Pass the turn on."""
        self._taken = False
        self.wake()

    def wake(self) -> None:
        """Let waiting requests in; called when there may be room again."""
        if self._turns and not self._taken:
            for key in list(self._turns):
                if self._has_room(key, False) and self._release(self._turns, key):
                    self._taken = True
                    break

    def schedule_next(self) -> None:
        """Begin to count anew with the next turn of the event loop."""
        if not self._next_scheduled:
            self._next_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Let paced requests in: another turn of the event loop has begun."""
        self._next_scheduled = False
        self.spent = 0.0
        released = 0
        while self._paced and released < PACE_REQUESTS:
            released += self._release(self._paced, next(iter(self._paced)))
        if self._paced:
            self.schedule_next()

    async def _queue(self, queues: dict[str, _Waiting], key: str, *, first: bool = False) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = queues.setdefault(key, collections.deque())
        if first:
            waiting.appendleft(future)
        else:
            waiting.append(future)
        try:
            async with asyncio.timeout(self._wait):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                # Let in and cancelled in the same turn of the loop: pass it on.
                if queues is self._turns:
                    self._taken = False
                self.wake()
            else:
                self._forget(queues, key, future)
            if isinstance(error, TimeoutError):
                raise overloaded() from None
            raise

    def _release(self, queues: dict[str, _Waiting], key: str) -> bool:
        """Let the first waiting request of a key in; the key goes to the end of the rotation."""
        waiting = queues.pop(key, None)
        if waiting is None:
            return False
        released = False
        while waiting and not released:
            future = waiting.popleft()
            if not future.done():
                future.set_result(None)
                released = True
        if waiting:
            queues[key] = waiting
        return released

    def _forget(self, queues: dict[str, _Waiting], key: str, future: asyncio.Future[None]) -> None:
        waiting = queues.get(key)
        if waiting is not None:
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                del queues[key]


class Admitted:
    """The context of a request that was let in.

    :param has_turn: whether it has the turn.
    :param counted: whether its time counts for the pace of small requests.
    """

    __slots__ = ("_admission", "_began", "_counted", "_has_turn", "key", "large")

    def __init__(
        self, admission: Admission, key: str, *, has_turn: bool = False, counted: bool = False
    ) -> None:
        self._admission = admission
        #: The write key, or another name for who sent the request.
        self.key = key
        #: Whether it keeps the turn until it leaves, so that no other large body needs memory.
        self.large = has_turn
        self._has_turn = has_turn
        self._counted = counted
        self._began = time.monotonic() if counted else 0.0

    def __enter__(self) -> Admitted:
        return self

    def leave(self, *_: object) -> None:
        """Let others in, at the latest at the end of the context. Idempotent.

        A request leaves before it waits for anything but its turn: see :meth:`enter_again`.
        """
        if self._counted:
            self._counted = False
            self._admission.spent += time.monotonic() - self._began
            self._admission.schedule_next()
        if self._has_turn:
            self._has_turn = False
            self._admission.end_turn()

    __exit__ = leave

    async def enter_again(self, *, small: bool) -> None:
        """Wait until the request may go on after it has left: as :meth:`Admission.enter`.

        :raises ApiError: 503 ``overloaded`` if that takes too long.
        """
        again = await self._admission.enter(self.key, small=small)
        self.large, self._has_turn = again.large, again._has_turn
        self._counted, self._began = again._counted, again._began

    async def pause(self) -> None:
        """Let other work of the event loop run; go on in turn with others that take long.

        :raises ApiError: 503 ``overloaded`` if the turn does not come.
        """
        began, admission = self._has_turn, self._admission
        if not self.large and (not began or admission.contested(self.key)):
            self.leave()
            await admission.take_turn(self.key, first=began)
            self._has_turn = True
        await asyncio.sleep(0)


@dataclasses.dataclass(slots=True, eq=False)
class WriteRequest(Generic[_Item, _Result]):
    """The items of one caller, and the future on which it waits."""

    #: The write key, or another name for the sender.
    key: str
    items: Sequence[_Item]
    #: The cost of the items for the storage, together.
    weight: int
    #: Bytes of all items together.
    size: int
    #: The time of the event loop until which the request may wait for its call.
    deadline: float
    #: For one result per item.
    future: asyncio.Future[Sequence[_Result]]
    #: Whether it is part of a large request.
    part: bool = False


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
        #: The weight and the bytes of each write key that has a request.
        self._used: dict[str, tuple[int, int]] = {}
        self._weight = 0
        self._bytes = 0
        #: How many items wait or are being written.
        self.items = 0

    def has_room(self, key: str, small: bool) -> bool:
        """Return whether a request of a write key may be added.

        Other keys cannot shut a key out: a full queue, which all keys would share in equal parts,
        still has room for a key that has less than half of such a part. Only large requests are
        then limited by the bytes of all keys, to twice the maximum: there may be many keys.
        """
        weight, size = self._used.get(key, (0, 0))
        if weight >= self._key_weight or size >= self._key_bytes:
            return False
        if self._weight < self._max_weight and self._bytes < self._max_bytes:
            return True
        halves = 2 * len(self._used)
        return (
            weight * halves < self._max_weight
            and size * halves < self._max_bytes
            and (small or self._bytes < 2 * self._max_bytes)
        )

    def add(self, request: WriteRequest[_Item, _Result]) -> None:
        """Count a request; :meth:`free` stops counting it."""
        weight, size = self._used.get(request.key, (0, 0))
        self._used[request.key] = weight + request.weight, size + request.size
        self.items += len(request.items)
        self._weight += request.weight
        self._bytes += request.size

    def free(self, requests: Sequence[WriteRequest[_Item, _Result]]) -> None:
        """Stop counting requests that are no longer waiting or being written."""
        for request in requests:
            self.items -= len(request.items)
            self._weight -= request.weight
            self._bytes -= request.size
            weight, size = self._used.pop(request.key)
            if weight != request.weight or size != request.size:
                self._used[request.key] = weight - request.weight, size - request.size
