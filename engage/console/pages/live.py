# SPDX-License-Identifier: Apache-2.0
"""``/live`` and ``/live.json``: events, a second after they were stored."""

from __future__ import annotations

from engage.console.base import ConsoleHandler
from engage.console.pages.events import fields_of
from engage.reading.live import RING, RowFilter

__all__ = ["LiveHandler", "LiveJsonHandler"]

#: Rows in the page; the script gets the others as they come.
FIRST = 100


def given_to(handler: ConsoleHandler) -> dict[str, str]:
    """Return the filter in the query."""
    names = ("status", "type", "name", "key", "user")
    return {name: text for name in names if (text := handler.get_query_argument(name, ""))}


class LiveHandler(ConsoleHandler):
    """The newest rows; the script adds those that come."""

    async def get(self) -> None:
        """Show the rows of the ring that the filters select."""
        live, given = self.console.live, given_to(self)
        await live.look(self.workspace.id)
        if live.error is not None:
            self.show_outage(live.error)
        row_filter = RowFilter(workspace_id=self.workspace.id, **given)
        rows = [] if self.unverified else live.rows(row_filter)
        self.page(
            "live.html",
            title="Live",
            nav="live",
            rows=rows[:FIRST],
            last=live.last,
            fields={"status": ("Status", ("stored", "rejected"))} | fields_of(self),
            given=given,
            stored=self.link("events", **given | {"status": None}),
            oldest=live.oldest(self.workspace.id),
            ring=RING,
            refused=live.refused(self.workspace.id),
        )


class LiveJsonHandler(ConsoleHandler):
    """The rows that came after those that a page has."""

    async def get(self) -> None:
        """Answer with the rows after ``after``."""
        live = self.console.live
        try:
            after = int(self.get_query_argument("after", "0"))
        except ValueError:
            after = 0
        await live.look(self.workspace.id)
        # A page of an earlier process of the console begins again.
        if after > live.last:
            after = 0
        row_filter = RowFilter(workspace_id=self.workspace.id, **given_to(self))
        rows = [] if self.unverified else live.rows(row_filter, after)
        version = str(live.refused_version)
        changed = self.get_query_argument("refused", "") != version
        self.json(
            {
                "after": live.last,
                "rows": [row.as_dict() for row in rows],
                "gap": live.has_gap(self.workspace.id, after),
                "outage": self.unverified or live.error,
                "last": self.console.reader.last_good,
                "refusedVersion": version,
                "refused": [row.as_dict() for row in live.refused(self.workspace.id)]
                if changed
                else None,
            }
        )
