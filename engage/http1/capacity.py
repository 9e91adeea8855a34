# SPDX-License-Identifier: Apache-2.0
"""Which connection gives way when a process has no room for another, or for more bytes.

The rule: the memory that an unauthenticated client can make the server hold is bounded, per
connection and in total, before the request is parsed. **The connection that has been silent for the
longest time gives way**, and never one whose request has arrived completely.

For another connection, that is any of those that wait for their client. For bytes, it is one that
holds more than its share: half of ``limits.inflight_bytes`` divided by the number of connections.
So all connections within their shares leave room for a newcomer. If no connection can give way, the
newcomer is refused with 503, as is a request while ``server.max_connections`` others are answered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from engage.http1.shares import Shares
    from engage.monitoring.metrics import Metrics

__all__ = ["SPARE", "Capacity", "Client"]

#: Connections that may wait for their clients although ``server.max_connections`` requests are
#: being answered, so that a newcomer has the time to send its request.
SPARE: Final = 256


class Client(Protocol):
    """A connection: an :class:`engage.http1.connection.Connection`."""

    #: Whether the client has finished sending.
    ended: bool
    #: Bytes that count against ``limits.inflight_bytes``.
    held: int

    def give_way(self) -> None:
        """Free the memory of an incomplete request, with an answer if possible."""


class Capacity:
    """The connections and the bytes of one process.

    :param requests: ``server.max_connections``.
    :param limit: ``limits.inflight_bytes``.
    """

    def __init__(self, requests: int, limit: int, metrics: Metrics) -> None:
        #: All connections that are open.
        self.connections: set[Client] = set()
        #: Those without a complete request; first the one that has been silent longest.
        self.waiting: OrderedDict[Client, None] = OrderedDict()
        #: What other workers have; ``None`` if there are none.
        self.shares: Shares | None = None
        #: Bytes held for requests without an answer …
        self.held = 0
        #: … and how many there may be.
        self.limit = limit
        self._requests = requests
        self._most = requests + SPARE
        self._share = limit // (2 * self._most)
        self._metrics = metrics
        self._giving_way = False

    # -------------------------------------------------------------------------------- connections
    def restrict(self, most: int) -> None:
        """Lower the number of connections to the number that the system can open.

        :param most: how many connections can be open at the same time.
        """
        self._most = min(self._most, max(1, most))
        self._requests = min(self._requests, self._most)

    def admit(self, connection: Client) -> None:
        """Count a new connection. Close another if there is no room for it."""
        self.connections.add(connection)
        self.waiting[connection] = None
        while len(self.connections) > self._most:
            victim = next(iter(self.waiting))
            self._give_way(victim)
            if victim in self.connections:
                break  # Its handler answers; it is closed for the next newcomer.

    @property
    def full(self) -> bool:
        """Whether no other request can be answered now."""
        return len(self.connections) - len(self.waiting) >= self._requests

    def end(self, connection: Client) -> None:
        """Note that a client has finished sending: it does not count when workers share new
        connections.

        Its last request may take a while. Clients that disconnect and connect again would find
        workers that seem to have many connections, some of them for longer than others.
        """
        if self.shares is not None and connection in self.connections and not connection.ended:
            connection.ended = True
            self.shares.closed()

    def forget(self, connection: Client) -> None:
        """Note that a connection is closed, or is closed next. Idempotent."""
        self.end(connection)
        self.connections.discard(connection)
        self.waiting.pop(connection, None)

    # -------------------------------------------------------------------------------------- bytes
    def make_room(self, newcomer: Client) -> bool:
        """Let connections give way until the bytes in memory are within their limit.

        :param newcomer: the connection whose bytes were counted last.
        :return: false if there is no room for them.
        """
        if self._giving_way:
            return True  # The answer to one that gives way.
        share = self._share
        for client in [x for x in self.waiting if x.held > share and x is not newcomer]:
            self._give_way(client)
            if self.held <= self.limit:
                return True
        return False

    def _give_way(self, connection: Client) -> None:
        self._metrics.count("dropped", "connection")
        self._giving_way = True
        try:
            connection.give_way()
        finally:
            self._giving_way = False
