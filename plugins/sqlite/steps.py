# SPDX-License-Identifier: Apache-2.0
"""The steps of plans as statements of SQL, in a transaction of the caller.

Events have steps of their own: their keys lead to numbers, and the numbers to the rows. A row has a
hash as its key. An erased event leaves a row without origin and message id.
"""

from __future__ import annotations

import functools
import itertools
import sqlite3
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeVar

from engage.api import StorageContext
from engage.store.events import ERASED_TYPE, EVENTS
from engage.store.keys import key_of
from engage.store.remembered import Remembered
from engage.store.tables import (
    MAX_STORED_BYTES,
    Add,
    Context,
    Delete,
    Get,
    Key,
    Pages,
    Put,
    Recall,
    Remember,
    Row,
    Steps,
    Table,
    Under,
)

from .connection import insert, look_up
from .keys import parts
from .keys.event_keys import Keys
from .pages import delete_page, page
from .tables import OWNERS, Numbers, sql_of

Result = TypeVar("Result")

_WIDTH: Final = len(EVENTS.columns)
_COLUMNS: Final = ", ".join(EVENTS.columns)
_FOUND: Final = "FROM {keys} w CROSS JOIN events ON seq = w.column2 AND key = w.column1"
_INSERT: Final = f"INSERT INTO events (seq, {_COLUMNS}, key)"
_UPDATE: Final = f"UPDATE events SET ({_COLUMNS}) = ({', '.join('?' * _WIDTH)}) WHERE seq = ?"
#: Find the number of a key where it is looked for first, and then among the newest events, which
#: takes a while.
_NUMBER: Final = (
    f"SELECT seq FROM events WHERE key = ?1 AND seq IN ({parts.NUMBERS})",
    "SELECT seq FROM events WHERE key = ?1 "
    "AND seq > (SELECT value FROM store WHERE name = 'merged') ORDER BY seq DESC LIMIT 1",
)


class Run:
    """What the execution of one plan has met.

    :param keys: those of the process that writes; otherwise their table is read.
    :param remembered: by the process that writes.
    """

    def __init__(self, keys: Keys | None = None, remembered: Remembered | None = None) -> None:
        self.keys = keys
        self.remembered = remembered
        #: What is to be remembered after the commit.
        self.new: list[Remember] = []
        self.owners: Numbers = {}
        #: The keys of new events, in the order of their numbers. None: the plan adds none.
        self.added: list[bytes] | None = None


def execute(
    db: sqlite3.Connection, steps: Steps[Result], context: StorageContext, run: Run | None = None
) -> Result:
    """Execute the steps of a plan, and return its result."""
    met = run or Run()
    answer: Any = None
    try:
        while True:
            step: Any = steps.send(answer)
            kind = type(step)
            if kind in _EVENTS and step.table.name == "events":
                answer = _EVENTS[kind](db, step, met)
            else:
                answer = context if kind is Context else _EXECUTE[kind](db, step, met)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _get(db: sqlite3.Connection, step: Get, run: Run) -> dict[Key, Row]:
    width = step.table.key
    rows = {row[:width]: row for row in sql_of(step.table).read(db, step.keys, run.owners)}
    if step.table.name in OWNERS and "number" in step.table.columns:
        run.owners.update({key: rows[key][-1] if key in rows else None for key in step.keys})
    return rows


def _under(db: sqlite3.Connection, step: Under, run: Run) -> dict[Key, list[Row]]:
    by_prefix: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
    width = len(next(iter(by_prefix), ()))
    if step.by:
        at = [sql_of(step.table).at[name] for name in step.by[:width]]
        query = _by_index(step.table, step.by, width, (*step.equal.items(),), step.first)
        for row in look_up(db, query, by_prefix):
            by_prefix[tuple([row[place] for place in at])].append(row)
    elif width == (sql := sql_of(step.table)).width:
        # By the numbers of the rows to which they belong.
        stored = sql.keys(db, by_prefix, run.owners)
        of_number = {run.owners[owner]: (owner, rows) for owner, rows in by_prefix.items()}
        for row in look_up(db, sql.look_up(sql.short, 1), stored):
            owner, rows = of_number[row[0]]
            rows.append(owner + row[1:])
    else:
        for row in sql_of(step.table).read(db, by_prefix, run.owners):
            by_prefix[row[:width]].append(row)
    return by_prefix


