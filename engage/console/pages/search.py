# SPDX-License-Identifier: Apache-2.0
"""``/search``: from an id, an e-mail address or the name of an event to its page."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from tornado.web import Finish

from engage.api import API_ORIGIN, Event, EventFilter, begins_with, identifier_value
from engage.console.display.formats import ROWS, number, plural
from engage.console.listing import Found, ListPage, find
from engage.console.pages.events import FILE_LIMIT, search_events
from engage.console.pages.users import note_on
from engage.reading.live import RowFilter, row_of_letter
from engage.reading.scans import PAGE
from engage.store.identifiers import named
from engage.store.people import people

__all__ = ["SearchHandler"]

#: Field of an event → what a page calls a text in it.
FIELDS: Final = {
    "name": "Event name",
    "user_id": "User",
    "anonymous_id": "Anonymous id",
    "message_id": "Event",
}
#: The kinds of results in the order of the list: first those of which there are few.
KINDS: Final = ("User", "Visitor", "Event name", "Anonymous id", "Rejected event", "Event")
#: Seconds after which the search reads no other rejected events; they are looked at before others.
LETTER_SECONDS: Final = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """Something that was found: one of the kinds of things, and its text or id."""

    kind: str
    text: str
    #: Of an event.
    origin: str = ""

    def target(self) -> tuple[str, dict[str, str]]:
        """Return the page that shows it, and its query."""
        if self.kind == "Event":
            return "event", {"origin": self.origin, "id": self.text}
        if self.kind == "Event name":
            return "events", {"name": f'"{self.text}"'}
        if self.kind == "Visitor":
            return "user", {"visitor": self.text}
        if self.kind == "Anonymous id":
            return "events", {"user": self.text}
        return ("user" if self.kind == "User" else "letter"), {"id": self.text}


class SearchHandler(ListPage):
    """Looks a text up in all indexes and in the newest events, and redirects to a single result."""

    name, what = "search", "results"
    parameters = ("q",)

    #: Whether there are rejected events that were not looked at.
    missed_letters = False

    async def find(self) -> Found[tuple[Hit, str]]:
        """Return the results, or redirect to the page of the only one."""
        text, cursor = self.exact("q"), self.cursor("before")
        hits: dict[Hit, str] = {}
        page: Found[Event] = Found()
        if text.strip():
            await self.console.live.look(self.workspace.id)
            row_filter = RowFilter(workspace_id=self.workspace.id)
            rows = [] if self.unverified else self.console.live.rows(row_filter)
            hits = dict.fromkeys(await self._known(text), "") if cursor is None else {}
            named = any((row.texts.name or "").lower() == text.strip().lower() for row in rows)
            if len(hits) != 1 or named:
                if cursor is None:
                    hits |= dict.fromkeys(await self._users_beginning(text.strip()), "")
                    hits |= await self._rejected(text.strip())
                page = await self._in_events(text, cursor)
                hits |= _hits(page, text)
            complete = page.cursor is None and not self.missed_letters and not self.outage
            if len(hits) == 1 and complete and cursor is None:
                (hit,) = hits
                route, query = hit.target()
                self.go(route, **query)
                raise Finish
            if not hits and complete and text != text.lstrip():
                self.go("search", q=text.strip())
                raise Finish
        ordered = sorted(hits.items(), key=lambda item: KINDS.index(item[0].kind))
        return Found(ordered, page.cursor, page.cursor is not None, page.reached)

    async def beside(self, page: Found[tuple[Hit, str]]) -> Mapping[str, Any]:
        """Return the first results with notes on them."""
        shown, more = dict(page.rows[:ROWS]), len(page.rows[ROWS:])
        ids, names = ([x.text for x in shown if x.kind == kind] for kind in KINDS[:2])
        read = self.console.store.read(people, self.workspace.id, ids, names, 0)
        users, visitors = await self.read(read) or ({}, {})

        def noted(hit: Hit, note: str) -> str:
            if hit.kind == "User":
                return note_on(self, users.get(hit.text), note)
            if hit.kind == "Visitor":
                return note_on(self, visitors.get(hit.text), note, visitor=True)
            return note

        return {
            "text": self.exact("q"),
            "rows": [(hit, hit.target(), noted(hit, note)) for hit, note in shown.items()],
            "note": f"{number(more)} more are not shown: type more of it." if more else "",
            "missed_letters": self.missed_letters,
        }

    async def _known(self, text: str) -> list[Hit]:
        """Return what has exactly this id or address, by the indexes of the storage."""
        workspace, store = self.workspace.id, self.console.store
        hits: list[Hit] = []
        for typed in dict.fromkeys((text, text.strip())):
            hits += [
                Hit("Event", typed, origin)
                for origin in (API_ORIGIN, *self.workspace.webhooks)
                if await self.read(store.find(workspace, origin, typed)) is not None
            ]
            # Some storages have an index for the events of a user.
            of_user = EventFilter(workspace_id=workspace, user_id=typed)
            page = await self.read(store.recent(of_user, limit=1))
            if page is not None and page.items:
                hits.append(Hit("User", typed))
            lists = await self.read(store.read(named, workspace, typed, self._values(typed)))
            hits += [Hit(x, key) for x, ids in zip(KINDS, lists or (), strict=False) for key in ids]
            if (
                len(typed) == 32
                and await self.read(store.dead_letter(workspace, typed)) is not None
            ):
                hits.append(Hit("Rejected event", typed))
        return list(dict.fromkeys(hits))

    def _values(self, text: str) -> dict[str, str]:
        """Return a text as the value of each declared identifier trait that can have it."""
        traits = self.workspace.subscription_identifiers
        values = {trait: identifier_value(trait, text) for trait in traits}
        return {trait: value for trait, value in values.items() if value is not None}

    async def _users_beginning(self, text: str) -> list[Hit]:
        """Return the users whose ids, in the usual capitals, or identifiers begin with a text."""
        store, hits = self.console.store, list[Hit]()
        ids = dict.fromkeys((text, text.lower(), text.upper(), text.capitalize()))
        beginnings: list[tuple[str | None, str]] = [(None, name) for name in ids]
        for trait, value in self._values(text).items():
            # The digits in a text with letters are not the beginning of a number.
            if trait != "phone" or text.lower() == text.upper():
                beginnings.append((trait, value))
        for field, start in beginnings:
            users = store.users_beginning(self.workspace.id, start, trait=field, limit=ROWS)
            hits += [Hit("User", user) for user in await self.read(users) or ()]
        return hits

    async def _rejected(self, text: str) -> dict[Hit, str]:
        """Return the rejected events of which one of the texts begins with this one."""
        page = await find(
            self,
            functools.partial(self.console.store.recent_dead_letters, self.workspace.id),
            lambda letter: any(begins_with(cell, text) for cell in row_of_letter(letter).texts),
            size=PAGE,
            seconds=LETTER_SECONDS,
        )
        self.missed_letters = page.gave_up
        rows = map(row_of_letter, page.rows)
        return {Hit("Rejected event", row.id): row.preview for row in rows}

    async def _in_events(self, text: str, cursor: str | None) -> Found[Event]:
        """Return events of which one of the texts begins with this one."""
        prefix = EventFilter(workspace_id=self.workspace.id, begins=[(list(FIELDS), text.rstrip())])
        return await search_events(self, prefix, FILE_LIMIT, cursor=cursor)


def _hits(page: Found[Event], text: str) -> dict[Hit, str]:
    """Return the texts of events that begin with a text, with the number of the events; a message
    id with what its event is."""
    hits = [
        (_hit_of(event, field), event)
        for field in FIELDS
        for event in page.rows
        if begins_with(getattr(event, field), text.rstrip())
    ]
    counts = Counter(hit for hit, _ in hits)
    least = "at least " if page.cursor is not None else ""
    words = {"Event name": "name", "User": "user id", "Anonymous id": "anonymous id"}
    return {
        hit: f"{least}{plural(counts[hit], 'event has', 'events have')} this {words[hit.kind]}"
        if hit.kind in words
        else " · ".join(filter(None, (event.type, event.name, event.user_id or event.anonymous_id)))
        for hit, event in hits
    }


def _hit_of(event: Event, field: str) -> Hit:
    return Hit(FIELDS[field], getattr(event, field), event.origin if field == "message_id" else "")
