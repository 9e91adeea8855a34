# SPDX-License-Identifier: Apache-2.0
"""Rows of counters.

A counter (name, workspace and labels) is one row of ``count_series``, and its number stands in the
registers: they are small, and there are hundreds of thousands of them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import orjson

from engage.api import Count, CountSum

from ..connection import insert, look_up
from . import paging

#: The time and the number of the last counter of a page.
Place = tuple[int, int]
#: The primary key of a register: step, time, number of the counter, process.
Register = tuple[int, int, int, str]

#: Less than every register.
_BEFORE_ALL: Final[Register] = (-1, -1, -1, "")


def put(db: sqlite3.Connection, counts: Sequence[Count]) -> None:
    """Write registers; of several values of one register the greatest stays."""
    keys = [(one.name, one.workspace_id, _encode(one.labels)) for one in counts]
    numbers = _numbers(db, keys)
    insert(
        db,
        "INSERT INTO counts (step, at, series, process, value)",
        [
            (one.step, one.at, numbers[key], one.process, one.value)
            for key, one in zip(keys, counts, strict=True)
        ],
        "ON CONFLICT (step, at, series, process) DO UPDATE SET value = excluded.value "
        "WHERE excluded.value > counts.value",
    )


def _numbers(
    db: sqlite3.Connection, keys: Sequence[tuple[str, str, str]]
) -> dict[tuple[str, str, str], int]:
    """Return the numbers of counters, and give a number to those that have none."""
    wanted = dict.fromkeys(keys)
    found = {
        (name, workspace, labels): int(number)
        for number, name, workspace, labels in look_up(
            db,
            "SELECT s.number, s.name, s.workspace, s.labels FROM {keys} k CROSS JOIN count_series "
            "s ON s.name = k.column1 AND s.workspace = k.column2 AND s.labels = k.column3",
            list(wanted),
        )
    }
    for key in wanted:
        if key not in found:
            cursor = db.execute(
                "INSERT INTO count_series (name, workspace, labels) VALUES (?, ?, ?)", key
            )
            found[key] = int(cursor.lastrowid or 0)
    return found


def _encode(labels: Sequence[str]) -> str:
    return orjson.dumps(list(labels)).decode()


def sums(
    db: sqlite3.Connection,
    step: int,
    since: int,
    until: int,
    names: Sequence[str] | None,
    workspace_id: str | None,
    after: Place | None,
    limit: int,
) -> tuple[list[CountSum], Place | None]:
    """Return a page of the sums over all processes, in order of time, and where it ends.

    :param after: where the previous page ended.
    """
    conditions: list[str] = []
    values: list[str] = []
    if names is not None:
        conditions.append(f"name IN ({', '.join('?' * len(names))})")
        values += names
    if workspace_id is not None:
        conditions.append("workspace = ?")
        values.append(workspace_id)
    chosen = f"FROM count_series WHERE {' AND '.join(conditions) or 'TRUE'}"
    counters = {
        number: (name, workspace, tuple(orjson.loads(labels)))
        for number, name, workspace, labels in db.execute(
            f"SELECT number, name, workspace, labels {chosen}", values
        )
    }
    # The + keeps SQLite at the primary key, which has the order.
    wanted = f"AND +series IN (SELECT number {chosen})" if conditions else ""
    start = (since, -1) if after is None else after
    end = _end(db, step, start, until)
    rows = db.execute(
        "SELECT at, series, sum(value), max(value), count(*) FROM counts "
        "WHERE step = ? AND (at, series) > (?, ?) AND (at, series) < (?, ?) "
        f"{wanted} GROUP BY at, series ORDER BY at, series LIMIT ?",
        (step, *start, *(end or (until, -1)), *values, limit),
    ).fetchall()
    found = []
    for at, number, total, greatest, processes in rows:
        name, workspace, labels = counters[number]
        found.append(
            CountSum(
                at=at,
                name=name,
                workspace_id=workspace,
                labels=labels,
                total=total,
                greatest=greatest,
                processes=processes,
            )
        )
    if len(rows) >= limit:
        return found, (rows[-1][0], rows[-1][1])
    return found, None if end is None else (end[0], end[1] - 1)


def _end(db: sqlite3.Connection, step: int, start: Place, until: int) -> Place | None:
    """Return the first counter that the page does not examine, or ``None`` if it examines all."""
    row = db.execute(
        "SELECT at, series FROM counts WHERE step = ? AND (at, series) > (?, ?) AND at < ? "
        "ORDER BY at, series LIMIT 1 OFFSET ?",
        (step, *start, until, paging.MAX_ROWS),
    ).fetchone()
    if row is None:
        return None
    at, number = row
    # A counter is not split. One that has more registers than a page is examined as a whole.
    return (at, number + 1) if (at, number - 1) <= start else (at, number)


def scan(
    db: sqlite3.Connection, after: Register | None, limit: int
) -> tuple[list[Count], Register | None]:
    """Return a page of registers in the order of their primary key, and where it ends."""
    rows = db.execute(
        "SELECT c.step, c.at, c.series, c.process, c.value, s.name, s.workspace, s.labels "
        "FROM counts c CROSS JOIN count_series s ON s.number = c.series "
        "WHERE (c.step, c.at, c.series, c.process) > (?, ?, ?, ?) "
        "ORDER BY c.step, c.at, c.series, c.process LIMIT ?",
        (*(after or _BEFORE_ALL), min(limit, paging.MAX_ROWS)),
    ).fetchall()
    last = rows[-1][:4] if len(rows) >= min(limit, paging.MAX_ROWS) else None
    return [_count(row) for row in rows], last


def _count(row: Any) -> Count:
    step, at, _, process, value, name, workspace, labels = row
    return Count(
        step=step,
        at=at,
        process=process,
        name=name,
        workspace_id=workspace,
        labels=tuple(orjson.loads(labels)),
        value=value,
    )


def expire(db: sqlite3.Connection, step: int, before: int, limit: int) -> int:
    """Delete the oldest registers of a step, and return how many."""
    return db.execute(
        "DELETE FROM counts WHERE (step, at, series, process) IN (SELECT step, at, series, process "
        "FROM counts WHERE step = ? AND at < ? ORDER BY at, series, process LIMIT ?)",
        (step, before, limit),
    ).rowcount
