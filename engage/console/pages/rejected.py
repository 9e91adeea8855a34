# SPDX-License-Identifier: Apache-2.0
"""``/rejected``: the dead letters of a workspace, grouped by their errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tornado.web import HTTPError

from engage.api import (
    BudgetName,
    DeadLetter,
)
from engage.console.base import ConsoleHandler
from engage.console.data.budgets import budgets_of
from engage.console.display.formats import READS, ROWS
from engage.monitoring.recorder import REFUSED_RECORD
from engage.pipeline.bulk_replay import BulkReplay
from engage.pipeline.replay import is_delivery
from engage.store.facade import Storage
from engage.upkeep.audit import Actor
from engage.upkeep.letter_groups import LetterFilter, delete_letters, group_letters
from engage.upkeep.refused import refused_of

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


def cause_link(handler: ConsoleHandler, wanted: LetterFilter, **query: str) -> str:
    """Return the link to the letters of a cause."""
    return handler.link("rejected", **_query(handler, wanted), **query) + "#cause"


def _query(handler: ConsoleHandler, wanted: LetterFilter) -> dict[str, str | None]:
    return {
        "workspace": handler.workspace.id,
        "reason": wanted.reason,
        "pointer": wanted.pointer,
        "rule": wanted.rule,
        "key": wanted.key,
        "origin": wanted.origin,
    }


class RejectedHandler(ConsoleHandler):
    """The groups, and the letters newest first."""

    async def get(self) -> None:
        """Show the groups, and a page of letters."""
        store = self.console.store
        wanted = self._wanted()
        grouped = await self.read(group_letters(store, self.workspace.id))
        letters, older = await self._letters(store, wanted)
        uses = await self.count_rejected(fresh=True)
        day = await self.numbers("24h")
        refused = []
        page = await self.read(store.list_records(REFUSED_RECORD, limit=100))
        refused = [
            one
            for one in ([] if page is None else refused_of(page.items))
            if one.workspace_id in ("", self.workspace.id)
        ]
        budget = self.console.config.limits.dead_letter_budget
        ask = ask if (ask := self.get_query_argument("ask", "")) in ACTIONS else ""
        self.page(
            "rejected.html",
            title="Rejected",
            nav="rejected",
            grouped=grouped,
            wanted=wanted,
            filtered=wanted != LetterFilter(),
            letters=letters,
            older=older,
            first=self.cursor("before") is None,
            refused=refused[:ROWS],
            budgets=[one for one in budgets_of(uses, budget) if one.use.count],
            budget_names=BUDGETS,
            rejections=None if day is None else sum(day.outcomes["rejected"]),
            done=self.get_query_argument("done", ""),
            count=self.get_query_argument("count", ""),
            query=_query(self, wanted),
            chosen=[
                group
                for group in (grouped.groups if grouped else ())
                if wanted.matches(group.example)
            ],
            ask=ask,
            tried=await self._tried(letters or ()) if ask == "replay" else [],
            cause_link=cause_link,
            partial=functools.partial,
        )

    async def post(self) -> None:
        """Replay all letters of a group in the background, or delete them."""
        store = self.console.store
        wanted = self._wanted()
        action = self.get_body_argument("action", "")
        if action == "replay":
            self._replay(store, wanted)
            self.go("replays", workspace=self.workspace.id)
        elif action == "delete":
            count = await delete_letters(
                store,
                self.workspace.id,
                dataclasses.replace(wanted, until=wanted.until or self.console.now() + 1),
                call=self.console.reader.read,
                seconds=DELETE_SECONDS,
            )
            await self.record_audit(
                "letters-deleted",
                workspace=self.workspace.id,
                reason=wanted.reason,
                pointer=wanted.pointer,
                rule=wanted.rule,
                key=wanted.key,
                origin=wanted.origin,
                count=count,
            )
            self.go("rejected", workspace=self.workspace.id, done="deleted", count=count)
        else:
            raise HTTPError(400, reason="This page has no such action")

    def _replay(self, store: Storage, wanted: LetterFilter) -> None:
        running = self.console.replay
        if running is not None and running.state == "running":
            who = running.actor.who
            raise HTTPError(409, reason=f"A replay is running, started by {who}; wait or cancel it")
        app = self.console.app
        self.console.replay = BulkReplay(
            store,
            app.replays,
            self.workspace.id,
            wanted,
            actor=Actor(who=self.person or "", origin=self.address),
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

    def _wanted(self) -> LetterFilter:
        """Return the filter in the query or the form. An empty pointer is the whole item."""
        return LetterFilter(
            reason=self.exact("reason") or None,
            pointer=self.exact("pointer") if "pointer" in self.request.arguments else None,
            rule=self.exact("rule") if "rule" in self.request.arguments else None,
            key=self.exact("key") or None,
            origin=self.exact("origin") or None,
            until=self.whole("until"),
        )

    async def _letters(
        self, store: Storage, wanted: LetterFilter
    ) -> tuple[list[DeadLetter] | None, str | None]:
        """Return the newest letters that match, and the cursor of older ones."""
        letters: list[DeadLetter] = []
        before = self.cursor("before")
        for _ in range(READS):
            page = await self.read(
                store.recent_dead_letters(
                    self.workspace.id, before=before, limit=ROWS - len(letters)
                )
            )
            if page is None:
                return (letters or None), None
            letters += [letter for letter in page.items if wanted.matches(letter)]
            before = page.cursor
            if before is None or len(letters) >= ROWS:
                break
        return letters, before
