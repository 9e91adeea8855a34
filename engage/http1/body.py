# SPDX-License-Identifier: Apache-2.0
"""Takes the body of a request out of the bytes of a client, by its length or by its chunks.

Chunks (RFC 9112, section 7.1) are decoded strictly and within bounds. The parser of the heads,
llhttp, could do it as well, but it does not report where in the input a body ends, and the next
request of a pipeline begins right there.
"""

from __future__ import annotations

import re
from typing import Final

from engage.http1.request import TCHAR

__all__ = ["BadChunkError", "Body", "BodyTooLargeError", "ChunkedBody"]

_TOKEN: Final = TCHAR.encode() + b"+"
_QUOTED: Final = rb'"(?:[\t !#-\[\]-~]|\\[\t -~])*"'
#: A size line without its CRLF: a size below 4 GiB, and extensions.
_SIZE_LINE: Final = re.compile(
    rb"([0-9A-Fa-f]{1,8})(?:;" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?)*"
)
_TRAILER: Final = re.compile(_TOKEN + rb":[\t\x20-\x7e\x80-\xff]*")

#: Maximum length of a size line or a trailer, and of all trailers together.
_LINE_BYTES: Final = 1024
_TRAILER_BYTES: Final = 8192
#: By how much sizes, extensions and line ends may be longer than the data itself.
_FRAMING_BYTES: Final = 65536

#: Lines (sizes, line ends) that one call decodes: less than half a millisecond. A client may send
#: chunks of a byte, on many connections at once, and each read of each connection is such a call.
_LINES_PER_CALL: Final = 500

# The next expected part.
_SIZE, _DATA, _DATA_END, _TRAILERS, _END = range(5)


class BodyTooLargeError(Exception):
    """The body is longer than its limit."""


class BadChunkError(Exception):
    """The input is not a chunked body, so its end cannot be found."""


class Body:
    """The body of one request while it arrives.

    :param length: its declared length in bytes; 0 if there is none.
    :param chunked: whether it comes in chunks.
    """

    __slots__ = ("_chunks", "decoded", "left")

    def __init__(self, length: int, *, chunked: bool) -> None:
        #: Bytes of the declared length that have been neither taken nor discarded.
        self.left = length
        self._chunks = ChunkedBody() if chunked else None
        #: The chunks that have arrived of an incomplete body.
        self.decoded = bytearray()

    @property
    def complete(self) -> bool:
        """Whether all of it has been taken or discarded."""
        return not self.left and self._chunks is None

    @property
    def stopped(self) -> bool:
        """Whether more of the buffer can be taken or discarded, in another turn of the loop."""
        return self._chunks is not None and self._chunks.stopped

    def take(self, buffer: bytearray, limit: int) -> bytes | None:
        """Take the body from the front of the buffer.

        :param limit: the largest body that is accepted, in bytes.
        :return: ``None`` if some of it has not arrived; the bytes after it stay in the buffer.
        :raises BodyTooLargeError: if it is longer than ``limit``, as soon as that is known.
        :raises BadChunkError: if it comes in chunks that cannot be decoded.
        """
        if self._chunks is None:
            length = self.left
            if length > limit:
                raise BodyTooLargeError
            if len(buffer) < length:
                return None
            body = bytes(buffer[:length])
            del buffer[:length]
            self.left = 0
            return body
        complete = self._chunks.take(buffer, self.decoded)
        if len(self.decoded) > limit:
            raise BodyTooLargeError
        if not complete:
            return None
        body = bytes(self.decoded)
        self.decoded.clear()
        self._chunks = None
        return body

    def discard(self, buffer: bytearray) -> bool:
        """Remove the part of the body that has arrived from the front of the buffer.

        :return: whether that was the end of the body.
        :raises BadChunkError: if it comes in chunks that cannot be decoded.
        """
        if self._chunks is None:
            discarded = min(len(buffer), self.left)
            del buffer[:discarded]
            self.left -= discarded
        elif self._chunks.take(buffer, self.decoded):
            self._chunks = None
        self.decoded.clear()
        return self.complete

    def forget(self, buffer: bytearray) -> None:
        """Free the memory of a body that has arrived in part and will not be taken."""
        self.decoded.clear()
        if self._chunks is None:
            self.discard(buffer)


class ChunkedBody:
    """Decodes one body from the front of a buffer that grows."""

    __slots__ = ("_expects", "_framing", "_left", "_taken", "_trailers", "stopped")

    def __init__(self) -> None:
        self._expects = _SIZE
        self._left = 0
        self._taken = 0
        self._framing = 0
        self._trailers = 0
        #: Whether the last call stopped although it could have gone on.
        self.stopped = False

    def take(self, buffer: bytearray, into: bytearray) -> bool:
        """Decode the content of the buffer and remove it from there.

        Very many chunks take several calls: see :attr:`stopped`.

        :param buffer: begins where the last call stopped.
        :param into: the data is appended here.
        :return: whether the body is complete; the rest of ``buffer`` then follows it.
        :raises BadChunkError: if it is not a chunked body, or has too much framing for its data.
        """
        position = 0
        lines = 0
        self.stopped = False
        try:
            while self._expects != _END:
                if lines >= _LINES_PER_CALL:
                    self.stopped = True
                    return False
                if self._expects == _DATA:
                    chunk = buffer[position : position + self._left]
                    if not chunk:
                        return False
                    into += chunk
                    position += len(chunk)
                    self._taken += len(chunk)
                    self._left -= len(chunk)
                    if self._left:
                        return False
                    self._expects = _DATA_END
                    continue
                end = buffer.find(b"\r\n", position, position + _LINE_BYTES + 2)
                if end < 0:
                    waiting = len(buffer) - position
                    if waiting > _LINE_BYTES or buffer.find(b"\n", position) >= 0:
                        raise BadChunkError
                    if self._expects == _DATA_END and waiting and buffer[position:] != b"\r":
                        raise BadChunkError
                    return False
                line = bytes(buffer[position:end])
                position = end + 2
                lines += 1
                self._line(line)
                if self._expects == _DATA:
                    end = position + self._left
                    if buffer[end : end + 2] == b"\r\n":
                        # The usual case, in one step: the whole chunk is there.
                        into += buffer[position:end]
                        self._taken += self._left
                        self._framing += 2
                        self._left = 0
                        self._expects = _SIZE
                        position = end + 2
                        lines += 1
            return True
        finally:
            del buffer[:position]

    def _line(self, line: bytes) -> None:
        self._framing += len(line) + 2
        if self._framing > self._taken + _FRAMING_BYTES:
            raise BadChunkError
        if self._expects == _DATA_END:
            if line:
                raise BadChunkError
            self._expects = _SIZE
        elif self._expects == _SIZE:
            match = _SIZE_LINE.fullmatch(line)
            if match is None:
                raise BadChunkError
            self._left = int(match[1], 16)
            self._expects = _DATA if self._left else _TRAILERS
        elif line:
            self._trailers += len(line) + 2
            if self._trailers > _TRAILER_BYTES or _TRAILER.fullmatch(line) is None:
                raise BadChunkError
        else:
            self._expects = _END
