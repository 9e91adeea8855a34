# SPDX-License-Identifier: Apache-2.0
"""What every handler does: answer, give each error the same shape, identify the request.

A handler overrides :meth:`Handler.check` for what can be refused by the head of a request, and
implements ``get``, ``post`` … for the rest. All of them raise :class:`~engage.errors.ApiError`.
:meth:`Handler.refuse` turns any exception, including a crash, into an answer.

A handler is Tornado's ``HTTPMessageDelegate``, the interface between a connection and what answers
its requests, and not Tornado's ``RequestHandler``: making one of those for each request, with its
futures and template modules, took more time than storing a small event.

Nothing in here depends on events, write keys or storages. What the routes for clients share beyond
this is in :mod:`engage.handlers.ingestion`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from tornado import httputil

from engage.errors import ApiError, error_body, from_exception
from engage.handlers.request import Request
from engage.http1 import early_errors
from engage.http1.exchange import Exchange

__all__ = ["JSON", "METHODS", "Handler", "Route"]

_log = logging.getLogger(__name__)

#: Content type of most answers.
JSON: Final = "application/json; charset=utf-8"

#: Method of a request → name of the method of a handler. Any other method gets a 405.
METHODS: Final[Mapping[str, str]] = {
    method: method.lower()
    for method in ("GET", "HEAD", "POST", "DELETE", "PATCH", "PUT", "OPTIONS")
}

#: A request id from a client is used only if it is harmless in a log.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{8,64}")
#: A header must not contain the beginning of another.
_HEADER: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")

_NO_HEADERS: Final[Mapping[str, str]] = {}
_NO_SEGMENTS: Final[Mapping[str, str]] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a handler knows about the paths that it serves."""

    #: In metrics and logs; several paths may share one.
    name: str
    #: Every method that is answered, as in the header ``Allow``.
    allowed: tuple[str, ...]
    #: Whether beacons are sent to it: CORS with credentials.
    credentials: bool = False


