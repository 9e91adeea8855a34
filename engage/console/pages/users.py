# SPDX-License-Identifier: Apache-2.0
"""``/users`` and ``/user``: the users of a workspace, and one of them with all that is known."""

from __future__ import annotations

import json
from typing import Any, Final

from engage.api import (
    Event,
    EventFilter,
    ProfileStore,
    SubscriptionRecord,
    SubscriptionStore,
    UserProfile,
)
from engage.console.base import ConsoleHandler
from engage.console.live import row_of_event

__all__ = ["UserHandler", "UsersHandler"]

#: Users on a page.
PAGE: Final = 50
#: Newest events of a user on their page, and calls of the storage to find them.
EVENTS: Final = 50
CALLS: Final = 4
#: Entries of a user's history of choices.
CHOICES: Final = 200
#: Traits in a line of the list.
SHOWN_TRAITS: Final = 4


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class UsersHandler(ConsoleHandler):
    """The users, in the order of the store."""

    async def get(self) -> None:
        """Show one page of users."""
        store = self.console.store
        page = None
        if isinstance(store, ProfileStore):
            after = self.get_query_argument("after", None)
            page = await self.read(store.scan_users(self.workspace.id, after=after, limit=PAGE))
        users = None
        if page is not None:
            users = [(user, self._summary(user)) for user in page.items]
        self.page(
            "users.html",
            title="Users",
            nav="users",
            supported=isinstance(store, ProfileStore),
            users=users,
            first=self.get_query_argument("after", None) is None,
            more=None if page is None else page.cursor,
            identifiers=self.workspace.subscription_identifiers,
        )

    def _summary(self, user: UserProfile) -> list[tuple[str, str]]:
        """Return the first traits: those by which users are looked up, then the others."""
        known = [name for name in self.workspace.subscription_identifiers if name in user.traits]
        others = [name for name in user.traits if name not in known]
        return [
            (name, _as_text(user.traits[name])[:80]) for name in (known + others)[:SHOWN_TRAITS]
        ]


class UserHandler(ConsoleHandler):
    """One user."""

    async def get(self) -> None:
        """Show the user."""
        store = self.console.store
        user_id = self.exact("id")
        workspace = self.workspace
        user = None
        if isinstance(store, ProfileStore):
            user = await self.read(store.profile(workspace.id, user_id))
        choices: dict[str, bool] = {}
        history: list[SubscriptionRecord] = []
        if isinstance(store, SubscriptionStore):
            choices = dict(await self.read(store.state(workspace.id, user_id)) or {})
            found = await self.read(store.history(workspace.id, user_id, after=None, limit=CHOICES))
            history = [] if found is None else list(found.items[::-1])
        events, complete = await self._events(user_id)
        if user is None and not events and not history and self.outage is None:
            self.set_status(404)
        names = {group.id: group.name for group in workspace.subscription_groups}
        self.page(
            "user.html",
            title=user_id,
            nav="users",
            user_id=user_id,
            user=user,
            supported=isinstance(store, ProfileStore),
            traits=[] if user is None else self._traits(user),
            text=""
            if user is None
            else json.dumps(dict(user.traits), ensure_ascii=False, indent=2, default=str),
            choices=[(names.get(group, group), on) for group, on in sorted(choices.items())],
            history=history,
            names=names,
            rows=None if events is None else [row_of_event(event) for event in events],
            complete=complete,
        )

    def _traits(self, user: UserProfile) -> list[tuple[str, str, int | None, bool]]:
        """Return (name, value, when it was set, whether users are looked up by it)."""
        identifiers = self.workspace.subscription_identifiers
        return [
            (name, _as_text(value), user.trait_times.get(name), name in identifiers)
            for name, value in sorted(
                user.traits.items(), key=lambda item: (item[0] not in identifiers, item[0])
            )
        ]

    async def _events(self, user_id: str) -> tuple[list[Event] | None, bool]:
        """Return the newest events, and whether all events were looked at."""
        wanted = EventFilter(workspace_id=self.workspace.id, user_id=user_id)
        events: list[Event] = []
        before: str | None = None
        for _ in range(CALLS):
            page = await self.read(
                self.console.store.recent(wanted, before=before, limit=EVENTS - len(events))
            )
            if page is None:
                return (None, False) if not events else (events, False)
            events += [event for event in page.items if wanted.matches(event)]
            before = page.cursor
            if before is None:
                return events, True
            if len(events) >= EVENTS:
                break
        return events, False
