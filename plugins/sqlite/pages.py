# SPDX-License-Identifier: Apache-2.0
"""A page of a table as a few statements of SQL, each of which looks at a bounded part."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from engage.store.tables import MAX_PAGE_BYTES, Page, Pages, Place, Row

from .tables import OWNERS, PARTIAL, Numbers, sql_of

#: Rows that are counted at most to find the first one of a time.
_MAX_COUNTED: Final = 20_000_000
#: Rows near a time among which the first or the last one is looked for.
_MAX_NEAR: Final = 200_000
#: Characters of the beginning of a text that SQLite compares. Its own limit is 50,000 bytes.
_MAX_PATTERN: Final = 1000


class _Query:
    """The query of a page."""

    def __init__(self, step: Pages) -> None:
        step.check_number()
        self.step = step
        self.sql = sql_of(step.table)
        order = step.order
        self.order = [self.sql.reference(name) for name in order]
        self.given = step.given
        #: The columns of the order that differ.
        self.free = self.order[self.given :]
        self.conditions: list[str] = []
        self.values: list[Any] = []
        #: The names in ``equal`` that neither the order nor an index serves.
        self.others = [*step.equal.keys() - {*order[: self.given]}]
        for name in order[: self.given]:
            self._where(f"{self.sql.reference(name)} = ?", [step.equal[name]])
        for name, value in PARTIAL.get(step.table.name, {}).items():
            if step.by and name in self.others and step.equal[name] == value:
                self.others.remove(name)
                self._where(f"{self.sql.reference(name)} = {value}", [])
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
        return bool(conditions or self.others)

    def filter(self) -> None:
        """Add these conditions. With a + SQLite keeps to the order, and uses no other index."""
        for name in self.others:
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

    def select(self, columns: str, tail: str, *, back: bool = False) -> str:
        """Return the query for the rows in order, or from the last one back."""
        way = " DESC" if self.step.reverse is not back else ""
        order = ", ".join(f"{name}{way}" for name in self.free or self.order)
        where = " AND ".join(self.conditions) or "TRUE"
        return f"SELECT {columns} FROM {self.sql.source} WHERE {where} ORDER BY {order} {tail}"

    def rows(
        self, db: sqlite3.Connection, columns: str, tail: str, *, back: bool = False
    ) -> sqlite3.Cursor:
        """Return these rows."""
        return db.execute(self.select(columns, tail, back=back), self.values)


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
    start = beginning[:_MAX_PATTERN].partition("\0")[0]
    return "".join(char if char.isascii() and char not in "%_" else "_" for char in start) + "%"


def _near(db: sqlite3.Connection, step: Pages) -> Pages:
    """Return a step in the order of arrival that does not look at rows before and after those that
    are wanted by a column with an index.

    Rows are not stored in the exact order of their times: several processes make them, and a clock
    is set. So the first of all is looked for, or the first or last one among many.
    """
    table, number = step.table.name, sql_of(step.table).column("number")

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


def _bounded(
    db: sqlite3.Connection, step: Pages
) -> tuple[_Query, tuple[Place | None, bool] | None]:
    """Return the query for the wanted rows among those that a page looks at, and their end if not
    all rows are wanted; see :func:`_end`."""
    if step.order == ("number",):
        step = _near(db, step)
    query = _Query(step)
    if not query.is_filtered:
        return query, None
    place, more = _end(db, step, query)
    if place is not None:
        query.end(place)
    query.filter()
    return query, (place, more)


def delete_page(db: sqlite3.Connection, step: Pages) -> int:
    """Delete the rows of a page, and return how many there were."""
    query, _ = _bounded(db, step)
    sql = query.sql
    own = [sql.column("number")] if step.table.arrival else sql.key
    rows = query.select(
        ", ".join(f"{sql.table.name}.{name}" for name in own), f"LIMIT {step.limit}"
    )
    delete = f"DELETE FROM {sql.table.name} WHERE ({', '.join(own)}) IN ({rows})"
    return db.execute(delete, query.values).rowcount


def page(db: sqlite3.Connection, step: Pages, numbers: Numbers) -> Page:
    """Read a page.

    :param numbers: gets the numbers of rows to which others belong.
    """
    query, ended = _bounded(db, step)
    table, (end, more) = step.table, ended or (None, False)
    sql, width, at = query.sql, len(table.columns), {**query.sql.at}
    for name in step.order:
        at.setdefault(name, len(at))
    columns = ", ".join((sql.columns, *map(sql.reference, [*at][width:])))
    rows, is_full = _until_full(query.rows(db, columns, f"LIMIT {step.limit + 1}"), step, sql.large)
    if rows and (is_full or end is None):
        end = tuple([rows[-1][at[name]] for name in step.order])
    if len(at) > width:
        rows = [row[:width] for row in rows]
    if table.name in OWNERS and "number" in table.columns:
        numbers.update({row[: table.key]: row[-1] for row in rows})
    return Page(rows, end or step.after, more or is_full)


def _until_full(hits: sqlite3.Cursor, step: Pages, large: Sequence[int]) -> tuple[list[Row], bool]:
    """Return the rows of a page, and whether it has no room for others.

    :param large: the places of the columns whose bytes count.
    """
    if not large:
        rows = hits.fetchall()
        is_full = len(rows) > step.limit
        del rows[step.limit :]
        return rows, is_full
    rows, size = [], 0
    for row in hits:
        if len(rows) == step.limit or size > MAX_PAGE_BYTES:
            return rows, True
        rows.append(row)
        size += sum([len(row[at] or b"") for at in large])
    return rows, False
