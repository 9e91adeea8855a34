# SPDX-License-Identifier: Apache-2.0
"""The pages with which people sign in and out: ``link``, ``login``, ``logout``; and ``healthz``."""

from __future__ import annotations

import logging
import re
from typing import ClassVar, Final
from urllib.parse import parse_qsl, urlsplit

from tornado.web import HTTPError

from engage.api import StorageUnavailable
from engage.console.base import ConsoleHandler
from engage.console.sign_in.links import link_command

__all__ = ["HealthHandler", "LinkHandler", "LoginHandler", "LogoutHandler"]

#: A route that signing in can lead to.
_ROUTE: Final = re.compile(r"[a-z.]{1,32}", re.ASCII)

_log = logging.getLogger(__name__)


class HealthHandler(ConsoleHandler):
    """``/healthz``: whether this process answers."""

    public = True
    in_turn = False

    async def get(self) -> None:
        """Answer 200."""
        self.json({"status": "ok"})


class _SignIn(ConsoleHandler):
    public = True
    works_read_only = True

    async def sign_in(self, how: str) -> None:
        """Begin a session, and go to the page that the form names."""
        self.session, cookie = await self.console.sessions.issue(self.session_name, how)
        self.set_session_cookie(cookie)
        await self.record_audit("signed-in", how=how)
        path, query = self._next()
        self.go(path, **query)

    def _next(self) -> tuple[str, dict[str, str]]:
        """Return the route and the query of the page that the form names.

        The route has no slash and no colon, so it cannot lead to another site.
        """
        try:
            target = urlsplit(self.get_argument("next", ""))
        except ValueError:
            return "", {}
        if target.scheme or target.netloc or not _ROUTE.fullmatch(target.path):
            return "", {}
        return target.path, dict(parse_qsl(target.query))


class LinkHandler(_SignIn):
    """``/link?t=…``: sign in with a one-time link.

    ``GET`` shows a button. Programs that preview or scan links open them too, and must not use them
    up: only ``POST`` does.
    """

    referrer_policy: ClassVar[str] = "no-referrer"

    async def has_link(self) -> bool:
        """Look for the link, before the request waits for its turn."""
        (token,) = self.request.arguments.get("t", [b""])[-1:]
        return await self.console.links.exists(token.decode("latin-1"))

    async def get(self) -> None:
        """Show the button."""
        token = self.get_query_argument("t", "")
        self._page(token, failed=False)

    async def post(self) -> None:
        """Use the link up, and sign in."""
        # Without the secret no one can sign in, and the link would be used up for nothing.
        await self.console.sessions.read_secret()
        if await self.console.links.redeem(self.get_body_argument("t", "")):
            await self.sign_in("link")
            return
        _log.warning("console: a one-time link was refused", extra={"from": self.address})
        self.set_status(403)
        self._page("", failed=True)

    def _page(self, token: str, *, failed: bool) -> None:
        command = link_command(self.console.config)
        self.page("link.html", title="Sign in", token=token, failed=failed, command=command)

    def is_from_console(self) -> bool:
        """Accept ``Origin: null`` too.

        That is what this page's own form sends over plain HTTP to another machine, because of
        ``no-referrer``. The token in the form proves more than an origin does.
        """
        headers = self.request.headers
        if "Sec-Fetch-Site" not in headers and headers.get("Origin") == "null":
            return True
        return super().is_from_console()


class LoginHandler(_SignIn):
    """``/login``: sign in with the password, if there is one."""

    async def get(self) -> None:
        """Show the form."""
        if self.session is not None:
            path, query = self._next()
            self.go(path, **query)
            return
        self._form()

    async def post(self) -> None:
        """Check the password, and sign in."""
        console = self.console
        password = self.get_body_argument("password", "", strip=False)
        if console.passwords is None:
            raise HTTPError(404, reason="This console has no password; use a one-time link")
        wait = console.throttle.wait(self.address)
        if wait:
            self._too_many(wait)
            return
        console.throttle.failed(self.address)
        if await console.passwords.check(password):
            console.throttle.succeeded(self.address)
            await self.sign_in("password")
            return
        entry_id, origin, count = console.guesses.add(self.address)
        await self.record_audit(
            "sign-in-failed", origin=origin, entry_id=entry_id, how="password", count=count
        )
        self.set_status(403)
        self._form(error="The password is wrong.")

    def _too_many(self, seconds: int) -> None:
        self.set_status(429)
        self.set_header("Retry-After", str(seconds))
        minutes = -(-seconds // 60)
        when = f"{minutes} minutes" if minutes > 1 else "a minute"
        self._form(
            error=f"There were too many attempts. Try again in {when}, or use a one-time link."
        )

    def _form(self, *, error: str | None = None) -> None:
        self.page(
            "login.html",
            title="Sign in",
            next=self.get_argument("next", ""),
            error=error,
            command=link_command(self.console.config),
            has_password=self.console.passwords is not None,
            # A browser that comes from another site does not send the cookie of a session. The page
            # then loads itself once more, which comes from the console.
            again=self.request.headers.get("Sec-Fetch-Site") == "cross-site",
        )


class LogoutHandler(ConsoleHandler):
    """``/logout``: end the session."""

    works_read_only = True
    fails_closed = False

    async def post(self) -> None:
        """End the session everywhere, and show the page for signing in."""
        self.set_session_cookie("")
        if self.session is not None:
            await self.record_audit("signed-out")
            try:
                await self.console.sessions.end(self.session)
            except StorageUnavailable:
                _log.warning("the end of a session could not be stored; the cookie was deleted")
        self.go("login", workspace=None)
