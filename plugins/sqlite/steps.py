# SPDX-License-Identifier: Apache-2.0
"""The steps of plans as statements of SQL, in a transaction of the caller.

The file has a few tables in another form than the plans: :class:`_Sql` knows it.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from engage.api import StorageContext
from engage.store.keys import key_of
from engage.store.tables import (
    MAX_PAGE_BYTES,
    Add,
    Delete,
    Get,
    Key,
    Page,
    Pages,
    Place,
    Put,
    Recall,
    Remember,
    Row,
    Steps,
    Table,
    Under,
)
from engage.store.tables import execute as execute_steps

from . import events
from .connection import insert, look_up
from .keys.keys import Keys
from .remembered import Remembered

Result = TypeVar("Result")

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

#: Rows that are counted at most to find the first one of a time.
_MAX_COUNTED: Final = 20_000_000
#: Rows near a time among which the first or the last one is looked for.
_MAX_NEAR: Final = 200_000
#: Characters of the beginning of a text that SQLite compares. Its own limit is 50,000 bytes.
_MAX_PATTERN: Final = 1000

#: The tables of rows to which others belong. The last column is the number.
_OWNERS: Final = frozenset({"profiles"})

#: The numbers of the rows to which others belong, by their keys, as far as a plan has met them;
#: None: there is no row.
_Numbers = dict[Key, int | None]


class Run:
    """What the execution of one plan has met.

    :param keys: see :class:`~.events.Events`.
    :param remembered: of the process that writes.
    """

    def __init__(self, keys: Keys | None = None, remembered: Remembered | None = None) -> None:
        self.numbers: _Numbers = {}
        self.events = events.Events(keys)
        self.remembered = remembered
        #: What is to be remembered after the commit.
        self.new: list[Remember] = []


def execute(
    db: sqlite3.Connection, steps: Steps[Result], context: StorageContext, run: Run | None = None
) -> Result:
    """Execute the steps of a plan, and return its result."""
    met = run or Run()

    def execute_one(step: Any) -> Any:
        kind = type(step)
        if kind in events.STEPS and step.table.name == "events":
            return events.STEPS[kind](met.events, db, step)
        return _EXECUTE[kind](db, step, met)

    return execute_steps(steps, execute_one, context)


class _Sql:
    """The parts of the statements over a table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.owner = None if table.within is None else _sql(table.within)
        #: How many columns of the key are one number in the file.
        self.width = 0 if table.within is None else table.within.key
        self._number = "profile" if self.owner else _NUMBERS.get(table.name, "number")
        self.is_hashed = table.name in _HASHED
        beside = _BESIDE.get(table.name, ())
        self._beside = [table.columns.index(name) for name in beside]
        own = [self.column(name) for name in table.columns[self.width :]]
        first = [self._number] if self.owner else ["key"] if self.is_hashed else []
        self.key = first if self.is_hashed else [*first, *own[: table.key - self.width]]
        written = [*first, *own, *beside]
        values = [f"{one} = excluded.{one}" for one in own if one not in (*self.key, self._number)]
        target = f"ON CONFLICT ({', '.join(self.key)}) DO"
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
        if table.name == "events":
            self.columns = self.columns.replace("events.message_id", events.MESSAGE_ID)
        #: The columns that count towards the bytes of a page.
        self.large = [at for at, kind in enumerate(table.types.values()) if kind is bytes]
        self.source = table.name
        if self.owner is not None:
            number = self.owner.reference("number")
            self.source += f" CROSS JOIN {self.owner.table.name} ON {number} = {table.name}.profile"

    def column(self, name: str) -> str:
        """Return how a column is called in the file."""
        return self._number if name == "number" else name

    @functools.cache  # noqa: B019 (each table has one)
    def reference(self, name: str) -> str:
        """Return a column with the alias of its table."""
        at = self.table.columns.index(name) if name in self.table.columns else self.width
        if at < self.width and at not in self._beside:
            return f"{self.owner.table.name}.{name}" if self.owner else name
        return f"{self.table.name}.{self.column(name)}"

    def keys(self, db: sqlite3.Connection, keys: Iterable[Key], numbers: _Numbers) -> list[Key]:
        """Return the values of the columns of the key in the file, or of their beginning."""
        if self.is_hashed:
            return [(key_of(*key),) for key in keys]
        if self.owner is None:
            return [*keys]
        keys, width = [*keys], self.width
        self.owner.load(db, {key[:width] for key in keys}, numbers)
        return [
            (number, *key[width:]) for key in keys if (number := numbers[key[:width]]) is not None
        ]

    def rows(self, db: sqlite3.Connection, rows: Iterable[Row], numbers: _Numbers) -> list[Row]:
        """Return the values that are written of rows."""
        if self.is_hashed:
            return [(key_of(*row[: self.table.key]), *row) for row in rows]
        if self.owner is None:
            return [*rows]
        rows, width = [*rows], self.width
        self.owner.load(db, {row[:width] for row in rows}, numbers)
        return [
            (numbers[row[:width]], *row[width:], *[row[at] for at in self._beside]) for row in rows
        ]

    def load(self, db: sqlite3.Connection, keys: Collection[Key], numbers: _Numbers) -> None:
        """Learn the numbers of rows."""
        if missing := [key for key in keys if key not in numbers]:
            columns = ", ".join((*self.key, self._number))
            numbers.update(dict.fromkeys(missing))
            for row in look_up(db, self.look_up(columns, self.table.key), missing):
                numbers[row[:-1]] = row[-1]

    @functools.cache  # noqa: B019 (each table has one)
    def look_up(self, columns: str, count: int) -> str:
        """Return the query for rows whose key in the file begins with ``count`` values."""
        table, key = self.table.name, self.key[:count]
        same = " AND ".join(f"{table}.{one} = k.column{at}" for at, one in enumerate(key, 1))
        return f"SELECT {columns} FROM {{keys}} k CROSS JOIN {table} ON {same}"

    def read(
        self, db: sqlite3.Connection, keys: Collection[Key], numbers: _Numbers
    ) -> Iterable[Row]:
        """Yield the rows whose keys begin with these; all have the same length."""
        stored = self.keys(db, keys, numbers)
        if not stored:
            return ()
        rows = look_up(db, self.look_up(self.short, len(stored[0])), stored)
        if self.owner is None:
            return rows
        owners = {numbers[key[: self.width]]: key[: self.width] for key in keys}
        return [(*owners[row[0]], *row[1:]) for row in rows]


