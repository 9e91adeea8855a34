# SPDX-License-Identifier: Apache-2.0
"""All connections of this process: accepting, bounding, draining them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from engage import logs
from engage.http1.connection import Connection
from engage.http1.sockets import BACKLOG

if TYPE_CHECKING:
    import socket

    from tornado.web import Application

    from engage.config import Config
    from engage.errors import ApiError
    from engage.metrics import Metrics

__all__ = ["Bounds", "Listener"]

_log = logging.getLogger(__name__)

#: Beyond ``server.max_connections`` so many are told that there are too many; others are cut off.
_TOLD: Final = 256
#: Seconds between two looks for connections whose time is over.
_SWEEP: Final = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one process takes in; sizes in bytes, times in seconds. See :mod:`engage.config`."""

    header_bytes: int
    body_bytes: int
    inflight_bytes: int
    request_timeout: float
    idle_timeout: float
    max_connections: int

    @classmethod
    def of(cls, config: Config) -> Bounds:
        """:return: the bounds that a config sets."""
        return cls(
            header_bytes=config.limits.header_bytes,
            body_bytes=config.limits.body_bytes,
            inflight_bytes=config.limits.inflight_bytes,
            request_timeout=config.server.request_timeout,
            idle_timeout=config.server.idle_timeout,
            max_connections=config.server.max_connections,
        )


class Listener:
    """Accepts connections for a Tornado application, within bounds.

    Made inside a running event loop. :meth:`serve`, then :meth:`start_draining`,
    :meth:`stop_accepting` and :meth:`drain`, each optional; :meth:`close` ends it at once.

    :param application: handlers that leave the body of a request to this listener's bounds.
    :param cors: path and origin → the headers that let a page's script read an answer that no
        handler gives.
    """

    def __init__(
        self,
        application: Application,
        bounds: Bounds,
        metrics: Metrics,
        *,
        cors: Callable[[str, str | None], Mapping[str, str]] = lambda _path, _origin: {},
    ) -> None:
        self.application = application
        self.bounds = bounds
        #: See above.
        self.cors = cors
        #: Bytes of bodies held in memory, of requests that are not answered.
        self.inflight = 0
        #: Whether every answer is the last of its connection.
        self.draining = False
        #: A future that is done: nobody waits for the writing of small answers.
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.set_result(None)
        self._metrics = metrics
        #: All that are open.
        self.connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._second = 0
        self._date = ""

    async def serve(self, sock: socket.socket) -> None:
        """Accept connections of a listening socket until :meth:`stop_accepting`."""
        loop = asyncio.get_running_loop()
        self._servers.append(
            await loop.create_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)
        )
        self._sockets.append(sock)
        if self._sweeper is None:
            self._sweep()

    def start_draining(self) -> None:
        """From now on each answer says ``Connection: close``."""
        self.draining = True

    async def stop_accepting(self) -> None:
        """Close the listening sockets."""
        self.draining = True
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            # Closing resets whoever the kernel has let in and nobody has accepted yet.
            while True:
                try:
                    connection, _ = sock.accept()
                except OSError:  # Usually BlockingIOError: that was the last.
                    break
                connection.setblocking(False)
                await loop.connect_accepted_socket(lambda: Connection(self), connection)
        self._sockets.clear()
        for server in self._servers:
            server.close()
        # What was accepted, or sent on a kept connection, before this is still read.
        await asyncio.sleep(0)

    async def drain(self, seconds: float) -> bool:
        """Answer what is in flight, close what is idle.

        :param seconds: after which the rest is cut off.
        :return: whether nothing was cut off.
        """
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.connections and loop.time() < end:
            await asyncio.sleep(0.02)
            for connection in [one for one in self.connections if one.idle]:
                connection.close()
        complete = not any(one.serving for one in self.connections)
        self.close()
        return complete

    def close(self) -> None:
        """Stop accepting and cut every connection off."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # ------------------------------------------------------------------ called by the connections
    def admit(self, connection: Connection) -> bool:
        """Count a new connection in.

        :return: false: there are too many; it is to be told so.
        """
        connections = self.connections
        connections.add(connection)
        excess = len(connections) - self.bounds.max_connections
        if excess <= 0:
            return True
        idle = [one for one in connections if one.idle and one is not connection]
        if idle:
            # Somebody who wants something is worth more than somebody who may.
            min(idle, key=lambda one: one.deadline).close()
            return True
        self._metrics.dropped("connection")
        if excess > _TOLD:
            connection.abort()
        return False

    def forget(self, connection: Connection) -> None:
        """Count a connection out."""
        self.connections.discard(connection)

    def refused(self, error: ApiError | None, request_id: str) -> None:
        """Count and log an answer that no handler gave.

        :param error: ``None``: what came was not HTTP.
        """
        status = 400 if error is None else error.status
        self._metrics.request("unknown", status, 0.0)
        logs.log_request(
            request_id=request_id,
            method="OTHER",
            route="unknown",
            status=status,
            seconds=0.0,
            code="invalid_request" if error is None else error.code,
        )

    def date(self) -> str:
        """:return: the header ``Date``, made once a second."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._date = f"Date: {formatdate(now, usegmt=True)}\r\n"
        return self._date

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        bounds = self.bounds
        # One look at all of them now and then is cheaper than a timer for each request.
        interval = min(_SWEEP, bounds.request_timeout / 4, bounds.idle_timeout / 4)
        self._sweeper = loop.call_later(interval, self._sweep)
        now = loop.time()
        for connection in [one for one in self.connections if one.deadline <= now]:
            try:
                connection.expired()
            except Exception:
                _log.exception("a connection could not be ended")
                connection.abort()
