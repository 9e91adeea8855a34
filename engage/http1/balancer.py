# SPDX-License-Identifier: Apache-2.0
"""Moves open connections from workers that have more than their share to one that has few.

Which worker accepts a connection is decided in a moment, in which the others may be busy and their
counts out of date (:mod:`engage.http1.shares`). A client may then stay there for hours. So a worker
that is far behind asks for connections. A worker that has more than its share chooses some, and
puts each into the :class:`~engage.http1.handover.Handover` once the answer to its current request
is sent. Workers accept from there as from the listening socket, with the same patience, so the one
that is behind gets it.

If no worker takes a connection, the one that put it there does, after that patience. A worker is
given connections once for each time that it asks, so one that hangs or is stopped delays a few
requests, and no more.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from engage.http1.shares import Shares

__all__ = ["Balancer", "Movable"]

#: Seconds between two comparisons with the other workers.
_INTERVAL: Final = 0.1
#: Maximum number of connections that are told to move at a time.
_CHOSEN: Final = 64


class Movable(Protocol):
    """A connection: an :class:`engage.http1.connection.Connection`."""

    #: Whether it is to be handed over.
    moves: bool

    @property
    def established(self) -> bool:
        """Whether the client has sent a whole request."""

    def move(self) -> None:
        """Hand the connection over as soon as no request is in progress."""


class Balancer:
    """Asks for connections, or gives some away, until :meth:`close`.

    :param connections: all that are open; they change.
    """

    def __init__(self, shares: Shares, connections: Collection[Movable]) -> None:
        self._shares = shares
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        #: Those that have been told to move.
        self._chosen: list[Movable] = []
        self._timer = self._loop.call_later(_INTERVAL, self._compare)

    def close(self) -> None:
        """Move nothing any more. Idempotent."""
        self._timer.cancel()
        self._forget()

    def _compare(self) -> None:
        self._timer = self._loop.call_later(_INTERVAL, self._compare)
        shares = self._shares
        shares.ask()
        # One must move even if the surplus is a fraction: of four workers with 3, 3, 3 and 0
        # connections, none has a whole one more than its share.
        surplus = math.ceil(shares.surplus())
        if surplus < 1 or not shares.ahead(without=1):
            self._forget()
        elif shares.answer():
            self._choose(min(surplus, _CHOSEN))

    def _choose(self, count: int) -> None:
        self._chosen = [one for one in self._chosen if one.moves and one in self._connections]
        # Idle connections as well as busy ones: otherwise the busy ones would gather where
        # connections were given to, and the idle ones where they were given away.
        # A client that has sent nothing stays: elsewhere it would pass for one that has.
        others = [one for one in self._connections if one.established and not one.moves]
        more = random.sample(others, min(max(count - len(self._chosen), 0), len(others)))
        self._chosen += more
        for connection in more:
            connection.move()

    def _forget(self) -> None:
        for connection in self._chosen:
            connection.moves = False
        self._chosen.clear()
