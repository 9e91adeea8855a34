# SPDX-License-Identifier: Apache-2.0
"""Admission: which request may be decoded next, decided before it costs anything.

A request is decoded only if the queue of the storage has room for its write key. A request without
room waits for a short time, undecoded, and is then refused (503 ``overloaded``). What is decoded is
always accepted by the queue, so overload never wastes the work of decoding.

Large and compressed bodies take turns: one at a time in a process, the write keys in rotation. So
the memory of one decoded body is needed at a time, and small requests are handled between two
turns. A small request with room does not take a turn.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from engage.errors import overloaded

__all__ = ["LARGE_BODY", "Admission"]

#: Bytes of a body beyond which decoding it waits for a turn. A smaller one takes less time than a
#: turn of the event loop may take anyway.
LARGE_BODY: Final = 64 * 1024
#: Complete bodies of one write key that may wait in memory for their turn, before further large
#: bodies of that key are left unread.
BODIES_AHEAD: Final = 4

_Waiting = collections.deque[asyncio.Future[None]]
_NO_TURN: Final = contextlib.nullcontext()


class Admission:
    """Lets requests in, fairly by write key.

    :param has_room: whether the queue has room for a write key.
    :param wait: seconds that a request waits for room or its turn.
    """

    def __init__(self, has_room: Callable[[str], bool], *, wait: float) -> None:
        self._has_room = has_room
        self._wait = wait
        #: By write key, in the order of rotation: requests that wait for a turn …
        self._turns: dict[str, _Waiting] = {}
        #: … and requests whose body is left unread until there is room.
        self._unread: dict[str, _Waiting] = {}
        self._taken = False

    def has_room(self, key: str) -> bool:
        """Return whether the queue has room for a write key that was found in the body."""
        return self._has_room(key)

    async def enter(self, key: str, *, small: bool) -> contextlib.AbstractContextManager[None]:
        """Wait until a request may be decoded.

        :param small: whether its body is small and not compressed: it needs room, but no turn.
        :return: the context in which to decode the request and submit its events.
        :raises ApiError: 503 ``overloaded`` if that takes too long.
        """
        if small and key not in self._turns and self._has_room(key):
            return _NO_TURN
        if self._taken or self._turns or not self._has_room(key):
            await self._queue(self._turns, key)
        else:
            self._taken = True
        return self._turn()

    def reads(self, key: str) -> bool:
        """Return whether a large body may be read now."""
        if key in self._unread:
            return False
        waiting = self._turns.get(key)
        if waiting is not None and len(waiting) >= BODIES_AHEAD:
            return False
        return self._has_room(key)

    async def until_read(self, key: str) -> None:
        """Wait until a large body may be read.

        :raises ApiError: 503 ``overloaded`` if that takes too long.
        """
        if not self.reads(key):
            await self._queue(self._unread, key)

    def wake(self) -> None:
        """Let waiting requests in; called when there may be room again."""
        if self._turns and not self._taken:
            for key in list(self._turns):
                if self._has_room(key) and self._release(self._turns, key):
                    self._taken = True
                    break
        if self._unread:
            for key in list(self._unread):
                ahead = len(self._turns.get(key, ()))
                if self._has_room(key):
                    for _ in range(BODIES_AHEAD - ahead):
                        self._release(self._unread, key)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._taken = False
            self.wake()

    async def _queue(self, queues: dict[str, _Waiting], key: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queues.setdefault(key, collections.deque()).append(future)
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
