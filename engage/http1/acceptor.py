# SPDX-License-Identifier: Apache-2.0
"""Accepts the connections of a listening socket, at most this worker's share of them.

asyncio and uvloop accept without end while connections wait, so of eight clients that connected at
once, all eight were often served by one worker of two. Here a worker that is ahead of another
(:class:`~engage.http1.shares.Shares`) leaves what waits to it for :data:`PATIENCE` seconds for each
connection by which it is ahead, and then accepts one. If the other does not make use of it, because
it hangs or is very busy, more and more are accepted after each pause.

Connections that another worker hands over (:mod:`engage.http1.handover`) are accepted in the same
way. If the others do not take them, a worker takes back all that it has handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

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


class _Source(NamedTuple):
    """Where connections come from."""

    #: Accepts one.
    accept: Callable[[], socket.socket]
    #: Returns its protocol.
    make_connection: Callable[[], asyncio.Protocol]


class Acceptor:
    """Accepts the connections of one socket, from :meth:`start` to :meth:`close`.

    :param sock: a listening socket that does not block.
    :param make_connection: returns the protocol of a new connection.
    :param shares: ``None`` if there are no other workers.
    :param take_over: returns the protocol of a connection that another worker hands over.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_connection: Callable[[], asyncio.Protocol],
        shares: Shares | None,
        take_over: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        self._sock = sock
        self._new = _Source(lambda: self._sock.accept()[0], make_connection)
        self._shares = shares
        self._handover = None if shares is None else shares.handover
        self._handed_over: _Source | None = None
        if self._handover is not None:
            self._handed_over = _Source(self._handover.take, take_over or make_connection)
        self._loop = asyncio.get_running_loop()
        #: Where the event loop cannot wait for a socket, as on Windows.
        self._server: asyncio.Server | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        #: Until when connections are left to the others, if they are now.
        self._patient_until: float | None = None
        #: Pauses in a row in which the others accepted nothing, and what they had then.
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
                self._new.make_connection, sock=self._sock, backlog=BACKLOG
            )
            return
        self._keep_spare()
        if self._shares is not None:
            self._shares.join()
            self._shares.released = self._look

    async def stop(self) -> None:
        """Accept what the kernel has completed, then close the socket."""
        self._pause()
        # Closing resets connections that the kernel has completed and nothing has accepted yet.
        for source in filter(None, (self._handed_over, self._new)):
            # Usually BlockingIOError: there are no more.
            with contextlib.suppress(OSError):
                while True:
                    self._open(source.accept(), source)
        self.close()
        if self._opening:
            await asyncio.wait(self._opening)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._pause()
        if self._shares is not None:
            self._shares.leave()
            self._shares.released = None
        if self._server is not None:
            self._server.close()
        if self._handover is not None:
            self._handover.close()
        self._sock.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    # ---------------------------------------------------------------------------------- internals
    def _listen(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept, self._new)
        if self._handover is not None and self._handed_over is not None:
            self._loop.add_reader(self._handover.fileno(), self._accept, self._handed_over)

    def _accept(self, source: _Source, extra: int = 0) -> None:
        """Accept what waits.

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
                connection = source.accept()
            except (BlockingIOError, InterruptedError):
                self._pauses = 0
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._turn_away(source)
                    return
                continue  # The client is gone already.
            self._open(connection, source)

    def _open(self, connection: socket.socket, source: _Source) -> None:
        connection.setblocking(False)
        if self._shares is not None:
            self._shares.opened()
        task = self._loop.create_task(self._connect(connection, source))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket, source: _Source) -> None:
        try:
            await self._loop.connect_accepted_socket(source.make_connection, connection)
        except Exception as error:
            _log.debug("a connection could not be opened: %r", error)
            connection.close()
            if self._shares is not None:
                self._shares.closed()

    def _leave_to_others(self, shares: Shares) -> None:
        least = shares.least()
        self._pauses = self._pauses + 1 if least == self._least else 1
        self._least = least
        self._pause()
        patience = min(PATIENCE * shares.lead(), _MAX_PATIENCE)
        self._patient_until = self._loop.time() + patience
        self._timer = self._loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        """Accept again if this worker is not ahead any more, or has been patient."""
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
        self._pause()
        self._listen()
        if extra:
            if self._handover is not None and self._handed_over is not None:
                pauses = self._pauses
                self._accept(self._handed_over, max(extra, self._handover.own))
                self._pauses = pauses
            self._accept(self._new, extra)

    def _pause(self) -> None:
        self._patient_until = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif self._server is None and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            if self._handover is not None:
                self._loop.remove_reader(self._handover.fileno())

    def _turn_away(self, source: _Source) -> None:
        """Close the next connection, so that its client does not wait in vain.

        One that was handed over is left to the other workers, which can read its requests.
        """
        if self._spare is None or source is self._handed_over:
            self._pause()
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
