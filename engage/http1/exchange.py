# SPDX-License-Identifier: Apache-2.0
"""One request and its answer, as handlers see their connection."""

from __future__ import annotations

import asyncio
import enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from tornado import httputil

if TYPE_CHECKING:
    from collections.abc import Callable

    from engage.http1.request import Request
    from engage.http1.shared import SharedState

__all__ = ["Channel", "Exchange", "Failure"]

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}
#: A body of this size is written after its head instead of with it. Joining them would be a copy
#: for each connection, and all connections can share the content of a file.
_SEPARATE_BYTES: Final = 16 * 1024
#: Answers that have no body by definition.
_BODILESS: Final = frozenset({204, 304})


class Failure(enum.Enum):
    """Why the rest of a request's body will not come."""

    #: ``server.request_timeout`` is over.
    TIMEOUT = "timeout"
    #: The client closed its side before the end.
    TRUNCATED = "truncated"
    #: The body is longer than :attr:`Exchange.max_body`.
    TOO_LARGE = "too large"
    #: The process holds ``limits.inflight_bytes`` already.
    OVERLOADED = "overloaded"


class Channel(Protocol):
    """A connection, as its exchanges use it."""

    #: The address that opened it; ``None``: it is not a TCP connection.
    remote_ip: str | None

    def is_last(self, exchange: Exchange) -> bool:
        """Return whether no other request can follow on this connection."""

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Write a part of an answer, unless the exchange is over for the connection."""

    def answered(self, exchange: Exchange) -> None:
        """Go on with the next request of the client: the answer is complete."""

    def read_on(self, exchange: Exchange) -> None:
        """Read the body of a request that was left unread."""


class Exchange(httputil.HTTPConnection):
    """A request, and where a handler writes its answer, once: with :meth:`respond`, or in parts as
    Tornado does.
    """

    def __init__(self, channel: Channel, shared: SharedState, request: Request) -> None:
        #: The head of the request.
        self.request = request
        #: The event loop of the connection.
        self.loop = shared.loop
        self._channel = channel
        self._shared = shared
        self._keep_alive = request.keep_alive
        self._chunked = False
        #: Maximum body size in bytes; a handler may lower it while it prepares.
        self.max_body = shared.bounds.body_bytes
        #: Set before the handler's ``on_connection_close`` is called, unless the client is gone.
        self.failure: Failure | None = None
        #: Whether the client sends the body only after a ``100 Continue``.
        self.expects_continue = request.expects_continue
        #: Whether the body is left unread, so that it costs the server no memory.
        self.unread = False
        #: Whether the answer has begun …
        self.answering = False
        #: … and whether it is the last one on this connection.
        self.closes = not request.keep_alive

    @property
    def context(self) -> Channel:
        """Where Tornado looks for ``remote_ip`` and ``protocol``."""
        return self._channel

    def set_close_callback(self, callback: Callable[[], None] | None) -> None:
        """Ignore the callback: handlers learn through their delegate that a client is gone."""

    def set_max_body_size(self, max_body_size: int) -> None:
        """Lower the limit of a body whose length was not declared."""
        self.max_body = max_body_size

    def leave_unread(self) -> None:
        """Do not read the body until :meth:`read_on`, or until the answer is complete."""
        self.unread = True

    def read_on(self) -> None:
        """Read the body."""
        if self.unread:
            self.unread = False
            self._channel.read_on(self)

    def respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send a whole answer.

        :param status: a status that HTTP defines.
        :param headers: all except those about the connection, the date and the body's length.
        :param body: empty if the status allows none. It is not sent in an answer to ``HEAD``.
        """
        if status not in _BODILESS:
            headers["Content-Length"] = str(len(body))
        self._start(_STATUS_LINES[status], headers, b"" if self.request.method == "HEAD" else body)
        self._channel.answered(self)

    def write_headers(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
        chunk: bytes | None = None,
    ) -> asyncio.Future[None]:
        assert isinstance(start_line, httputil.ResponseStartLine)
        code = start_line.code
        if "Content-Length" not in headers and code not in _BODILESS:
            if self.request.version == "HTTP/1.1":
                headers["Transfer-Encoding"] = "chunked"
                self._chunked = self.request.method != "HEAD"
            else:
                self._keep_alive = False
        line = _STATUS_LINES.get(code) or f"HTTP/1.1 {code} {start_line.reason}\r\n"
        self._start(line, headers, chunk or b"")
        return self._shared.done

    def write(self, chunk: bytes) -> asyncio.Future[None]:
        if chunk:
            self._channel.send(self, self._frame(chunk) if self._chunked else chunk)
        return self._shared.done

    def finish(self) -> None:
        if self._chunked:
            self._channel.send(self, b"0\r\n\r\n")
        self._channel.answered(self)

    def _start(
        self, line: str, headers: dict[str, str] | httputil.HTTPHeaders, chunk: bytes
    ) -> None:
        """Send the head of an answer, and a part of its body."""
        channel = self._channel
        self.answering = True
        self.closes = not self._keep_alive or self._shared.draining or channel.is_last(self)
        if self.closes:
            headers["Connection"] = "close"
        elif self.request.version == "HTTP/1.0":
            headers["Connection"] = "keep-alive"
        pairs = headers.items() if isinstance(headers, dict) else headers.get_all()
        date = "" if "Date" in headers else self._shared.date()
        fields = "".join([f"{name}: {value}\r\n" for name, value in pairs])
        head = f"{line}{date}{fields}\r\n".encode("latin-1", "replace")
        if chunk and (self._chunked or len(chunk) < _SEPARATE_BYTES):
            channel.send(self, head + (self._frame(chunk) if self._chunked else chunk))
        else:
            channel.send(self, head)
            if chunk:
                channel.send(self, chunk)

    @staticmethod
    def _frame(chunk: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(chunk), chunk)