_sql: Final = functools.cache(_Sql)


def _if_it_wins(table: Table) -> str:
    """Return the condition under which a row of a register replaces another one."""
    cases, equal = [], ""
    for name in table.register:
        column, sign = name.removeprefix("-"), "<" if name.startswith("-") else ">"
        cases.append(f"{equal}excluded.{column} {sign} {table.name}.{column}")
        equal += f"excluded.{column} = {table.name}.{column} AND "
    return f"WHERE {' OR '.join(cases)}" if cases else ""


def _get(db: sqlite3.Connection, step: Get, run: Run) -> dict[Key, Row]:
    width = step.table.key
    found = {row[:width]: row for row in _sql(step.table).read(db, step.keys, run.numbers)}
    if step.table.name in _OWNERS:
        run.numbers.update({key: found[key][-1] if key in found else None for key in step.keys})
    return found


def _under(db: sqlite3.Connection, step: Under, run: Run) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
    width = len(next(iter(found), ()))
    if step.by:
        at = [step.table.columns.index(name) for name in step.by[:width]]
        for row in look_up(db, _by_index(step, width), found):
            found[tuple([row[one] for one in at])].append(row)
    elif width == (sql := _sql(step.table)).width:
        # By the numbers of the rows to which they belong.
        stored = sql.keys(db, found, run.numbers)
        of_number = {run.numbers[owner]: (owner, rows) for owner, rows in found.items()}
        for number, *row in look_up(db, sql.look_up(sql.short, 1), stored):
            owner, rows = of_number[number]
            rows.append((*owner, *row))
    else:
        for row in _sql(step.table).read(db, found, run.numbers):
            found[row[:width]].append(row)
    return found


def _by_index(step: Under, width: int) -> str:
    """Return the query for the rows under prefixes of an index."""
    sql, name = _sql(step.table), step.table.name

    def where(alias: str) -> str:
        return " AND ".join(
            (
                *(f"{alias}.{one} = k.column{at}" for at, one in enumerate(step.by[:width], 1)),
                *(f"{alias}.{one} IS NOT NULL" for one in step.by[width:]),
                *(f"{alias}.{one} = {value!r}" for one, value in step.equal.items()),
            )
        )

    select = f"SELECT {sql.columns} FROM {{keys}} k CROSS JOIN {sql.source}"
    if not step.first:
        return f"{select} WHERE {where(name)}"
    # The prefix has the other columns of the key.
    number = sql.key[0]
    order = ", ".join(f"f.{one}" for one in (*step.by[width:], number))
    rows = f"{name} f WHERE {where('f')} ORDER BY {order} LIMIT 1"
    return f"{select} WHERE {number} = (SELECT f.{number} FROM {rows}) AND {where(name)}"


