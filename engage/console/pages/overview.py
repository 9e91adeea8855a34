# SPDX-License-Identifier: Apache-2.0
"""``/``: what arrived, and what needs attention."""

from __future__ import annotations

from engage.console.base import ConsoleHandler

__all__ = ["OverviewHandler"]


class OverviewHandler(ConsoleHandler):
    """The first page."""

    async def get(self) -> None:
        """Show the overview."""
        self.page("overview.html", title="Overview", nav="overview")
