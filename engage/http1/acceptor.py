# SPDX-License-Identifier: Apache-2.0
"""Accepts the connections of a listening socket, at most this worker's share of them.

asyncio and uvloop accept without end while connections wait, so of eight clients that connected at
once, all eight were often served by one worker of two. Here a worker that is ahead of another
(:class:`~engage.http1.shares.Shares`) leaves new connections to it for :data:`PATIENCE` seconds for
each connection by which it is ahead, and then accepts one. If the other does not make use of it,
because it hangs or is very busy, more and more are accepted after each pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engage.http1.sockets import BACKLOG

if TYPE_CHECKING:
    import socket

    from engage.http1.shares import Shares

__all__ = ["PATIENCE", "Acceptor"]

_log = logging.getLogger(__name__)

#: Seconds for which a worker that is ahead leaves connections to the others, for each connection by
#: which it is ahead; and the most of these. On a busy machine a process may have to wait tens of
#: milliseconds for a core …
PATIENCE: Final = 0.005
_MAX_PATIENCE: Final = 0.05
#: … and seconds until it looks whether it still is: the others may be ahead by then.
_LOOK: Final = 0.001
#: Pauses in a row after which one connection is accepted; after the next, two, then four …
_SLOW_STEPS: Final = 4
#: Connections accepted in one turn of the event loop.
_PER_TURN: Final = 64
#: Seconds until the next attempt when no file can be opened and no connection can be closed.
_RETRY: Final = 0.1
#: Reasons for which nothing can be accepted, whichever connection is next.
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts the connections of one socket, from :meth:`start` to :meth:`close`.

    :param sock: a listening socket that does not block.
    :param make_connection: returns the protocol of a new connection.
    :param shares: ``None`` if there are no other workers.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_connection: Callable[[], asyncio.Protocol],
        shares: Shares | None,
    ) -> None:
        self._sock = sock
        self._make_connection = make_connection
        self._shares = shares
        self._loop = asyncio.get_running_loop()
        #: Where the event loop cannot wait for a socket, as on Windows.
        self._server: asyncio.Server | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        #: Until when connections are left to the others, if they are now.
        self._patient_until: float | None = None
        #: Pauses in a row in which the others accepted nothing, and their connections then.
        self._pauses = 0
        self._least: int | None = None
        #: Given up to accept a connection, and to close it, when no file can be opened.
        self._spare: int | None = None

    async def start(self) -> None:
        """Begin to accept."""
        try:
            self._listen()
        except NotImplementedError:
            self._server = await self._loop.create_server(
                self._make_connection, sock=self._sock, backlog=BACKLOG
            )
            return
        self._keep_spare()
        if self._shares is not None:
            self._shares.join()
            self._shares.released = self._look

    async def stop(self) -> None:
        """Accept the connections that the kernel has completed, then close the socket."""
        self.pause()
        # Closing resets connections that the kernel has completed and nothing has accepted yet.
        # Usually this ends with a BlockingIOError: the queue is empty.
        with contextlib.suppress(OSError):
            while True:
                self._open(self._sock.accept()[0])
        self.close()
        if self._opening:
            await asyncio.wait(self._opening)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.pause()
        if self._shares is not None:
            self._shares.leave()
            self._shares.released = None
        if self._server is not None:
            self._server.close()
        self._sock.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def pause(self) -> None:
        """Accept nothing until the next :meth:`start`."""
        self._patient_until = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif self._server is None and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())

    # ---------------------------------------------------------------------------------- internals
    def _listen(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self, extra: int = 0) -> None:
        """Accept the connections that wait.

        :param extra: how many to accept although this worker is ahead.
        """
        shares = self._shares
        for _ in range(_PER_TURN):
            if shares is not None and shares.ahead():
                if not extra:
                    self._leave_to_others(shares)
                    return
                extra -= 1
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                self._pauses = 0
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._turn_away()
                    return
                continue  # The client is gone already.
            self._open(connection)

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if self._shares is not None:
            self._shares.opened()
        task = self._loop.create_task(self._connect(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_connection, connection)
        except Exception as error:
            _log.debug("a connection could not be opened: %r", error)
            connection.close()
            if self._shares is not None:
                self._shares.closed()

    def _leave_to_others(self, shares: Shares) -> None:
        least = shares.least()
        self._pauses = self._pauses + 1 if least == self._least else 1
        self._least = least
        self.pause()
        patience = min(PATIENCE * shares.lead(), _MAX_PATIENCE)
        self._patient_until = self._loop.time() + patience
        self._timer = self._loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        """Accept again if this worker is no longer ahead, or has waited long enough."""
        shares = self._shares
        if shares is None or self._patient_until is None:
            return
        if not shares.ahead():
            self._resume(0)
        elif self._loop.time() < self._patient_until:
            assert self._timer is not None
            self._timer.cancel()
            self._timer = self._loop.call_later(_LOOK, self._look)
        else:
            if shares.least() != self._least:
                self._pauses = 1  # Another worker has accepted connections, or lost some.
            steps = min(max(self._pauses - _SLOW_STEPS, 0), _PER_TURN.bit_length() - 1)
            self._resume(1 << steps)

    def _resume(self, extra: int) -> None:
        self.pause()
        self._listen()
        if extra:
            self._accept(extra)

    def _turn_away(self) -> None:
        """Close the next connection, so that its client does not wait in vain."""
        if self._spare is None:
            self.pause()
            self._timer = self._loop.call_later(_RETRY, self._resume, 0)
        else:
            os.close(self._spare)
            self._spare = None
            # The client may be gone, or another process may have been faster.
            with contextlib.suppress(OSError):
                self._sock.accept()[0].close()
        self._keep_spare()

    def _keep_spare(self) -> None:
        if self._spare is None:
            # Otherwise it is tried again with the next connection.
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