def _add(db: sqlite3.Connection, step: Add, run: Run) -> dict[Key, Row]:
    sql, rows = _sql(step.table), list(step.rows)
    if step.table.columns[0] == "number":  # No row has a key yet.
        insert(db, sql.insert, rows)
        return {}
    stored = _get(db, Get(step.table, {row[: step.table.key] for row in rows}), run)
    new = [row for row in rows if row[: step.table.key] not in stored]
    insert(db, sql.insert, sql.rows(db, new, run.numbers), sql.or_skip)
    return stored


def _put(db: sqlite3.Connection, step: Put, run: Run) -> None:
    sql = _sql(step.table)
    insert(db, sql.insert, sql.rows(db, step.rows, run.numbers), sql.or_replace)
    if step.table.name in _OWNERS:
        for row in step.rows:
            if row[-1] is None:
                run.numbers.pop(row[: step.table.key], None)


def _delete(db: sqlite3.Connection, step: Delete, run: Run) -> int:
    sql = _sql(step.table)
    deleted = db.executemany(sql.delete, sql.keys(db, step.keys, run.numbers)).rowcount
    if step.table.name in _OWNERS:
        run.numbers.update(dict.fromkeys(step.keys))
    return max(0, deleted)


class _Query:
    """The query of a page."""

    def __init__(self, step: Pages) -> None:
        self.step = step
        self.sql = _sql(step.table)
        order = step.order
        self.order = [self.sql.reference(name) for name in order]
        self.given = step.given
        #: The columns of the order that differ.
        self.free = self.order[self.given :]
        self.conditions: list[str] = []
        self.values: list[Any] = []
        for name in order[: self.given]:
            self._where(f"{self.sql.reference(name)} = ?", [step.equal[name]])
        for sign, bound in ((">=", step.low), ("<", step.high)):
            if bound is not None:
                self._where(f"{self.free[0]} {sign} ?", [bound])
        if step.after is not None:
            self._behind(">", step.after)

    def _where(self, condition: str, values: Sequence[Any]) -> None:
        self.conditions.append(condition)
        self.values += values

    def _behind(self, sign: str, place: Place) -> None:
        if self.step.reverse:
            sign = sign.translate({ord("<"): ">", ord(">"): "<"})
        if not self.free:  # There is one row at most, and the place is behind it.
            self._where("TRUE" if "=" in sign else "FALSE", [])
            return
        columns, marks = ", ".join(self.free), ", ".join("?" * len(self.free))
        self._where(f"({columns}) {sign} ({marks})", place[self.given :])

    @property
    def is_filtered(self) -> bool:
        """Whether there are conditions that the order does not serve."""
        step = self.step
        conditions = step.one_of or step.least or step.below or step.begins
        return bool(conditions) or len(step.equal) > self.given

    def filter(self) -> None:
        """Add these conditions. With a + SQLite keeps to the order, and uses no other index."""
        for name in self.step.equal.keys() - {*self.step.order[: self.step.given]}:
            self._where(f"{self._column(name)} IS ?", [self.step.equal[name]])
        for names, values in self.step.one_of.items():
            column, marks = self._column(names), ", ".join("?" * len(values))
            or_null = f" OR {column} IS NULL" * (None in values)
            self._where(f"({column} IN ({marks}){or_null})", [*values])
        for sign, bounds in ((">=", self.step.least), ("<", self.step.below)):
            for name, value in bounds.items():
                self._where(f"{self._column(name)} {sign} ?", [value])
        for several, text in self.step.begins:
            likes = [f"{self._column(name)} LIKE ?" for name in several]
            self._where(f"({' OR '.join(likes)})", [_pattern(text)] * len(likes))

    def _column(self, names: str | tuple[str, ...]) -> str:
        if isinstance(names, str):
            return f"+{self.sql.reference(names)}"
        return f"coalesce({', '.join(map(self.sql.reference, names))})"

    def end(self, place: Place) -> None:
        """Look at no row behind a place."""
        self._behind("<=", place)

    def number(self, db: sqlite3.Connection, function: str) -> Any:
        """Return the least or the greatest number, or None."""
        where = " AND ".join(self.conditions) or "TRUE"
        select = f"SELECT {function}({self.order[-1]}) FROM {self.sql.source} WHERE {where}"
        return db.execute(select, self.values).fetchone()[0]

    def rows(
        self, db: sqlite3.Connection, columns: str, tail: str, *, back: bool = False
    ) -> sqlite3.Cursor:
        """Return the rows in order, or from the last one back."""
        way = " DESC" if self.step.reverse is not back else ""
        order = ", ".join(f"{name}{way}" for name in self.free or self.order)
        where = " AND ".join(self.conditions) or "TRUE"
        return db.execute(
            f"SELECT {columns} FROM {self.sql.source} WHERE {where} ORDER BY {order} {tail}",
            self.values,
        )


