# SPDX-License-Identifier: Apache-2.0
"""What a writer and its clients send each other.

Each message is four bytes of length and a body. The first one is the writer's :class:`Welcome`, in
JSON, whose form never changes; a client of another protocol disconnects. The others are
MessagePack:

- the client sends requests: ``[id, operation, deadline, arguments]``. The deadline is
  ``time.monotonic()`` of this machine; after it, the client has stopped waiting.
- the writer sends answers: ``[id, kind, value]``. Answers come in any order.

No format here can run code when it is read, and all of them are stable between versions of Python
and of engage.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engage.api import (
    StorageError,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)

from ..schema import NotADatabase

#: Version of the requests and the answers. It increases when an older process would misunderstand
#: them.
PROTOCOL: Final = 3
#: Maximum size of a message in bytes; an event has at most 256 MiB.
MAX_MESSAGE: Final = 512 * 1024 * 1024


class Welcome(msgspec.Struct):
    """The first message of a writer. Fields may be added, each with a default."""

    protocol: int
    pid: int
    #: See :data:`SQLITE`.
    sqlite: str = ""


class Kind(enum.IntEnum):
    """The kind of an answer."""

    #: The value is the result.
    DONE = 0
    # The value is the message of an error: StorageUnavailable, StorageMissing, StorageIncompatible,
    # NotADatabase.
    UNAVAILABLE = 1
    MISSING = 2
    INCOMPATIBLE = 3
    NOT_A_DATABASE = 4
    #: An unexpected error; the value is its message. The writer has logged it.
    FAILED = 5
    #: Not an answer, so its id is 0: all requests wait longer, while the store is being opened.
    PROGRESS = 6


class RequestFailedError(Exception):
    """The writer met an unexpected error."""


_ERRORS: Final[dict[int, type[Exception]]] = {
    Kind.UNAVAILABLE: StorageUnavailable,
    Kind.MISSING: StorageMissing,
    Kind.INCOMPATIBLE: StorageIncompatible,
    Kind.NOT_A_DATABASE: NotADatabase,
    Kind.FAILED: RequestFailedError,
}

Request = tuple[int, str, float, msgspec.Raw]
Answer = tuple[int, int, msgspec.Raw]

_encoder: Final = msgspec.msgpack.Encoder()
# The arguments or the value are a part of what is decoded.
request_decoder: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
answer_decoder: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_LENGTH: Final = struct.Struct("!I")


def encode(*values: Any) -> bytes:
    """Return a request or an answer as a whole message: the length, and the body."""
    body = _encoder.encode(values)
    return _LENGTH.pack(len(body)) + body


def encode_welcome(welcome: Welcome) -> bytes:
    """Return the first message as a whole."""
    body = msgspec.json.encode(welcome)
    return _LENGTH.pack(len(body)) + body


def kind_of(error: Exception) -> Kind:
    """Return the kind of the answer that makes :func:`error_of` return such an error."""
    if isinstance(error, StorageError):
        for kind in (Kind.NOT_A_DATABASE, Kind.INCOMPATIBLE, Kind.MISSING, Kind.UNAVAILABLE):
            if isinstance(error, _ERRORS[kind]):
                return kind
    return Kind.FAILED


def error_of(kind: int, value: msgspec.Raw) -> Exception:
    """Return the error of an answer."""
    return _ERRORS.get(kind, RequestFailedError)(msgspec.msgpack.decode(value))


class Frames:
    """Cuts what was received into the bodies of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        #: Bytes that are needed before there is another message.
        self._needed = _LENGTH.size

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that are complete now.

        :raises ValueError: if a message is too long.
        """
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._needed:
                return
            data = bytes(buffer)
            buffer.clear()
        start, end = 0, len(data)
        while end - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, start)
            if size > MAX_MESSAGE:
                raise ValueError(f"a message of {size} bytes")
            stop = start + _LENGTH.size + size
            if stop > end:
                self._needed = stop - start
                break
            yield data[start + _LENGTH.size : stop]
            start = stop
        else:
            self._needed = _LENGTH.size
        if start < end:
            buffer += data[start:]
