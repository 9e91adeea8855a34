# SPDX-License-Identifier: Apache-2.0
"""``/users`` and ``/user``: the users of a workspace, and one user or visitor with all that is
known."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final

from tornado.web import HTTPError

from engage.api import (
    EngageError,
    EventFilter,
    Page,
    ProfileLimits,
    StorageUnavailable,
    UserProfile,
    VisitorProfile,
)
from engage.console.base import ConsoleHandler
from engage.console.display.formats import LONGEST, ROWS, one_line
from engage.console.listing import Found, ListPage
from engage.console.pages.events import search_events
from engage.errors import quote
from engage.pipeline.operator import decide_link
from engage.pipeline.replay import MAX_SHOWN
from engage.reading.live import RING, Row, RowFilter, row_of_event
from engage.store.choices import Known, person
from engage.store.people import people

__all__ = ["UserHandler", "UsersHandler", "note_on"]

#: Entries of a user's history of choices.
CHOICES: Final = 200
#: Users of the newest events.
LATEST: Final = 10
#: Traits in a line of the list.
SHOWN_TRAITS: Final = 4


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def summary_of(
    user: UserProfile | VisitorProfile, identifiers: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the first traits: those by which users are looked up, then the others."""
    named = [name for name in identifiers if name in user.traits]
    others = [name for name in user.traits if name not in named]
    names = (named + others)[:SHOWN_TRAITS]
    return [(name, one_line(_as_text(user.traits[name]), LONGEST)) for name in names]


def note_on(
    handler: ConsoleHandler,
    profile: UserProfile | VisitorProfile | None,
    events: str = "",
    *,
    visitor: bool = False,
) -> str:
    """Return a line about a user or visitor: whom it belongs to, and the first traits.

    :param profile: ``None``: there is no profile.
    :param events: how many events have this id, in words; for a user without traits.
    """
    if profile is None:
        plain = handler.outage or visitor
        return events if plain else f"No profile yet; {events}".removesuffix("; ")
    traits = summary_of(profile, handler.workspace.subscription_identifiers)
    owner = profile.user_id if visitor else None
    notes = [] if owner is None else [f"belongs to the user {owner}"]
    return " · ".join(notes + [f"{trait} {value}" for trait, value in traits]) or events


class UsersHandler(ListPage):
    """The users of the newest events, and all users in the order of the store."""

    name, what, by = "users", "users", "after"
    words = ("First page", "More")

    def rows(self, **page: Any) -> Awaitable[Page[UserProfile]]:
        """Read users."""
        return self.console.store.scan_users(self.workspace.id, **page)

    async def beside(self, page: Found[UserProfile]) -> Mapping[str, Any]:
        """Return the first traits of the users, and the users of the newest events."""
        identifiers = self.workspace.subscription_identifiers
        note = "engage does not count users, because it would have to read the whole store."
        return {
            "latest": [] if self.cursor("after") is not None else await self._latest(),
            "ring": RING,
            "note": note if page.rows else "",
            "identifiers": identifiers,
            "rows": [(user, summary_of(user, identifiers)) for user in page.rows],
        }

    async def _latest(self) -> list[tuple[str, Row, str]]:
        """Return the users of the newest events with the last event and a note, newest first."""
        live = self.console.live
        await live.look(self.workspace.id)
        row_filter = RowFilter(workspace_id=self.workspace.id, status="stored")
        latest: dict[str, Row] = {}
        for row in () if self.unverified else live.rows(row_filter):
            if row.texts.user_id is not None:
                latest.setdefault(row.texts.user_id, row)
        newest = dict([*latest.items()][:LATEST])
        read = self.console.store.read(people, self.workspace.id, [*newest], [], 0)
        profiles, _ = await self.read(read) or ({}, {})
        return [(name, row, note_on(self, profiles.get(name))) for name, row in newest.items()]


