# SPDX-License-Identifier: Apache-2.0
"""Which handler serves which operation, and the router that finds it by a request's path."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from tornado import httputil

from engage.api import CONFLICT
from engage.handlers.base import METHODS, Handler, Route, Services
from engage.handlers.calls import BatchHandler, EventHandler
from engage.handlers.files import DescriptionHandler, PageHandler, SnippetHandler
from engage.handlers.health import AliveHandler, ReadyHandler
from engage.handlers.missing import MissingHandler
from engage.handlers.operations import OPERATIONS, allowed_at
from engage.handlers.preferences.handler import PreferencesHandler
from engage.handlers.settings import ProjectSettingsHandler, SourceConfigHandler
from engage.handlers.subscriptions import SubscriptionsHandler
from engage.handlers.webhook import WebhookHandler
from engage.monitoring import logs
from engage.monitoring.sampler import Refusal, key_prefix

if TYPE_CHECKING:
    from engage.http1.exchange import Exchange
    from engage.monitoring.metrics import Metrics

__all__ = ["HANDLERS", "Router"]

#: Id of an operation → its handler.
HANDLERS: Final[Mapping[str, type[Handler]]] = {
    "identify": EventHandler,
    "track": EventHandler,
    "page": EventHandler,
    "screen": EventHandler,
    "group": EventHandler,
    "alias": EventHandler,
    "batch": BatchHandler,
    "beacon": BatchHandler,
    "subscriptions": SubscriptionsHandler,
    "userSubscriptions": SubscriptionsHandler,
    "preferencesPage": PreferencesHandler,
    "preferences": PreferencesHandler,
    "webhook": WebhookHandler,
    "projectSettings": ProjectSettingsHandler,
    "sourceConfig": SourceConfigHandler,
    "snippet": SnippetHandler,
    "healthz": AliveHandler,
    "readyz": ReadyHandler,
    "openapi": DescriptionHandler,
    "docs": PageHandler,
}

#: The route of every other path.
_UNKNOWN: Final = Route(
    name="unknown",
    allowed=("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"),
)

#: Errors of events that are kept as dead letters; they are shown as these.
_WITH_LETTER: Final = frozenset(
    {"invalid_payload", "event_too_large", "event_refused", "transform_failed", CONFLICT}
)

#: Routes whose 503 is their answer, and not a refused request.
_HEALTH: Final = frozenset({"healthz", "readyz"})

#: A handler, and the description of its paths.
_Served = tuple[type[Handler], Route]
_NO_SEGMENTS: Final[Mapping[str, str]] = {}


class Router(httputil.HTTPServerConnectionDelegate):
    """Finds the handler of each request in a dictionary.

    :param services: the services that the handlers call.
    :param metrics: counts the requests.
    """

    def __init__(self, services: Services, metrics: Metrics) -> None:
        self._services = services
        self._cors = services.cors
        self._metrics = metrics
        self._exact: dict[str, _Served] = {}
        #: The text before the part in braces and after it, the part's name, the handler.
        self._patterns: list[tuple[str, str, str, _Served]] = []
        for operation in OPERATIONS:
            for path in operation.paths:
                # Operations that share a path make the same route.
                route = Route(
                    name=operation.name,
                    allowed=allowed_at(path),
                    credentials=operation.credentials,
                    cross_origin=operation.cross_origin,
                )
                served = (HANDLERS[operation.id], route)
                before, brace, rest = path.partition("{")
                if brace:
                    name, _, after = rest.partition("}")
                    self._patterns.append((before, after, name, served))
                else:
                    self._exact[path] = served
        self._unknown: _Served = (MissingHandler, _UNKNOWN)

    def cors(self, path: str, origin: str | None) -> Mapping[str, str]:
        """Return the CORS headers of an answer that no handler gives, as a handler's would be."""
        (_, route), _ = self._find(path)
        if not route.cross_origin:
            return {}
        return self._cors.headers(origin, credentials=route.credentials)

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> httputil.HTTPMessageDelegate:
        """Return the handler of a new request."""
        exchange = cast("Exchange", request_conn)
        (handler, route), segments = self._find(exchange.request.path)
        return handler(exchange, route, self._services, self.log_request, segments)

    def log_request(self, handler: Handler) -> None:
        """Count an answered request and log it."""
        status = handler.status
        request = handler.request
        seconds = time.monotonic() - request.began
        name = handler.route.name
        self._metrics.request(name, status, seconds)
        principal = handler.principal
        code = handler.error_code
        logs.log_request(
            request_id=request.id,
            # Any other method is a client's invention.
            method=request.method if request.method in METHODS else "OTHER",
            route=name,
            status=status,
            seconds=seconds,
            workspace=None if principal is None else principal.workspace.id,
            key_id=None if principal is None else principal.write_key.id,
            code=code,
            events=handler.event_count,
            more=handler.log_fields,
        )
        if status == 503 and name in _HEALTH:
            return
        if handler.partial is not None or (code is not None and code not in _WITH_LETTER):
            self._metrics.refused(_refusal(handler))

    def _find(self, path: str) -> tuple[_Served, Mapping[str, str]]:
        """Return what serves a path, and the path's part in braces if it has one."""
        if path.startswith("//"):
            # Several SDKs append "/v1/…" to a configured host that ends with a slash.
            path = "/" + path.lstrip("/")
        served = self._exact.get(path)
        if served is not None:
            return served, _NO_SEGMENTS
        for before, after, name, served in self._patterns:
            if path.startswith(before) and path.endswith(after):
                segment = path[len(before) : len(path) - len(after)]
                if segment and "/" not in segment:
                    return served, {name: segment}
        return self._unknown, _NO_SEGMENTS


def _refusal(handler: Handler) -> Refusal:
    request = handler.request
    principal = handler.principal
    keys = request.query_arguments.get("writeKey", ()) if request.query else ()
    partial = handler.partial
    # A server key is a secret: its id is enough.
    secret = principal is not None and principal.write_key.kind == "server"
    return Refusal(
        reason=handler.error_code or "" if partial is None else partial.code,
        status=handler.status,
        route=handler.route.name,
        key=""
        if secret
        else key_prefix(
            request.headers.get_list("Authorization"),
            [key.decode("utf-8", "replace") for key in keys],
        ),
        workspace_id="" if principal is None else principal.workspace.id,
        write_key_id="" if principal is None else principal.write_key.id,
        message=handler.error_message if partial is None else partial.message,
    )
