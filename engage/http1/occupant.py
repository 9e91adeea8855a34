# SPDX-License-Identifier: Apache-2.0
"""What a connection takes up: bytes in memory, and one of the connections that may be open.

This is the lower half of :class:`engage.http1.connection.Connection`: the buffers and the counting,
without HTTP. :mod:`engage.http1.capacity` decides what happens when there is no room.
"""

from __future__ import annotations

import abc
import asyncio
import math
from typing import TYPE_CHECKING, Final, cast

from engage.http1.body import Body

if TYPE_CHECKING:
    from engage.http1.capacity import Capacity

__all__ = ["PROGRESS_BYTES", "UNREAD_BYTES", "Occupant"]

#: A body makes progress when it has grown by this much.
PROGRESS_BYTES: Final = 16 * 1024
#: When more than this of a connection's answers is waiting for the client, all of it counts as
#: held, and no other request of the connection begins.
UNREAD_BYTES: Final = 16 * 1024


class Occupant(asyncio.Protocol, abc.ABC):
    """One client's connection, as the capacity sees it.

    :param capacity: counts it.
    """

    def __init__(self, capacity: Capacity) -> None:
        #: When :meth:`~engage.http1.connection.Connection.expired` is to be called; by the event
        #: loop's clock.
        self.deadline = math.inf
        #: Whether the client sends no more.
        self.ended = False
        #: Bytes that count against ``limits.inflight_bytes``.
        self.held = 0
        #: When the client last made progress with what the server waits for.
        self.progress_at = 0.0
        self._capacity = capacity
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        #: What has arrived and is not parsed.
        self._buffer = bytearray()
        #: The body of the current request while it arrives.
        self._body = Body(0, chunked=False)
        #: Bytes of the current request's head and body that were taken out of the buffer.
        self._taken = 0
        #: How much of the body had arrived at :attr:`progress_at`.
        self._progress = 0
        #: Whether answers are waiting for the client to read them.
        self._slow_reader = False
        #: Whether nothing is lost with the connection.
        self._expendable = True

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether no request has begun to arrive and no answer is due."""

    @property
    @abc.abstractmethod
    def stalls(self) -> bool:
        """Whether the server waits for the client."""

    @abc.abstractmethod
    def give_up(self) -> None:
        """Free what the connection holds, with an answer if possible: there is no room for it."""

    # ------------------------------------------------------------------------------ for subclasses
    def _hold(self) -> bool:
        """Count what the connection holds in memory for requests without an answer.

        :return: false if that is too much for this process; the connection is then given up.
        """
        count = self._taken + self._body.held(self._buffer)
        if self._slow_reader:
            count += self._transport.get_write_buffer_size()
        capacity = self._capacity
        capacity.held += count - self.held
        self.held = count
        if capacity.held > capacity.limit and count and not capacity.make_room(self, count):
            self.give_up()
            return False
        return True

    def _release(self) -> None:
        """Free everything except answers that the client has not read."""
        self._buffer.clear()
        self._body.forget(self._buffer)
        self._taken = 0
        self._hold()

    def _begin_body(self, body: Body, head_bytes: int) -> None:
        """Wait for the body of a request whose head was taken out of the buffer."""
        self._body = body
        self._taken = head_bytes
        self._progress = -PROGRESS_BYTES

    def _note_progress(self) -> None:
        """Note that more of the body has arrived. Less than :data:`PROGRESS_BYTES` do not count."""
        arrived = self._body.held(self._buffer)
        if arrived >= self._progress + PROGRESS_BYTES:
            self._progress = arrived
            self.progress_at = self._loop.time()

    def _expend(self) -> None:
        """Note that nothing would be lost with the connection."""
        if not self._expendable:
            self._expendable = True
            self.progress_at = self._loop.time()
            self._capacity.expend(self)