class UserHandler(ConsoleHandler):
    """The user ``id``, or else the visitor with this id; or the visitor ``visitor``."""

    async def get(self) -> None:
        """Show the user or the visitor."""
        await self._show()

    async def post(self) -> None:
        """Undo the link of an anonymous id, or restore it."""
        action = self.get_body_argument("action", "")
        if action not in ("unlink", "link"):
            raise HTTPError(400, reason="This page has no such action")
        user_id, anonymous_id = self.exact("id"), self.exact("anonymous_id")
        workspace, linked, now = self.workspace.id, action == "link", self.console.now()
        try:
            await self.console.reader.read(
                decide_link(
                    self.console.store, workspace, user_id, anonymous_id, linked=linked, now=now
                )
            )
        except StorageUnavailable:
            raise
        except EngageError as error:
            self.set_status(400)
            await self._show(str(error))
            return
        done = f"{action}ed"
        await self.record_audit(
            f"anonymous-id-{done}", workspace=workspace, user=user_id, anonymousId=anonymous_id
        )
        self.go("user", id=user_id, done=done, anonymous_id=anonymous_id)

    async def _show(self, error: str = "") -> None:
        workspace, after = self.workspace, self.cursor("after") or ""
        name, as_visitor = self.exact("visitor") or self.exact("id"), bool(self.exact("visitor"))
        seen = (workspace.id, name, as_visitor, ROWS, after, CHOICES)
        stored = await self.read(self.console.store.read(person, *seen)) or Known(as_visitor)
        user, visitor, is_visitor = stored.user, stored.visitors.get(name), stored.is_visitor
        profile, history = user or visitor, stored.history[::-1]
        ids = [other for other in (user.anonymous_ids if user else ()) if other > after]
        of_user = EventFilter(workspace_id=workspace.id, user_id=name)
        of_visitor = EventFilter(workspace_id=workspace.id, begins=[(["anonymous_id"], name)])
        page = await search_events(self, of_visitor if is_visitor else of_user)
        if not (is_visitor or user or page.rows or page.cursor):
            # It may be an anonymous id that only events have.
            of_anonymous = await search_events(self, of_visitor)
            if any(event.anonymous_id == name for event in of_anonymous.rows):
                page, is_visitor = of_anonymous, True
        events = [event for event in page.rows if name in (event.user_id, event.anonymous_id)]
        nothing = profile is None and not events and page.cursor is None and not history
        if nothing and self.outage is None and not error:
            self.set_status(404)
        names = {group.id: group.name for group in workspace.subscription_groups}
        self.page(
            "user.html",
            title=name,
            nav="users",
            own_id=name,  # Loops of the templates have a ``name``.
            user=user,
            visitor=visitor,
            profile=profile,
            is_visitor=is_visitor,
            linked=[(other, stored.visitors.get(other)) for other in ids[:ROWS]],
            more=ids[:ROWS][-1] if user and ids[ROWS:] else None,
            error=error,
            done=self.get_query_argument("done", ""),
            decided=self.exact("anonymous_id"),
            unlink=self.exact("unlink"),
            user_page=functools.partial(self.link, "user"),
            # A text in quotation marks is a whole user id, but no anonymous id.
            events=self.link("events", user=name if is_visitor else f'"{name}"'),
            config=self.console.config,
            merged=ProfileLimits().user_visitors,
            traits=[] if profile is None else self._traits(profile),
            text=""
            if profile is None
            else quote(
                json.dumps(dict(profile.traits), ensure_ascii=False, indent=2, default=str),
                MAX_SHOWN,
            ),
            choices=[(names.get(group, group), on) for group, on in sorted(stored.choices.items())],
            history=history,
            names=names,
            rows=[row_of_event(event) for event in events],
            page=page,
        )

    def _traits(
        self, user: UserProfile | VisitorProfile
    ) -> list[tuple[str, str, int | None, bool]]:
        """Return (name, value, when it was set, whether users are looked up by it)."""
        identifiers = self.workspace.subscription_identifiers
        return [
            (name, _as_text(value), user.trait_times.get(name), name in identifiers)
            for name, value in sorted(
                user.traits.items(), key=lambda item: (item[0] not in identifiers, item[0])
            )
        ]
