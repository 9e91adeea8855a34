# SPDX-License-Identifier: Apache-2.0
"""The collection of events: reading and expiring. Writing is in ``store.py``, because it changes
profiles too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from bson.datetime_ms import DatetimeMS

from engage.api import Event, EventFilter, Page

from .client import Connection
from .documents import cursor_of, decode_event, event_id, is_text, page_after
from .schema import EVENTS

Item = TypeVar("Item")

#: A page ends early when its documents are this large.
PAGE_BYTES: Final = 32 * 1024 * 1024
#: Statements of one delete command.
_DELETES: Final = 1000


async def gather_page(
    find: Any, limit: int, decode: Callable[[Mapping[str, Any]], tuple[Item, int]]
) -> tuple[list[Item], Mapping[str, Any] | None]:
    """Read a cursor of the driver to the end of a page.

    :param find: the cursor, with its order.
    :param decode: document → item and its size in bytes.
    :return: the items, and the last document if there may be more.
    """
    items: list[Item] = []
    size = 0
    cursor = find.limit(limit).batch_size(max(2, min(limit, 1000)))
    try:
        async for document in cursor:
            item, bytes_ = decode(document)
            items.append(item)
            size += bytes_
            if len(items) >= limit or size > PAGE_BYTES:
                return items, document
    finally:
        await cursor.close()
    return items, None


def arrival_after(query: dict[str, Any], after: str | None) -> dict[str, Any]:
    """:return: the filter for what arrived after a cursor, within the index of arrival."""
    if after is None:
        return query
    received, seq = page_after(after)
    bounds = dict(query.get("receivedAt", {}))
    bounds["$gte"] = max(bounds.get("$gte", received), received, key=int)
    place = [{"receivedAt": {"$gt": received}}, {"receivedAt": received, "_seq": {"$gt": seq}}]
    return {**query, "receivedAt": bounds, "$or": place}


def among(ids: Sequence[str]) -> Any:
    """:return: a condition on ``_id``; plain for a single one, which every server answers from its
    index."""
    return ids[0] if len(ids) == 1 else {"$in": list(ids)}


async def delete_oldest(
    connection: Connection,
    collection: str,
    before: int,
    limit: int,
    newest_is_due: Callable[[Any], Awaitable[bool]] | None,
) -> int:
    """Delete documents received before ``before`` (milliseconds), oldest first, at most ``limit``.

    :param newest_is_due: asked first, with the database; nothing is deleted if it says yes.
    """
    with connection.calling() as db:
        if newest_is_due is not None and await newest_is_due(db):
            return 0
        query = {"receivedAt": {"$lt": DatetimeMS(before)}}
        order = [("receivedAt", 1), ("_seq", 1)]
        cursor = db[collection].find(query, {"_id": 1}).sort(order).limit(limit)
        ids = [document["_id"] for document in await cursor.to_list(None)]
        deleted = 0
        for start in range(0, len(ids), _DELETES):
            condition = {"_id": among(ids[start : start + _DELETES])}
            deleted += (await db[collection].delete_many(condition)).deleted_count
        return deleted


class Events:
    """Reads and expires events."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """See :meth:`EventStore.find`."""
        key = event_id(workspace_id, origin, message_id)
        if not is_text(key):
            return None
        with self._connection.calling() as db:
            found = await db[EVENTS].find_one({"_id": key})
        return None if found is None else decode_event(found)

    async def stored(self, ids: Sequence[str]) -> dict[str, tuple[Event, str | None]]:
        """:return: id → event, and its mark if it has one; of those that are stored. To be called
        within :meth:`Connection.calling`.
        """
        found = {}
        for part in self._connection.portions(ids):
            async for document in self._connection.db[EVENTS].find({"_id": among(part)}):
                found[document["_id"]] = (decode_event(document), document.get("_mark"))
        return found

    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        """See :meth:`EventStore.scan`."""
        fields = {
            "workspaceId": wanted.workspace_id,
            "type": wanted.type,
            "userId": wanted.user_id,
        }
        query: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        if wanted.since is not None:
            query["receivedAt"] = {"$gte": DatetimeMS(wanted.since)}
        query = arrival_after(query, after)
        with self._connection.calling() as db:
            cursor = db[EVENTS].find(query).sort([("receivedAt", 1), ("_seq", 1)])
            items, last = await gather_page(cursor, limit, _sized)
        return Page(items, None if last is None else cursor_of(last))

    async def expire(self, before: int, *, limit: int, force: bool) -> int:
        """See :meth:`EventStore.expire`."""

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