def _end(db: sqlite3.Connection, step: Pages, query: _Query) -> tuple[Place | None, bool]:
    """Return the place of the last row that a page looks at, if there is one, and whether there may
    be rows behind it."""
    places = ", ".join(query.order)
    if step.order != ("number",):
        if end := query.rows(db, places, f"LIMIT 1 OFFSET {step.most - 1}").fetchone():
            return end, True
        return query.rows(db, places, "LIMIT 1", back=True).fetchone(), False
    # The rows are large, so they are not counted.
    first, last = query.number(db, "min"), query.number(db, "max")
    if first is None:
        return None, False
    if step.reverse:
        far = last - step.most + 1
        return (max(far, first),), far > first
    far = first + step.most - 1
    return (min(far, last),), far < last


def _pattern(beginning: str) -> str:
    """Return a pattern that every text with a beginning fits.

    ``LIKE`` knows the capitals of ASCII only, and ends at a NUL.
    """
    known = beginning[:_MAX_PATTERN].partition("\0")[0]
    return "".join(one if one.isascii() and one not in "%_" else "_" for one in known) + "%"


def _near(db: sqlite3.Connection, step: Pages) -> Pages:
    """Return a step in the order of arrival that does not look at rows before and after those that
    are wanted by a column with an index.

    Rows are not stored in the exact order of their times: several processes make them, and a clock
    is set. So the first of all is looked for, or the first or last one among many.
    """
    table, number = step.table.name, _sql(step.table).column("number")

    def first(select: str, *values: Any) -> Any:
        return db.execute(f"SELECT {select}", values).fetchone()

    for name, least in step.least.items():
        if (name,) in step.table.indexes and (step.reverse or step.after is None):
            most, order = (_MAX_NEAR, f"ORDER BY {name}") if step.reverse else (_MAX_COUNTED, "")
            rows = f"SELECT {number} FROM {table} WHERE {name} >= ? {order} LIMIT ?"
            low, count = first(f"min({number}), count(*) FROM ({rows})", least, most)
            if low is None:
                (low,) = first(f"max({number}) + 1 FROM {table}")
            if step.reverse or count < most:
                step = step._replace(low=low)
    for name, below in step.below.items():
        if (name,) in step.table.indexes and step.reverse and step.after is None:
            newest = first(
                f"{name} FROM {table} WHERE {number} = (SELECT max({number}) FROM {table})"
            )
            if newest is not None and newest[0] >= below:
                rows = f"SELECT {number} FROM {table} WHERE {name} < ? ORDER BY {name} DESC LIMIT ?"
                (high,) = first(f"max({number}) FROM ({rows})", below, _MAX_NEAR)
                step = step._replace(high=(high or 0) + 1)
    return step


def _page(db: sqlite3.Connection, step: Pages, run: Run) -> Page:
    if step.order == ("number",):
        step = _near(db, step)
    query = _Query(step)
    end, more = None, False
    if query.is_filtered:
        end, more = _end(db, step, query)
        if end is not None:
            query.end(end)
        query.filter()
    sql, limit = query.sql, f"LIMIT {step.limit + 1}"
    if not sql.large and {*step.order} <= {*step.table.columns}:
        # Nothing has to be counted, and the last row has the place.
        rows = query.rows(db, sql.columns, limit).fetchall()
        if len(rows) > step.limit:
            del rows[step.limit :]
            end, more = None, True
        if end is None and rows:
            end = tuple([rows[-1][step.table.columns.index(name)] for name in step.order])
        return Page(rows, end or step.after, more)
    rows = []
    place, size, width = step.after, 0, len(query.order)
    for found in query.rows(db, f"{', '.join(query.order)}, {sql.columns}", limit):
        if len(rows) == step.limit or size > MAX_PAGE_BYTES:
            return Page(rows, place, more=True)
        place, row = found[:width], found[width:]
        rows.append(row)
        size += sum([len(row[at] or b"") for at in sql.large])
        if step.table.name == "events" and run.events.keys is not None:
            run.events.numbers[events.hash_of(row)] = place[-1]
    return Page(rows, place if end is None else end, more)


def _recall(_: sqlite3.Connection, step: Recall, run: Run) -> Mapping[Any, Any]:
    return {} if run.remembered is None else run.remembered.of(step.topic)


def _remember(_: sqlite3.Connection, step: Remember, run: Run) -> None:
    if step.values is not None:
        run.new.append(step)
    elif run.remembered is not None:
        run.remembered.forget(step.topic)


_EXECUTE: Final[dict[type, Callable[[sqlite3.Connection, Any, Run], Any]]] = {
    Get: _get,
    Under: _under,
    Add: _add,
    Put: _put,
    Delete: _delete,
    Pages: _page,
    Recall: _recall,
    Remember: _remember,
}
