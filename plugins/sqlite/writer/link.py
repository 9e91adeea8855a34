# SPDX-License-Identifier: Apache-2.0
"""A connection to a writer process, as its client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from .listening import short, socket_path
from .operations import Operation
from .protocol import MAX_MESSAGE, Frames, Hello, Welcome, decode_answer, encode_first

_log = logging.getLogger("engage.storage.sqlite")


class Owner(Protocol):
    """The client that uses a connection."""

    def answered(self, number: int, kind: int, value: msgspec.Raw) -> None:
        """Handle a message of the writer; see :meth:`WriterClient.answered`."""

    def lost(self, link: WriterLink) -> None:
        """Handle the end of the connection."""


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


class WriterLink(asyncio.Protocol):
    """A connection to a writer process."""

    #: What the writer answered first; set when ``greeted`` is done.
    welcome: Welcome

    def __init__(self, owner: Owner, hello: Hello) -> None:
        self._owner = owner
        self._hello = hello
        self._frames = Frames(MAX_MESSAGE)
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._take: Callable[[bytes], None] = self._take_welcome

    def send(self, request: WaitingCall) -> None:
        """Send a request; it is not sent a second time."""
        if self._transport is not None and not request.sent and not request.future.done():
            request.sent = True
            self._transport.write(request.message)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self, seconds: float) -> None:
        """Close the connection, and wait until the writer has closed it, too."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.write_eof()
        await asyncio.wait([self._closed], timeout=seconds)
        self.abort()

    # ------------------------------------------------------------------- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        transport.write(encode_first(self._hello))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(body)
        except (ValueError, msgspec.MsgspecError):
            _log.exception("SQLite: the writer process does not follow the protocol")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError("the writer process ended"))
            # Retrieved, so that asyncio does not log it if the client has stopped waiting.
            self.greeted.exception()
        if not self._closed.done():
            self._closed.set_result(None)
        self._owner.lost(self)

    def _take_welcome(self, body: bytes) -> None:
        self.welcome = msgspec.json.decode(body, type=Welcome)
        self._take = self._take_answer
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _take_answer(self, body: bytes) -> None:
        number, kind, value = decode_answer(body)
        self._owner.answered(number, kind, value)


def connected_socket(store: str) -> socket.socket | None:
    """Return a socket that is connected to the writer of a store, or ``None``. It does not wait."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        with short(socket_path(store)) as address:
            sock.connect(address)
    except OSError:
        # There is no process, or too many clients wait to be accepted.
        sock.close()
        return None
    return sock
