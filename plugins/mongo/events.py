# SPDX-License-Identifier: Apache-2.0
"""The collection of events: finding, scanning and expiring. ``writer.py`` stores events, because
that changes profiles, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bson.datetime_ms import DatetimeMS

from engage.api import Arrivals, Event, EventFilter, Page

from .connection import Connection
from .documents import any_of, decode_event, event_id, is_text
from .paging import ARRIVAL, arrived_after, cursor_of, delete_oldest, read_page
from .schema import EVENTS


class Events:
    """Reads and expires events."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """Return the event of this identity, or ``None``."""
        key = event_id(workspace_id, origin, message_id)
        if not is_text(key):
            return None
        with self._connection.calling() as db:
            found = await db[EVENTS].find_one({"_id": key})
        return None if found is None else decode_event(found)

    async def stored(self, ids: Sequence[str]) -> dict[str, tuple[Event, str | None]]:
        """Return the stored events among these ids: id → event, and its mark if it has one. To be
        called within :meth:`Connection.calling`.
        """
        found = {}
        for chunk in self._connection.chunks(ids):
            async for document in self._connection.db[EVENTS].find({"_id": any_of(chunk)}):
                found[document["_id"]] = (decode_event(document), document.get("_mark"))
        return found

    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        """Return a page of events in order of arrival."""
        fields = {
            "workspaceId": wanted.workspace_id,
            "type": wanted.type,
            "userId": wanted.user_id,
        }
        query: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        if wanted.since is not None:
            query["receivedAt"] = {"$gte": DatetimeMS(wanted.since)}
        query = arrived_after(query, after)
        with self._connection.calling() as db:
            items, last = await read_page(db[EVENTS].find(query).sort(ARRIVAL), limit, _sized)
        return Page(items, None if last is None else cursor_of(last))

    async def arrivals(self, at: int) -> Arrivals:
        """Return when the events around a time were received."""
        time = DatetimeMS(at)
        with self._connection.calling() as db:

            async def first(query: dict[str, Any], way: int) -> int | None:
                order = [(field, way) for field, _ in ARRIVAL]
                cursor = db[EVENTS].find(query, {"receivedAt": 1}).sort(order).limit(1)
                found = await cursor.to_list(None)
                return int(found[0]["receivedAt"]) if found else None

            return Arrivals(
                last_before=await first({"receivedAt": {"$lt": time}}, -1),
                first_after=await first({"receivedAt": {"$gte": time}}, 1),
                newest=await first({}, -1),
            )

    async def expire(self, before: int, *, limit: int, force: bool) -> int:
        """Delete the oldest events, and return how many; see :meth:`EventStore.expire`."""

        async def newest_is_due(db: Any) -> bool:
            cursor = db[EVENTS].find({}, {"receivedAt": 1}).sort([("receivedAt", -1)]).limit(1)
            newest = await cursor.to_list(None)
            return bool(newest) and int(newest[0]["receivedAt"]) < before

        return await delete_oldest(
            self._connection, EVENTS, before, limit, None if force else newest_is_due
        )


def _sized(document: Mapping[str, Any]) -> tuple[Event, int]:
    event = decode_event(document)
    return event, len(event.body)
