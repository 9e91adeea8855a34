# SPDX-License-Identifier: Apache-2.0
"""Pages of a collection, and its oldest documents."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from bson.datetime_ms import DatetimeMS
from bson.objectid import ObjectId

from .connection import BATCH, Connection
from .documents import any_of, in_workspace

Item = TypeVar("Item")

#: Documents that are read at once for work that goes on behind them.
STEP: Final = 200
#: A page ends early when its documents are this large.
_MAX_BYTES: Final = 32 * 1024 * 1024

#: The order of arrival; the index of the same keys serves it.
ARRIVAL: Final = [("receivedAt", 1), ("_seq", 1)]
#: The reverse of it, which the same index serves.
NEWEST_FIRST: Final = [(field, -1) for field, _ in ARRIVAL]


async def read_page(
    cursor: Any, limit: int, decode: Callable[[Mapping[str, Any]], tuple[Item, int]]
) -> tuple[list[Item], Mapping[str, Any] | None]:
    """Read a page from a cursor of the driver.

    :param cursor: the cursor, with its order.
    :param limit: the maximum number of items.
    :param decode: makes an item of a document, and returns it with its size in bytes.
    :return: the items, and the last document if there may be more.
    """
    items: list[Item] = []
    total = 0
    cursor = cursor.limit(limit).batch_size(max(2, min(limit, BATCH)))
    try:
        async for document in cursor:
            item, size = decode(document)
            items.append(item)
            total += size
            if len(items) >= limit or total > _MAX_BYTES:
                return items, document
    finally:
        await cursor.close()
    return items, None


def id_after(workspace_id: str | None, after: str | None) -> dict[str, Any]:
    """Return a query for the documents of a workspace whose ``_id`` is greater than ``after``.

    :param workspace_id: ``None`` means all workspaces.
    :param after: ``None`` means from the first one on.
    """
    condition = in_workspace(workspace_id)
    if after is not None:
        condition = {**condition, "$gt": after}
        condition.pop("$gte", None)
    return {"_id": condition} if condition else {}


def beyond(field: str, value: Any, key: Any, second: str = "_id") -> dict[str, Any]:
    """Return a query for the documents after one in the order of two fields."""
    later = [{field: {"$gt": value}}, {field: value, second: {"$gt": key}}]
    return {field: {"$gte": value}, "$or": later}


def arrived_after(query: dict[str, Any], cursor: str | None) -> dict[str, Any]:
    """Return the query, restricted to arrivals after a cursor, which the index of arrival serves.

    :raises ValueError: if ``cursor`` is not a cursor of events.
    """
    if cursor is None:
        return query
    received, seq = parse_cursor(cursor)
    bounds = dict(query.get("receivedAt", {}))
    bounds["$gte"] = max(bounds.get("$gte", received), received, key=int)
    return {**query, **beyond("receivedAt", received, seq, "_seq"), "receivedAt": bounds}


def between(
    bounds: Mapping[str, Any],
    first: tuple[DatetimeMS, ObjectId] | None,
    end: tuple[DatetimeMS, ObjectId] | None,
    conditions: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a query for a part of the order of arrival, which the index of arrival serves.

    :param bounds: conditions on ``receivedAt``.
    :param first: the place of the first document; ``None``: the oldest one.
    :param end: the place before which the part ends; ``None``: the newest one is in it.
    :param conditions: others that must all hold.
    """
    bounds = dict(bounds)
    places = [*conditions]
    if first is not None:
        received, seq = first
        bounds["$gte"] = max(bounds.get("$gte", received), received, key=int)
        later = {"receivedAt": {"$gt": received}}
        places.append({"$or": [later, {"receivedAt": received, "_seq": {"$gte": seq}}]})
    if end is not None:
        received, seq = end
        bounds["$lte"] = received
        earlier = {"receivedAt": {"$lt": received}}
        places.append({"$or": [earlier, {"receivedAt": received, "_seq": {"$lt": seq}}]})
    return {
        **({"receivedAt": bounds} if bounds else {}),
        **({"$and": places} if places else {}),
    }


def place_of(document: Mapping[str, Any]) -> tuple[DatetimeMS, ObjectId]:
    """Return the place of a document in the order of arrival."""
    return document["receivedAt"], document["_seq"]


def parse_cursor(cursor: str) -> tuple[DatetimeMS, ObjectId]:
    """Return the place in the order of arrival that a cursor names.

    :raises ValueError: if it is not a cursor of events.
    """
    received, _, seq = cursor.partition(".")
    if not re.fullmatch(r"-?[0-9]{1,16}", received) or not ObjectId.is_valid(seq):
        raise ValueError("not a cursor of this storage")
    return DatetimeMS(int(received)), ObjectId(seq)


def cursor_of(document: Mapping[str, Any]) -> str:
    """Return the cursor of the arrivals after this document."""
    return f"{int(document['receivedAt'])}.{document['_seq']}"


async def delete_oldest(
    connection: Connection,
    collection: str,
    before: int,
    limit: int,
    newest_is_due: Callable[[Any], Awaitable[bool]] | None = None,
) -> int:
    """Delete the oldest documents, and return how many.

    :param before: milliseconds; documents received at that time or later are kept.
    :param limit: how many are deleted at most.
    :param newest_is_due: called first, with the database; if it returns true, nothing is deleted.
    """
    with connection.calling() as db:
        if newest_is_due is not None and await newest_is_due(db):
            return 0
        query = {"receivedAt": {"$lt": DatetimeMS(before)}}
        cursor = db[collection].find(query, {"_id": 1}).sort(ARRIVAL).limit(limit)
        ids = [document["_id"] for document in await cursor.to_list(None)]
        deleted = 0
        for start in range(0, len(ids), BATCH):
            condition = {"_id": any_of(ids[start : start + BATCH])}
            deleted += (await db[collection].delete_many(condition)).deleted_count
        return deleted
