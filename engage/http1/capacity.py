# SPDX-License-Identifier: Apache-2.0
"""Counts the connections and the bytes of a process; gives up a connection when there is no room.

The rule: what a client that has proven nothing can make the server hold is bounded, per connection
and in total, before it is parsed. Of two clients, the one that keeps the server waiting goes.

**Connections.** A connection takes a seat (``server.max_connections``) with its first complete
head. Until then it is *expendable*, as is every connection that owes the rest of a head or whose
last answer is written: nothing is lost with it. There is room for :data:`SPARE` connections in
addition to the seats. When that is used up, the connection that has been expendable longest is
closed. When all seats are taken, the one goes whose client has stalled longest with a body or an
answer, and then the idle one that would expire first.

**Bytes.** Everything held for requests without an answer counts against ``limits.inflight_bytes``:
heads, bodies, pipelined requests and answers that the client does not read. A connection's share is
half of the limit divided by the number of connections. When the limit is reached, the connection
over its share with the most bytes times seconds since its last progress is given up. Progress is
16 KiB more of a body (:data:`~engage.http1.occupant.PROGRESS_BYTES`); a head makes none. A
connection that is over its share itself gives way unless another has made no progress for
:data:`STALL_SECONDS`. A request that is complete is never given up.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from engage.http1.shares import Shares
    from engage.monitoring.metrics import Metrics

__all__ = ["SPARE", "STALL_SECONDS", "Capacity", "Holder"]

_log = logging.getLogger(__name__)

#: Connections that may be open in addition to ``server.max_connections``; all are expendable.
SPARE: Final = 256
#: A client that makes no progress for this time has stalled.
STALL_SECONDS: Final = 1.0
#: Connections chosen in one search for those to close, and seconds per connection until the next
#: search when there were none: looking at all connections for each new one would take too long.
_CHOSEN: Final = 64
_PAUSE: Final = 5e-6


class Holder(Protocol):
    """A connection: an :class:`~engage.http1.occupant.Occupant`, which describes these."""

    deadline: float
    ended: bool
    held: int
    progress_at: float

    @property
    def idle(self) -> bool:
        """Whether no request has begun to arrive and no answer is due."""

    @property
    def stalls(self) -> bool:
        """Whether the server waits for the client."""

    def give_up(self) -> None:
        """Free what the connection holds, with an answer if possible."""


class Capacity:
    """The connections and the bytes of one process. Made inside a running event loop.

    :param seats: ``server.max_connections``.
    :param limit: ``limits.inflight_bytes``.
    """

    def __init__(self, seats: int, limit: int, metrics: Metrics) -> None:
        #: All connections that are open.
        self.connections: set[Holder] = set()
        #: Those with which nothing is lost, the longest first.
        self.expendable: OrderedDict[Holder, None] = OrderedDict()
        #: Those that are cut off; the event loop closes them next.
        self.leaving: set[Holder] = set()
        #: What other workers have; ``None`` if there are none.
        self.shares: Shares | None = None
        #: Bytes held for requests without an answer …
        self.held = 0
        #: … and how many there may be.
        self.limit = limit
        self._seats = seats
        self._most = seats + SPARE
        # Half of the limit is for all shares: if none holds more, there is room for a newcomer.
        self._share = limit // (2 * self._most)
        self._metrics = metrics
        self._time = asyncio.get_running_loop().time
        #: Connections to close, the first one last, with what was true of them when chosen.
        self._chosen: list[tuple[tuple[int, float], int, Holder]] = []
        self._next_search = -math.inf
        self._giving_up = False

    # -------------------------------------------------------------------------------- connections
    def restrict(self, most: int) -> None:
        """Lower the number of connections to what the system can open.

        :param most: how many connections can be open at the same time.
        """
        self._most = min(self._most, max(1, most))
        self._seats = min(self._seats, self._most)

    def admit(self, connection: Holder) -> None:
        """Count a new connection; it is expendable. Close another if there is no room for it."""
        self.connections.add(connection)
        self.expendable[connection] = None
        if len(self.connections) - len(self.leaving) > self._most:
            self._give_up(next(iter(self.expendable)))

    def take_seat(self, connection: Holder) -> bool:
        """Note that a connection is expendable no longer: it has a request.

        :return: false if all seats are taken by clients that do not keep the server waiting.
        """
        self.expendable.pop(connection, None)
        while len(self.connections) - len(self.expendable) - len(self.leaving) > self._seats:
            victim = self._least(connection)
            if victim is None:
                self._metrics.dropped("connection")
                return False
            self._give_up(victim)
        return True

    def expend(self, connection: Holder) -> None:
        """Note that nothing would be lost with a connection."""
        self.expendable[connection] = None

    def leave(self, connection: Holder) -> None:
        """Note that a connection is cut off."""
        self.expendable.pop(connection, None)
        if connection in self.connections:
            self.leaving.add(connection)

    def end(self, connection: Holder) -> None:
        """Note that a client sends no more: it does not count when workers share new connections.

        Its last request may take a while. Clients that disconnect and connect again would find
        workers that seem to have many connections, some of them for longer than others.
        """
        if self.shares is not None and connection in self.connections and not connection.ended:
            connection.ended = True
            self.shares.closed()

    def forget(self, connection: Holder) -> None:
        """Note that a connection is closed."""
        self.end(connection)
        self.connections.discard(connection)
        self.expendable.pop(connection, None)
        self.leaving.discard(connection)

    def _least(self, newcomer: Holder) -> Holder | None:
        """Choose a connection whose seat another may have."""
        now = self._time()
        for _ in range(2):
            while self._chosen:
                rank, _, victim = self._chosen.pop()
                present = victim is not newcomer and victim in self.connections
                if present and self._rank(victim, now) == rank:
                    return victim
            if now < self._next_search:
                return None
            ranks = ((self._rank(one, now), one) for one in self.connections)
            ranked = ((rank, id(one), one) for rank, one in ranks if rank is not None)
            self._chosen = heapq.nsmallest(_CHOSEN, ranked)
            self._chosen.reverse()
            if not self._chosen:
                self._next_search = now + _PAUSE * len(self.connections)
        return None

    def _rank(self, connection: Holder, now: float) -> tuple[int, float] | None:
        """Return what orders the connections that may be closed; ``None`` for the others."""
        if connection in self.expendable or connection in self.leaving:
            return None
        if connection.stalls and connection.progress_at <= now - STALL_SECONDS:
            return (0, connection.progress_at)
        return (1, connection.deadline) if connection.idle else None

    # -------------------------------------------------------------------------------------- bytes
    def reserve(self, count: int) -> bool:
        """Count bytes that no connection holds, such as a decompressed body.

        :return: false if there is no room for them; nothing is counted then.
        """
        self.held += count
        if self.held <= self.limit or self.make_room(None, count):
            return True
        self.held -= count
        return False

    def release(self, count: int) -> None:
        """Count bytes no longer that :meth:`reserve` counted."""
        self.held -= count

    def make_room(self, holder: Holder | None, count: int) -> bool:
        """Give up connections until the bytes in memory are within their limit.

        :param holder: the connection that needs room.
        :param count: bytes it needs in total; they are counted already.
        :return: false if there is no room for it.
        """
        if self._giving_up:
            return True  # The answer to one that is given up.
        now = self._time()
        # Anyone may have the share; with more, one gives way to those that do not stall.
        since = now if count <= self._share else now - STALL_SECONDS
        victims = [
            (one.held * (now - one.progress_at), id(one), one)
            for one in self.connections
            if one.held > self._share and one is not holder
            if one.stalls and one.progress_at <= since
        ]
        for _, _, victim in sorted(victims, reverse=True):
            self._give_up(victim)
            if self.held <= self.limit:
                return True
        return False

    def _give_up(self, connection: Holder) -> None:
        self._metrics.dropped("connection")
        self._giving_up = True
        try:
            connection.give_up()
        except Exception:
            _log.exception("a connection could not be given up")
        finally:
            self._giving_up = False
