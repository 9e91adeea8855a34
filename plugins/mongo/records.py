# SPDX-License-Identifier: Apache-2.0
"""Records: write keys, sessions and other small things that all processes share.

Each record is one document, changed by compare-and-set on its ``version``. The number that
:meth:`Records.version` returns is a document for each kind in the collection ``meta``. It is
    incremented after each write and each deletion, with a write of its own. A crash between the two
    leaves the number as it is, although a record has changed. That does no harm: the processes that
    use records list them again every 30 seconds, even if the number is the same, and the next write
    of any record of the kind increments it. The caller had no answer, so it does not rely on the
    change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from bson.datetime_ms import DatetimeMS
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from engage.api import Page, Record, StorageUnavailable

from .connection import MAX_ATTEMPTS, Connection
from .documents import any_of, is_text, pair_id
from .paging import read_page
from .schema import META, RECORDS

#: The order of records; the index of the same keys serves it.
_ORDER: Final = ("kind", "workspaceId", "id")


class Records:
    """Reads and writes records."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def put(self, record: Record, *, expected_version: int | None = None) -> int | None:
        """Write a record; see :meth:`RecordStore.put_record`."""
        record.check()
        key = pair_id(record.kind, record.workspace_id, record.id)
        names = {"kind": record.kind, "workspaceId": record.workspace_id, "id": record.id}
        fields = {"body": record.body.decode(), "at": DatetimeMS(record.at)}
        with self._connection.calling() as db:
            version: int | None
            if expected_version is None:
                version = await self._replace(db, key, names, fields)
            elif expected_version == 0:
                version = await self._insert(db, {"_id": key, "version": 1, **names, **fields})
            else:
                version = await self._change(db, key, fields, expected_version)
            if version is not None:
                await self._changed(record.kind)
        return version

    async def _replace(
        self, db: Any, key: str, names: Mapping[str, str], fields: Mapping[str, Any]
    ) -> int:
        for _ in range(MAX_ATTEMPTS):
            try:
                async with self._connection.updating:
                    found = await db[RECORDS].find_one_and_update(
                        {"_id": key},
                        {"$set": fields, "$inc": {"version": 1}, "$setOnInsert": names},
                        upsert=True,
                        return_document=ReturnDocument.BEFORE,
                    )
            except DuplicateKeyError:
                # Another caller inserted it at the same time.
                continue
            return int(found["version"]) + 1 if found else 1
        raise StorageUnavailable("this record is being changed by too many callers")

    async def _insert(self, db: Any, document: dict[str, Any]) -> int | None:
        try:
            await db[RECORDS].insert_one(document)
        except DuplicateKeyError:
            return None
        return 1

    async def _change(
        self, db: Any, key: str, fields: Mapping[str, Any], expected: int
    ) -> int | None:
        async with self._connection.updating:
            done = await db[RECORDS].update_one(
                {"_id": key, "version": expected}, {"$set": {**fields, "version": expected + 1}}
            )
        return expected + 1 if done.raw_result["n"] else None

    async def _changed(self, kind: str) -> None:
        # A second increment after a lost answer does no harm.
        counter, more = {"_id": f"records:{kind}"}, {"$inc": {"version": 1}}
        await self._connection.update(META, [{"q": counter, "u": more, "upsert": True}])

    async def version(self, kind: str) -> int:
        """Return a number that grows when a record of a kind changes."""
        if not is_text(kind):
            return 0
        with self._connection.calling() as db:
            found = await db[META].find_one({"_id": f"records:{kind}"})
        return 0 if found is None else int(found["version"])

    async def get(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        """Return a record, or ``None``."""
        key = pair_id(kind, workspace_id, record_id)
        if not is_text(key):
            return None
        with self._connection.calling() as db:
            found = await db[RECORDS].find_one({"_id": key})
        return None if found is None else _decode(found)

    async def scan(
        self,
        kind: str | None,
        workspace_id: str | None = None,
        *,
        after: str | None = None,
        limit: int,
        reverse: bool = False,
    ) -> Page[Record]:
        """Return a page of records; see :meth:`RecordStore.list_records`."""
        fixed = {"kind": kind, "workspaceId": workspace_id}
        query: dict[str, Any] = {name: one for name, one in fixed.items() if one is not None}
        if not all(map(is_text, query.values())):
            return Page((), None)
        if after is not None:
            query.update(
                _beyond(_cursor(after), [one for one in _ORDER if one not in query], reverse)
            )
        order = [(name, -1 if reverse else 1) for name in _ORDER]
        with self._connection.calling() as db:
            items, last = await read_page(db[RECORDS].find(query).sort(order), limit, _sized)
        cursor = None if last is None else orjson.dumps([last[name] for name in _ORDER]).decode()
        return Page(items, cursor)

    async def delete(self, kind: str, workspace_id: str, record_id: str) -> bool:
        """Delete a record, and return whether there was one."""
        key = pair_id(kind, workspace_id, record_id)
        if not is_text(key):
            return False
        with self._connection.calling() as db:
            done = await db[RECORDS].delete_one({"_id": key})
            deleted = bool(done.raw_result["n"])
            if deleted:
                await self._changed(kind)
        return deleted

    async def expire(self, kind: str, before: int, *, limit: int) -> int:
        """Delete old records of a kind, and return how many."""
        if not is_text(kind):
            return 0
        old = {"kind": kind, "at": {"$lt": DatetimeMS(before)}}
        deleted = 0
        with self._connection.calling() as db:
            cursor = db[RECORDS].find(old, {"_id": 1}).sort([("at", 1)]).limit(limit)
            found = await cursor.to_list(None)
            for chunk in self._connection.chunks([one["_id"] for one in found]):
                # A record that is written at this moment is no longer old.
                done = await db[RECORDS].delete_many({"_id": any_of(chunk), **old})
                deleted += done.deleted_count
            if deleted:
                await self._changed(kind)
        return deleted


def _beyond(place: Mapping[str, str], free: list[str], reverse: bool) -> dict[str, Any]:
    """Return a query for the records beyond a place.

    :param free: the fields that the records differ in, in their order.
    """
    beyond = "$lt" if reverse else "$gt"
    cases = [
        {**{same: place[same] for same in free[:index]}, name: {beyond: place[name]}}
        for index, name in enumerate(free)
    ]
    if len(cases) == 1:
        return cases[0]
    # The first condition is for the index.
    return {free[0]: {f"{beyond}e": place[free[0]]}, "$or": cases}


def _cursor(after: str) -> dict[str, str]:
    """Return the place that a cursor names.

    :raises ValueError: if it is not a cursor of records.
    """
    parts = orjson.loads(after)
    if not isinstance(parts, list) or [type(one) for one in parts] != [str] * len(_ORDER):
        raise ValueError("not a cursor of this storage")
    return dict(zip(_ORDER, parts, strict=True))


def _decode(document: Mapping[str, Any]) -> Record:
    return Record(
        kind=document["kind"],
        workspace_id=document["workspaceId"],
        id=document["id"],
        body=document["body"].encode(),
        at=int(document["at"]),
        version=int(document["version"]),
    )


def _sized(document: Mapping[str, Any]) -> tuple[Record, int]:
    record = _decode(document)
    return record, len(record.body)