@functools.cache
def _by_index(
    table: Table, by: tuple[str, ...], width: int, equal: tuple[Any, ...], first: bool
) -> str:
    """Return the query for the rows under prefixes of an index."""
    sql, name = sql_of(table), table.name

    def where(alias: str) -> str:
        return " AND ".join(
            (
                *(f"{alias}.{column} = k.column{at}" for at, column in enumerate(by[:width], 1)),
                *(f"{alias}.{column} IS NOT NULL" for column in by[width:]),
                *(f"{alias}.{column} = {value!r}" for column, value in equal),
            )
        )

    select = f"SELECT {sql.columns} FROM {{keys}} k CROSS JOIN {sql.source}"
    if not first:
        return f"{select} WHERE {where(name)}"
    # The prefix has the other columns of the key.
    number = sql.key[0]
    order = ", ".join(f"f.{column}" for column in (*by[width:], number))
    rows = f"{name} f WHERE {where('f')} ORDER BY {order} LIMIT 1"
    return f"{select} WHERE {number} = (SELECT f.{number} FROM {rows}) AND {where(name)}"


def _add(db: sqlite3.Connection, step: Add, run: Run) -> dict[Key, Row]:
    sql, rows = sql_of(step.table), list(step.rows)
    if step.table.columns[0] == "number":  # No row has a key yet.
        insert(db, sql.insert, rows)
        return {}
    stored = _get(db, Get(step.table, {row[: step.table.key] for row in rows}), run)
    new = [row for row in rows if row[: step.table.key] not in stored]
    insert(db, sql.insert, sql.rows(db, new, run.owners), sql.or_skip)
    return stored


def _put(db: sqlite3.Connection, step: Put, run: Run) -> None:
    sql = sql_of(step.table)
    insert(db, sql.insert, sql.rows(db, step.rows, run.owners), sql.or_replace)


def _delete(db: sqlite3.Connection, step: Delete, run: Run) -> int:
    if isinstance(step.keys, Pages):
        run.owners.clear()
        return delete_page(db, step.keys)
    sql = sql_of(step.table)
    deleted = db.executemany(sql.delete, sql.keys(db, step.keys, run.owners)).rowcount
    if step.table.name in OWNERS:
        run.owners.update(dict.fromkeys(step.keys))
    return max(0, deleted)


def _recall(_: sqlite3.Connection, step: Recall, run: Run) -> Mapping[Any, Any]:
    return {} if run.remembered is None else run.remembered.of(step.topic)


def _remember(_: sqlite3.Connection, step: Remember, run: Run) -> None:
    if step.values is not None:
        run.new.append(step)
    elif run.remembered is not None:
        run.remembered.forget(step.topic)


# ---------------------------------------------------------------------------------------- events
def hash_of(row: Row) -> bytes:
    """Return the key in the file of a row or a key."""
    return row[-1] if len(row) > _WIDTH else key_of(*row[: EVENTS.key])


def _select(table: Table) -> str:
    return f"SELECT key, {', '.join(table.columns)} {_FOUND}"


def _candidates(
    db: sqlite3.Connection, keys: AbstractSet[bytes], run: Run
) -> Collection[tuple[bytes, int]]:
    """Return the keys and the numbers of events that may be stored."""
    numbers: dict[bytes, int] = {}
    if run.keys is None:
        for key in keys:
            rows = (db.execute(query, (key,)).fetchone() for query in _NUMBER)
            if (row := next(filter(None, rows), None)) is not None:
                numbers[key] = row[0]
        return numbers.items()
    if not run.keys.is_taken_over:
        run.keys.take_over(db)
    numbers = run.keys.candidates(db, keys)
    if run.added:
        new = dict(zip(run.added, itertools.count(run.keys.next_number), strict=False))
        numbers.update({key: new[key] for key in keys if key in new})
    return numbers.items()


