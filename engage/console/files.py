# SPDX-License-Identifier: Apache-2.0
"""The static files, and the answer to every path that is not a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tornado.web import HTTPError, StaticFileHandler

from engage.console.base import ConsoleHandler

if TYPE_CHECKING:
    from engage.console.services import Console

__all__ = ["MissingHandler", "StaticHandler"]


class MissingHandler(ConsoleHandler):
    """Every path that is not a page."""

    async def get(self) -> None:
        """Answer 404."""
        raise HTTPError(404)

    post = get


class StaticHandler(ConsoleHandler, StaticFileHandler):
    """The files in ``static/``. The page for signing in needs them, so anyone may read them."""

    public = True

    def initialize(self, console: Console, path: str) -> None:  # type: ignore[override]
        """Take over the services and the folder."""
        ConsoleHandler.initialize(self, console)
        StaticFileHandler.initialize(self, path)

    @classmethod
    def get_absolute_path(cls, root: str, path: str) -> str:
        """Return the path of a file.

        :raises HTTPError: 404, if no file can have such a name.
        """
        if "\0" in path:
            raise HTTPError(404)
        return super().get_absolute_path(root, path)

    async def head(self, path: str) -> None:  # type: ignore[override]
        """Answer without a body."""
        await StaticFileHandler.get(self, path, include_body=False)

    def set_extra_headers(self, path: str) -> None:
        """Let a browser keep a file whose name has its version."""
        if self.get_argument("v", None):
            self.set_header("Cache-Control", "public, max-age=31536000, immutable")
