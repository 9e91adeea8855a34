# SPDX-License-Identifier: Apache-2.0
"""The tables of plans in the file, which has a few of them in another form."""

from __future__ import annotations

import functools
import itertools
import sqlite3
from collections.abc import Collection, Iterable
from typing import Final

from engage.store.keys import key_of
from engage.store.tables import Key, Row, Table

from .connection import look_up

#: The numbers of the rows to which others belong, by their keys, as far as a plan has met them;
#: None: there is no row.
Numbers = dict[Key, int | None]

#: Table → the column with the numbers of its rows, if that is not ``number``.
_NUMBERS: Final = {
    **dict.fromkeys(("events", "letters", "history"), "seq"),
    **dict.fromkeys(("choices", "profiles"), "id"),
}
#: The tables whose unique key is in one column, ``key``, as a hash.
_HASHED: Final = frozenset({"letters"})
#: Table within another one → the columns of that one's key that its rows have beside the number of
#: the row to which they belong: an index has them.
_BESIDE: Final = {"links": ("workspace",), "identifiers": ("workspace", "kind")}
#: Table → the values that rows have which its index has.
PARTIAL: Final = {"links": {"undone": 0}}
#: The tables of rows to which others belong. The last column is the number.
OWNERS: Final = frozenset({"profiles"})


