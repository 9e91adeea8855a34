# SPDX-License-Identifier: Apache-2.0
"""Counters: a document for each register.

The ``_id`` of a register is ``<step>:<at>:["<name>","<workspace>",["<label>", …],"<process>"]``
with ``at`` in 14 digits. So the index of ids, which every collection has, has the registers of a
step in order of time, and those of one counter next to each other. It serves all queries.

Sums are made here, from the registers in that order, because not every compatible server has the
operators that an aggregation would need (FerretDB 1.24: no ``$max`` in ``$group``). So a page reads
no more registers than it needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from bson.datetime_ms import DatetimeMS

from engage.api import Count, CountSum, Page

from .connection import BATCH, Connection
from .documents import any_of, is_text
from .paging import read_page
from .schema import COUNTS

_log = logging.getLogger("engage.storage.mongo")

#: Registers that one page of sums reads at most, except the first sum, which is never cut off.
MAX_ROWS: Final = 50_000
#: The end of the times that an ``_id`` can have: in the year 5138.
_END: Final = 10**14

#: A counter in a step of time: at, name, workspace, labels.
_Series = tuple[int, str, str, tuple[str, ...]]


class Counts:
    """Writes, sums and expires counters."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: Updates of one register by one process are made one after the other, because FerretDB 1
        #: loses some of those that are made at the same time.
        self._writing = asyncio.Lock()

    async def put(self, counts: Sequence[Count]) -> None:
        """Write registers; the greatest value of each stays.

        :raises ValueError: if a register cannot be stored.
        """
        greatest: dict[str, Count] = {}
        for count in counts:
            key = _key(count)
            existing = greatest.get(key)
            if existing is None or existing.value < count.value:
                greatest[key] = count
        if not greatest:
            return
        statements = [_statement(key, count) for key, count in greatest.items()]
        async with self._writing:
            with self._connection.calling():
                codes = await self._connection.update(COUNTS, statements)
        refused = [code for code in codes if code]
        if refused:
            _log.error("%d counters can never be stored (code %d)", len(refused), refused[0])

    async def sums(
        self,
        step: int,
        *,
        since: int,
        until: int,
        names: Sequence[str] | None = None,
        workspace_id: str | None = None,
        after: str | None = None,
        limit: int,
    ) -> Page[CountSum]:
        """Return a page of sums; see :meth:`Storage.counts`."""
        start, end = _start(step, since), _start(step, until)
        query: dict[str, Any] = {"_id": {"$gte": start, "$lt": end}}
        if after is not None:
            query["_id"] = {"$gt": max(after, start), "$lt": end}
        if names is not None:
            if not names:
                return Page((), None)
            query["name"] = any_of(names)
        if workspace_id is not None:
            query["workspaceId"] = workspace_id
        with self._connection.calling() as db:
            cursor = db[COUNTS].find(query, {"value": 1}).sort([("_id", 1)])
            return await _summed(cursor, step, limit)

    async def scan(self, *, after: str | None, limit: int) -> Page[Count]:
        """Return a page of all registers."""
        query = {} if after is None else {"_id": {"$gt": after}}
        with self._connection.calling(scan=True) as db:
            cursor = db[COUNTS].find(query, {"value": 1}).sort([("_id", 1)])
            items, last = await read_page(cursor, limit, _sized)
        return Page(items, None if last is None else last["_id"])

    async def expire(self, step: int, before: int, *, limit: int) -> int:
        """Delete the oldest registers of a step, and return how many."""
        query = {"_id": {"$gte": _start(step, 0), "$lt": _start(step, before)}}
        deleted = 0
        with self._connection.calling() as db:
            cursor = db[COUNTS].find(query, {"_id": 1}).sort([("_id", 1)]).limit(limit)
            ids = [document["_id"] for document in await cursor.to_list(None)]
            for begin in range(0, len(ids), BATCH):
                condition = {"_id": any_of(ids[begin : begin + BATCH])}
                deleted += (await db[COUNTS].delete_many(condition)).deleted_count
        return deleted


