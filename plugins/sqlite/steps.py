# SPDX-License-Identifier: Apache-2.0
"""The steps of plans as statements of SQL, in a transaction of the caller."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from engage.api import StorageContext
from engage.store.tables import (
    MAX_PAGE_BYTES,
    Add,
    Context,
    Delete,
    Get,
    Key,
    Page,
    Pages,
    Place,
    Put,
    Row,
    Steps,
    Table,
    Under,
)

from .connection import insert, key_of, look_up

Result = TypeVar("Result")

#: Table → the column with the numbers of its rows, if that is not ``number``.
_NUMBERS: Final = {"letters": "seq", "history": "seq"}
#: The tables whose unique key is in one column, ``key``, as a hash.
_HASHED: Final = frozenset({"letters"})


def execute(db: sqlite3.Connection, steps: Steps[Result], context: StorageContext) -> Result:
    """Execute the steps of a plan, and return its result."""
    answer: Any = None
    try:
        while True:
            step = steps.send(answer)
            answer = context if isinstance(step, Context) else _EXECUTE[type(step)](db, step)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class _Sql:
    """The parts of the statements over a table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._number = _NUMBERS.get(table.name, "number")
        self._is_hashed = table.name in _HASHED
        self.columns = ", ".join(map(self.column, table.columns))
        self.key = ["key"] if self._is_hashed else self._key_columns(table.key)
        named = "key, " * self._is_hashed + self.columns
        target = f"ON CONFLICT ({', '.join(self.key)}) DO"
        rest = [self.column(name) for name in table.columns[table.key :]]
        values = ", ".join(f"{name} = excluded.{name}" for name in rest)
        self.insert = f"INSERT INTO {table.name} ({named})"
        self.or_skip = f"{target} NOTHING"
        self.or_replace = f"{target} UPDATE SET {values} {_if_it_wins(table)}"
        same = " AND ".join(f"{name} = ?" for name in self.key)
        self.delete = f"DELETE FROM {table.name} WHERE {same}"

    def _key_columns(self, width: int) -> list[str]:
        return [self.column(name) for name in self.table.columns[:width]]

    def column(self, name: str) -> str:
        """Return how a column is called in the file."""
        return self._number if name == "number" else name

    def stored_key(self, key: Key) -> Key:
        """Return the values of the columns of the unique key."""
        return (key_of(*key),) if self._is_hashed else key

    def stored(self, row: Row) -> Row:
        """Return the values of the columns that are inserted."""
        return (key_of(*row[: self.table.key]), *row) if self._is_hashed else row

    @functools.cache  # noqa: B019 (there is one for each table)
    def look_up(self, width: int) -> str:
        """Return the query for rows whose key begins with ``width`` values."""
        columns = ", ".join(f"t.{self.column(name)}" for name in self.table.columns)
        key = self.key if self._is_hashed else self._key_columns(width)
        same = " AND ".join(f"t.{name} = k.column{at}" for at, name in enumerate(key, 1))
        return f"SELECT {columns} FROM {{keys}} k CROSS JOIN {self.table.name} t ON {same}"


_sql: Final = functools.cache(_Sql)


def _if_it_wins(table: Table) -> str:
    """Return the condition under which a row of a register replaces another one."""
    cases, equal = [], ""
    for name in table.register:
        column, sign = name.removeprefix("-"), "<" if name.startswith("-") else ">"
        cases.append(f"{equal}excluded.{column} {sign} {table.name}.{column}")
        equal += f"excluded.{column} = {table.name}.{column} AND "
    return f"WHERE {' OR '.join(cases)}" if cases else ""


def _get(db: sqlite3.Connection, step: Get) -> dict[Key, Row]:
    sql, width = _sql(step.table), step.table.key
    rows = look_up(db, sql.look_up(width), [sql.stored_key(key) for key in step.keys])
    return {row[:width]: row for row in rows}


def _under(db: sqlite3.Connection, step: Under) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
    width = len(next(iter(found), ()))
    for row in sorted(look_up(db, _sql(step.table).look_up(width), found), key=_values(step.table)):
        found[row[:width]].append(row)
    return found


def _values(table: Table) -> Callable[[Row], Key]:
    return lambda row: row[: table.key]


def _add(db: sqlite3.Connection, step: Add) -> dict[Key, Row]:
    sql, rows = _sql(step.table), list(step.rows)
    if step.table.columns[0] == "number":  # No row has a key yet.
        insert(db, sql.insert, rows)
        return {}
    stored = _get(db, Get(step.table, {row[: step.table.key] for row in rows}))
    new = [sql.stored(row) for row in rows if row[: step.table.key] not in stored]
    insert(db, sql.insert, new, sql.or_skip)
    return stored


