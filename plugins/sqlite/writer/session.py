# SPDX-License-Identifier: Apache-2.0
"""A client, as the writer sees it: what it has sent, and what it has not read yet."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from ..connection import SQLITE
from .operations import OPERATIONS, WRITE, Operation, find
from .protocol import (
    PROTOCOL,
    Frames,
    Kind,
    Request,
    Welcome,
    encode,
    encode_welcome,
    kind_of,
    request_decoder,
)

#: Bytes that are read at once.
_READ_BYTES: Final = 256 * 1024
#: Requests and bytes of one client that wait; with more, nothing more is read from it.
MAX_WAITING: Final = 256
MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
#: Bytes of answers that a client has not read; with more, its requests wait.
MAX_UNREAD_BYTES: Final = 1024 * 1024
#: Seconds from an answer to the next write of a client that has more to write already; also the
#: least that a selector can wait.
PROMPT_SECONDS: Final = 0.001


class WaitingRequest:
    """A request that waits."""

    __slots__ = ("_data", "arguments", "deadline", "number", "operation", "session", "size")

    def __init__(self, session: Session, request: Request, operation: Operation[Any]) -> None:
        self.session = session
        self.number, _, self.deadline, self._data = request
        self.operation = operation
        #: Bytes of the arguments.
        self.size = len(memoryview(self._data))
        self.arguments: Sequence[Any] | None = None

    def decode(self) -> Sequence[Any]:
        """Return the arguments.

        :raises msgspec.DecodeError: if they have the wrong types.
        :raises ValueError: if a text is not UTF-8.
        """
        if self.arguments is None:
            self.arguments = self.operation.arguments.decode(self._data)
        assert self.arguments is not None
        return self.arguments

    def done(self, result: Any) -> None:
        """Answer with a result."""
        self.session.send(encode(self.number, Kind.DONE, result))
        if self.operation is WRITE:
            self.session.written_at = time.monotonic()

    def failed(self, error: Exception) -> None:
        """Answer with an error."""
        text = str(error) or type(error).__name__
        self.session.send(encode(self.number, kind_of(error), text))


class Session:
    """The connection of a client. Nothing here blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.requests: collections.deque[WaitingRequest] = collections.deque()
        #: Whether the client has closed its end, or is to be disconnected.
        self.gone = False
        #: What the loop waits for: a mask of :mod:`selectors`.
        self.events = 0
        #: When its last write was answered, and whether it sent that write promptly after the one
        #: before.
        self.written_at = 0.0
        self._is_prompt = False
        self._waiting_bytes = 0
        self._frames = Frames()
        self._unsent = bytearray()
        self.send(encode_welcome(Welcome(PROTOCOL, os.getpid(), SQLITE)))

    # ----------------------------------------------------------------------------- receiving
    @property
    def wants_reading(self) -> bool:
        """Whether more may be read from the client now."""
        return len(self.requests) < MAX_WAITING and self._waiting_bytes < MAX_WAITING_BYTES

    def receive(self) -> None:
        """Read what the client has sent.

        :raises ValueError: if the client does not follow the protocol.
        """
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.gone = True
        for body in self._frames.feed(data):
            self._add(body)

    def _add(self, body: bytes) -> None:
        request = request_decoder.decode(body)
        operation = OPERATIONS.get(request[1]) or find(request[1])
        if operation is None:
            message = f"the writer does not know the operation {request[1]}"
            self.send(encode(request[0], Kind.FAILED, message))
            return
        waiting = WaitingRequest(self, request, operation)
        if operation is WRITE:
            self._is_prompt = time.monotonic() - self.written_at < PROMPT_SECONDS
        self.requests.append(waiting)
        self._waiting_bytes += waiting.size

    def next_request(self, now: float) -> WaitingRequest | None:
        """Return the first request, or ``None`` if none can be run now. Remove requests whose
        deadline is over.

        :param now: ``time.monotonic()``.
        """
        requests = self.requests
        while requests and requests[0].deadline < now:
            self.take()
        return requests[0] if requests and len(self._unsent) <= MAX_UNREAD_BYTES else None

    def is_expected(self, now: float) -> bool:
        """Return whether the client will probably send a write within :data:`PROMPT_SECONDS` of
        the last answer.

        :param now: ``time.monotonic()``.
        """
        return self._is_prompt and not self.requests and now - self.written_at < PROMPT_SECONDS

    def progress(self, deadline: float) -> None:
        """Report that its requests take longer than usual, so that the client waits longer.

        :param deadline: ``time.monotonic()`` until which each of them waits at least.
        """
        self.send(encode(0, Kind.PROGRESS, None))
        for request in self.requests:
            request.deadline = max(request.deadline, deadline)

    def take(self) -> WaitingRequest:
        """Remove the first request, and return it."""
        request = self.requests.popleft()
        self._waiting_bytes -= request.size
        return request

    # ------------------------------------------------------------------------------- sending
    @property
    def wants_writing(self) -> bool:
        """Whether the client has yet to read something."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, or keep it until the client reads."""
        if self.gone:
            return
        sent = 0 if self._unsent else self._try(message)
        if sent < len(message):
            self._unsent += memoryview(message)[sent:]

    def flush(self) -> None:
        """Send what was kept, as far as the client reads it now."""
        del self._unsent[: self._try(self._unsent)]

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.gone = True
            return 0

    def close(self) -> None:
        """Close the connection."""
        self.gone = True
        self.requests.clear()
        with contextlib.suppress(OSError):
            self.sock.close()
