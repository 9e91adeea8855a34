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

from engage.console.sign_in.addresses import network_of

if TYPE_CHECKING:
    from tornado.iostream import IOStream

__all__ = ["Connection", "Connections"]

#: Open connections: those of dozens of operators.
MAX_CONNECTIONS: Final = 256
#: Seconds for which a connection does not give way. So 1024 newcomers a second find a place.
GRACE_SECONDS: Final = 0.25
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
    known: bool = False
    #: Whether its request has arrived and is not answered …
    busy: bool = False
    #: … and waits for its turn, which it gets (true) or does not get (false).
    turn: asyncio.Future[bool] | None = None
    #: Whether a request was answered.
    served: bool = False
    #: Whether it gave its place to another.
    left: bool = False


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
        self._open: dict[IOStream, Connection] = {}
        self._waiting: collections.deque[Connection] = collections.deque()
        self._strangers: set[Connection] = set()
        self._held = False
        self._busy: set[Connection] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    def add(self, stream: IOStream, address: str) -> None:
        """Count a new connection."""
        self._open[stream] = Connection(stream, network_of(address), self._clock())

    def remove(self, stream: IOStream) -> None:
        """Forget a connection that is closed. Its request is not answered if it waits."""
        one = self._open.pop(stream, None)
        if one is not None and one.turn is not None and not one.turn.done():
            one.turn.set_result(False)

    def of(self, stream: IOStream) -> Connection:
        """Return a connection; one that is closed as if it were new."""
        return self._open.get(stream) or Connection(stream, "", self._clock())

    def make_room(self, address: str) -> bool | None:
        """Return whether a newcomer has a place; ``None``: not yet."""
        places = [one for one in self._open.values() if not one.left]
        if len(places) < MAX_CONNECTIONS:
            return True
        strangers = [one for one in places if not one.known]
        counts = collections.Counter(one.network for one in strangers)
        most = max(counts.values(), default=1)
        if counts[network_of(address)] >= most and not self._is_shared(address):
            return False
        movable = [one for one in strangers if not one.busy or one.turn is not None]
        movable = movable or [one for one in places if not one.busy]
        oldest = min(movable, key=lambda one: (-counts[one.network], one.since), default=None)
        if oldest is None or self._clock() - oldest.since < GRACE_SECONDS:
            return None
        oldest.left = True
        if oldest.turn is None:
            oldest.stream.close()
        elif not oldest.turn.done():
            oldest.turn.set_result(False)
        return True

    def arrived(self, one: Connection) -> None:
        """Note that a request has arrived completely."""
        one.busy = True
        self._busy.add(one)
        self._quiet.clear()

    async def wait_for_turn(self, one: Connection) -> bool:
        """Wait until the request of a connection is to be answered; false: it is refused."""
        if one.known:
            return True
        one.turn = asyncio.get_running_loop().create_future()
        self._waiting.append(one)
        self._next()
        try:
            return await one.turn
        finally:
            one.turn = None

    def answered(self, one: Connection) -> None:
        """Note that the request of a connection is answered or refused. Idempotent."""
        one.busy, one.served, one.since = False, True, self._clock()
        self._busy.discard(one)
        if not self._busy:
            self._quiet.set()
        self._strangers.discard(one)
        self._next()

    def hold(self, held: bool) -> None:
        """Answer no other request of a stranger, or go on."""
        self._held = held
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._held and len(self._strangers) < STRANGERS_AT_ONCE:
            one = self._waiting.popleft()
            if one.turn is not None and not one.turn.done():
                self._strangers.add(one)
                one.turn.set_result(True)

    async def finished(self) -> None:
        """Wait until no request is being answered."""
        await self._quiet.wait()
