# SPDX-License-Identifier: Apache-2.0
"""``/events``: stored events, newest first; ``/events.ndjson``: the same as a file."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Final

from engage.api import EVENT_TYPES, Event, EventFilter
from engage.console.base import ConsoleHandler
from engage.console.display.formats import ROWS
from engage.upkeep.live import quoted, row_of_event

__all__ = ["EventsFileHandler", "EventsHandler", "search_events"]

#: The maximum number of events in a file: as many as a browser gets within a few seconds.
FILE_LIMIT: Final = 2000
#: Seconds after which a search begins no other read of the store, so that a page takes less than
#: one.
SEARCH_SECONDS: Final = 0.5
#: The same for a file, which does not say how far it looked.
FILE_SECONDS: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Some events, newest first."""

    events: list[Event]
    #: For the next page; ``None``: there are no older ones.
    cursor: str | None
    #: Whether the search ended before it found enough.
    gave_up: bool = False
    #: Back to when it looked: milliseconds; ``None``: it looked at all, or it is not known.
    reached: int | None = None
    #: Whether the storage can search at all.
    possible: bool = True


def parse_time(text: str) -> int | None:
    """Return a time of a form in milliseconds; ``None`` if there is none or it is wrong."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip().upper())
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round(moment.timestamp() * 1000)


def key_of(event: Event) -> str:
    """Return the id of the event's write key, or the name of its provider."""
    return row_of_event(event).key


async def find_events(handler: ConsoleHandler, limit: int, seconds: float | None = None) -> Found:
    """Read the events that the query of a request selects; see :func:`search_events`."""
    name, user = handler.exact("name"), handler.exact("user")
    typed = ((("name",), name), (("user_id", "anonymous_id"), user))
    wanted = EventFilter(
        workspace_id=handler.workspace.id,
        type=handler.exact("type") or None,
        name=quoted(name),
        user_id=quoted(user),
        begins=[(fields, text) for fields, text in typed if text and quoted(text) is None],
        origin=handler.exact("origin") or None,
        since=parse_time(handler.get_query_argument("since", "")),
        until=parse_time(handler.get_query_argument("until", "")),
    )
    key = handler.get_query_argument("key", "")
    return await search_events(
        handler, wanted, limit, key=key, cursor=handler.cursor("before"), seconds=seconds
    )


async def search_events(
    handler: ConsoleHandler,
    wanted: EventFilter,
    limit: int = ROWS,
    *,
    key: str = "",
    cursor: str | None = None,
    seconds: float | None = None,
) -> Found:
    """Read the newest events that are wanted.

    :param key: only those of this write key or provider.
    :param cursor: of the page before.
    :param seconds: instead of :data:`SEARCH_SECONDS`.
    """
    found: list[Event] = []
    end = time.monotonic() + (SEARCH_SECONDS if seconds is None else seconds)
    while True:
        page = await handler.read(
            handler.console.store.recent(wanted, before=cursor, limit=limit - len(found))
        )
        if page is None:
            return Found(found, cursor, possible=handler.outage is not None)
        found += [
            event
            for event in page.items
            if wanted.matches(event) and (not key or key_of(event) == key)
        ]
        cursor = page.cursor
        if cursor is None or len(found) >= limit:
            return Found(found, cursor, reached=found[-1].received_at if cursor else None)
        if time.monotonic() > end:
            break
    older = await handler.read(handler.console.store.recent(EventFilter(), before=cursor, limit=1))
    reached = older.items[0].received_at if older is not None and older.items else None
    return Found(found, cursor, gave_up=True, reached=reached)


class EventsHandler(ConsoleHandler):
    """The events that the filters select."""

    async def get(self) -> None:
        """Show one page."""
        await self.console.live.look(self.workspace.id)
        found = await find_events(self, ROWS)
        query = {
            name: self.exact(name)
            for name in ("type", "name", "user", "key", "origin", "since", "until")
        }
        self.page(
            "events.html",
            title="Events",
            nav="events",
            rows=[row_of_event(event) for event in found.events],
            found=found,
            query=query,
            given={name: value for name, value in query.items() if value},
            paged=self.cursor("before") is not None,
            types=EVENT_TYPES,
            keys=[key.id for key in self.console.keys.of(self.workspace.id)],
        )


class EventsFileHandler(ConsoleHandler):
    """The same as NDJSON: one stored event in each line."""

    async def get(self) -> None:
        """Send the newest events that the filters select."""
        found = await find_events(self, FILE_LIMIT, FILE_SECONDS)
        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("Content-Disposition", 'attachment; filename="events.ndjson"')
        self.finish(b"".join(event.body + b"\n" for event in found.events))
