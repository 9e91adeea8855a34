# SPDX-License-Identifier: Apache-2.0
"""Counters.

A counter (name, workspace and labels) is one row of ``count_series``, and its number stands in the
registers: they are small, and there are hundreds of thousands of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import orjson

from engage.api import Count, CountSum, Page
from engage.store.pages import LAST_TEXT, cursor_of, every, place_of
from engage.store.pages import expire as expire_rows
from engage.store.pages import page as rows_page
from engage.store.tables import (
    MAX_ROWS,
    Add,
    Executor,
    Get,
    Pages,
    Put,
    Row,
    Steps,
    Table,
    nothing,
    plan,
)

#: The labels are a JSON array. A row is never deleted: registers have its number.
SERIES: Final = Table(
    "count_series",
    {"name": str, "workspace": str, "labels": str, "number": int},
    key=3,
    arrival=True,
)
COUNTS: Final = Table(
    "counts",
    {"step": int, "at": int, "series": int, "process": str, "value": int},
    key=4,
    register=("value",),
)


@plan(locks=nothing)
def put(counts: Sequence[Count]) -> Steps[None]:
    """Write registers; of several values of one register the greatest stays."""
    keys = [(x.name, x.workspace_id, orjson.dumps(x.labels).decode()) for x in counts]
    series = yield Get(SERIES, set(keys))
    if new := [key for key in dict.fromkeys(keys) if key not in series]:
        yield Add(SERIES, [(*key, None) for key in new])
        series |= yield Get(SERIES, new)
    rows: dict[Row, Row] = {}
    for key, count in sorted(zip(keys, counts, strict=True), key=lambda pair: pair[1].value):
        register = (count.step, count.at, series[key][3], count.process)
        rows[register] = (*register, count.value)
    yield Put(COUNTS, list(rows.values()))


@plan()
def sums(
    step: int,
    since: int,
    until: int,
    names: Sequence[str] | None,
    workspace_id: str | None,
    after: str | None,
    limit: int,
) -> Steps[Page[CountSum]]:
    """Return a page of the sums over all processes; see :meth:`Counts.counts`."""
    filters: dict[str, Any] = {} if names is None else {"name": names}
    if workspace_id is not None:
        filters["workspace"] = [workspace_id]
    series = {row[3]: row for row in (yield from every(SERIES, one_of=filters))}
    one_of = {"series": series.keys()} if filters else {}
    last = place_of(after, int, int)
    place = None if last is None else (step, *last, LAST_TEXT)
    registers: dict[tuple[int, int], list[int]] = {}
    more = bool(series)
    while more and len(registers) <= limit:
        page = yield Pages(
            COUNTS, MAX_ROWS, (), {"step": step}, one_of, low=since, high=until, after=place
        )
        for row in page.rows:
            registers.setdefault(row[1:3], []).append(row[4])
        place, more = page.place, page.more
        if more and len(page.rows) < MAX_ROWS and place[1:3] not in registers:
            break  # It looked at enough registers. That of the place is not wanted.
    items = [
        CountSum(
            at=at,
            name=series[number][0],
            workspace_id=series[number][1],
            labels=tuple(orjson.loads(series[number][2])),
            total=sum(values),
            greatest=max(values),
            processes=len(values),
        )
        for (at, number), values in itertools.islice(registers.items(), limit)
    ]
    if len(registers) > limit:
        # The registers of the counter behind it may be on the next page.
        return Page(items, cursor_of([*registers][limit - 1]))
    return Page(items, cursor_of(place[1:3]) if more and place else None)


@plan()
def scan(after: str | None, limit: int) -> Steps[Page[Count]]:
    """Return a page of registers; see :meth:`~engage.store.facade.Storage.scan_counts`."""
    series = {row[3]: row for row in (yield from every(SERIES))}

    def count(row: Row) -> Count:
        step, at, number, process, value = row
        name, workspace, labels, _ = series[number]
        return Count(
            step=step,
            at=at,
            process=process,
            name=name,
            workspace_id=workspace,
            labels=tuple(orjson.loads(labels)),
            value=value,
        )

    return (yield from rows_page(count, COUNTS, {}, after, limit))


@plan(frees=True)
def expire(step: int, before: int, limit: int) -> Steps[int]:
    """Delete the oldest registers of a step, and return how many."""
    return (yield from expire_rows(COUNTS, "at", before, limit, {"step": step}))


# --------------------------------------------------------------------------------------- storage
class Counts(Executor):
    """Counters."""

    async def put_counts(self, counts: Sequence[Count]) -> None:
        """Write registers in one durable step; see :class:`Count`. Idempotent."""
        if counts:
            await self.run(put, counts)

    async def counts(
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
        """Return one page of sums, in order of time.

        :param step: 60, 3600 or 86400.
        :param since: the earliest ``at``, inclusive: milliseconds.
        :param until: the end, exclusive.
        :param names: only these counters; ``None``: all.
        :param workspace_id: only this workspace; ``None``: all.
        :param after: the cursor of the previous page; ``None`` for the first page.
        :param limit: the maximum number of items.
        """
        return await self.read(sums, step, since, until, names, workspace_id, after, limit)

    async def scan_counts(self, *, after: str | None, limit: int) -> Page[Count]:
        """Return one page of all registers, in a constant order, for a copy of the store."""
        return await self.read(scan, after, limit)

    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        """Delete at most ``limit`` registers of a step with ``at`` below ``before`` (milliseconds).

        :return: how many were deleted.
        """
        return await self.run(expire, step, before, limit)
