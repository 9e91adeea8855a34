# SPDX-License-Identifier: Apache-2.0
"""Takes the body of a request out of what a client sends, by its length or by its chunks."""

from __future__ import annotations

from engage.http1.chunked import ChunkedBody

__all__ = ["Body", "BodyTooLargeError"]


class BodyTooLargeError(Exception):
    """The body is longer than its limit."""


class Body:
    """The body of one request while it arrives.

    :param length: its declared length in bytes; 0 if there is none.
    :param chunked: whether it comes in chunks.
    """

    __slots__ = ("_chunks", "_decoded", "left")

    def __init__(self, length: int, *, chunked: bool) -> None:
        #: Bytes of the declared length that have been neither taken nor discarded.
        self.left = length
        self._chunks = ChunkedBody() if chunked else None
        self._decoded = bytearray()

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
        :return: ``None`` if some of it has not arrived; what follows it stays in the buffer.
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
        complete = self._chunks.take(buffer, self._decoded)
        if len(self._decoded) > limit:
            raise BodyTooLargeError
        if not complete:
            return None
        body = bytes(self._decoded)
        self._decoded.clear()
        self._chunks = None
        return body

    def held(self, buffer: bytearray) -> int:
        """Return how many bytes of an incomplete body are in memory, its framing included."""
        return len(buffer) + len(self._decoded)

    def discard(self, buffer: bytearray) -> bool:
        """Remove what has arrived of the body from the front of the buffer.

        :return: whether that was the end of the body.
        :raises BadChunkError: if it comes in chunks that cannot be decoded.
        """
        if self._chunks is None:
            discarded = min(len(buffer), self.left)
            del buffer[:discarded]
            self.left -= discarded
        elif self._chunks.take(buffer, self._decoded):
            self._chunks = None
        self._decoded.clear()
        return self.complete

    def forget(self, buffer: bytearray) -> None:
        """Free the memory of what has arrived of a body that will not be taken."""
        self._decoded.clear()
        if self._chunks is None:
            self.discard(buffer)