class Handler(httputil.HTTPMessageDelegate):
    """Answers one request. Subclasses implement ``get``, ``post`` …, which may be coroutines.

    :param route: what the handler knows about its paths.
    :param log: called with the handler when it has answered.
    :param segments: name of a part of the path → its value; arguments of ``get``, ``post`` ….
    """

    #: The status of the answer, once there is one.
    status = 0
    #: The code of the error that was answered, for the log.
    error_code: str | None = None
    #: Its message.
    error_message: str = ""
    _request_id: str | None = None
    #: Whether the answer is sent.
    _answered = False
    #: Whether the body has arrived …
    _complete = False
    #: … and whether it has, or never will.
    _ended = False
    #: What :meth:`_run` waits for while the body arrives.
    _body_ends: asyncio.Future[None] | None = None
    #: What the connection waits for before it asks for the body.
    _prepared: asyncio.Future[None] | None = None
    _task: asyncio.Task[None]

    def __init__(
        self,
        request: Request,
        route: Route,
        log: Callable[[Any], None],
        segments: Mapping[str, str] = _NO_SEGMENTS,
    ) -> None:
        self.request = request
        self.route = route
        self._log = log
        self._segments = segments
        self._chunks: list[bytes] = []

    # --------------------------------------------------------------------- for handlers to override
    def check(self) -> None:
        """Refuse what can be refused by the head of the request, in order of precedence.

        :raises ApiError: with the answer, which does not wait for the body.
        """

    def common_headers(self) -> Mapping[str, str]:
        """Return headers for every answer except that to ``OPTIONS``, errors included.

        They come in addition to ``X-Request-Id`` and ``X-Content-Type-Options``.
        """
        return _NO_HEADERS

    def not_allowed(self) -> ApiError:
        """Return the answer to a method that the route does not have."""
        allowed = ", ".join(self.route.allowed)
        return ApiError(
            "method_not_allowed", f"this path accepts only {allowed}", headers={"Allow": allowed}
        )

    def prepare(self) -> Awaitable[None] | None:
        """Call :meth:`check` if the route has the method.

        :return: what to wait for before the body is read; ``None`` to read it at once.
        """
        method = self.request.method
        if method not in self.route.allowed:
            raise self.not_allowed()
        if method != "OPTIONS":
            self.check()
        return None

    def options(self, **_: str) -> None:
        """Answer with the methods of the route."""
        self.answer_options(_NO_HEADERS)

    # ------------------------------------------------------------------------- for handlers to call
    @property
    def exchange(self) -> Exchange:
        """Where the answer goes."""
        return self.request.connection

    @property
    def body(self) -> bytes:
        """The whole body, as it was sent. It has not arrived yet when :meth:`check` runs."""
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def header(self, name: str) -> str | None:
        """Return a header of the request; several values are joined by commas."""
        value: str | None = self.request.headers.get(name)
        return value

    @property
    def request_id(self) -> str:
        """The client's request id if it sent a usable one, otherwise a new one."""
        if self._request_id is None:
            sent = self.header("X-Request-Id")
            usable = sent is not None and _REQUEST_ID.fullmatch(sent) is not None
            self._request_id = sent if sent is not None and usable else early_errors.request_id()
        return self._request_id

    def client_has(self, etag: str) -> bool:
        """Return whether the client has what an ETag stands for, as ``If-None-Match`` names it."""
        sent = self.request.headers.get("If-None-Match", "")
        known = [tag.strip().removeprefix("W/") for tag in sent.split(",")]
        return etag.removeprefix("W/") in known or "*" in known

    def answer(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole answer. A 304 has no body and no content type.

        :param headers: in addition to those that every answer has. A ``Vary`` is added to theirs.
        """
        common = self.common_headers()
        if status == 304:
            sent = {}
        else:
            sent = {"Content-Type": content_type if content_type is JSON else _safe(content_type)}
        sent["X-Request-Id"] = self.request_id
        sent["X-Content-Type-Options"] = "nosniff"
        sent.update(common)
        if headers is not None:
            # Names as Tornado writes them: ``Etag``.
            for name, value in httputil.HTTPHeaders(headers).items():
                if name == "Vary" and "Vary" in common:
                    sent[name] = f"{common['Vary']}, {_safe(value)}"
                else:
                    sent[name] = _safe(value)
        self._send(status, sent, body)

    def answer_options(self, headers: Mapping[str, str]) -> None:
        """Send the answer to ``OPTIONS``.

        :param headers: in addition to ``Allow``.
        """
        sent = {name: _safe(value) for name, value in headers.items()}
        sent["Allow"] = ", ".join(self.route.allowed)
        sent["X-Request-Id"] = self.request_id
        sent["X-Content-Type-Options"] = "nosniff"
        self._send(204, sent, b"")

    def refuse(self, raised: BaseException) -> None:
        """Answer with an error, unless there is an answer. A crash is logged.

        :param raised: an :class:`ApiError`, or whatever was raised.
        """
        error = from_exception(raised)
        if error.code == "internal_error" and error is not raised:
            _log.error(
                "%s failed",
                self.route.name,
                exc_info=raised,
                extra={"requestId": self.request_id},
            )
        if self._answered:
            return
        self.error_code = error.code
        self.error_message = error.message
        headers = dict(error.headers)
        if "Origin" in self.request.headers or "Sec-Fetch-Mode" in self.request.headers:
            # A browser would open a login dialog.
            headers.pop("WWW-Authenticate", None)
        self.answer(error_body(error, self.request_id), status=error.status, headers=headers)

    # --------------------------------------------------------------------- called by the connection
    def headers_received(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
    ) -> asyncio.Future[None] | None:
        """Handle the request in the next turn of the event loop. Its body may be there by then."""
        loop = self.request.connection.loop
        if self.request.connection.expects_continue:
            self._prepared = loop.create_future()
        self._task = loop.create_task(self._run())
        return self._prepared

    def data_received(self, chunk: bytes) -> None:
        # The connection limits how much arrives.
        self._chunks.append(chunk)

    def finish(self) -> None:
        """Note that the body has arrived."""
        self._complete = True
        self._end_body()

    def on_connection_close(self) -> None:
        """Note that the rest of the body will not arrive.

        This is not called later: a client that hangs up after its body cancels nothing.
        """
        self._end_body()

    # ---------------------------------------------------------------------------------- internals
    async def _run(self) -> None:
        """Handle the request: :meth:`prepare`, then wait for the body, then ``get``, ``post`` …"""
        try:
            name = METHODS.get(self.request.method)
            if name is None:
                raise self.not_allowed()
            prepared = self.prepare()
            if prepared is not None:
                await prepared
            self._end_preparation()
            if self._answered:
                return
            if not self._ended:
                self._body_ends = self.request.connection.loop.create_future()
                await self._body_ends
            if not self._complete:
                return
            answered = getattr(self, name)(**self._segments)
            if answered is not None:
                await answered
        except Exception as error:
            self.refuse(error)
            _forget_frames(error)
        except asyncio.CancelledError as error:
            self.refuse(error)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            self._end_preparation()

    def _end_preparation(self) -> None:
        if self._prepared is not None and not self._prepared.done():
            self._prepared.set_result(None)

    def _end_body(self) -> None:
        self._ended = True
        if self._body_ends is not None and not self._body_ends.done():
            self._body_ends.set_result(None)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        if self._answered:
            raise RuntimeError("the request is answered already")
        self._answered = True
        self.status = status
        self.request.connection.respond(status, headers, body)
        self._log(self)


def _forget_frames(error: BaseException) -> None:
    """Let the frames go through which an error came.

    They refer to the future of a write, and its error to them. Only the garbage collector would
    free them, late, and with them the events of each request that fails during an outage.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def _safe(value: str) -> str:
    if _HEADER.fullmatch(value) is None:
        raise ValueError("a header of an answer is not valid")
    return value
