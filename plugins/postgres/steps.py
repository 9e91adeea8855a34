# SPDX-License-Identifier: Apache-2.0
"""The steps of plans as statements of SQL, in a transaction of the caller."""

from __future__ import annotations

from typing import Any

from engage.store import tables as seam
from engage.store.tables import Key, Row

from .pages import read_page
from .tables import encode, sql_of


class NotAloneError(Exception):
    """The plan deletes what it has not named: it is to run alone."""


class Run:
    """One execution of a plan, maybe alone, or up to an ``end`` of what arrived."""

    def __init__(self, db: Any, *, alone: bool = True, end: int | None = None) -> None:
        self._db, self._alone, self._end = db, alone, end
        #: The tables of which it has read pages: others may change these rows meanwhile.
        self._paged: set[str] = set()
        #: Whether it has changed anything.
        self.wrote = False

    async def execute(self, step: Any) -> Any:
        """Execute a step, and return its result."""
        return await getattr(self, f"_{type(step).__name__.lower()}")(step)

    async def _get(self, step: seam.Get) -> dict[Key, Row]:
        sql, width = sql_of(step.table), step.table.key
        records = await self._db.fetch(sql.get, sql.keys(step.keys)) if step.keys else ()
        return {row[:width]: row for row in map(sql.row, records)}

    async def _under(self, step: seam.Under) -> dict[Key, list[Row]]:
        rows: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
        if rows:
            sql, prefixes = sql_of(step.table), [*rows]
            query = sql.under(step.by, len(prefixes[0]), (*step.equal,), step.first)
            arrays = [[*map(encode, column)] for column in zip(*prefixes, strict=True)]
            for record in await self._db.fetch(query, *arrays, *map(encode, step.equal.values())):
                rows[prefixes[record["place"] - 1]].append(sql.row(record))
        return rows

    async def _add(self, step: seam.Add) -> dict[Key, Row]:
        table, sql = step.table, sql_of(step.table)
        new: dict[Key, Row] = {}
        for row in step.rows:
            # No row of some tables has a key yet.
            key = row[: table.key] if sql.is_hashed else (len(new),)
            new.setdefault(key, row[: len(table.columns)])
        stored: dict[Key, Row] = {}
        while new:
            added = await self._db.fetch(sql.add, *sql.arrays(new.values()))
            self.wrote |= bool(added)
            if len(added) == len(new):
                break
            keys = dict(zip(sql.keys(new), new, strict=True))
            for (hash_,) in added:
                del new[keys.pop(hash_)]
            # One that is deleted between the two statements is inserted after all.
            for row in map(sql.row, await self._db.fetch(sql.stored, [*keys])):
                stored[row[: table.key]] = row
                del new[row[: table.key]]
        return stored

    async def _put(self, step: seam.Put) -> None:
        if step.rows:
            sql = sql_of(step.table)
            await self._db.execute(sql.put, *sql.arrays(step.rows))
            self.wrote = True

    async def _delete(self, step: seam.Delete) -> int:
        sql, keys = sql_of(step.table), step.keys
        if isinstance(keys, seam.Pages):
            keys = [row[: step.table.key] for row in (await read_page(self._db, keys)).rows]
        elif keys and step.table.name in self._paged and not self._alone:
            raise NotAloneError
        if not keys:
            return 0
        status = await self._db.execute(sql.delete, sql.keys(keys))
        deleted = int(status.rpartition(" ")[2])
        self.wrote |= deleted > 0
        return deleted

    async def _pages(self, step: seam.Pages) -> seam.Page:
        self._paged.add(step.table.name)
        if self._end is not None and step.order == ("number",):
            step = step._replace(high=self._end + 1)
        return await read_page(self._db, step)

    async def _recall(self, _: seam.Recall | seam.Remember) -> dict[Any, Any]:
        return {}  # Other processes change what this one would remember.

    _remember = _recall
