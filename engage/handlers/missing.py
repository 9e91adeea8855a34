# SPDX-License-Identifier: Apache-2.0
"""Paths that are not there."""

from __future__ import annotations

from engage.errors import ApiError
from engage.handlers.ingestion import IngestionHandler

__all__ = ["MissingHandler"]


class MissingHandler(IngestionHandler):
    """404 for every method."""

    def check(self) -> None:
        """Refuse."""
        raise self.not_allowed()

    def not_allowed(self) -> ApiError:
        """See :meth:`Handler.not_allowed`."""
        return ApiError("not_found", "there is nothing at this path")

    def options(self, *_: str, **__: str) -> None:
        """Answer ``OPTIONS *``, and preflights: only then may a page's script read the 404."""
        asks = "Access-Control-Request-Method" in self.request.headers
        if self.request.path != "*" and not asks:
            raise self.not_allowed()
        super().options()
