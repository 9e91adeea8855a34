# SPDX-License-Identifier: Apache-2.0
"""Rows that are sums over documents. They are counted by an index, and not stored.

They are remembered for a few seconds, and what plans put changes only what is remembered. So they
are exact within a process; other processes also add to them.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from typing import Any, Final

from engage.store.tables import Get, Key, Page, Pages, Put, Row, Table

from .connection import BATCH, Connection
from .tables import FORMS

#: Seconds after which sums are counted again.
_SECONDS: Final = 5.0


class Totals:
    """Counts sums, and remembers them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: Name of the table → key → when it was counted, and the row.
        self._known = collections.defaultdict[str, dict[Key, tuple[float, Row]]](dict)

    async def execute(self, step: Get | Put | Pages) -> Any:
        """Execute a step over a table of sums, and return its result."""
        table, known = step.table, self._known[step.table.name]
        form, now = FORMS[table.name], time.monotonic()
        if isinstance(step, Pages):
            # With this condition too the server answers from the index alone.
            rows = await self._count(table, {form.field(table.columns[0]): {"$gte": ""}})
            return Page(sorted(rows.values()), None, more=False)
        if isinstance(step, Put):
            for row in step.rows:
                counted_at, _ = known.get(key := row[: table.key], (now, row))
                known[key] = (counted_at, row)
            return None
        for key in step.keys:
            if key not in known or known[key][0] <= now - _SECONDS:
                query = form.query(dict(zip(table.columns, key, strict=False)))
                none = (*key, *[0] * (len(table.columns) - table.key))
                known[key] = (now, (await self._count(table, query)).get(key, none))
        return {key: known[key][1] for key in step.keys}

    async def _count(self, table: Table, query: Mapping[str, Any]) -> dict[Key, Row]:
        """Return the rows of the documents of a query: their count, and the sum of a field."""
        form, found = FORMS[table.name], dict[Key, Row]()
        *names, _, size = table.columns
        fields = {"_id": 0, **(form.projection([*names, size]) or {})}
        with self._connection.calling() as db:
            async for one in db[form.collection].find(query, fields).batch_size(BATCH):
                key = tuple(form.decode(name, one) for name in names)
                *_, count, total = found.get(key, (0, 0))
                found[key] = (*key, count + 1, total + form.decode(size, one))
        return found

    def forget(self) -> None:
        """Forget everything: what was put may not have become true."""
        self._known.clear()
