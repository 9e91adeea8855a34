# SPDX-License-Identifier: Apache-2.0
"""``/subscriptions``: the groups, how many users chose them, and the choices of a user."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping
from typing import Any, Final

from engage.api import Kind, Subject
from engage.console.display.formats import number
from engage.console.listing import Found, ListPage, find
from engage.console.pages.users import CHOICES
from engage.reading.scans import PAGE

__all__ = ["SubscriptionsHandler"]

#: Choices that are counted: a scan, so the page has a bound.
COUNTED: Final = 20_000


class SubscriptionsHandler(ListPage):
    """The groups of a workspace."""

    name, what = "subscriptions", "groups"

    async def find(self) -> Found[Any]:
        """Return the groups."""
        return Found(self.workspace.subscription_groups)

    async def beside(self, page: Found[Any]) -> Mapping[str, Any]:
        """Return the numbers of the choices, and the choices of a user."""
        store, workspace, user = self.console.store, self.workspace, self.exact("user")
        scan = functools.partial(store.scan_subscriptions, workspace.id)
        choices = await find(self, scan, by="after", limit=COUNTED, size=PAGE, seconds=math.inf)
        people = {(row.group_id, row.subject): row.subscribed for row in choices.rows}
        complete = choices.cursor is None and self.outage is None
        note = (
            "Users and visitors who made a choice. In a group of the type opt out, everyone else is"
            " subscribed."
        )
        if not complete:
            note += f" Only the first {number(COUNTED)} choices were counted."
        history = None
        if user:
            subject = Subject(Kind.USER, user)
            past = await self.read(store.history(workspace.id, subject, after=None, limit=CHOICES))
            history = None if past is None else past.items[::-1]
        return {
            "links": bool(workspace.subscription_secrets),
            "counted": collections.Counter(
                (group, chosen)
                for (group, (kind, name)), chosen in people.items()
                # A link of a user unsubscribes the visitor with the same id, too.
                if kind is Kind.USER or people.get((group, Subject(Kind.USER, name))) is not chosen
            ),
            "least": "" if complete else "≥ ",
            "user": user,
            "history": history,
            "note": note if page.rows else "",
        }