class Sql:
    """The parts of the statements over a table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.owner = None if table.within is None else sql_of(table.within)
        #: How many columns of the key are one number in the file.
        self.width = 0 if table.within is None else table.within.key
        self.number = "profile" if self.owner else _NUMBERS.get(table.name, "number")
        self.is_hashed = table.name in _HASHED
        beside = _BESIDE.get(table.name, ())
        #: Column → its place in a row.
        self.at = {name: at for at, name in enumerate(table.columns)}
        self._beside = [self.at[name] for name in beside]
        own = [self.column(name) for name in table.columns[self.width :]]
        first = [self.number] if self.owner else ["key"] if self.is_hashed else []
        self.key = first if self.is_hashed else [*first, *own[: table.key - self.width]]
        written = [*first, *own, *beside]
        replaced = [column for column in own if column not in (*self.key, self.number)]
        more = {column: f" + {table.name}.{column}" for column in table.sums}
        values = [f"{column} = excluded.{column}{more.get(column, '')}" for column in replaced]
        # The number of an owner is known when it is written.
        unique = [self.number] if table.name in OWNERS else self.key
        target = f"ON CONFLICT ({', '.join(unique)}) DO"
        self.insert = f"INSERT INTO {table.name} ({', '.join(written)})"
        self.or_skip = f"{target} NOTHING"
        # A row that is all key is replaced by itself.
        self.or_replace = self.or_skip
        if values:
            self.or_replace = f"{target} UPDATE SET {', '.join(values)} {_if_it_wins(table)}"
        same = " AND ".join(f"{name} = ?" for name in self.key)
        self.delete = f"DELETE FROM {table.name} WHERE {same}"
        #: What is read of a row if the row to which it belongs is known, and if it is not.
        read = [*(first if self.owner else ()), *own]
        self.short = ", ".join(f"{table.name}.{name}" for name in read)
        self.columns = ", ".join(map(self.reference, table.columns))
        #: The columns that count towards the bytes of a page.
        self.large = [at for at, kind in enumerate(table.types.values()) if kind is bytes]
        self.source = table.name
        if self.owner is not None:
            number = self.owner.reference("number")
            self.source += f" CROSS JOIN {self.owner.table.name} ON {number} = {table.name}.profile"

    def column(self, name: str) -> str:
        """Return how a column is called in the file."""
        return self.number if name == "number" else name

    @functools.cache  # noqa: B019 (each table has one)
    def reference(self, name: str) -> str:
        """Return a column with the alias of its table."""
        at = self.at.get(name, self.width)
        if at < self.width and at not in self._beside:
            return f"{self.owner.table.name}.{name}" if self.owner else name
        return f"{self.table.name}.{self.column(name)}"

    def keys(self, db: sqlite3.Connection, keys: Collection[Key], numbers: Numbers) -> list[Key]:
        """Return the values of the columns of the key in the file, or of their beginning."""
        if self.is_hashed:
            return [(key_of(*key),) for key in keys]
        if self.owner is None:
            return [*keys]
        width, owners = self.width, self._numbers_of(db, keys, numbers)
        return [
            (number, *key[width:])
            for number, key in zip(owners, keys, strict=True)
            if number is not None
        ]

    def rows(self, db: sqlite3.Connection, rows: Collection[Row], numbers: Numbers) -> list[Row]:
        """Return the values that are written of rows."""
        if self.table.name in OWNERS:
            return self._numbered(db, rows, numbers)
        if self.is_hashed:
            return [(key_of(*row[: self.table.key]), *row) for row in rows]
        if self.owner is None:
            return [*rows]
        width, owners = self.width, self._numbers_of(db, rows, numbers)
        if self._beside:
            rows = [(*row, *[row[at] for at in self._beside]) for row in rows]
        return [(number, *row[width:]) for number, row in zip(owners, rows, strict=True)]

    def _numbered(
        self, db: sqlite3.Connection, rows: Collection[Row], numbers: Numbers
    ) -> list[Row]:
        """Return rows with their numbers; a new one gets the next."""
        width = self.table.key
        keys = [row[:width] for row in rows]
        self.load(db, keys, numbers)
        if new := [key for key in keys if numbers[key] is None]:
            query = f"SELECT ifnull(max({self.number}), 0) + 1 FROM {self.table.name}"
            first = itertools.count(*db.execute(query).fetchone())
            numbers.update(zip(dict.fromkeys(new), first, strict=False))
        return [
            row if row[-1] else (*row[:-1], numbers[key])
            for row, key in zip(rows, keys, strict=True)
        ]

    def _numbers_of(
        self, db: sqlite3.Connection, rows: Collection[Row], numbers: Numbers
    ) -> list[int | None]:
        """Return the number of the row to which each of these belongs, given by rows or keys."""
        width = self.width
        owners = [row[:width] for row in rows]
        try:
            return [numbers[owner] for owner in owners]
        except KeyError:
            assert self.owner
            self.owner.load(db, owners, numbers)
            return [numbers[owner] for owner in owners]

    def load(self, db: sqlite3.Connection, keys: Iterable[Key], numbers: Numbers) -> None:
        """Learn the numbers of rows."""
        if missing := {key for key in keys if key not in numbers}:
            columns = ", ".join((*self.key, self.number))
            numbers.update(dict.fromkeys(missing))
            for row in look_up(db, self.look_up(columns, self.table.key), missing):
                numbers[row[:-1]] = row[-1]

    @functools.cache  # noqa: B019 (each table has one)
    def look_up(self, columns: str, count: int) -> str:
        """Return the query for rows whose key in the file begins with ``count`` values."""
        table, key = self.table.name, self.key[:count]
        same = " AND ".join(f"{table}.{column} = k.column{at}" for at, column in enumerate(key, 1))
        return f"SELECT {columns} FROM {{keys}} k CROSS JOIN {table} ON {same}"

    def read(
        self, db: sqlite3.Connection, keys: Collection[Key], numbers: Numbers
    ) -> Iterable[Row]:
        """Yield the rows whose keys begin with these; all have the same length."""
        stored = self.keys(db, keys, numbers)
        if not stored:
            return ()
        rows = look_up(db, self.look_up(self.short, len(stored[0])), stored)
        if self.owner is None:
            return rows
        owners = {number: owner for owner, number in numbers.items()}
        return [owners[row[0]] + row[1:] for row in rows]


sql_of: Final = functools.cache(Sql)


def _if_it_wins(table: Table) -> str:
    """Return the condition under which a row of a register replaces another one."""
    cases, equal = [], ""
    for name in table.register:
        column, sign = name.removeprefix("-"), "<" if name.startswith("-") else ">"
        cases.append(f"{equal}excluded.{column} {sign} {table.name}.{column}")
        equal += f"excluded.{column} = {table.name}.{column} AND "
    return f"WHERE {' OR '.join(cases)}" if cases else ""
