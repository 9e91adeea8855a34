# SPDX-License-Identifier: Apache-2.0
"""What the routes for clients share: CORS, write keys, the limit of a body and how it arrives.

Bodies come in through Tornado's streaming interface: a refusal does not wait for the body, and
Tornado's form parsing never sees it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, cast

from tornado.web import stream_request_body

from engage.errors import ApiError, Limit, body_too_large
from engage.handlers.base import Handler, Route
from engage.http1 import early_errors
from engage.http1.exchange import Exchange, Failure
from engage.pipeline.auth import UnknownKeyError

if TYPE_CHECKING:
    from engage.config import Config
    from engage.deliveries.receive import Deliveries
    from engage.handlers.cors import CorsPolicy
    from engage.pipeline.auth import Authenticator, Principal
    from engage.pipeline.keys import KeyTable
    from engage.pipeline.pipeline import Pipeline
    from engage.storage.readiness import Readiness

__all__ = ["IngestionHandler", "Services"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the handlers call. Made by :mod:`engage.app`."""

    config: Config
    #: The largest body that is accepted, unless a handler lowers it for its request.
    body_limit: Limit
    pipeline: Pipeline
    authenticator: Authenticator
    keys: KeyTable
    cors: CorsPolicy
    readiness: Readiness
    deliveries: Deliveries
    #: Whether this process is about to stop.
    draining: Callable[[], bool]


@stream_request_body
class IngestionHandler(Handler):
    """Base of the handlers for clients."""

    services: Services
    #: The workspace and write key, once they are known; for the log.
    principal: Principal | None = None
    #: How many events the request had, where that is known; for the log.
    event_count: int | None = None
    #: Whether the page that asked may not send events, because of its origin.
    origin_refused = False
    #: The largest body of this request; :meth:`check` may lower it.
    body_limit: Limit

    # ------------------------------------------------------------------------- for handlers to call
    @property
    def exchange(self) -> Exchange:
        """The request's connection."""
        return cast("Exchange", self.request.connection)

    @property
    def body(self) -> bytes:
        """The whole body, as it was sent. It has not arrived yet when :meth:`check` runs."""
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def check_length(self) -> int:
        """Check the declared length of the body.

        :return: the length in bytes; 0 if the body comes in chunks.
        :raises ApiError: 411 if the body has neither a length nor chunks, 413 if it is too long.
        """
        declared = self.header("Content-Length")
        if declared is None:
            if "Transfer-Encoding" not in self.request.headers:
                raise ApiError("length_required", "send a body, with Content-Length or in chunks")
            return 0
        length = int(declared)
        if length > self.body_limit.bytes:
            raise body_too_large(self.body_limit)
        return length

    def principal_of_head(self) -> Principal | None:
        """Authenticate by the header or the query.

        :return: ``None`` if neither has a key.
        :raises ApiError: 401 or 403 if the key is not accepted; 503 if the keys were not read. An
            :class:`UnknownKeyError` that :meth:`check` raises is final only after a refresh.
        """
        request = self.request
        keys = request.query_arguments.get("writeKey", ()) if request.query else ()
        return self.services.authenticator.header_or_query(
            request.headers.get_list("Authorization"),
            [key.decode("utf-8", "replace") for key in keys],
        )

    def common_headers(self) -> Mapping[str, str]:
        return self.services.cors.headers(self.header("Origin"), credentials=self.route.credentials)

    # -------------------------------------------------------------------------- called by Tornado
    def initialize(self, *, route: Route, services: Services) -> None:
        self.route = route
        self.services = services
        self.body_limit = services.body_limit
        self._chunks: list[bytes] = []
        self._prepared = False

    def prepare(self) -> Awaitable[None] | None:
        self._prepared = True
        if self._finished:
            return None
        try:
            super().prepare()
        except UnknownKeyError as unknown:
            return self._check_again(unknown)
        if self.exchange.failure is not None:
            raise self._failed(self.exchange.failure)
        return self.before_body()

    def before_body(self) -> Awaitable[None] | None:
        """Return what to wait for before the body is read; ``None`` to read it at once."""
        return None

    def data_received(self, chunk: bytes) -> None:
        # The connection limits how much arrives.
        self._chunks.append(chunk)

    def on_connection_close(self) -> None:
        """Answer with the reason why the body is incomplete.

        Tornado calls this only while the body arrives: a client that hangs up later cancels
        nothing.
        """
        failure = self.exchange.failure
        # prepare() may refuse the request for another reason; it looks at the failure afterwards.
        if failure is not None and self._prepared and not self._finished:
            error = self._failed(failure)
            self.send_error(error.status, exc_info=(ApiError, error, None))
        super().on_connection_close()

    def options(self, *_: str, **__: str) -> None:
        """Answer with the methods of the route, and a preflight with what the page may send."""
        preflight = self.services.cors.preflight(
            self.header("Origin"),
            self.header("Access-Control-Request-Headers"),
            self.route.allowed,
            credentials=self.route.credentials,
        )
        for name, value in preflight.items():
            self.set_header(name, value)
        self.origin_refused = (
            "Origin" in self.request.headers and "Access-Control-Allow-Origin" not in preflight
        )
        super().options()

    # ---------------------------------------------------------------------------------- internals
    async def _check_again(self, unknown: UnknownKeyError) -> None:
        """Prepare when it is known whether a key was created just now.

        The body is left unread, so that clients with wrong keys cannot make the server hold it. It
        is there already if it came together with the head.
        """
        self.exchange.leave_unread(proven=False)
        await self.services.keys.wait(unknown, held=sum(map(len, self._chunks)))
        if self._finished:
            return
        self.check()
        if self.exchange.failure is not None:
            raise self._failed(self.exchange.failure)
        waited = self.before_body()
        if waited is not None:
            await waited
        self.exchange.read_on()

    def _failed(self, failure: Failure) -> ApiError:
        if failure is Failure.TIMEOUT:
            return early_errors.request_timeout(self.services.config.server.request_timeout)
        if failure is Failure.TOO_LARGE:
            return body_too_large(self.body_limit)
        if failure is Failure.OVERLOADED:
            return early_errors.too_many_bytes()
        return ApiError("invalid_request", "the body ended before its declared length")
