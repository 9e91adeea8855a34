# SPDX-License-Identifier: Apache-2.0
"""One request and its answer, as Tornado's handlers see their connection."""

from __future__ import annotations

import asyncio
import enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from tornado import httputil

if TYPE_CHECKING:
    from collections.abc import Callable

    from engage.http1.connection import Connection

__all__ = ["Exchange", "Failure"]

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}
#: Answers that have no body by definition.
_BODILESS: Final = frozenset({204, 304})


class Failure(enum.Enum):
    """Why the rest of a request's body will not come."""

    #: ``server.request_timeout`` is over.
    TIMEOUT = "timeout"
    #: The client closed its side before the end.
    TRUNCATED = "truncated"
    #: More came than :attr:`Exchange.max_body`.
    TOO_LARGE = "too large"
    #: ``limits.inflight_bytes`` are held already.
    OVERLOADED = "overloaded"


class Exchange(httputil.HTTPConnection):
    """Where a handler writes its answer, once.

    :param keep_alive: whether the client can send another request afterwards.
    """

    def __init__(
        self, connection: Connection, version: str, method: str, *, keep_alive: bool
    ) -> None:
        self._connection = connection
        self._version = version
        self._is_head = method == "HEAD"
        self._keep_alive = keep_alive
        self._chunked = False
        #: The body may be as long; a handler may lower it while it prepares.
        self.max_body = connection.listener.bounds.body_bytes
        #: Set before the handler's ``on_connection_close`` is called; ``None``: the client is gone.
        self.failure: Failure | None = None
        #: The client waits with the body until it is told to send it.
        self.expects_continue = False
        #: Whether the answer has begun …
        self.answering = False
        #: … and said that it is the last one on this connection.
        self.closes = not keep_alive

    @property
    def context(self) -> Connection:
        """Where Tornado looks for ``remote_ip`` and ``protocol``."""
        return self._connection

    def set_close_callback(self, callback: Callable[[], None] | None) -> None:
        """Tornado's handlers call it; what matters to them they hear through their delegate."""

    def set_max_body_size(self, max_body_size: int) -> None:
        """Lower the limit of a body whose length was not declared."""
        self.max_body = max_body_size

    def write_headers(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
        chunk: bytes | None = None,
    ) -> asyncio.Future[None]:
        """See :class:`tornado.httputil.HTTPConnection`."""
        assert isinstance(start_line, httputil.ResponseStartLine)
        connection = self._connection
        self.answering = True
        self.closes = (
            not self._keep_alive or connection.listener.draining or connection.is_last(self)
        )
        code = start_line.code
        if "Content-Length" not in headers and code not in _BODILESS:
            if self._version == "HTTP/1.1":
                headers["Transfer-Encoding"] = "chunked"
                self._chunked = not self._is_head
            else:
                self.closes = True
        if self.closes:
            headers["Connection"] = "close"
        elif self._version == "HTTP/1.0":
            headers["Connection"] = "keep-alive"
        lines = [_STATUS_LINES.get(code) or f"HTTP/1.1 {code} {start_line.reason}\r\n"]
        if "Date" not in headers:
            lines.append(connection.listener.date())
        lines += [f"{name}: {value}\r\n" for name, value in headers.get_all()]
        lines.append("\r\n")
        head = "".join(lines).encode("latin-1", "replace")
        connection.send(self, head + self._frame(chunk) if chunk else head)
        return connection.listener.done

    def write(self, chunk: bytes) -> asyncio.Future[None]:
        """See :class:`tornado.httputil.HTTPConnection`."""
        if chunk:
            self._connection.send(self, self._frame(chunk))
        return self._connection.listener.done

    def finish(self) -> None:
        """See :class:`tornado.httputil.HTTPConnection`."""
        if self._chunked:
            self._connection.send(self, b"0\r\n\r\n")
        self._connection.answered(self)

    def _frame(self, chunk: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk
