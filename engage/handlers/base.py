# SPDX-License-Identifier: Apache-2.0
"""What every handler does: answer, give each error the same shape, identify the request.

A handler overrides :meth:`Handler.check` for what can be refused by the head of a request, and
implements ``get``, ``post`` … for the rest. All of them raise :class:`~engage.errors.ApiError`.
:meth:`Handler.write_error` turns any exception, including a crash, into an answer.

Nothing in here depends on events, write keys or storages. What the routes for clients share beyond
this is in :mod:`engage.handlers.ingestion`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tornado.httputil import HTTPHeaders
from tornado.web import HTTPError, RequestHandler

from engage.errors import ApiError, error_body, from_exception
from engage.http1 import early_errors

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["JSON", "Handler", "Route"]

_log = logging.getLogger(__name__)

#: Content type of most answers.
JSON: Final = "application/json; charset=utf-8"

#: A request id from a client is used only if it is harmless in a log.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{8,64}")

_NO_HEADERS: Final[Mapping[str, str]] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a handler knows about the paths that it serves."""

    #: In metrics and logs; several paths may share one.
    name: str
    #: Every method that is answered, as in the header ``Allow``.
    allowed: tuple[str, ...]
    #: Whether beacons are sent to it: CORS with credentials.
    credentials: bool = False


class Handler(RequestHandler):
    """Base of all handlers. Subclasses set :attr:`route` in ``initialize``."""

    route: Route
    #: The code of the error that was answered, for the log.
    error_code: str | None = None
    #: Its message.
    error_message: str = ""
    _request_id: str | None = None

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

    def answer_error(self, error: ApiError) -> None:
        """Send an error as JSON. A handler of pages may send a page instead."""
        headers = dict(error.headers)
        if "Origin" in self.request.headers or "Sec-Fetch-Mode" in self.request.headers:
            # A browser would open a login dialog.
            headers.pop("WWW-Authenticate", None)
        self.answer(error_body(error, self.request_id), status=error.status, headers=headers)

    # ------------------------------------------------------------------------- for handlers to call
    def header(self, name: str) -> str | None:
        """Return a header of the request; several values are joined by commas."""
        headers = self.request.headers
        # Faster than ``get`` when the header is absent, as it usually is.
        return headers[name] if name in headers else None  # noqa: SIM401

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
        """Send a whole answer.

        :param headers: in addition to those that every answer has. A ``Vary`` is added to theirs.
        """
        if status != 200:
            self.set_status(status)
        if content_type is JSON:
            self._headers["Content-Type"] = JSON
        else:
            self.set_header("Content-Type", content_type)
        self._identify()
        common = self.common_headers()
        for name, value in common.items():
            self._headers[name] = value
        if headers is not None:
            for name, value in headers.items():
                if name == "Vary" and "Vary" in common:
                    self.set_header(name, f"{common['Vary']}, {value}")
                else:
                    self.set_header(name, value)
        # Tornado counts an empty body as one, and refuses to send it with a 304.
        self.finish(body or None)

    # -------------------------------------------------------------------------- called by Tornado
    def prepare(self) -> Awaitable[None] | None:
        method = self.request.method
        if method not in self.route.allowed:
            raise self.not_allowed()
        if method != "OPTIONS":
            self.check()
        return None

    def options(self, *_: str, **__: str) -> None:
        """Answer with the methods of the route."""
        self.set_status(204)
        self.set_header("Allow", ", ".join(self.route.allowed))
        self._identify()
        self.finish()

    def clear(self) -> None:
        """Reset the answer.

        Tornado's method also formats a date and a version, neither of which is sent. That took a
        tenth of the time of a small request.
        """
        self._headers = HTTPHeaders()
        self._write_buffer = []
        self._status_code = 200
        self._reason = "OK"

    def compute_etag(self) -> None:
        """Compute nothing: a handler whose answer is worth comparing sets the header itself."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        raised = kwargs["exc_info"][1] if "exc_info" in kwargs else None
        if isinstance(raised, HTTPError):
            # Raised by Tornado for a method that it does not know, before it calls prepare().
            error = self.not_allowed() if raised.status_code == 405 else _from_tornado(raised)
        else:
            error = from_exception(raised if raised is not None else Exception())
        self.error_code = error.code
        self.error_message = error.message
        self.answer_error(error)

    def log_exception(
        self,
        typ: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Log a crash. Tornado would log the query, too, in which a beacon carries its key."""
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
    def _identify(self) -> None:
        # Assigned, without the checks of set_header(): these values are known to be harmless.
        self._headers["X-Request-Id"] = self.request_id
        self._headers["X-Content-Type-Options"] = "nosniff"


def _from_tornado(raised: HTTPError) -> ApiError:
    if raised.status_code >= 500:
        return from_exception(raised)
    return ApiError("invalid_request", "the request is not valid", status=raised.status_code)
