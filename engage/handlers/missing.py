# SPDX-License-Identifier: Apache-2.0
"""Paths that do not exist."""

from __future__ import annotations

from engage.errors import ApiError
from engage.handlers.files import FileHandler, StaticFile, welcome

__all__ = ["MissingHandler"]


class MissingHandler(FileHandler):
    """Answers 404 to every request, except to a browser that opens ``/``."""

    def check(self) -> None:
        """Refuse the request, unless a person is to see the answer."""
        request = self.request
        opens = request.path == "/" and request.method in ("GET", "HEAD")
        if not (opens and "text/html" in request.fields.get("Accept", "")):
            raise self.not_allowed()

    def file(self) -> StaticFile:
        config = self.services.config
        console = config.console
        # A server with a public address does not tell strangers where its console is.
        if console is None or not console.port or config.server.public_url or console.public_url:
            return welcome(None)
        return welcome(f"http://127.0.0.1:{console.port}")

    def not_allowed(self) -> ApiError:
        return ApiError("not_found", "there is nothing at this path")

    def options(self, **_: str) -> None:
        """Answer ``OPTIONS *`` and preflights, without which no page could read the 404."""
        preflight = "Access-Control-Request-Method" in self.request.fields
        if self.request.path != "*" and not preflight:
            raise self.not_allowed()
        super().options()
