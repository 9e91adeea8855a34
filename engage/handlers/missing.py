# SPDX-License-Identifier: Apache-2.0
"""Paths that do not exist."""

from __future__ import annotations

from engage.errors import ApiError
from engage.handlers.base import Handler

__all__ = ["MissingHandler"]


class MissingHandler(Handler):
    """Answers 404 to every method."""

    def check(self) -> None:
        """Refuse the request."""
        raise self.not_allowed()

    def not_allowed(self) -> ApiError:
        return ApiError("not_found", "there is nothing at this path")

    def options(self, **_: str) -> None:
        """Answer ``OPTIONS *`` and preflights, without which no page could read the 404."""
        preflight = "Access-Control-Request-Method" in self.request.fields
        if self.request.path != "*" and not preflight:
            raise self.not_allowed()
        super().options()