def _get_events(db: sqlite3.Connection, step: Get, run: Run) -> dict[Key, Row]:
    keys = {hash_of(key): key for key in step.keys}
    rows = look_up(db, _select(step.table), _candidates(db, keys.keys(), run))
    return {keys[row[0]]: row[1:] for row in rows}


def _add_events(db: sqlite3.Connection, step: Add, run: Run) -> dict[Key, Row]:
    keys = run.keys
    assert keys is not None
    keys.require_room()
    given = [row if len(row) > _WIDTH else _in_file(row) for row in step.rows]
    new = {row[-1]: row for row in given}
    if len(new) < len(given):
        # Of each key, the first.
        new.update({row[-1]: row for row in reversed(given)})
    candidates = _candidates(db, new.keys(), run)
    stored = _stored(db, candidates) if candidates else {}
    for key in stored:
        del new[key]
    run.added = [] if run.added is None else run.added
    first = keys.next_number + len(run.added)
    insert(db, _INSERT, [(number, *row) for number, row in enumerate(new.values(), first)])
    run.added += new
    if not stored:
        return {}
    return {row[:3]: stored[key] for row in step.rows if (key := hash_of(row)) in stored}


def _put_events(db: sqlite3.Connection, step: Put, run: Run) -> None:
    rows = {row[-1]: row for row in map(_in_file, step.rows)}
    stored = look_up(db, f"SELECT key, seq {_FOUND}", _candidates(db, rows.keys(), run))
    db.executemany(_UPDATE, [(*rows.pop(key)[:-1], number) for key, number in stored])
    if rows:
        _add_events(db, Add(step.table, rows.values()), run)


def _delete_events(db: sqlite3.Connection, step: Delete, run: Run) -> int:
    if isinstance(step.keys, Pages):
        return delete_page(db, step.keys)
    candidates = _candidates(db, {hash_of(key) for key in step.keys}, run)
    deleted = db.executemany("DELETE FROM events WHERE key = ? AND seq = ?", candidates)
    return max(0, deleted.rowcount)


def _stored(db: sqlite3.Connection, candidates: Collection[tuple[bytes, int]]) -> dict[bytes, Row]:
    """Return the rows that are stored; see :class:`Add` for their bodies."""
    rows = look_up(db, _select(EVENTS), candidates)
    if sum([len(row[-1]) for row in rows]) > MAX_STORED_BYTES:
        rows.sort(key=lambda row: len(row[-1]))
        sizes = itertools.accumulate(len(row[-1]) for row in rows)
        rows = [
            row if size <= MAX_STORED_BYTES else (*row[:-1], None)
            for row, size in zip(rows, sizes, strict=True)
        ]
    return {row[0]: row[1:] for row in rows}


def _in_file(row: Row) -> Row:
    """Return a row as it is stored, with its key as the last value."""
    key = hash_of(row)
    return (row[0], "", "", *row[3:], key) if row[3] == ERASED_TYPE else (*row, key)


_EXECUTE: Final[dict[type, Callable[[sqlite3.Connection, Any, Run], Any]]] = {
    Get: _get,
    Under: _under,
    Add: _add,
    Put: _put,
    Delete: _delete,
    Pages: lambda db, step, run: page(db, step, run.owners),
    Recall: _recall,
    Remember: _remember,
}
#: The same over events.
_EVENTS: Final[dict[type, Callable[[sqlite3.Connection, Any, Run], Any]]] = {
    Get: _get_events,
    Add: _add_events,
    Put: _put_events,
    Delete: _delete_events,
}
