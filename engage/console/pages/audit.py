# SPDX-License-Identifier: Apache-2.0
"""``/audit``: who did what in the console and with commands."""

from __future__ import annotations

from engage.console.base import ConsoleHandler
from engage.console.display.formats import ROWS
from engage.upkeep.audit import AUDIT, read_entry

__all__ = ["AuditHandler"]


class AuditHandler(ConsoleHandler):
    """The entries of the audit, newest first."""

    async def get(self) -> None:
        """Show one page of entries."""
        after = self.cursor("after")
        page = await self.read(
            self.console.store.list_records(AUDIT, "", after=after, limit=ROWS, reverse=True)
        )
        self.page(
            "audit.html",
            title="Audit",
            nav="audit",
            entries=None if page is None else [read_entry(record) for record in page.items],
            older=None if page is None else page.cursor,
        )
