# SPDX-License-Identifier: Apache-2.0
"""``/search``: from a message id, a user id or an e-mail address to its page."""

from __future__ import annotations

from engage.api import API_ORIGIN, DeadLetterStore, ProfileStore, identifier_value
from engage.console.base import ConsoleHandler

__all__ = ["SearchHandler"]


class SearchHandler(ConsoleHandler):
    """Looks a text up in all indexes, and redirects to the result."""

    async def get(self) -> None:
        """Redirect to the page of the result, or list several users."""
        text = self.exact("q")
        workspace = self.workspace.id
        store = self.console.store
        users: list[str] = []
        for wanted in dict.fromkeys((text, text.strip())):
            if not wanted:
                continue
            for origin in (API_ORIGIN, *self.workspace.webhooks):
                event = await self.read(store.find(workspace, origin, wanted))
                if event is not None:
                    self.go("event", workspace=workspace, origin=origin, id=wanted)
                    return
            if isinstance(store, ProfileStore):
                if await self.read(store.profile(workspace, wanted)) is not None:
                    self.go("user", workspace=workspace, id=wanted)
                    return
                users += await self._by_trait(store, wanted)
            if isinstance(store, DeadLetterStore) and len(wanted) == 32:
                letter = await self.read(store.dead_letter(workspace, wanted))
                if letter is not None:
                    self.go("letter", workspace=workspace, id=wanted)
                    return
        users = list(dict.fromkeys(users))
        if len(users) == 1:
            self.go("user", workspace=workspace, id=users[0])
            return
        self.page("search.html", title="Search", nav=None, text=text.strip(), users=users)

    async def _by_trait(self, store: ProfileStore, text: str) -> list[str]:
        """Return the users of whom a declared identifier trait has this value."""
        found: list[str] = []
        for trait in self.workspace.subscription_identifiers:
            value = identifier_value(trait, text)
            if value is not None:
                users = await self.read(store.find_users(self.workspace.id, trait, [value]))
                found += (users or {}).get(value, ())
        return found
