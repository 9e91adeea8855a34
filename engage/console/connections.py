# SPDX-License-Identifier: Apache-2.0
"""The open connections of the console: which one gives way to another, and whose request is next.

Anyone can open connections and send requests. They must not keep out people who are signed in or
who open a one-time link that works:

- Their requests are answered at once. Those of strangers are answered in turn, at most
  :data:`STRANGERS_AT_ONCE` at the same time, and their connections are then closed.
- A connection whose request is being answered is never closed for another. If there are too many,
  newcomers of the network that has the most connections of strangers are refused. Another newcomer
  takes the place of the oldest connection of that network that has no complete request, or whose
  request waits for its turn: the answer is then 503. A connection of someone who is signed in gives
  way only if there is none of a stranger.
- Operators and strangers may share the address of this machine or of a trusted proxy. Its newcomers
  are never refused. They wait in the kernel until a connection has had :data:`GRACE_SECONDS` to
  send its request.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engage.http1.addresses import network_of

if TYPE_CHECKING:
    from tornado.iostream import IOStream

__all__ = ["Connection", "Connections"]

#: Open connections: those of dozens of operators.
MAX_CONNECTIONS: Final = 256
#: Seconds for which a connection does not give way. So 1024 newcomers a second find a place.
GRACE_SECONDS: Final = 0.25
#: Seconds until the next look whether there is room, or whether all requests are answered.
RETRY_SECONDS: Final = 0.01
#: Requests of strangers that are answered at the same time: one may wait for a password's hash.
STRANGERS_AT_ONCE: Final = 2


@dataclasses.dataclass(slots=True, eq=False)
class Connection:
    """An open connection."""

    stream: IOStream
    network: str
    #: When it began to wait for its client.
    since: float
    #: Whether a one-time link that works came over it, and whether its request is one of somebody
    #: who is signed in or has such a link.
    has_link: bool = False
    trusted: bool = False
    #: Whether a request was answered.
    served: bool = False
    #: Set while its request waits for its turn.
    waiting: asyncio.Timeout | None = None
    #: Whether its request has the turn of a stranger.
    has_turn: bool = False


class Connections:
    """The connections of the console's process.

    :param is_shared: whether operators and strangers may share an address.
    :param clock: seconds that only go forward.
    """

    def __init__(
        self, is_shared: Callable[[str], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_shared = is_shared
        self._clock = clock
        #: Those that have a place.
        self._open: dict[IOStream, Connection] = {}
        #: Those whose request has arrived and is not answered.
        self._busy: set[Connection] = set()
        self._turns = asyncio.Semaphore(STRANGERS_AT_ONCE)

    def add(self, stream: IOStream, address: str) -> None:
        """Count a new connection."""
        self._open[stream] = Connection(stream, network_of(address), self._clock())

    def remove(self, stream: IOStream) -> None:
        """Forget a connection, which is closed or gives way. Its request does not wait longer."""
        connection = self._open.pop(stream, None)
        if connection is not None and connection.waiting is not None:
            connection.waiting.reschedule(0)

    def of(self, stream: IOStream) -> Connection:
        """Return a connection; one that is closed as if it were new."""
        return self._open.get(stream) or Connection(stream, "", self._clock())

    def make_room(self, address: str) -> bool | None:
        """Return whether a newcomer has a place; ``None``: not yet."""
        places = self._open.values()
        if len(places) < MAX_CONNECTIONS:
            return True
        counts = collections.Counter(peer.network for peer in places if not peer.trusted)
        most = max(counts.values(), default=1)
        if counts[network_of(address)] >= most and not self._is_shared(address):
            return False
        movable = [peer for peer in places if peer not in self._busy or peer.waiting is not None]
        oldest = min(movable, key=lambda x: (x.trusted, -counts[x.network], x.since), default=None)
        if oldest is None or self._clock() - oldest.since < GRACE_SECONDS:
            return None
        if oldest.waiting is None:
            oldest.stream.close()
        self.remove(oldest.stream)
        return True

    def arrived(self, connection: Connection) -> None:
        """Note that a request has arrived completely."""
        self._busy.add(connection)

    async def wait_for_turn(self, connection: Connection) -> bool:
        """Wait until the request of a connection is to be answered; false: it is refused."""
        if not connection.trusted:
            try:
                async with asyncio.timeout(None) as connection.waiting:
                    connection.has_turn = await self._turns.acquire()
            except TimeoutError:
                return False
            finally:
                connection.waiting = None
        return True

    def answered(self, connection: Connection) -> None:
        """Note that the request of a connection is answered or refused. Idempotent."""
        connection.served, connection.since = True, self._clock()
        self._busy.discard(connection)
        if connection.has_turn:
            connection.has_turn = False
            self._turns.release()

    async def finished(self) -> None:
        """Wait until no request is being answered."""
        while self._busy:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_SECONDS)
