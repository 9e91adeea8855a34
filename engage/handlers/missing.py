# SPDX-License-Identifier: Apache-2.0
"""Paths that are not there."""

from __future__ import annotations

from engage.errors import ApiError
from engage.handlers.base import Handler

__all__ = ["MissingHandler"]


class MissingHandler(Handler):
    """404 for every method; ``OPTIONS`` is answered, so that a browser may read the 404."""

    def check(self) -> None:
        """Refuse."""
        raise self._not_allowed()

    def _not_allowed(self) -> ApiError:
        return ApiError("not_found", "there is nothing here; see the table of operations")
