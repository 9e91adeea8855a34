# SPDX-License-Identifier: Apache-2.0
"""What a writer process and its clients send each other.

Each message is four bytes of length and a body. First each side sends one message in JSON, whose
form never changes: the client its :class:`Hello`, and then the writer its :class:`Welcome`. After
that, messages are MessagePack:

- the client sends requests: ``[id, operation, deadline, arguments]``. The deadline is
  ``time.monotonic()`` of this machine; after it, the client has stopped waiting.
- the writer sends answers: ``[id, kind, value]``. Answers come in any order.

No format here can run code when it is read, and all of them are stable between versions of Python
and of engage.
"""

from __future__ import annotations

import enum
import socket
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

from ..connection import Settings
from ..schema import NotADatabase

#: Version of the requests, the answers and the settings. It increases when an older process would
#: misunderstand them.
PROTOCOL: Final = 1
#: Maximum size of a message in bytes; an event has at most 256 MiB.
MAX_MESSAGE: Final = 512 * 1024 * 1024
#: Maximum size of the first message in bytes.
MAX_HELLO: Final = 16 * 1024 * 1024


class Hello(msgspec.Struct):
    """The first message of a client. Fields may be added, each with a default."""

    protocol: int
    #: The client's :class:`Settings`; only a writer of the same protocol can read them.
    settings: msgspec.Raw
    #: Whether the client belongs to a server, whose settings matter.
    serving: bool


class Welcome(msgspec.Struct):
    """The first message of a writer. It takes no requests of a client whose protocol differs."""

    protocol: int
    pid: int


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
    #: Nothing was done, because the writer is ending: send the request to the next one.
    AGAIN = 6
    #: The request takes longer than usual, because the tables of the store are being changed.
    PROGRESS = 7
    #: Not an answer, so its id is 0. The value is a line for the log: logger, level and text.
    LOG = 8


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
_request_decoder: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_answer_decoder: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_LENGTH: Final = struct.Struct("!I")


def encode_request(number: int, operation: str, deadline: float, arguments: bytes) -> bytes:
    """Return a whole message."""
    return frame(_encoder.encode((number, operation, deadline, msgspec.Raw(arguments))))


def encode_answer(number: int, kind: Kind, value: bytes) -> bytes:
    """Return a whole message.

    :param value: MessagePack.
    """
    return frame(_encoder.encode((number, int(kind), msgspec.Raw(value))))


def decode_request(body: bytes | memoryview) -> Request:
    """Return a request. Its arguments are a part of ``body``.

    :raises msgspec.DecodeError: if it is not a request.
    """
    return _request_decoder.decode(body)


def decode_answer(body: bytes | memoryview) -> Answer:
    """Return an answer. Its value is a part of ``body``.

    :raises msgspec.DecodeError: if it is not an answer.
    """
    return _answer_decoder.decode(body)


def encode_error(number: int, error: Exception) -> bytes:
    """Return the answer that makes :func:`error_of` return such an error."""
    kind = Kind.FAILED
    if isinstance(error, StorageError):
        for kind in (Kind.NOT_A_DATABASE, Kind.INCOMPATIBLE, Kind.MISSING, Kind.UNAVAILABLE):
            if isinstance(error, _ERRORS[kind]):
                break
    return encode_answer(number, kind, _encoder.encode(str(error) or type(error).__name__))


def error_of(kind: int, value: msgspec.Raw) -> Exception:
    """Return the error of an answer."""
    return _ERRORS.get(kind, RequestFailedError)(msgspec.msgpack.decode(value))


def encode_log(name: str, level: int, text: str) -> bytes:
    """Return a line for the log as a whole message."""
    return encode_answer(0, Kind.LOG, _encoder.encode((name, level, text)))


def encode_first(message: Hello | Welcome) -> bytes:
    """Return the first message of a side as a whole message."""
    return frame(msgspec.json.encode(message))


def encode_settings(settings: Settings) -> msgspec.Raw:
    """Return settings as JSON."""
    return msgspec.Raw(msgspec.json.encode(settings))


def decode_settings(data: msgspec.Raw) -> Settings:
    """Return settings from JSON.

    :raises msgspec.DecodeError: if they are not :class:`Settings`.
    """
    return msgspec.json.decode(data, type=Settings)


# --------------------------------------------------------------------------------------- frames
def frame(body: bytes) -> bytes:
    """Return a message: the length, and the body."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what was received into the bodies of messages."""

    def __init__(self, limit: int) -> None:
        """:param limit: maximum size of a message in bytes."""
        self.limit = limit
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
            if size > self.limit:
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


# ----------------------------------------------------------------------------------------- peers
_UCRED: Final = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int | None:
    """Return the user of the process at the other end, or ``None`` where this is unknown. There,
    the mode of the socket's file is the only protection."""
    found = _peer(sock)
    return None if found is None else found[1]


def peer_pid(sock: socket.socket) -> int | None:
    """Return the process at the other end as this one sees it, or ``None`` where this is unknown.
    In another container it may have another id, or none here."""
    found = _peer(sock)
    return None if found is None else found[0] or None


def _peer(sock: socket.socket) -> tuple[int, int, int] | None:
    """Return the process, the user and the group at the other end, where the system knows them."""
    option: Any = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _UCRED.size))
    return pid, uid, gid
