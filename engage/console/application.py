# SPDX-License-Identifier: Apache-2.0
"""The paths of the console and their handlers, and the HTTP server with its bounds."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final

from tornado.http1connection import HTTP1Connection, HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPMessageDelegate, parse_cookie
from tornado.web import Application

from engage.console.base import STATIC, TEMPLATES, ConsoleHandler
from engage.console.files import MissingHandler, StaticHandler
from engage.console.pages.audit import AuditHandler
from engage.console.pages.event import EventHandler, EventJsonHandler
from engage.console.pages.events import EventsFileHandler, EventsHandler
from engage.console.pages.keys import KeysHandler
from engage.console.pages.letter import CheckHandler, LetterHandler, ReplayHandler
from engage.console.pages.live import LiveHandler, LiveJsonHandler
from engage.console.pages.overview import OverviewHandler, OverviewJsonHandler
from engage.console.pages.rejected import RejectedHandler
from engage.console.pages.replays import ReplaysHandler
from engage.console.pages.search import SearchHandler
from engage.console.pages.sign_in import HealthHandler, LinkHandler, LoginHandler, LogoutHandler
from engage.console.pages.subscriptions import SubscriptionsHandler
from engage.console.pages.system import SystemHandler
from engage.console.pages.users import UserHandler, UsersHandler
from engage.console.pages.webhooks import WebhooksHandler

if TYPE_CHECKING:
    from tornado.httputil import (
        HTTPConnection,
        HTTPHeaders,
        RequestStartLine,
        ResponseStartLine,
    )
    from tornado.iostream import IOStream
    from tornado.web import RequestHandler

    from engage.console.services import Console

__all__ = ["ROUTES", "ConsoleServer", "make_application"]

#: Path → handler. The paths are relative to the root of the console.
ROUTES: Final[Mapping[str, type[ConsoleHandler]]] = {
    "/": OverviewHandler,
    "/event": EventHandler,
    "/event.json": EventJsonHandler,
    "/events": EventsHandler,
    "/events.ndjson": EventsFileHandler,
    "/live": LiveHandler,
    "/live.json": LiveJsonHandler,
    "/overview.json": OverviewJsonHandler,
    "/search": SearchHandler,
    "/rejected": RejectedHandler,
    "/letter": LetterHandler,
    "/letter/check": CheckHandler,
    "/letter/replay": ReplayHandler,
    "/replays": ReplaysHandler,
    "/users": UsersHandler,
    "/user": UserHandler,
    "/keys": KeysHandler,
    "/webhooks": WebhooksHandler,
    "/subscriptions": SubscriptionsHandler,
    "/system": SystemHandler,
    "/audit": AuditHandler,
    "/link": LinkHandler,
    "/login": LoginHandler,
    "/logout": LogoutHandler,
    "/healthz": HealthHandler,
}

#: Open connections: those of dozens of operators. One more takes the place of an older one.
MAX_CONNECTIONS: Final = 256
#: Bytes of a form: a dead letter of 1 MiB, of which each byte may become three …
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
#: … and of a form of someone who is not signed in. A form is decoded before a page sees it, and
#: decoding a million fields takes seconds.
MAX_STRANGERS_BODY_BYTES: Final = 16 * 1024


def make_application(console: Console) -> Application:
    """Return Tornado's application with all pages."""
    # A reverse proxy may remove the path of public_url from a request, or leave it.
    prefix = re.escape(console.addresses.prefix)
    prefix = f"(?:{prefix})?" if prefix else ""
    services = {"console": console}
    rules: list[tuple[str, type[RequestHandler], dict[str, object]]] = [
        (f"{prefix}{re.escape(path)}", handler, {**services}) for path, handler in ROUTES.items()
    ]
    rules.append((f"{prefix}/static/(.+)", StaticHandler, {**services, "path": str(STATIC)}))
    return Application(
        rules,
        template_path=str(TEMPLATES),
        compress_response=True,
        default_handler_class=MissingHandler,
        default_handler_args=services,
        # The line of the access log would contain the query.
        log_function=lambda _: None,
        console=console,
    )


class ConsoleServer(HTTPServer):
    """Tornado's server with bounds: connections, sizes and times."""

    def initialize(self, application: Application) -> None:  # type: ignore[override]
        """Set the bounds."""
        console: Console = application.settings["console"]
        self._known = functools.partial(_has_session, console)
        #: The open connections. The one whose last request began first is first.
        self._open: dict[HTTP1ServerConnection, IOStream] = {}
        server, limits = console.config.server, console.config.limits
        super().initialize(
            application,
            max_header_size=limits.header_bytes,
            max_body_size=MAX_BODY_BYTES,
            max_buffer_size=MAX_BODY_BYTES + limits.header_bytes,
            idle_connection_timeout=server.idle_timeout,
            body_timeout=server.request_timeout,
        )

    def start_request(
        self, server_conn: object, request_conn: HTTPConnection
    ) -> HTTPMessageDelegate:
        """Bound the size of a form by who sends it."""
        assert isinstance(server_conn, HTTP1ServerConnection)
        self._open.pop(server_conn, None)
        self._open[server_conn] = server_conn.stream
        return _Bounded(super().start_request(server_conn, request_conn), request_conn, self._known)

    def handle_stream(self, stream: IOStream, address: tuple[str, int]) -> None:
        """Serve a connection; if there are too many, the one that was idle longest is closed."""
        if len(self._open) >= MAX_CONNECTIONS:
            self._open.pop(next(iter(self._open))).close()
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        """Forget a connection."""
        assert isinstance(server_conn, HTTP1ServerConnection)
        self._open.pop(server_conn, None)
        super().on_close(server_conn)


def _has_session(console: Console, headers: HTTPHeaders) -> bool:
    name = console.addresses.cookie_name(headers.get("Host", ""))
    try:
        cookies = parse_cookie(headers.get("Cookie", ""))
    except ValueError:
        return False
    return console.sessions.is_signed(name, cookies.get(name))


class _Bounded(HTTPMessageDelegate):
    """Sets the maximum size of a body when the head of its request is known."""

    def __init__(
        self,
        inner: HTTPMessageDelegate,
        connection: HTTPConnection,
        known: Callable[[HTTPHeaders], bool],
    ) -> None:
        self._inner = inner
        self._connection = connection
        self._known = known

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        if isinstance(self._connection, HTTP1Connection):
            limit = MAX_BODY_BYTES if self._known(headers) else MAX_STRANGERS_BODY_BYTES
            self._connection.set_max_body_size(limit)
        return self._inner.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return self._inner.data_received(chunk)

    def finish(self) -> None:
        self._inner.finish()

    def on_connection_close(self) -> None:
        self._inner.on_connection_close()
