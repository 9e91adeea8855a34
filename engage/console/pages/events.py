# SPDX-License-Identifier: Apache-2.0
"""``/events``: stored events, newest first; ``/events.ndjson``: the same as a file."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Mapping
from typing import Any, Final

from engage.api import EVENT_TYPES, Event, EventFilter
from engage.console.base import ConsoleHandler
from engage.console.display.formats import ROWS
from engage.console.listing import Found, ListPage, find
from engage.reading.live import quoted, row_of_event

__all__ = ["EventsFileHandler", "EventsHandler", "fields_of", "search_events"]

#: The maximum number of events in a file: as many as a browser gets within a few seconds.
FILE_LIMIT: Final = 2000
#: Seconds for a file, which does not say how far it looked.
FILE_SECONDS: Final = 5.0


def parse_time(text: str) -> int | None:
    """Return a time of a form in milliseconds; ``None`` if there is none or it is wrong."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip().upper())
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round(moment.timestamp() * 1000)


def fields_of(handler: ConsoleHandler) -> dict[str, tuple[str, Any]]:
    """Return the fields of a filter of events: parameter → its label and its values or type."""
    keys = [key.id for key in handler.console.keys.of(handler.workspace.id)]
    return {
        "type": ("Type", EVENT_TYPES),
        "key": ("Key", keys),
        "name": ("Name", ""),
        "user": ("User id", ""),
    }


async def find_events(
    handler: ConsoleHandler, limit: int = ROWS, seconds: float | None = None
) -> Found[Event]:
    """Read the events that the query of a request selects; see :func:`search_events`."""
    name, user, key = handler.exact("name"), handler.exact("user"), handler.exact("key")
    typed = ((("name",), name), (("user_id", "anonymous_id"), user))
    criteria = EventFilter(
        workspace_id=handler.workspace.id,
        type=handler.exact("type") or None,
        name=quoted(name),
        user_id=quoted(user),
        begins=[(fields, text) for fields, text in typed if text and quoted(text) is None],
        origin=handler.exact("origin") or None,
        since=parse_time(handler.exact("since")),
        until=parse_time(handler.exact("until")),
    )
    return await search_events(
        handler, criteria, limit, key=key, cursor=handler.cursor("before"), seconds=seconds
    )


async def search_events(
    handler: ConsoleHandler,
    criteria: EventFilter,
    limit: int = ROWS,
    *,
    key: str = "",
    cursor: str | None = None,
    seconds: float | None = None,
) -> Found[Event]:
    """Read the newest events that are wanted.

    :param key: only those of this write key or provider.
    :param cursor: of the page before.
    :param seconds: see :func:`~engage.console.listing.find`.
    """
    recent = handler.console.store.recent
    matches = await find(
        handler,
        functools.partial(recent, criteria),
        lambda event: criteria.matches(event) and key in ("", row_of_event(event).key),
        cursor=cursor,
        limit=limit,
        seconds=seconds,
    )
    if matches.cursor is None:
        return matches
    last = matches.rows[-1:]
    if matches.gave_up:
        page = await handler.read(recent(EventFilter(), before=matches.cursor, limit=1))
        last = () if page is None else page.items
    return dataclasses.replace(matches, reached=last[0].received_at if last else None)


class EventsHandler(ListPage):
    """The events that the filters select."""

    name = what = "events"
    parameters = ("type", "name", "user", "key", "origin", "since", "until")
    shown = staticmethod(row_of_event)

    async def find(self) -> Found[Event]:
        """Return one page."""
        await self.console.live.look(self.workspace.id)
        return await find_events(self)

    async def beside(self, page: Found[Event]) -> Mapping[str, Any]:
        """Return the fields of the filter."""
        times = {"since": ("Since", "datetime-local"), "until": ("Until", "datetime-local")}
        return {"fields": fields_of(self) | times}


class EventsFileHandler(ConsoleHandler):
    """The same as NDJSON: one stored event in each line."""

    async def get(self) -> None:
        """Send the newest events that the filters select."""
        page = await find_events(self, FILE_LIMIT, FILE_SECONDS)
        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("Content-Disposition", 'attachment; filename="events.ndjson"')
        self.finish(b"".join(event.body + b"\n" for event in page.rows))
