# SPDX-License-Identifier: Apache-2.0
"""A client, as the writer process sees it: what it has sent, and what it has not read yet."""

from __future__ import annotations

import collections
import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from .operations import OPEN, OPERATIONS, WRITE, Operation
from .protocol import (
    MAX_HELLO,
    MAX_MESSAGE,
    Frames,
    Hello,
    Kind,
    Request,
    decode_request,
    encode_answer,
    encode_error,
)

#: Bytes that are read at once.
_READ_BYTES: Final = 256 * 1024
#: Requests and bytes of one client that wait; with more, nothing more is read from it.
MAX_WAITING: Final = 256
MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
#: Bytes of answers that a client has not read; with more, its requests wait.
MAX_UNREAD_BYTES: Final = 1024 * 1024
#: Seconds after which a client that does not read its answers is disconnected.
MAX_UNREAD_SECONDS: Final = 10.0
#: Seconds from an answer to the next write of a client that has more to write already.
PROMPT_SECONDS: Final = 0.001


class WaitingRequest:
    """A request that waits."""

    __slots__ = ("_data", "arguments", "connection", "deadline", "number", "operation", "size")

    def __init__(self, connection: Connection, request: Request, operation: Operation[Any]) -> None:
        self.connection = connection
        self.number, _, self.deadline, self._data = request
        self.operation = operation
        #: Bytes of the arguments.
        self.size = len(memoryview(self._data))
        self.arguments: Sequence[Any] | None = None

    def decode(self) -> Sequence[Any]:
        """Return the arguments.

        :raises msgspec.DecodeError: if they have the wrong types.
        """
        if self.arguments is None:
            self.arguments = self.operation.decode_arguments(self._data)
        assert self.arguments is not None
        return self.arguments

    def done(self, result: Any) -> None:
        """Answer with a result."""
        value = self.operation.encode_result(result)
        self.connection.send(encode_answer(self.number, Kind.DONE, value))
        if self.operation is WRITE:
            self.connection.written_at = time.monotonic()

    def failed(self, error: Exception) -> None:
        """Answer with an error."""
        self.connection.send(encode_error(self.number, error))

    def again(self) -> None:
        """Answer that nothing was done, so that the client sends it to the next writer."""
        self.connection.send(encode_answer(self.number, Kind.AGAIN, _NIL))

    def progress(self) -> None:
        """Report that the request takes longer than usual, so that the client waits longer."""
        self.connection.send(encode_answer(self.number, Kind.PROGRESS, _NIL))


_NIL: Final = msgspec.msgpack.encode(None)


class Connection:
    """The connection of a client. Nothing here blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.connected_at = time.monotonic()
        #: ``None`` until the client has sent it.
        self.hello: Hello | None = None
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
        self._frames = Frames(MAX_HELLO)
        self._unsent = bytearray()
        #: Since when the client reads nothing.
        self._stuck_since = 0.0

    # ----------------------------------------------------------------------------- receiving
    @property
    def wants_reading(self) -> bool:
        """Whether more may be read from the client now."""
        return len(self.requests) < MAX_WAITING and self._waiting_bytes < MAX_WAITING_BYTES

    def receive(self) -> Hello | None:
        """Read what the client has sent.

        :return: its first message, when that is complete.
        :raises ValueError: if the client does not follow the protocol.
        """
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        if not data:
            self.gone = True
            return None
        hello = None
        for body in self._frames.feed(data):
            if self.hello is None:
                hello = self.hello = msgspec.json.decode(body, type=Hello)
                self._frames.limit = MAX_MESSAGE
            else:
                self._add(body)
        return hello

    def _add(self, body: bytes) -> None:
        request = decode_request(body)
        operation = OPERATIONS.get(request[1])
        if operation is None:
            error = RuntimeError(f"the writer process does not know the operation {request[1]}")
            self.send(encode_error(request[0], error))
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
        # A client that opens a store may wait longer, while the tables are changed.
        while requests and requests[0].deadline < now and requests[0].operation is not OPEN:
            self.take()
        return requests[0] if requests and len(self._unsent) <= MAX_UNREAD_BYTES else None

    def is_expected(self, now: float) -> bool:
        """Return whether the client will probably send a write within :data:`PROMPT_SECONDS` of
        the last answer.

        :param now: ``time.monotonic()``.
        """
        return self._is_prompt and not self.requests and now - self.written_at < PROMPT_SECONDS

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
        if self._unsent:
            self._unsent += message
            return
        sent = self._try(message)
        if sent < len(message):
            self._unsent += memoryview(message)[sent:]
            self._stuck_since = time.monotonic()

    def flush(self) -> None:
        """Send what was kept, as far as the client reads it now."""
        sent = self._try(self._unsent)
        if sent:
            del self._unsent[:sent]
            self._stuck_since = time.monotonic()

    def is_stuck(self, now: float) -> bool:
        """Return whether to disconnect the client, because it does not read its answers."""
        return bool(self._unsent) and now - self._stuck_since > MAX_UNREAD_SECONDS

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
