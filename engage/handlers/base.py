# SPDX-License-Identifier: Apache-2.0
"""What all handlers share: the order of the checks, the body, the shape of every answer.

A handler says in :meth:`Handler.check` what can be refused by the head of a request, and does the
rest in ``get``, ``post`` …, where the body is complete. Both raise
:class:`~engage.errors.ApiError`; whatever is raised, a crash too, becomes an answer of one shape in
:meth:`Handler.write_error`.

Bodies come in through Tornado's streaming interface: so a refusal does not wait for the body, and
Tornado's own form parsing never sees it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from tornado.httputil import HTTPHeaders
from tornado.web import HTTPError, RequestHandler, stream_request_body

from engage.errors import (
    ApiError,
    Limit,
    body_too_large,
    error_body,
    from_exception,
    overloaded,
)
from engage.http1 import early_errors
from engage.http1.exchange import Exchange, Failure

if TYPE_CHECKING:
    from types import TracebackType

    from engage.config import Config
    from engage.deliveries.receive import Deliveries
    from engage.handlers.cors import CorsPolicy
    from engage.pipeline.auth import Authenticator, Principal
    from engage.pipeline.pipeline import Pipeline
    from engage.storage.readiness import Readiness

__all__ = ["Handler", "Route", "Services"]

_log = logging.getLogger(__name__)

JSON: Final = "application/json; charset=utf-8"

#: A client's own request id, if it is one that cannot do harm in a log.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{8,64}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the handlers call. Made by :mod:`engage.app`."""

    config: Config
    pipeline: Pipeline
    authenticator: Authenticator
    cors: CorsPolicy
    readiness: Readiness
    deliveries: Deliveries
    #: Whether this process is about to end.
    draining: Callable[[], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a handler needs to know of the operation that it serves."""

    #: In metrics and logs; several paths may share one.
    name: str
    #: Every method that is answered, as in the header ``Allow``.
    allowed: tuple[str, ...]
    #: Whether beacons are sent to it: CORS with credentials.
    credentials: bool = False


@stream_request_body
class Handler(RequestHandler):
    """Base of all handlers."""

    route: Route
    services: Services
    #: Who writes, once that is known; for the log.
    principal: Principal | None
    #: Code of the error that was answered; for the log.
    error_code: str | None
    #: How many events the request had, where that is known; for the log.
    event_count: int | None
    #: How long the body may be, and what says so; for :meth:`check` to lower.
    body_limit: Limit

    # ----------------------------------------------------------------- what handlers fill in, use
    def check(self) -> None:
        """Refuse by the head what can be refused by it, in the order of precedence.

        :raises ApiError: the answer; the body is not waited for.
        """

    @property
    def exchange(self) -> Exchange:
        """The request's connection."""
        return cast("Exchange", self.request.connection)

    @property
    def body(self) -> bytes:
        """The whole body, raw. Not to be used in :meth:`check`."""
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def header(self, name: str) -> str | None:
        """:return: a header of the request; several values are joined by commas."""
        headers = self.request.headers
        # Faster than ``get`` for what is not there, as most of what is asked for.
        return headers[name] if name in headers else None  # noqa: SIM401

    def check_length(self) -> None:
        """Check the declared length of the body.

        :raises ApiError: 411: there is none, and no chunks; 413: it is too long.
        """
        declared = self.header("Content-Length")
        if declared is None:
            if "Transfer-Encoding" not in self.request.headers:
                raise ApiError(
                    "length_required", "a body is needed, with Content-Length or chunked"
                )
        elif int(declared) > self.body_limit.bytes:
            raise body_too_large(self.body_limit)

    def principal_of_head(self) -> Principal | None:
        """Authenticate by the header or the query.

        :return: ``None``: neither has a key.
        :raises ApiError: 401 or 403.
        """
        request = self.request
        keys = request.query_arguments.get("writeKey", ()) if request.query else ()
        return self.services.authenticator.header_or_query(
            request.headers.get_list("Authorization"),
            [key.decode("utf-8", "replace") for key in keys],
        )

    def not_allowed(self) -> ApiError:
        """:return: the answer to a method that the route does not have."""
        allowed = ", ".join(self.route.allowed)
        return ApiError(
            "method_not_allowed", f"only {allowed} can be used here", headers={"Allow": allowed}
        )

    def answer(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole answer.

        :param headers: beside those that every answer has.
        """
        if status != 200:
            self.set_status(status)
        if content_type is JSON:
            self._headers["Content-Type"] = JSON
        else:
            self.set_header("Content-Type", content_type)
        self._common_headers(headers)
        # Even an empty one is a body to Tornado, which refuses to send it with a 304.
        self.finish(body or None)

    # -------------------------------------------------------------------------- called by Tornado
    def initialize(self, *, route: Route, services: Services) -> None:
        """See :class:`tornado.web.RequestHandler`."""
        self.route = route
        self.services = services
        self.principal = None
        self.error_code = None
        self.event_count = None
        self.body_limit = Limit(services.config.limits.body_bytes, "limits.body_bytes")
        self._chunks: list[bytes] = []
        self._prepared = False
        self._request_id: str | None = None

    def prepare(self) -> None:
        """See :class:`tornado.web.RequestHandler`."""
        self._prepared = True
        if self._finished:
            return
        method = self.request.method
        if method not in self.route.allowed:
            raise self.not_allowed()
        if method != "OPTIONS":
            self.check()
        if self.exchange.failure is not None:
            raise self._failed(self.exchange.failure)

    def data_received(self, chunk: bytes) -> None:
        """See :class:`tornado.web.RequestHandler`. The connection bounds what comes."""
        self._chunks.append(chunk)

    def on_connection_close(self) -> None:
        """See :class:`tornado.web.RequestHandler`: the body will not be complete.

        Not called once it is: a client that hangs up then does not cancel anything.
        """
        failure = self.exchange.failure
        # What prepare() refuses comes first; it looks at the failure afterwards.
        if failure is not None and self._prepared and not self._finished:
            error = self._failed(failure)
            self.send_error(error.status, exc_info=(ApiError, error, None))
        super().on_connection_close()

    def options(self, *_: str, **__: str) -> None:
        """Answer a preflight, or tell the methods."""
        allowed = self.route.allowed
        self.set_status(204)
        self.set_header("Allow", ", ".join(allowed))
        preflight = self.services.cors.preflight(
            self.header("Origin"),
            self.header("Access-Control-Request-Headers"),
            allowed,
            credentials=self.route.credentials,
        )
        for name, value in preflight.items():
            self.set_header(name, value)
        self._identify()
        self.finish()

    def clear(self) -> None:
        """See :class:`tornado.web.RequestHandler`. Tornado's own also formats a date and a version,
        which we do not send: a tenth of the time of a small request."""
        self._headers = HTTPHeaders()
        self._write_buffer = []
        self._status_code = 200
        self._reason = "OK"

    def compute_etag(self) -> None:
        """No answer is worth comparing."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer whatever was raised, in the one shape."""
        raised = kwargs["exc_info"][1] if "exc_info" in kwargs else None
        if isinstance(raised, HTTPError):
            # Tornado's own: a method that it does not know, before prepare() could say so.
            error = self.not_allowed() if raised.status_code == 405 else _of_tornado(raised)
        else:
            error = from_exception(raised if raised is not None else Exception())
        self.error_code = error.code
        headers = dict(error.headers)
        if "Origin" in self.request.headers or "Sec-Fetch-Mode" in self.request.headers:
            # A browser would open a login dialog.
            headers.pop("WWW-Authenticate", None)
        self.answer(error_body(error, self.request_id), status=error.status, headers=headers)

    def log_exception(
        self,
        typ: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Log a crash. Tornado's own line would have the query, where a beacon carries its key."""
        if not isinstance(value, (ApiError, HTTPError)) and (
            from_exception(value or Exception()).code == "internal_error"
        ):
            _log.error(
                "%s failed",
                self.route.name,
                exc_info=(typ, value, tb),  # type: ignore[arg-type]
                extra={"requestId": self.request_id},
            )

    # ---------------------------------------------------------------------------------- internals
    @property
    def request_id(self) -> str:
        """The client's own, if it sent one that may be used, else a fresh one."""
        if self._request_id is None:
            own = self.header("X-Request-Id")
            usable = own is not None and _REQUEST_ID.fullmatch(own) is not None
            self._request_id = own if own is not None and usable else early_errors.request_id()
        return self._request_id

    def _identify(self) -> None:
        # Not through set_header(): these values have been checked.
        self._headers["X-Request-Id"] = self.request_id
        self._headers["X-Content-Type-Options"] = "nosniff"

    def _common_headers(self, headers: Mapping[str, str] | None) -> None:
        self._identify()
        cors = self.services.cors.headers(self.header("Origin"), credentials=self.route.credentials)
        for name, value in cors.items():
            self._headers[name] = value
        if headers is None:
            return
        for name, value in headers.items():
            if name == "Vary" and "Vary" in cors:
                self.set_header(name, f"{cors['Vary']}, {value}")
            else:
                self.set_header(name, value)

    def _failed(self, failure: Failure) -> ApiError:
        if failure is Failure.TIMEOUT:
            return early_errors.request_timeout(self.services.config.server.request_timeout)
        if failure is Failure.TOO_LARGE:
            return body_too_large(self.body_limit)
        if failure is Failure.OVERLOADED:
            return overloaded("too much is being received; send the same again later")
        return ApiError("invalid_request", "the body ended before its declared length")


def _of_tornado(raised: HTTPError) -> ApiError:
    if raised.status_code >= 500:
        return from_exception(raised)
    return ApiError("invalid_request", "the request is not valid", status=raised.status_code)
