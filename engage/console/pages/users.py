# SPDX-License-Identifier: Apache-2.0
"""``/users`` and ``/user``: the users of a workspace, and one of them with all that is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from engage.api import (
    EventFilter,
    ProfileStore,
    SubscriptionRecord,
    SubscriptionStore,
    UserProfile,
)
from engage.console.base import ConsoleHandler
from engage.console.display.formats import LONGEST, ROWS, one_line
from engage.console.pages.events import search_events
from engage.errors import quote
from engage.pipeline.replay import MAX_SHOWN
from engage.upkeep.live import RING, Row, Wanted, row_of_event

__all__ = ["UserHandler", "UsersHandler", "note_on"]

#: Entries of a user's history of choices.
CHOICES: Final = 200
#: Users of the newest events.
LATEST: Final = 10
#: Traits in a line of the list.
SHOWN_TRAITS: Final = 4


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def summary_of(user: UserProfile, identifiers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the first traits: those by which users are looked up, then the others."""
    known = [name for name in identifiers if name in user.traits]
    others = [name for name in user.traits if name not in known]
    names = (known + others)[:SHOWN_TRAITS]
    return [(name, one_line(_as_text(user.traits[name]), LONGEST)) for name in names]


async def note_on(handler: ConsoleHandler, user_id: str, events: str = "") -> str:
    """Return a line about the user of an id: the first traits.

    :param events: how many events have this id, in words; for a user without traits.
    """
    store, workspace = handler.console.store, handler.workspace
    if not isinstance(store, ProfileStore):
        return events
    user = await handler.read(store.profile(workspace.id, user_id))
    if user is None:
        return events if handler.outage else f"No profile yet; {events}".removesuffix("; ")
    traits = summary_of(user, workspace.subscription_identifiers)
    return " · ".join(f"{name} {value}" for name, value in traits) or events


class UsersHandler(ConsoleHandler):
    """The users of the newest events, and all users in the order of the store."""

    async def get(self) -> None:
        """Show one page of users."""
        store = self.console.store
        page = None
        if isinstance(store, ProfileStore):
            after = self.cursor("after")
            page = await self.read(store.scan_users(self.workspace.id, after=after, limit=ROWS))
        users = None
        if page is not None:
            identifiers = self.workspace.subscription_identifiers
            users = [(user, summary_of(user, identifiers)) for user in page.items]
        first = self.cursor("after") is None
        self.page(
            "users.html",
            title="Users",
            nav="users",
            supported=isinstance(store, ProfileStore),
            users=users,
            first=first,
            latest=await self._latest() if first else [],
            ring=RING,
            more=None if page is None else page.cursor,
            identifiers=self.workspace.subscription_identifiers,
        )

    async def _latest(self) -> list[tuple[str, Row, str]]:
        """Return the users of the newest events with the last event and a note, newest first."""
        live = self.console.live
        await live.look(self.workspace.id)
        wanted = Wanted(workspace_id=self.workspace.id, status="stored")
        latest: dict[str, Row] = {}
        for row in () if self.unverified else live.rows(wanted):
            if row.texts.user_id is not None:
                latest.setdefault(row.texts.user_id, row)
        return [
            (user_id, row, await note_on(self, user_id))
            for user_id, row in list(latest.items())[:LATEST]
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
            page = await self.read(store.history(workspace.id, user_id, after=None, limit=CHOICES))
            history = [] if page is None else list(page.items[::-1])
        wanted = EventFilter(workspace_id=workspace.id, user_id=user_id)
        found = await search_events(self, wanted)
        nothing = user is None and not found.events and found.cursor is None and not history
        if nothing and self.outage is None:
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
            else quote(
                json.dumps(dict(user.traits), ensure_ascii=False, indent=2, default=str), MAX_SHOWN
            ),
            choices=[(names.get(group, group), on) for group, on in sorted(choices.items())],
            history=history,
            names=names,
            rows=[row_of_event(event) for event in found.events],
            found=found,
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
