# SPDX-License-Identifier: Apache-2.0
"""The work that all handlers share: answers, one shape for errors, the id of a request.

A handler overrides :meth:`Handler.check` to refuse a request by its head, and implements ``get``,
``post`` … for the rest. All of them raise :class:`~engage.errors.ApiError`.
:meth:`Handler.refuse` turns any exception, including a crash, into an answer.

A handler is Tornado's ``HTTPMessageDelegate``, the interface between a connection and what answers
its requests, and not Tornado's ``RequestHandler``: making one of those for each request, with its
futures and template modules, took more time than storing a small event.

All routes share CORS, the limit of a body, and how a write key in the head is found: a request may
wait for one that was created just now. A refusal does not wait for the body.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tornado import httputil

from engage.errors import (
    ApiError,
    Limit,
    body_too_large,
    error_body,
    from_exception,
    key_refused,
)
from engage.http1 import early_errors
from engage.http1.addresses import client_address, is_within
from engage.http1.exchange import Failure
from engage.keys.auth import UnknownKeyError
from engage.keys.limits import STRANGE, Guards
from engage.monitoring.history import DAY
from engage.monitoring.sampler import Throttle
from engage.pipeline.decode import check_encoding

if TYPE_CHECKING:
    from engage.config import Config
    from engage.deliveries.receive import Deliveries
    from engage.handlers.cors import CorsPolicy
    from engage.handlers.preferences.looks import Looks
    from engage.http1.addresses import Network
    from engage.http1.exchange import Exchange
    from engage.keys.auth import Authenticator, Principal
    from engage.keys.table import KeyTable
    from engage.pipeline.decode import Encoding
    from engage.pipeline.pipeline import Pipeline
    from engage.upkeep.readiness import Readiness

__all__ = ["JSON", "METHODS", "Handler", "Route", "Services"]

_log = logging.getLogger(__name__)

#: Content type of most answers.
JSON: Final = "application/json; charset=utf-8"

#: Method of a request → name of the method of a handler. Any other method gets a 405.
METHODS: Final[Mapping[str, str]] = {
    method: method.lower()
    for method in ("GET", "HEAD", "POST", "DELETE", "PATCH", "PUT", "OPTIONS")
}

#: A header must not contain the beginning of another.
_HEADER: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The description of the paths that a handler serves."""

    #: In metrics and logs; several paths may share one.
    name: str
    #: Every method that is answered, as in the header ``Allow``.
    allowed: tuple[str, ...]
    #: Whether beacons are sent to it: CORS with credentials.
    credentials: bool = False
    #: Whether pages of other origins may read its answers.
    cross_origin: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that the handlers call. Made by :mod:`engage.app`."""

    config: Config
    #: The largest body that is accepted, unless a handler lowers it for its request.
    body_limit: Limit
    pipeline: Pipeline
    authenticator: Authenticator
    keys: KeyTable
    guards: Guards
    cors: CorsPolicy
    readiness: Readiness
    deliveries: Deliveries
    #: Of the preferences pages.
    looks: Looks
    #: ``server.trusted_proxies``.
    trusted_proxies: Sequence[Network]
    #: Whether this process is about to stop.
    draining: Callable[[], bool]
    #: How often the log tells of a trusted proxy that does not name its clients.
    unforwarded: Throttle = dataclasses.field(default_factory=lambda: Throttle(DAY))
    #: With a log, returns the body of ``/readyz`` of a process that is ready.
    log_state: Callable[[], Mapping[str, object]] | None = None


class Handler(httputil.HTTPMessageDelegate):
    """Answers one request. Subclasses implement ``get``, ``post`` …, which may be coroutines.

    :param exchange: the request, and where the answer goes.
    :param route: the paths that the handler serves.
    :param services: the rest of the server.
    :param log: called with the handler when it has answered.
    :param segments: name of a part of the path → its value; arguments of ``get``, ``post`` ….
    """

    #: The status of the answer, once there is one.
    status = 0
    #: The code of the error that was answered, for the log.
    error_code: str | None = None
    #: Its message.
    error_message: str = ""
    #: An error within an answer that is none; for the log.
    partial: ApiError | None = None
    #: The workspace and write key, once they are known; for the log.
    principal: Principal | None = None
    #: How many events the request had, where that is known; for the log.
    event_count: int | None = None
    #: Further fields of the line in the log, with short values; nothing that a client chooses.
    log_fields: Mapping[str, str] = {}
    #: The body, as it was sent. It has not arrived yet when :meth:`check` runs.
    body = b""
    #: How the body is compressed; set by :meth:`check_body`.
    encoding: Encoding = "identity"
    #: Whether :meth:`check` has begun.
    _checking = False
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
        exchange: Exchange,
        route: Route,
        services: Services,
        log: Callable[[Any], None],
        segments: Mapping[str, str],
    ) -> None:
        self.exchange = exchange
        self.request = exchange.request
        self.route = route
        self.services = services
        #: The largest body of this request; :meth:`check` may lower it.
        self.body_limit = services.body_limit
        self._log = log
        self._segments = segments

    # --------------------------------------------------------------------- for handlers to override
    def check(self) -> None:
        """Refuse a request that can be refused by its head, in order of precedence.

        :raises ApiError: with the answer, which does not wait for the body.
        """

    def not_allowed(self) -> ApiError:
        """Return the answer to a method that the route does not have."""
        allowed = ", ".join(self.route.allowed)
        return ApiError(
            "method_not_allowed", f"this path accepts only {allowed}", headers={"Allow": allowed}
        )

    def options(self, **_: str) -> None:
        """Answer with the methods of the route, and a preflight with the headers to send."""
        fields = self.request.fields
        preflight: Mapping[str, str] = {}
        if self.route.cross_origin:
            preflight = self.services.cors.preflight(
                fields.get("Origin"),
                fields.get("Access-Control-Request-Headers"),
                self.route.allowed,
                credentials=self.route.credentials,
            )
        if preflight and "Origin" in fields and "Access-Control-Allow-Origin" not in preflight:
            message = f"pages of {fields['Origin'][:100]} may not send events (cors.origins)"
            self.partial = ApiError("origin_not_allowed", message)
        sent = {name: _safe(value) for name, value in preflight.items()}
        sent["Allow"] = ", ".join(self.route.allowed)
        sent["X-Request-Id"] = self.request.id
        sent["X-Content-Type-Options"] = "nosniff"
        self._send(204, sent, b"")

    # ------------------------------------------------------------------------- for handlers to call
    def check_body(self) -> None:
        """Check the encoding of the body, then its declared length.

        :raises ApiError: 415 if the encoding is unknown, or as :meth:`check_length`.
        """
        encoding = self.request.fields.get("Content-Encoding")
        if encoding:
            self.encoding = check_encoding(encoding)
        self.check_length()

    def check_length(self) -> None:
        """Check the declared length of the body.

        :raises ApiError: 411 if the body has neither a length nor chunks, 413 if it is too long.
        """
        request = self.request
        if request.length > self.body_limit.bytes:
            raise body_too_large(self.body_limit)
        if not (request.length or request.chunked or "Content-Length" in request.fields):
            raise ApiError("length_required", "send a body, with Content-Length or in chunks")

    def principal_of_head(self) -> Principal | None:
        """Authenticate by the header or the query.

        :return: ``None`` if neither has a key.
        :raises ApiError: 401 or 403 if the key is not accepted; 503 if the keys were not read. An
            :class:`UnknownKeyError` that :meth:`check` raises is final only after a refresh.
        """
        request = self.request
        if "Authorization" in request.headers.repeated:
            raise key_refused("the request has more than one Authorization header")
        keys = request.query_arguments.get("writeKey", ()) if request.query else ()
        return self.services.authenticator.header_or_query(
            request.fields.get("Authorization"),
            [key.decode("utf-8", "replace") for key in keys],
        )

    @property
    def client_address(self) -> str:
        """The address of the client, also behind the proxies of ``server.trusted_proxies``;
        ``""`` if it is not known."""
        return self._address_of_client()

    @property
    def recorded_address(self) -> str:
        """The same for a record of who it was; ``""`` also if a proxy does not know it."""
        return self._address_of_client(certain=True)

    def _address_of_client(self, *, certain: bool = False) -> str:
        peer, trusted = self.exchange.context.remote_ip or "", self.services.trusted_proxies
        forwarded = self.request.headers.get_list("X-Forwarded-For")
        if not forwarded and is_within(peer, trusted) and self.services.unforwarded() is not None:
            _log.warning(
                "%s, one of server.trusted_proxies, sent a request without X-Forwarded-For:"
                " it counts as the client",
                peer,
            )
        return client_address(peer, forwarded, trusted, certain=certain)

    def client_has(self, etag: str) -> bool:
        """Return whether ``If-None-Match`` shows that the client has the version of an ETag."""
        sent = self.request.fields.get("If-None-Match", "")
        tags = [tag.strip().removeprefix("W/") for tag in sent.split(",")]
        return etag.removeprefix("W/") in tags or "*" in tags

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
        common: Mapping[str, str] = {}
        if self.route.cross_origin:
            common = self.services.cors.headers(
                self.request.fields.get("Origin"), credentials=self.route.credentials
            )
        if status == 304:
            sent = {}
        else:
            sent = {"Content-Type": content_type if content_type == JSON else _safe(content_type)}
        sent["X-Request-Id"] = self.request.id
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

    def refuse(self, raised: BaseException) -> None:
        """Answer with an error, unless there is an answer. A crash is logged.

        :param raised: an :class:`ApiError` or any other exception.
        """
        error = from_exception(raised)
        if error.status in STRANGE:
            error = self.services.guards.answer(error, self.client_address)
        if error.code == "internal_error" and error is not raised:
            _log.error(
                "%s failed",
                self.route.name,
                exc_info=raised,
                extra={"requestId": self.request.id},
            )
        if self._answered:
            return
        self.error_code = error.code
        self.error_message = error.message
        headers = dict(error.headers)
        if "Origin" in self.request.fields or "Sec-Fetch-Mode" in self.request.fields:
            # A browser would open a login dialog.
            headers.pop("WWW-Authenticate", None)
        self.answer_error(error, headers)

    def answer_error(self, error: ApiError, headers: Mapping[str, str]) -> None:
        """Send an error as JSON; a page for people overrides this."""
        self.answer(error_body(error, self.request.id), status=error.status, headers=headers)

    # --------------------------------------------------------------------- called by the connection
    def headers_received(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
    ) -> asyncio.Future[None] | None:
        """Handle the request in the next turn of the event loop. Its body may be there by then."""
        loop = self.exchange.loop
        if self.exchange.expects_continue:
            self._prepared = loop.create_future()
        self._task = loop.create_task(self._run())
        return self._prepared

    def data_received(self, chunk: bytes) -> None:
        # The connection limits how much arrives.
        self.body += chunk

    def finish(self) -> None:
        """Note that the body has arrived."""
        self._complete = True
        self._end_body()

    def on_connection_close(self) -> None:
        """Note that the rest of the body will not arrive; answer with the reason if there is one.

        This is not called later: a client that hangs up after its body cancels nothing.
        """
        failure = self.exchange.failure
        # check() may refuse the request for another reason; the failure is looked at afterwards.
        if failure is not None and self._checking:
            self.refuse(self._failed(failure))
        self._end_body()

    # ---------------------------------------------------------------------------------- internals
    async def _run(self) -> None:
        """Handle the request: :meth:`check`, then wait for the body, then ``get``, ``post`` …"""
        try:
            method = self.request.method
            if method not in self.route.allowed:
                raise self.not_allowed()
            self._checking = True
            if method != "OPTIONS":
                try:
                    self.check()
                except UnknownKeyError as unknown:
                    await self._check_again(unknown)
            if self.exchange.failure is not None:
                raise self._failed(self.exchange.failure)
            if self._prepared is not None:
                self._end_preparation(self._prepared)
            if self._answered:
                return
            if not self._ended:
                self._body_ends = self.exchange.loop.create_future()
                await self._body_ends
            if not self._complete:
                return
            answered = getattr(self, METHODS[method])(**self._segments)
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
            if self._prepared is not None:
                self._end_preparation(self._prepared)

    async def _check_again(self, unknown: UnknownKeyError) -> None:
        """Check again when it is known whether a key was created just now.

        The body is left unread, so that clients with wrong keys cannot make the server hold it. It
        is there already if it came together with the head.
        """
        self.exchange.leave_unread()
        await self.wait_for_key(unknown)
        if not self._answered:
            self.check()
            self.exchange.read_on()

    async def wait_for_key(self, unknown: UnknownKeyError) -> None:
        """Wait until the keys in the store were read again, because a key is unknown.

        :raises ApiError: as :meth:`engage.keys.table.KeyTable.wait`. The unknown key itself, if the
            address of the client has sent too many: then the store is not read for it.
        """
        if self.services.guards.is_over(self.client_address):
            raise unknown
        await self.services.keys.wait(unknown, held=len(self.body))

    def _failed(self, failure: Failure) -> ApiError:
        if failure is Failure.TIMEOUT:
            return early_errors.request_timeout(self.services.config.server.request_timeout)
        if failure is Failure.TOO_LARGE:
            return body_too_large(self.body_limit)
        if failure is Failure.OVERLOADED:
            return early_errors.too_many_bytes()
        return ApiError("invalid_request", "the body ended before its declared length")

    @staticmethod
    def _end_preparation(prepared: asyncio.Future[None]) -> None:
        if not prepared.done():
            prepared.set_result(None)

    def _end_body(self) -> None:
        self._ended = True
        if self._body_ends is not None and not self._body_ends.done():
            self._body_ends.set_result(None)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        if self._answered:
            raise RuntimeError("the request is answered already")
        self._answered = True
        self.status = status
        self.exchange.respond(status, headers, body)
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
