# SPDX-License-Identifier: Apache-2.0
"""Suppressed addresses.

Each is one document. ``rank`` orders those of one ``_id``: twice the time, and one more for a
suppression that is not lifted. A document is inserted, and replaced only by one of a greater rank.
It is deleted only
when a person is erased.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import bson
from bson.datetime_ms import DatetimeMS

from engage.api import Page, Suppression

from .connection import DUPLICATE, Connection
from .documents import below, path_id
from .paging import id_after, read_page
from .schema import SUPPRESSIONS


class Suppressions:
    """Reads and writes suppressions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def put(self, suppressions: Sequence[Suppression]) -> None:
        """Write those that are later than what is stored; see :meth:`SuppressionStore.suppress`."""
        # One for each _id: the updates of one call have no order.
        latest = {one["_id"]: one for one in sorted(map(_encode, suppressions), key=_rank)}
        documents = list(latest.values())
        if not documents:
            return
        with self._connection.calling():
            codes = await self._connection.insert(SUPPRESSIONS, [*map(bson.encode, documents)])
            known = [documents[index] for index, code in codes.items() if code == DUPLICATE]
            # Also those of the same rank, which may not be durable yet.
            await self._connection.update(
                SUPPRESSIONS,
                [
                    {
                        "q": {"_id": one.pop("_id"), "rank": {"$lte": one["rank"]}},
                        "u": {"$set": one},
                    }
                    for one in known
                ],
            )

    async def find(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> Sequence[Suppression]:
        """Return those of addresses (channel, address) that are not lifted."""
        found: list[Suppression] = []
        with self._connection.calling() as db:
            for address in addresses:
                query = {"_id": below(path_id(workspace_id, *address)), "lifted": False}
                found += [_decode(one) async for one in db[SUPPRESSIONS].find(query)]
        return found

    async def erase(self, workspace_id: str, addresses: Collection[tuple[str, str]]) -> int:
        """Delete the suppressions of addresses (channel, address), and return how many."""
        deleted = 0
        with self._connection.calling() as db:
            for address in addresses:
                query = {"_id": below(path_id(workspace_id, *address))}
                deleted += (await db[SUPPRESSIONS].delete_many(query)).deleted_count
        return deleted

    async def scan(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[Suppression]:
        """Return a page of all, also of those that are lifted, in the order of their ``_id``."""
        with self._connection.calling(scan=True) as db:
            cursor = db[SUPPRESSIONS].find(id_after(workspace_id, after)).sort([("_id", 1)])
            items, last = await read_page(cursor, limit, lambda one: (_decode(one), 1000))
        return Page(items, None if last is None else last["_id"])


def _rank(document: Mapping[str, Any]) -> int:
    rank: int = document["rank"]
    return rank


def _encode(one: Suppression) -> dict[str, Any]:
    return {
        "_id": path_id(one.workspace_id, one.channel, one.address, one.group_id, one.reason),
        "workspaceId": one.workspace_id,
        "channel": one.channel,
        "address": one.address,
        "groupId": one.group_id,
        "reason": one.reason,
        "at": DatetimeMS(one.at),
        "lifted": one.lifted,
        "how": one.how,
        "sourceId": one.source_id,
        "rank": 2 * one.at + (not one.lifted),
    }


def _decode(document: Mapping[str, Any]) -> Suppression:
    return Suppression(
        workspace_id=document["workspaceId"],
        channel=document["channel"],
        address=document["address"],
        group_id=document["groupId"],
        reason=document["reason"],
        at=int(document["at"]),
        lifted=document["lifted"],
        how=document["how"],
        source_id=document["sourceId"],
    )
