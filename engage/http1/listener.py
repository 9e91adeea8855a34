# SPDX-License-Identifier: Apache-2.0
"""Accepts, limits and drains all connections of a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, cast

from engage.http1.acceptor import Acceptor
from engage.http1.connection import Connection
from engage.http1.shared import Bounds, SharedState
from engage.http1.sockets import can_open_files, open_file_limit

if TYPE_CHECKING:
    import socket

    from tornado.httputil import HTTPServerConnectionDelegate

    from engage.http1.shares import Shares
    from engage.monitoring.metrics import Metrics

__all__ = ["Listener"]

_log = logging.getLogger(__name__)

#: File descriptors for everything except connections. Fewer are left if the system allows few.
_OTHER_FILES: Final = 128
#: Seconds between two searches for connections whose time is over.
_SWEEP: Final = 1.0


class Listener:
    """Accepts connections for a Tornado application, within bounds.

    Made inside a running event loop. :meth:`serve`, then :meth:`start_draining`,
    :meth:`stop_accepting` and :meth:`drain`, each optional; :meth:`close` ends it at once.

    :param application: its handlers leave the body of a request to this listener's bounds.
    :param cors: path and origin → the headers that let a page's script read an answer that no
        handler gives.
    """

    def __init__(
        self,
        application: HTTPServerConnectionDelegate,
        bounds: Bounds,
        metrics: Metrics,
        *,
        cors: Callable[[str, str | None], Mapping[str, str]] = lambda _path, _origin: {},
    ) -> None:
        self.shared = SharedState(application, bounds, metrics, cors)
        #: All that are open.
        self.connections = cast("set[Connection]", self.shared.capacity.connections)
        self._metrics = metrics
        #: Whether no file could be opened when that was last tried.
        self._exhausted = False
        self._acceptors: list[Acceptor] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def serve(self, sock: socket.socket, shares: Shares | None = None) -> None:
        """Accept connections of a listening socket until :meth:`stop_accepting`.

        :param shares: how many connections the other workers on the socket have; ``None`` if there
            are no others.
        """
        acceptor = Acceptor(sock, self.make_connection, shares)
        self.shared.capacity.shares = shares
        await acceptor.start()
        self._acceptors.append(acceptor)
        limit = open_file_limit()
        if limit is not None:
            self.shared.capacity.restrict(max(limit - _OTHER_FILES, limit // 2))
        if self._sweeper is None:
            self._sweep()

    def make_connection(self) -> Connection:
        """Return the protocol of a new connection, for the event loop to give it a transport."""
        return Connection(self.shared)

    def start_draining(self) -> None:
        """Make each answer the last of its connection, with ``Connection: close``."""
        self.shared.draining = True

    async def stop_accepting(self) -> None:
        """Close the listening sockets."""
        self.start_draining()
        for acceptor in self._acceptors:
            await acceptor.stop()
        # Requests that were sent before this are still read.
        await asyncio.sleep(0)

    async def drain(self, seconds: float) -> bool:
        """Finish the requests in flight and close idle connections.

        :param seconds: after which the remaining connections are cut off.
        :return: whether no request was cut off.
        """
        self.start_draining()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.connections and loop.time() < end:
            await asyncio.sleep(0.02)
            for connection in [connection for connection in self.connections if connection.idle]:
                connection.close()
        complete = not any(connection.serving for connection in self.connections)
        self.close()
        return complete

    def close(self) -> None:
        """Stop accepting and cut off every connection."""
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors.clear()
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        bounds = self.shared.bounds
        # Looking at all connections now and then is cheaper than a timer for each request.
        shortest = min(bounds.head_timeout, bounds.request_timeout, bounds.idle_timeout)
        interval = min(_SWEEP, shortest / 4)
        self._sweeper = loop.call_later(interval, self._sweep)
        now = loop.time()
        for connection in [x for x in self.connections if x.deadline <= now]:
            try:
                connection.expired()
            except Exception:
                _log.exception("an expired connection could not be closed")
                connection.abort()
        self._check_files()

    def _check_files(self) -> None:
        """Log when the process or the system cannot open another file, and count the times.

        Without a file descriptor, new connections are closed as they come.
        """
        exhausted = not can_open_files()
        if exhausted:
            self._metrics.count("dropped", "accept")
            if not self._exhausted:
                _log.error(
                    "no file descriptors are left, so new connections are closed; raise the limit"
                    " of open files (ulimit -n, LimitNOFILE) or lower server.max_connections"
                )
        elif self._exhausted:
            _log.info("files can be opened again; new connections are accepted")
        self._exhausted = exhausted
