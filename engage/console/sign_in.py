# SPDX-License-Identifier: Apache-2.0
"""The pages with which people sign in and out: ``link``, ``login``, ``logout``; and ``healthz``."""

from __future__ import annotations

from engage.console.base import ConsoleHandler

__all__ = ["HealthHandler", "LoginHandler"]


class HealthHandler(ConsoleHandler):
    """``/healthz``: whether this process answers."""

    public = True

    async def get(self) -> None:
        """Answer 200."""
        self.json({"status": "ok"})


class LoginHandler(ConsoleHandler):
    """``/login``: sign in with the password."""

    public = True
    works_read_only = True

    async def get(self) -> None:
        """Show the form."""
        self.page("login.html", title="Sign in")
