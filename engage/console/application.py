# SPDX-License-Identifier: Apache-2.0
"""The paths of the console and their handlers, and the HTTP server with its bounds."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tornado.http1connection import HTTP1Connection, HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application

from engage.console.base import STATIC, TEMPLATES, ConsoleHandler
from engage.console.connections import RETRY_SECONDS
from engage.console.display.parts import escaped
from engage.console.files import MissingHandler, StaticHandler
from engage.console.headers import HEADERS
from engage.console.pages.audit import AuditHandler
from engage.console.pages.erase import EraseHandler, PersonHandler
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
from engage.console.sign_in.addresses import session_name

if TYPE_CHECKING:
    import socket

    from tornado.httputil import HTTPConnection, HTTPMessageDelegate, HTTPServerRequest
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
    "/user.ndjson": PersonHandler,
    "/erase": EraseHandler,
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

#: Bytes of a form: a dead letter of 1 MiB, of which each byte may become three …
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
#: … and of a form of someone who is not signed in. A form is decoded before a page sees it, and
#: decoding a million fields takes seconds.
MAX_STRANGERS_BODY_BYTES: Final = 16 * 1024
_REFUSAL: Final = "\r\n".join(
    (
        "HTTP/1.1 400 Bad Request",
        *(f"{name}: {value}" for name, value in HEADERS.items()),
        f"Referrer-Policy: {ConsoleHandler.referrer_policy}",
        "Content-Length: 0\r\nConnection: close\r\n\r\n",
    )
).encode()
#: Connections that are accepted in a turn of the event loop, which answers strangers only now and
#: then: the newcomer who has a session or a link is behind them.
ACCEPTED_FIRST: Final = 16


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
    return _Pages(
        rules,
        template_path=str(TEMPLATES),
        autoescape=escaped.__name__,
        compress_response=True,
        default_handler_class=MissingHandler,
        default_handler_args=services,
        # The line of the access log would contain the query.
        log_function=lambda _: None,
        console=console,
    )


class _Pages(Application):
    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        """Find out who sends a request when its head is known, and bound the size of its body."""
        console: Console = self.settings["console"]
        server, connection, host = request.server_connection, request.connection, request.host
        name = console.addresses.cookie_name(host)
        cookie = request.cookies.get(name)
        session = cookie and console.sessions.find(session_name(name, host), cookie.value)
        if isinstance(server, HTTP1ServerConnection):
            client = console.connections.of(server.stream)
            client.trusted = bool(session) or client.has_link
        if isinstance(connection, HTTP1Connection):
            connection.set_max_body_size(MAX_BODY_BYTES if session else MAX_STRANGERS_BODY_BYTES)
        return super().find_handler(request, **kwargs)


class _Stream(IOStream):
    """Gives the headers of every answer to the one with which Tornado itself refuses a request that
    it cannot read, such as a form that is too large."""

    def write(self, data: bytes | memoryview) -> asyncio.Future[None]:
        """Send bytes."""
        return super().write(_REFUSAL if data == b"HTTP/1.1 400 Bad Request\r\n\r\n" else data)


class ConsoleServer(HTTPServer):
    """Tornado's server with bounds: connections, sizes and times."""

    def initialize(self, application: Application) -> None:  # type: ignore[override]
        """Set the bounds."""
        console: Console = application.settings["console"]
        self._console = console
        self._accepting: list[asyncio.Task[None]] = []
        server, limits = console.config.server, console.config.limits
        super().initialize(
            application,
            max_header_size=limits.header_bytes,
            max_body_size=MAX_BODY_BYTES,
            max_buffer_size=MAX_BODY_BYTES + limits.header_bytes,
            idle_connection_timeout=server.idle_timeout,
            body_timeout=server.request_timeout,
        )

    def add_sockets(self, sockets: Iterable[socket.socket]) -> None:
        """Begin to accept connections."""
        self._accepting += [asyncio.create_task(self._accept(sock)) for sock in sockets]

    def stop(self) -> None:
        """Accept no more connections."""
        for task in self._accepting:
            task.cancel()

    async def _accept(self, sock: socket.socket) -> None:
        """Accept connections, as long as there is room; the others wait in the kernel."""
        connections, loop = self._console.connections, asyncio.get_running_loop()
        with sock:
            for count in itertools.count(1):
                if count % ACCEPTED_FIRST == 0:
                    await asyncio.sleep(0)
                try:
                    try:
                        connection, (address, *_) = sock.accept()
                    except BlockingIOError:
                        connection, (address, *_) = await loop.sock_accept(sock)
                except OSError:  # The client is gone, or the system has no room.
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                while (room := connections.make_room(address)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(RETRY_SECONDS)
                if not room:
                    connection.close()
                    continue
                stream = _Stream(connection, max_buffer_size=self.max_buffer_size)
                connections.add(stream, address)
                self.handle_stream(stream, (address, *_))

    def start_request(
        self, server_conn: object, request_conn: HTTPConnection
    ) -> HTTPMessageDelegate:
        """Wait for another request, but not for one of a stranger."""
        assert isinstance(server_conn, HTTP1ServerConnection)
        client = self._console.connections.of(server_conn.stream)
        if client.served and not client.trusted:
            server_conn.stream.close()
        return super().start_request(server_conn, request_conn)

    def on_close(self, server_conn: object) -> None:
        """Forget a connection."""
        assert isinstance(server_conn, HTTP1ServerConnection)
        self._console.connections.remove(server_conn.stream)
        super().on_close(server_conn)
