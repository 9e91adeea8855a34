# SPDX-License-Identifier: Apache-2.0
"""Which path goes to which handler: the one table, for the router and for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tornado import httputil
from tornado.web import Application

from engage.handlers import files, settings, webhook
from engage.handlers.base import Route, Services
from engage.handlers.events import BatchHandler, EventHandler
from engage.handlers.health import AliveHandler, ReadyHandler
from engage.handlers.missing import MissingHandler
from engage.handlers.subscriptions import SubscriptionsHandler

__all__ = ["ROUTES", "Router"]


def _event(name: str, *paths: str) -> list[Route]:
    return [
        Route(path=path, name=name, handler=EventHandler, methods=("POST",), credentials=True)
        for path in (f"/api/public/apps/{name}", f"/v1/{name}", *paths)
    ]


def _batch(*paths: str) -> list[Route]:
    return [
        Route(path=path, name="batch", handler=BatchHandler, methods=("POST",), credentials=True)
        for path in paths
    ]


#: Every route. Unmodified SDKs use the paths under ``/v1`` and ``/beacon``.
ROUTES: Final[Sequence[Route]] = (
    *_event("identify", "/v1/i"),
    *_event("track", "/v1/t"),
    *_event("page", "/v1/p"),
    *_event("screen", "/v1/s"),
    *_event("group", "/v1/g"),
    *_event("alias", "/v1/a"),
    *_batch("/api/public/apps/batch", "/v1/batch", "/v1/b", "/beacon/v1/batch"),
    # Segment's libraries for Java (with the slash), Ruby, .NET and Android.
    *_batch("/v1/import", "/v1/import/"),
    Route(
        path="/api/public/subscription-management/user-subscriptions",
        name="subscriptions",
        handler=SubscriptionsHandler,
        methods=("PUT",),
    ),
    Route(path="/healthz", name="healthz", handler=AliveHandler, methods=("GET",)),
    Route(path="/readyz", name="readyz", handler=ReadyHandler, methods=("GET",)),
    *webhook.ROUTES,
    *settings.ROUTES,
    *files.ROUTES,
)

_MISSING: Final = Route(
    path="*",
    name="unknown",
    handler=MissingHandler,
    methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
)


class Router(Application):
    """Tornado's application with a dictionary instead of a list of regular expressions.

    :param routes: as :data:`ROUTES`; a path with a part in braces is looked for after the others.
    :param options: Tornado's.
    """

    def __init__(self, routes: Sequence[Route], services: Services, **options: Any) -> None:
        super().__init__([], **options)
        self._cors = services.cors
        self._exact: dict[str, dict[str, Any]] = {}
        #: What stands before the part in braces, what after it, its name, the handler's arguments.
        self._patterns: list[tuple[str, str, str, dict[str, Any]]] = []
        for route in routes:
            arguments = {"route": route, "services": services}
            before, brace, rest = route.path.partition("{")
            if brace:
                name, _, after = rest.partition("}")
                self._patterns.append((before, after, name, arguments))
            else:
                self._exact[route.path] = arguments
        self._missing = {"route": _MISSING, "services": services}

    def cors(self, path: str, origin: str | None) -> Mapping[str, str]:
        """:return: what an answer has of CORS that no handler gives, as a handler's would."""
        arguments, _ = self._find(path)
        return self._cors.headers(origin, credentials=arguments["route"].credentials)

    def find_handler(self, request: httputil.HTTPServerRequest, **kwargs: Any) -> Any:
        """See :class:`tornado.routing.Router`."""
        arguments, segments = self._find(request.path)
        return self.get_handler_delegate(
            request, arguments["route"].handler, arguments, path_kwargs=segments
        )

    def _find(self, path: str) -> tuple[dict[str, Any], dict[str, bytes] | None]:
        """:return: the arguments of a path's handler, and its part in braces if it has one."""
        if path.startswith("//"):
            # A host setting that ends with a slash: several SDKs put a path with its own after it.
            path = "/" + path.lstrip("/")
        arguments = self._exact.get(path)
        if arguments is not None:
            return arguments, None
        for before, after, name, arguments in self._patterns:
            if path.startswith(before) and path.endswith(after):
                segment = path[len(before) : len(path) - len(after)]
                if segment and "/" not in segment:
                    return arguments, {name: segment.encode("latin-1")}
        return self._missing, None
