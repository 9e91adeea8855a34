# SPDX-License-Identifier: Apache-2.0
"""``/audit``: who did what in the console and with commands."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from engage.api import Page, Record
from engage.audit import AUDIT, read_entry
from engage.console.listing import ListPage

__all__ = ["AuditHandler"]


class AuditHandler(ListPage):
    """The entries of the audit, newest first."""

    name, what, by = "audit", "entries", "after"
    shown = staticmethod(read_entry)

    def rows(self, **page: Any) -> Awaitable[Page[Record]]:
        """Read entries."""
        return self.console.store.list_records(AUDIT, "", reverse=True, **page)