def _put(db: sqlite3.Connection, step: Put) -> None:
    sql = _sql(step.table)
    insert(db, sql.insert, [sql.stored(row) for row in step.rows], sql.or_replace)


def _delete(db: sqlite3.Connection, step: Delete) -> int:
    sql = _sql(step.table)
    deleted = db.executemany(sql.delete, [sql.stored_key(key) for key in step.keys]).rowcount
    return max(0, deleted)


class _Query:
    """The query of a page."""

    def __init__(self, step: Pages) -> None:
        self.step = step
        self.sql = _sql(step.table)
        self.order = [self.sql.column(name) for name in step.order]
        #: The columns of the order that differ, and the values at which they begin.
        self.free = self.order[step.given :]
        self.conditions: list[str] = []
        self.values: list[Any] = []
        for name in step.order[: step.given]:
            self._where(f"{self.sql.column(name)} = ?", [step.equal[name]])
        for sign, bound in ((">=", step.low), ("<", step.high)):
            if bound is not None:
                self._where(f"{self.free[0]} {sign} ?", [bound])
        if step.after is not None and self.free:
            self._behind(">", step.after)

    def _where(self, condition: str, values: Sequence[Any]) -> None:
        self.conditions.append(condition)
        self.values += values

    def _behind(self, sign: str, place: Place) -> None:
        if self.step.reverse:
            sign = sign.translate({ord("<"): ">", ord(">"): "<"})
        columns, marks = ", ".join(self.free), ", ".join("?" * len(self.free))
        self._where(f"({columns}) {sign} ({marks})", place[self.step.given :])

    @property
    def is_filtered(self) -> bool:
        """Whether there are conditions that the order does not serve."""
        return bool(self.step.one_of) or len(self.step.equal) > self.step.given

    def filter(self) -> None:
        """Add these conditions. With a + SQLite keeps to the order, and uses no other index."""
        for name in self.step.equal.keys() - {*self.step.order[: self.step.given]}:
            self._where(f"+{self.sql.column(name)} = ?", [self.step.equal[name]])
        for name, values in self.step.one_of.items():
            marks = ", ".join("?" * len(values))
            self._where(f"+{self.sql.column(name)} IN ({marks})", [*values])

    def end(self, place: Place) -> None:
        """Look at no row behind a place."""
        self._behind("<=", place)

    def rows(self, db: sqlite3.Connection, columns: str, tail: str) -> sqlite3.Cursor:
        """Return the rows in order."""
        way = " DESC" if self.step.reverse else ""
        order = ", ".join(f"{name}{way}" for name in self.free or self.order)
        where = " AND ".join(self.conditions) or "TRUE"
        return db.execute(
            f"SELECT {columns} FROM {self.step.table.name} WHERE {where} ORDER BY {order} {tail}",
            self.values,
        )


def _last_place(db: sqlite3.Connection, step: Pages, query: _Query) -> Place | None:
    """Return the place of the last row that a page looks at; ``None``: it looks at all."""
    places = ", ".join(query.order)
    if step.order != ("number",):
        found: Place | None = query.rows(db, places, f"LIMIT 1 OFFSET {step.most - 1}").fetchone()
        return found
    # The rows are large, so they are not counted.
    first = query.rows(db, places, "LIMIT 1").fetchone()
    if first is None:
        return None
    far = first[0] + (1 - step.most if step.reverse else step.most - 1)
    function = "min" if step.reverse else "max"
    (newest,) = db.execute(f"SELECT {function}({places}) FROM {step.table.name}").fetchone()
    return (far,) if (far > newest if step.reverse else far < newest) else None


def _page(db: sqlite3.Connection, step: Pages) -> Page:
    query = _Query(step)
    last = None
    if query.is_filtered:
        if (last := _last_place(db, step, query)) is not None:
            query.end(last)
        query.filter()
    rows: list[Row] = []
    place, size, width = step.after, 0, len(query.order)
    columns = f"{', '.join(query.order)}, {query.sql.columns}"
    for found in query.rows(db, columns, f"LIMIT {step.limit + 1}"):
        if len(rows) == step.limit or size > MAX_PAGE_BYTES:
            return Page(rows, place, more=True)
        place, row = found[:width], found[width:]
        rows.append(row)
        size += sum([len(value) for value in row if isinstance(value, bytes)])
    return Page(rows, place if last is None else last, more=last is not None)


_EXECUTE: Final[dict[type, Callable[[sqlite3.Connection, Any], Any]]] = {
    Get: _get,
    Under: _under,
    Add: _add,
    Put: _put,
    Delete: _delete,
    Pages: _page,
}
