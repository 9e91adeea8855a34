# SPDX-License-Identifier: Apache-2.0
"""The work that all pages of the console share, before and after their own.

A page is a subclass of :class:`ConsoleHandler` with an asynchronous ``get`` or ``post``. Before it
runs, :meth:`ConsoleHandler.prepare` refuses, in this order: a foreign ``Host``, a method that the
page does not have, a change that a foreign page asked for, a change of a console that only shows,
and a caller who is not signed in.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import http.client
import json
import logging
import secrets
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar
from urllib.parse import urlencode

from tornado.http1connection import HTTP1ServerConnection
from tornado.web import Finish, HTTPError, RequestHandler

import engage
from engage.api import StorageUnavailable
from engage.audit import Actor, record_audit
from engage.console.data.reader import PATIENCE, Outage
from engage.console.data.seen import Seen, seen
from engage.console.display import formats, parts
from engage.console.headers import HEADERS
from engage.console.sign_in.addresses import session_name
from engage.console.sign_in.sessions import IDLE_SECONDS, Session
from engage.http1.addresses import client_address
from engage.reading.live import RowFilter

if TYPE_CHECKING:
    from types import TracebackType

    from engage.api import BudgetUse
    from engage.config import Workspace
    from engage.console.connections import Connection, Connections
    from engage.console.data.history import Overview
    from engage.console.services import Console

__all__ = ["STATIC", "TEMPLATES", "ConsoleHandler"]

_log = logging.getLogger(__name__)

_REASONS: Final = http.client.responses

TEMPLATES: Final = Path(__file__).parent / "templates"
STATIC: Final = Path(__file__).parent / "static"

#: Parameters of a query that hold a cursor of the store.
CURSORS: Final = ("before", "after")

SAFE_METHODS: Final = ("GET", "HEAD")

Result = TypeVar("Result")


class ConsoleHandler(RequestHandler):
    """Base of all pages.

    Every template has the names that ``templates/base.html`` lists, ``link("event", id=…)``,
    ``read_only``, ``request_id``, and the arguments of the page.
    """

    #: Whether the page is served to anyone.
    public: ClassVar[bool] = False
    #: Whether its ``post`` also works in a console that only shows.
    works_read_only: ClassVar[bool] = False
    #: Whether its ``post`` needs a session that cannot have ended.
    fails_closed: ClassVar[bool] = True
    #: Whether the requests of strangers take turns.
    in_turn: ClassVar[bool] = True
    #: See https://www.w3.org/TR/referrer-policy/. With ``no-referrer``, the forms of a page would
    #: send ``Origin: null``, and could not be told from those of a foreign page.
    referrer_policy: ClassVar[str] = "same-origin"

    def initialize(self, console: Console) -> None:
        """Take over the services, and give the request an id."""
        self.console = console
        #: A call of the store that failed in this request: shown as a bar on top of the page.
        self.outage: Outage | None = None
        #: The number beside "Rejected"; 0: none, or unknown.
        self.rejected = 0
        #: ``None``: the caller is not signed in.
        self.session: Session | None = None
        #: Why the session may have ended: then nothing is shown but what a browser has already.
        self.unverified: str | None = None
        #: Whether the request had its turn.
        self.admitted = False

    async def prepare(self) -> None:
        """Refuse requests that must not reach the page. See the module."""
        connections, connection = self.console.connections, self.connection
        connections.arrived(connection)
        if not connection.trusted and await self.has_link():
            connection.trusted = connection.has_link = True
        if self.in_turn and not await connections.wait_for_turn(connection):
            raise HTTPError(503)
        self.admitted = True
        if connection.trusted:
            self.clear_header("Connection")
        addresses = self.console.addresses
        if not addresses.allows_host(self.request.host):
            raise HTTPError(421)
        if addresses.prefix and self.request.path == addresses.prefix:
            # Relative links of a page begin at the last slash.
            self.redirect(f"{addresses.prefix.rpartition('/')[2]}/", status=303)
            raise Finish
        method = self.request.method or ""
        own = getattr(type(self), method.lower(), None)
        if own is None or own is getattr(RequestHandler, method.lower()):
            raise HTTPError(405)
        if method not in SAFE_METHODS:
            if not self.is_from_console():
                raise HTTPError(403, reason="This request did not come from a page of the console")
            if self.console.settings.read_only and not self.works_read_only:
                raise HTTPError(403, reason="This console is read-only")
        await self.identify()
        if not self.public and self.person is None:
            if self.wants_json:
                raise HTTPError(401)
            self.go("login", workspace=None, next=self._here())
            raise Finish
        if method == "GET" and not self.public and not self.wants_json and not self.outage:
            await self.count_rejected()

    async def count_rejected(self, *, fresh: bool = False) -> Sequence[BudgetUse]:
        """Set the number beside "Rejected"; see :meth:`Badge.uses`."""
        workspace = self._workspace_or_first().id
        uses = await self._unless_down(self.console.badge.uses(workspace, fresh=fresh)) or ()
        self.rejected = sum(use.count for use in uses)
        return uses

    async def numbers(self, span: str) -> Overview | None:
        """Return the numbers of the workspace; ``None``: the store is down.

        :param span: a key of :data:`engage.console.data.history.RANGES`.
        """
        return await self._unless_down(self.console.overview(self.workspace.id, span))

    async def _unless_down(self, call: Coroutine[Any, Any, Result]) -> Result | None:
        if self.outage is not None:
            call.close()
            return None
        try:
            return await call
        except StorageUnavailable as error:
            self.show_outage(str(error))
            return None

    def on_finish(self) -> None:
        """Note that the request is answered."""
        self.console.connections.answered(self.connection)

    @functools.cached_property
    def connection(self) -> Connection:
        """The connection over which the request came."""
        server = self.request.server_connection
        assert isinstance(server, HTTP1ServerConnection)
        connections: Connections = self.settings["console"].connections
        return connections.of(server.stream)

    async def has_link(self) -> bool:
        """Return whether the request has a one-time link that works."""
        return False

    def _here(self) -> str | None:
        """Return the page that was asked for, so that signing in leads to it."""
        if self.request.method not in SAFE_METHODS:
            return None
        path = self.request.path.removeprefix(self.console.addresses.prefix).lstrip("/")
        query = self.request.query
        return (f"{path}?{query}" if query else path) or None

    def is_from_console(self) -> bool:
        """Return whether a request that changes something was sent by a page of the console."""
        return self.console.addresses.same_origin(self.request.headers, self.request.host)

    async def identify(self) -> None:
        """Find the session of the caller."""
        sessions = self.console.sessions
        name = self.session_name
        cookie = self.get_cookie(self.cookie_name)
        shows = self.request.method in SAFE_METHODS
        try:
            session = await sessions.check(name, cookie, within=PATIENCE if shows else None)
        except StorageUnavailable as error:
            if self.public:  # The page works without a session.
                return
            if not shows and self.fails_closed:
                raise
            session = sessions.recall(name, cookie)
            self.unverified = str(error)
            self.show_outage(self.unverified)
        self.session = session
        # A script that polls does not show that a person is there.
        if session is not None and not self.wants_json:
            renewed = sessions.renewed(name, session)
            if renewed is not None:
                self.set_session_cookie(renewed)

    @property
    def cookie_name(self) -> str:
        """The name of the session cookie."""
        return self.console.addresses.cookie_name(self.request.host)

    @property
    def session_name(self) -> str:
        """The name with which a session is signed."""
        return session_name(self.cookie_name, self.request.host)

    def set_session_cookie(self, value: str) -> None:
        """Send the session cookie to the browser; an empty value makes the browser forget it."""
        self.set_cookie(
            self.cookie_name,
            value,
            path=f"{self.console.addresses.prefix}/",
            expires=None if value else 1.0,  # 1970
            secure=self.console.addresses.https,
            httponly=True,
            samesite="Strict",
            max_age=IDLE_SECONDS if value else 0,
        )

    @property
    def person(self) -> str | None:
        """The person who is signed in, for the audit, or ``None``."""
        return None if self.session is None else f"session {self.session.id[:6]}"

    @property
    def actor(self) -> Actor:
        """The caller, for the audit."""
        return Actor(who=self.person or "", origin=self.address)

    async def head(self) -> None:
        """Answer as ``GET`` does; the body is left out."""
        await self.get()  # type: ignore[misc]

    @functools.cached_property
    def request_id(self) -> str:
        """The id of the request in the log and on error pages."""
        return secrets.token_hex(8)

    @property
    def address(self) -> str:
        """The address of the client."""
        return client_address(
            self.request.remote_ip or "",
            self.request.headers.get_list("X-Forwarded-For"),
            self.console.trusted_proxies,
        )

    @property
    def wants_json(self) -> bool:
        """Whether a script sent the request."""
        path = self.request.path
        return path.endswith(".json") or self.request.headers.get("Accept") == "application/json"

    @property
    def base(self) -> str:
        """The start of every relative link, which leads to the console's root."""
        path = self.request.path.removeprefix(self.console.addresses.prefix)
        return "../" * max(path.count("/") - 1, 0)

    @functools.cached_property
    def workspace(self) -> Workspace:
        """The workspace that ``?workspace=`` names, or the first one.

        :raises HTTPError: 404, if there is no such workspace.
        """
        chosen = self.get_argument("workspace", None)
        workspaces = self.console.config.workspaces
        for workspace in workspaces:
            if chosen in (None, "", workspace.id):
                return workspace
        raise HTTPError(404, reason="There is no such workspace")

    def exact(self, name: str) -> str:
        """Return a parameter of the query or the form as it was sent; ``""`` if it was not.

        Ids and names of clients may begin with a space and have control characters, which
        ``get_argument`` removes.
        """
        values = self.request.arguments.get(name)
        return self.decode_argument(values[-1], name) if values else ""

    def whole(self, name: str) -> int | None:
        """Return a number of the form or the query; ``None`` if they have none."""
        text = self.get_argument(name, "")
        return int(text) if text.isdecimal() and len(text) < 16 else None

    def cursor(self, name: str) -> str | None:
        """Return a parameter that holds a cursor; ``None`` if the query does not have it."""
        return self.exact(name) if name in self.request.query_arguments else None

    def page(self, template: str, *, title: str, nav: str | None = None, **values: Any) -> None:
        """Answer with a page.

        :param template: the name of a file in ``templates/``.
        :param nav: the name of the page in the navigation, such as ``live``; ``None``: none.
        :param values: other names for the template.
        """
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(self.render_string(template, title=title, nav=nav, **values))

    def json(self, value: Any) -> None:
        """Answer with JSON."""
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def go(self, route: str, /, **query: str | int | None) -> None:
        """Answer 303: the browser is to ``GET`` another page of the console.

        :param route: its route without a slash at the beginning, such as ``keys``; ``""`` is the
            overview.
        """
        self.set_status(303)
        # Relative, because a reverse proxy may serve the console under another path.
        self.set_header("Location", self.link(route, **query))
        self.finish()

    def link(self, route: str, /, **query: str | int | None) -> str:
        """Return a relative link to a page of this workspace, unless the query names another one.

        ``None`` values of the query are left out.
        """
        if not self.public:
            query = {"workspace": self._workspace_or_first().id, **query}
        given = {name: value for name, value in query.items() if value is not None}
        path = f"{self.base}{route}" or "./"
        return f"{path}?{urlencode(given)}" if given else path

    async def read(self, call: Awaitable[Result]) -> Result | None:
        """Call the store.

        A page that reads shows as much as it can: if the store cannot answer, the page has a bar
        with the reason, and does not call the store again. Code that changes something uses
        ``console.reader.read`` instead, whose error becomes a page with status 503.

        :param call: such as ``self.console.store.find(…)``.
        :return: the result; ``None`` if the store cannot answer.
        :raises HTTPError: 400, if the query has a cursor that the store did not return.
        """
        if self.outage is not None:
            if asyncio.iscoroutine(call):
                call.close()
            return None
        try:
            return await self._unless_down(self.console.reader.read(call))
        except (ValueError, OverflowError) as error:
            if any(name in self.request.query_arguments for name in CURSORS):
                raise HTTPError(400, reason="This link is not one of the console") from error
            raise

    def show_outage(self, reason: str) -> None:
        """Show a bar that says why the storage does not answer."""
        self.outage = Outage(reason, self.console.reader.last_good)

    async def record_audit(
        self,
        action: str,
        *,
        origin: str | None = None,
        entry_id: str | None = None,
        **details: Any,
    ) -> None:
        """Record an action of the caller: in the log and in the
        store.

        :param action: such as ``key-disabled``.
        :param origin: instead of the address of the client.
        :param entry_id: of an entry that this one replaces.
        :param details: small JSON values: ids, counts, never a secret or the text of an event.
        """
        actor = Actor(who=self.person or "", origin=origin or self.address)
        store, now = self.console.store, self.console.now()
        try:
            written = record_audit(store, actor, action, details, now=now, entry_id=entry_id)
            # Signing in does not wait for the pages that others have open.
            await self.console.reader.read(written, waits=not self.public)
        except StorageUnavailable:  # The action itself was carried out.
            _log.exception("an entry of the audit could not be stored")

    def get_template_namespace(self) -> dict[str, Any]:
        """Return the names that every template has."""
        return {
            **{name: getattr(part, name) for part in (formats, parts) for name in part.__all__},
            **super().get_template_namespace(),
            "base": self.base,
            "static": self._static,
            "link": self.link,
            "workspace": self._workspace_or_first().id,
            "workspaces": self.console.config.workspaces,
            "person": self.person,
            "read_only": self.console.settings.read_only,
            "rejected": self.rejected,
            "outage": self.outage,
            "theme": self.get_cookie("engage-theme", ""),
            "utc": self.get_cookie("engage-times") == "utc",
            "version": engage.__version__,
            "request_id": self.request_id,
            "search": self._searched(),
            "seen": self._seen(),
        }

    def _seen(self) -> Seen:
        """Return the suggestions for the search fields: what the console has read lately."""
        if self.person is None or self.unverified:
            return Seen()
        return seen(self.console.live.rows(RowFilter(workspace_id=self._workspace_or_first().id)))

    def _searched(self) -> str:
        """Return the text in the search box."""
        try:
            return self.get_query_argument("q", "")
        except HTTPError:  # It is not UTF-8. The error page also has a search box.
            return ""

    def _workspace_or_first(self) -> Workspace:
        try:
            return self.workspace
        except HTTPError:
            return self.console.config.workspaces[0]

    def _static(self, name: str) -> str:
        return f"static/{name}?v={_version_of(name)}"

    def set_default_headers(self) -> None:
        """Set the headers of every answer, errors included."""
        self.clear_header("Server")
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.set_header("Referrer-Policy", self.referrer_policy)
        self.set_header("X-Request-Id", self.request_id)
        if not self.connection.trusted:
            self.set_header("Connection", "close")

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with an error page, or with JSON. Neither has a traceback or data of the
        request."""
        if not self.admitted:  # Even an error page costs time.
            self.set_header("Content-Type", "text/plain")
            self.finish(f"{_REASONS.get(status_code, 'Error')}\n")
            return
        error = (kwargs.get("exc_info") or (None, None, None))[1]
        reason = _REASONS.get(status_code, "Error")
        detail = _DETAILS.get(status_code, "")
        if isinstance(error, HTTPError) and error.reason:
            detail = error.reason
        if isinstance(error, StorageUnavailable):
            status_code, reason, detail = 503, "The storage does not answer", formats.visible(error)
        # The reason of an HTTPError is for the page; the status line has that of the status.
        self.set_status(status_code, _REASONS.get(status_code, "Error"))
        if self.wants_json:
            self.json({"error": reason, "detail": detail, "requestId": self.request_id})
            return
        self.page(
            "stopped.html" if self.person is None else "error.html",
            title=reason,
            status=status_code,
            detail=detail,
        )

    def log_exception(
        self,
        typ: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Log an unexpected error with the id that the error page shows."""
        if isinstance(value, HTTPError):
            return
        fields = {"requestId": self.request_id}
        if isinstance(value, StorageUnavailable):
            _log.warning("console: the storage does not answer: %s", value, extra=fields)
        elif typ is not None and value is not None:
            _log.error("console: a page failed", exc_info=(typ, value, tb), extra=fields)


_DETAILS: Final[Mapping[int, str]] = {
    401: "Sign in first",
    404: "There is no such page",
    405: "This page does not accept this method",
    421: "This name is not one of the console's: see console.allowed_hosts in docs/console.md",
    500: "An error of the console; its log has the reason under this id",
}


@functools.cache
def _version_of(name: str) -> str:
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:16]
