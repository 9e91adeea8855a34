# SPDX-License-Identifier: Apache-2.0
"""A connection to a writer, as its client sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from .operations import Operation
from .protocol import Frames, Welcome, answer_decoder
from .sockets import peer

_log = logging.getLogger("engage.storage.sqlite")


class WaitingCall:
    """A call that waits for its answer."""

    __slots__ = ("future", "message", "operation", "sent", "timer")

    def __init__(
        self, operation: Operation[Any], message: bytes, future: asyncio.Future[Any]
    ) -> None:
        self.operation = operation
        self.message = message
        self.future = future
        #: Whether it was sent on the current connection.
        self.sent = False
        self.timer: asyncio.TimerHandle


class Channel(asyncio.Protocol):
    """A connection to a writer.

    :param answered: called with the id, the kind and the value of each answer.
    :param lost: called when the connection has ended.
    """

    #: What the writer sent first; set when ``greeted`` is done.
    welcome: Welcome
    #: The other process as this one sees it; 0: this process, or it is not known.
    process = 0

    def __init__(
        self,
        answered: Callable[[int, int, msgspec.Raw], None],
        lost: Callable[[Channel], None],
    ) -> None:
        self._answered = answered
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take: Callable[[bytes], None] = self._take_welcome

    async def connect(self, sock: socket.socket) -> None:
        """Wait for the first message of the writer.

        :param sock: connected to it.
        :raises OSError: if the connection is lost.
        """
        ids = peer(sock)
        self.process = 0 if ids is None or ids[0] == os.getpid() else ids[0]
        loop = asyncio.get_running_loop()
        try:
            if sock.family == socket.AF_INET:
                # A socket pair of Windows.
                await loop.create_connection(lambda: self, sock=sock)
            else:
                await loop.create_unix_connection(lambda: self, sock=sock)
        except OSError:
            sock.close()
            raise
        await self.greeted

    def send(self, request: WaitingCall) -> None:
        """Send a request; it is not sent a second time."""
        if self._transport is not None and not request.sent and not request.future.done():
            request.sent = True
            self._transport.write(request.message)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(body)
        except (ValueError, msgspec.MsgspecError):
            _log.exception("SQLite: the writer does not follow the protocol")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError("the writer ended"))
            # Retrieved, so that asyncio does not log it if the client has stopped waiting.
            self.greeted.exception()
        self._lost(self)

    def _take_welcome(self, body: bytes) -> None:
        self.welcome = msgspec.json.decode(body, type=Welcome)
        self._take = self._take_answer
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _take_answer(self, body: bytes) -> None:
        self._answered(*answer_decoder.decode(body))
