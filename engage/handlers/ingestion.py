# SPDX-License-Identifier: Apache-2.0
"""What the routes for clients share: CORS, write keys, the limit of a body and how it arrives.

A refusal does not wait for the body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from engage.errors import ApiError, Limit, body_too_large
from engage.handlers.base import Handler, Route
from engage.http1 import early_errors
from engage.http1.exchange import Failure
from engage.pipeline.auth import UnknownKeyError

if TYPE_CHECKING:
    from engage.config import Config
    from engage.deliveries.receive import Deliveries
    from engage.handlers.cors import CorsPolicy
    from engage.handlers.request import Request
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
    #: With a log, returns the body of ``/readyz`` of a process that is ready.
    log_state: Callable[[], Mapping[str, object]] | None = None


class IngestionHandler(Handler):
    """Base of the handlers for clients.

    The parameters are those of :class:`~engage.handlers.base.Handler`, and what handlers call.
    """

    #: The workspace and write key, once they are known; for the log.
    principal: Principal | None = None
    #: How many events the request had, where that is known; for the log.
    event_count: int | None = None
    #: Whether the page that asked may not send events, because of its origin.
    origin_refused = False
    #: Whether :meth:`prepare` was called.
    _preparing = False

    def __init__(
        self,
        request: Request,
        route: Route,
        log: Callable[[Any], None],
        segments: Mapping[str, str],
        services: Services,
    ) -> None:
        super().__init__(request, route, log, segments)
        self.services = services
        #: The largest body of this request; :meth:`check` may lower it.
        self.body_limit = services.body_limit

    # ------------------------------------------------------------------------- for handlers to call
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

    # --------------------------------------------------------------------- for handlers to override
    def before_body(self) -> Awaitable[None] | None:
        """Return what to wait for before the body is read; ``None`` to read it at once."""
        return None

    # --------------------------------------------------------------------- called by the connection
    def prepare(self) -> Awaitable[None] | None:
        self._preparing = True
        try:
            super().prepare()
        except UnknownKeyError as unknown:
            return self._check_again(unknown)
        if self.exchange.failure is not None:
            raise self._failed(self.exchange.failure)
        return self.before_body()

    def on_connection_close(self) -> None:
        """Answer with the reason why the body is incomplete."""
        failure = self.exchange.failure
        # prepare() may refuse the request for another reason; it looks at the failure afterwards.
        if failure is not None and self._preparing:
            self.refuse(self._failed(failure))
        super().on_connection_close()

    def options(self, **_: str) -> None:
        """Answer with the methods of the route, and a preflight with what the page may send."""
        preflight = self.services.cors.preflight(
            self.header("Origin"),
            self.header("Access-Control-Request-Headers"),
            self.route.allowed,
            credentials=self.route.credentials,
        )
        self.origin_refused = (
            "Origin" in self.request.headers and "Access-Control-Allow-Origin" not in preflight
        )
        self.answer_options(preflight)

    # ---------------------------------------------------------------------------------- internals
    async def _check_again(self, unknown: UnknownKeyError) -> None:
        """Prepare when it is known whether a key was created just now.

        The body is left unread, so that clients with wrong keys cannot make the server hold it. It
        is there already if it came together with the head.
        """
        self.exchange.leave_unread(proven=False)
        await self.services.keys.wait(unknown, held=sum(map(len, self._chunks)))
        if self._answered:
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