async def _summed(cursor: Any, step: int, limit: int) -> Page[CountSum]:
    """Return the sums of the registers of a cursor, which has those of a counter together."""
    sums: list[CountSum] = []
    series: _Series | None = None
    values: list[int] = []
    rows = 0
    try:
        async for document in cursor.batch_size(BATCH):
            _, next_series, _ = _parse(document["_id"])
            if next_series != series:
                if series is not None:
                    sums.append(_sum(series, values))
                    if len(sums) == limit or rows >= MAX_ROWS:
                        return Page(sums, _after(step, series))
                series, values = next_series, []
            elif rows >= MAX_ROWS and sums:
                last = sums[-1]
                place = (last.at, last.name, last.workspace_id, last.labels)
                return Page(sums, _after(step, place))
            values.append(int(document["value"]))
            rows += 1
    finally:
        await cursor.close()
    if series is not None:
        sums.append(_sum(series, values))
    return Page(sums, None)


def _sum(series: _Series, values: Sequence[int]) -> CountSum:
    at, name, workspace_id, labels = series
    return CountSum(
        at=at,
        name=name,
        workspace_id=workspace_id,
        labels=labels,
        total=sum(values),
        greatest=max(values),
        processes=len(values),
    )


# --------------------------------------------------------------------------------------------- ids
def _start(step: int, at: int) -> str:
    """Return a value that is less than all ids of a step from a time on."""
    return f"{step}:{min(max(at, 0), _END):014d}:" if at < _END else f"{step};"


def _prefix(step: int, series: _Series) -> str:
    at, name, workspace_id, labels = series
    # A JSON text cannot be the beginning of another one, so no other counter has this prefix.
    return f"{_start(step, at)}{orjson.dumps([name, workspace_id, labels]).decode()[:-1]},"


def _after(step: int, series: _Series) -> str:
    """Return the cursor behind all registers of a counter in a step: a quotation mark follows the
    prefix in each of these, and this character is behind it."""
    return _prefix(step, series) + "#"


def _key(count: Count) -> str:
    """Return the ``_id`` of a register.

    :raises ValueError: if it cannot be stored.
    """
    texts = (count.name, count.workspace_id, *count.labels, count.process)
    if not all(map(is_text, texts)):
        raise ValueError("a text of a counter contains a lone surrogate")
    if not (0 <= count.at < _END and 0 <= count.value < 2**63):
        raise ValueError("a counter has a time or a value that cannot be stored")
    series = (count.at, count.name, count.workspace_id, count.labels)
    return f"{_prefix(count.step, series)}{orjson.dumps(count.process).decode()}]"


def _parse(key: str) -> tuple[int, _Series, str]:
    """Return step, counter and process of an ``_id``."""
    step, at, rest = key.split(":", 2)
    name, workspace_id, labels, process = orjson.loads(rest)
    return int(step), (int(at), name, workspace_id, tuple(labels)), process


def _statement(key: str, count: Count) -> dict[str, Any]:
    # The fields follow from the _id. They are for people who query the collection.
    fields = {
        "step": count.step,
        "at": DatetimeMS(count.at),
        "name": count.name,
        "workspaceId": count.workspace_id,
        "labels": list(count.labels),
        "process": count.process,
    }
    changes = {"$max": {"value": count.value}, "$setOnInsert": fields}
    # With the _id alone, FerretDB also uses its index.
    return {"q": {"_id": key}, "u": changes, "upsert": True}


def _sized(document: Mapping[str, Any]) -> tuple[Count, int]:
    key = document["_id"]
    step, (at, name, workspace_id, labels), process = _parse(key)
    count = Count(
        step=step,
        at=at,
        process=process,
        name=name,
        workspace_id=workspace_id,
        labels=labels,
        value=int(document["value"]),
    )
    return count, len(key)
