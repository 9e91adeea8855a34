# SPDX-License-Identifier: Apache-2.0
"""The collection of events: finding, scanning and expiring. ``writer.py`` stores events, because
that also changes profiles."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import pymongo
from bson.datetime_ms import DatetimeMS
from bson.objectid import ObjectId
from pymongo.errors import OperationFailure, PyMongoError

from engage.api import Event, EventFilter, Page

from .connection import Connection
from .documents import any_of, decode_event, event_id, is_text, of_origin
from .paging import (
    ARRIVAL,
    NEWEST_FIRST,
    arrived_after,
    between,
    cursor_of,
    delete_oldest,
    parse_cursor,
    place_of,
    read_page,
)
from .schema import BY_USER, EVENTS

#: Seconds of one call of :meth:`Events.recent`; half of them for its look at the events of a user.
_RECENT_SECONDS: Final = 2.0
#: The numbers of events that this call looks at, one after the other, until it has a page: 50,000
#: together.
_WINDOWS: Final = (1_000, 4_000, 15_000, 30_000)
#: A user with at most this many events has them all looked at, however old they are.
_MAX_OF_USER: Final = 5_000
#: The fields of events of which a filter can give the beginning.
_TEXTS: Final = {
    "message_id": "messageId",
    "user_id": "userId",
    "anonymous_id": "anonymousId",
    "name": "_name",
}
#: Characters of the beginning of a text that the server compares. MongoDB's limit is 32 KiB.
_MAX_PATTERN: Final = 1000
#: The type of the document that an erased event leaves. Its body is the mark, and it expires as the
#: event would have.
ERASED_TYPE: Final = "erased"
#: The times that BSON can have.
_TIMES: Final = (-(2**63), 2**63 - 1)


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
            document = await db[EVENTS].find_one({"_id": key})
        event = None if document is None else decode_event(document)
        return None if event is None or event.type == ERASED_TYPE else event

    async def erase(self, events: Sequence[Event], marks: Sequence[bytes]) -> int:
        """Erase events, and return how many were stored; see :meth:`Storage.erase_events`."""
        by_id = {event_id(*event.identity): mark for event, mark in zip(events, marks, strict=True)}
        ids = [key for key in by_id if is_text(key)]
        fields = {"_seq": 1, "workspaceId": 1, "receivedAt": 1}
        with self._connection.calling() as db:
            statements = []
            for chunk in self._connection.chunks(ids):
                async for document in db[EVENTS].find(
                    {"_id": any_of(chunk), "type": {"$ne": ERASED_TYPE}}, fields
                ):
                    left = {**document, "timestamp": document["receivedAt"], "type": ERASED_TYPE}
                    left["_raw"] = by_id[document["_id"]]
                    statements.append({"q": {"_id": document["_id"]}, "u": left})
            await self._connection.update(EVENTS, statements)
        return len(statements)

    async def stored(self, ids: Sequence[str]) -> dict[str, tuple[Event, str | None, ObjectId]]:
        """Return the stored events among these ids: id → event, its mark if it has one, and its
        ``_seq``. To be called within :meth:`Connection.calling`."""
        stored = {}
        for chunk in self._connection.chunks(ids):
            async for document in self._connection.db[EVENTS].find({"_id": any_of(chunk)}):
                mark, seq = document.get("_mark"), document["_seq"]
                stored[document["_id"]] = (decode_event(document), mark, seq)
        return stored

    async def scan(self, criteria: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        """Return a page of events in order of arrival."""
        fields, bounds = _fields(criteria), _bounds(criteria)
        if fields is None:
            return Page((), None)
        query = arrived_after({**fields, **({"receivedAt": bounds} if bounds else {})}, after)
        with self._connection.calling(scan=True) as db:
            if criteria.ids is not None:
                return await self._some(db, query, criteria.ids, limit)
            return await _page(db[EVENTS].find(query).sort(ARRIVAL), limit)

    async def _some(
        self, db: Any, query: Mapping[str, Any], ids: Collection[str], limit: int
    ) -> Page[Event]:
        """Return a page of the events of some ids, which looks at a bounded number of events."""
        any_id = {"$in": [key for key in ids if is_text(key)]}
        of_ids = {"$or": [{"userId": any_id}, {"userId": None, "anonymousId": any_id}]}
        conditions: list[Mapping[str, Any]] = [query, of_ids]
        cursor = db[EVENTS].find(query, {"_id": 0, "receivedAt": 1, "_seq": 1}).sort(ARRIVAL)
        ends = await cursor.skip(_WINDOWS[-1] - 1).limit(1).to_list(None)
        for end in ends:
            received, seq = place_of(end)
            earlier = {"receivedAt": {"$lt": received}}
            conditions.append({"$or": [earlier, {"receivedAt": received, "_seq": {"$lte": seq}}]})
        page = await _page(db[EVENTS].find({"$and": conditions}).sort(ARRIVAL), limit)
        more = page.cursor or (cursor_of(ends[0]) if ends else None)
        return Page(page.items, more)

    async def recent(
        self, criteria: EventFilter, *, before: str | None = None, limit: int
    ) -> Page[Event]:
        """Return a page of events, newest first; see :meth:`Storage.recent`.

        A filter that rarely fits would read far back. So the events are looked at in windows, each
        of a known number of events: a window of time has any number of them. The call ends when it
        has a page, has looked at 50,000 events, or has taken two seconds; its cursor is where it
        stopped.
        """
        fields, bounds = _fields(criteria), _bounds(criteria)
        end = None if before is None else parse_cursor(before)
        if fields is None:
            return Page((), None)
        seconds = min(_RECENT_SECONDS, self._connection.timeout)
        with self._connection.calling(seconds=seconds) as db:
            if not fields:
                return await self._newest(db, between(bounds, None, end), limit)
            if criteria.workspace_id is not None and criteria.user_id is not None:
                page = await self._of_user(db, fields, between(bounds, None, end), limit)
                if page is not None:
                    return page
            return await self._in_windows(db, fields, bounds, end, limit, _beginnings(criteria))

    async def _newest(self, db: Any, query: Mapping[str, Any], limit: int) -> Page[Event]:
        cursor = db[EVENTS].find(query).sort(NEWEST_FIRST)
        return await _page(cursor, limit)

    async def _of_user(
        self, db: Any, fields: Mapping[str, Any], place: Mapping[str, Any], limit: int
    ) -> Page[Event] | None:
        """Return a page of the events of a user by the index of users; ``None`` if there are too
        many, or if that index is missing."""
        user = {name: fields[name] for name in ("workspaceId", "userId")}
        try:
            with pymongo.timeout(min(_RECENT_SECONDS, self._connection.timeout) / 2):
                if await db[EVENTS].count_documents(user, limit=_MAX_OF_USER + 1) > _MAX_OF_USER:
                    return None
                # Without the hint, the server may search all events for those of the user.
                cursor = db[EVENTS].find({**fields, **place}).sort(NEWEST_FIRST)
                return await _page(cursor.hint(list(BY_USER.items())), limit)
        except PyMongoError as error:
            if isinstance(error, OperationFailure) or error.timeout:
                return None
            raise

    async def _in_windows(
        self,
        db: Any,
        fields: Mapping[str, Any],
        bounds: Mapping[str, Any],
        end: tuple[DatetimeMS, ObjectId] | None,
        limit: int,
        conditions: Sequence[Mapping[str, Any]],
    ) -> Page[Event]:
        """Return a page of events, which looks at a bounded number of events."""
        items: list[Event] = []
        place: Mapping[str, Any] | None = None
        for size in _WINDOWS:
            try:
                oldest = await self._nth(db, between(bounds, None, end), size)
                first = None if oldest is None else place_of(oldest)
                query = {**fields, **between(bounds, first, end, conditions)}
                page = await self._newest(db, query, limit - len(items))
            except PyMongoError as error:
                if place is None or not error.timeout:
                    raise
                break
            items += page.items
            if page.cursor is not None:
                return Page(items, page.cursor)
            if oldest is None:
                return Page(items, None)
            place, end = oldest, first
        return Page(items, None if place is None else cursor_of(place))

    async def _nth(
        self, db: Any, query: Mapping[str, Any], number: int
    ) -> Mapping[str, Any] | None:
        """Return the place of the event with ``number - 1`` newer ones, from the index alone."""
        cursor = db[EVENTS].find(query, {"_id": 0, "receivedAt": 1, "_seq": 1})
        documents = await cursor.sort(NEWEST_FIRST).skip(number - 1).limit(1).to_list(None)
        return documents[0] if documents else None

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        """Delete the oldest events, and return how many; see :meth:`Storage.expire`."""

        async def newest_is_due(db: Any) -> bool:
            cursor = db[EVENTS].find({}, {"receivedAt": 1}).sort([("receivedAt", -1)]).limit(1)
            newest = await cursor.to_list(None)
            return bool(newest) and int(newest[0]["receivedAt"]) < before

        return await delete_oldest(
            self._connection, EVENTS, before, limit, None if force else newest_is_due
        )


def _fields(criteria: EventFilter) -> dict[str, Any] | None:
    """Return the conditions of a filter, without those on the time; ``None`` if no event can fit
    it, because no event can have one of its texts."""
    texts = {
        "workspaceId": criteria.workspace_id,
        "type": criteria.type,
        "userId": criteria.user_id,
        "_name": criteria.name,
        "_id": criteria.origin,
    }
    fields: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    if not all(map(is_text, fields.values())):
        return None
    if criteria.origin is not None:
        fields["_id"] = of_origin(criteria.workspace_id, criteria.origin)
    return fields


def _beginnings(criteria: EventFilter) -> list[dict[str, Any]]:
    """Return the conditions of a filter on the beginnings of texts."""
    return [
        {"$or": [{_TEXTS[field]: {"$regex": _pattern(text), "$options": "i"}} for field in fields]}
        for fields, text in criteria.begins
    ]


def _pattern(beginning: str) -> str:
    """Return an expression that every text with a beginning fits.

    Servers differ in the capitals of other letters than ASCII, and take no NUL.
    """
    start = beginning[:_MAX_PATTERN]
    return "^" + "".join(
        re.escape(char) if char.isascii() and char.isprintable() else r"[\s\S]" for char in start
    )


def _bounds(criteria: EventFilter) -> dict[str, Any]:
    """Return the conditions of a filter on ``receivedAt``."""
    times = {"$gte": criteria.since, "$lt": criteria.until}
    least, greatest = _TIMES
    return {
        name: DatetimeMS(min(max(time, least), greatest))
        for name, time in times.items()
        if time is not None
    }


async def _page(cursor: Any, limit: int) -> Page[Event]:
    """Return a page of events in the order of a cursor of the driver, without those erased."""
    items, last = await read_page(cursor, limit, _sized)
    events = [event for event in items if event.type != ERASED_TYPE]
    return Page(events, None if last is None else cursor_of(last))


def _sized(document: Mapping[str, Any]) -> tuple[Event, int]:
    event = decode_event(document)
    return event, len(event.body)
