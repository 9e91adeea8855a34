# SPDX-License-Identifier: Apache-2.0
"""``/subscriptions``: the groups, how many users chose them, and the choices of a user."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Final

from engage.api import Kind, Subject, SubscriptionRecord
from engage.console.base import ConsoleHandler
from engage.console.pages.users import CHOICES
from engage.upkeep.export import PAGE

__all__ = ["SubscriptionsHandler"]

#: Choices that are counted: a scan, so the page has a bound.
COUNTED: Final = 20_000


class SubscriptionsHandler(ConsoleHandler):
    """The groups of a workspace."""

    async def get(self) -> None:
        """Show the groups."""
        store = self.console.store
        user = self.exact("user")
        people: dict[tuple[str, Subject], bool] = {}
        complete = False
        history: Sequence[SubscriptionRecord] | None = None
        after: str | None = None
        seen = 0
        while seen < COUNTED and not complete:
            page = await self.read(
                store.scan_subscriptions(self.workspace.id, after=after, limit=PAGE)
            )
            if page is None:
                break
            people.update({(one.group_id, one.subject): one.subscribed for one in page.items})
            seen += len(page.items)
            after = page.cursor
            complete = after is None
        if user:
            subject = Subject(Kind.USER, user)
            found = await self.read(
                store.history(self.workspace.id, subject, after=None, limit=CHOICES)
            )
            history = None if found is None else found.items[::-1]
        counted = collections.Counter(
            (group, wanted)
            for (group, (kind, name)), wanted in people.items()
            # A link of a user unsubscribes the visitor with the same id, too.
            if kind is Kind.USER or people.get((group, Subject(Kind.USER, name))) is not wanted
        )
        self.page(
            "subscriptions.html",
            title="Subscriptions",
            nav="subscriptions",
            groups=self.workspace.subscription_groups,
            links=bool(self.workspace.subscription_secrets),
            counted=counted,
            complete=complete,
            user=user,
            history=history,
        )
