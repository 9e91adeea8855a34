# SPDX-License-Identifier: Apache-2.0
"""``/rejected``: the dead letters of a workspace, grouped by their errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tornado.web import HTTPError

from engage.api import BudgetName, DeadLetter, Page
from engage.console.base import ConsoleHandler
from engage.console.data.badge import budgets_of
from engage.console.display.formats import ROWS
from engage.console.listing import Found, ListPage
from engage.pipeline.bulk_replay import BulkReplay
from engage.pipeline.replay import is_delivery
from engage.reading.letter_groups import LetterFilter, delete_letters, group_letters
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.pipeline.explain import Explained

__all__ = ["RejectedHandler", "cause_link"]

#: Seconds for which one request deletes letters.
DELETE_SECONDS: Final = 5.0

#: What can be asked of all letters of a cause.
ACTIONS: Final = ("replay", "delete")
BUDGETS: Final[dict[BudgetName, str]] = {
    "api": "rejected events",
    "webhook": "rejected webhook deliveries",
    "conflict": "events with a conflicting message id",
}


def cause_link(handler: ConsoleHandler, cause: LetterFilter, **query: str) -> str:
    """Return the link to the letters of a cause."""
    return handler.link("rejected", **_query(cause), **query) + "#cause"


def _query(cause: LetterFilter) -> dict[str, str | None]:
    return {name: getattr(cause, name) for name in ("reason", "pointer", "rule", "key", "origin")}


class RejectedHandler(ListPage):
    """The groups, and the letters newest first."""

    name, what = "rejected", "rejected events"

    def rows(self, **page: Any) -> Awaitable[Page[DeadLetter]]:
        """Read letters."""
        return self.console.store.recent_dead_letters(self.workspace.id, **page)

    def fits(self, row: DeadLetter) -> bool:
        """Return whether a letter has the cause that the query names."""
        return self.filter.matches(row)

    @functools.cached_property
    def filter(self) -> LetterFilter:
        """The filter in the query or the form. An empty pointer is the whole item."""
        return LetterFilter(
            reason=self.exact("reason") or None,
            pointer=self.exact("pointer") if "pointer" in self.request.arguments else None,
            rule=self.exact("rule") if "rule" in self.request.arguments else None,
            key=self.exact("key") or None,
            origin=self.exact("origin") or None,
            until=self.whole("until"),
        )

    @functools.cached_property
    def given(self) -> Mapping[str, str | None]:
        """The filter, as the links of the page repeat it."""
        return {} if self.filter == LetterFilter() else _query(self.filter)

    async def beside(self, page: Found[DeadLetter]) -> Mapping[str, Any]:
        """Return the groups, and what was asked about one."""
        workspace, live = self.workspace.id, self.console.live
        grouped = await self.read(group_letters(self.console.store, workspace))
        uses = await self.count_rejected(fresh=True)
        day = await self.numbers("24h")
        await live.look(workspace)
        budget = self.console.config.limits.dead_letter_budget
        ask = ask if (ask := self.get_query_argument("ask", "")) in ACTIONS else ""
        groups = grouped.groups if grouped else ()
        return {
            "grouped": grouped,
            "letter_filter": self.filter,
            "refused": [] if self.unverified else live.refused(workspace)[:ROWS],
            "budgets": [row for row in budgets_of(uses, budget) if row.use.count],
            "budget_names": BUDGETS,
            "rejections": None if day is None else sum(day.outcomes["rejected"]),
            "done": self.get_query_argument("done", ""),
            "count": self.get_query_argument("count", ""),
            "chosen": [group for group in groups if self.filter.matches(group.example)],
            "ask": ask,
            "tried": await self._tried(page.rows) if ask == "replay" else [],
            "cause_link": cause_link,
            "partial": functools.partial,
        }

    async def post(self) -> None:
        """Replay all letters of a group in the background, or delete them."""
        store, cause = self.console.store, self.filter
        action = self.get_body_argument("action", "")
        if action == "replay":
            self._replay(store, cause)
            self.go("replays")
        elif action == "delete":
            count = await delete_letters(
                store,
                self.workspace.id,
                dataclasses.replace(cause, until=cause.until or self.console.now() + 1),
                call=self.console.reader.read,
                seconds=DELETE_SECONDS,
            )
            await self.record_audit(
                "letters-deleted",
                workspace=self.workspace.id,
                **_query(cause),
                count=count,
            )
            self.go("rejected", done="deleted", count=count)
        else:
            raise HTTPError(400, reason="This page has no such action")

    def _replay(self, store: Storage, cause: LetterFilter) -> None:
        running = self.console.replay
        if running is not None and running.state == "running":
            who = running.actor.who
            raise HTTPError(409, reason=f"A replay is running, started by {who}; wait or cancel it")
        app = self.console.app
        self.console.replay = BulkReplay(
            store,
            app.replays,
            self.workspace.id,
            cause,
            actor=self.actor,
            clock=app.clock,
            new_ids=self.get_body_argument("new_ids", "") == "1",
        )
        self.console.replay.start()

    async def _tried(self, letters: Sequence[DeadLetter]) -> list[Explained]:
        """Return what would become of letters now. A delivery has to be translated for that."""
        tried = [
            await self.read(self.console.app.replays.check(letter))
            for letter in letters
            if not is_delivery(letter)
        ]
        return [explained for explained in tried if explained is not None]
