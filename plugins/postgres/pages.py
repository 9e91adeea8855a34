# SPDX-License-Identifier: Apache-2.0
"""A page of a table as a few statements, each of which looks at a bounded part."""

from __future__ import annotations

import re
from typing import Any

from engage.store.tables import MAX_PAGE_BYTES, Page, Pages, Place

from .tables import TYPES, decode, encode, sql_of


class _Query:
    """The query of a page."""

    def __init__(self, step: Pages) -> None:
        step.check_number()
        self.step = step
        self.sql = sql_of(step.table)
        #: The columns of the order that differ.
        self.free = step.order[step.given :]
        self._order = self.sql.order(self.free)
        self.places = ", ".join(f't."{name}"' for name in step.order)
        self.values: list[Any] = []
        given = {name: self._value(name, step.equal[name]) for name in step.order[: step.given]}
        self.conditions = [self.sql.equals(*pair) for pair in given.items()]
        for sign, bound in ((">=", step.low), ("<", step.high)):
            if bound is not None:
                name, value = self.free[0], self._value(self.free[0], bound)
                column, short = f't."{name}"', self.sql.short[name]
                begins = f"{short.format(column)} {sign[0]}= {short.format(value)}"
                self.conditions.append(f"{begins} AND {column} {sign} {value}")
        if step.after is not None:
            self._behind(">", step.after)

    def _value(self, name: str, value: Any, array: str = "") -> str:
        self.values.append([*map(encode, value)] if array else encode(value))
        return f"${len(self.values)}::{TYPES[self.sql.types[name]]}{array}"

    def _behind(self, sign: str, place: Place) -> None:
        """Look only at rows that are behind a place, or with ``<=`` at those that are not."""
        if not self.free:  # There is one row at most, and the place is behind it.
            self.conditions.append("TRUE" if "=" in sign else "FALSE")
            return
        if None in place:
            raise NotImplementedError("no plan reads on behind a row without a value")
        if self.step.reverse:
            sign = sign.translate({ord("<"): ">", ord(">"): "<"})
        parts = zip(self.free, place[self.step.given :], strict=True)
        values = {name: self._value(name, value) for name, value in parts}
        rows = ", ".join(form.format(f't."{name}"') for name, form in self._order)
        ends = ", ".join(form.format(values[name]) for name, form in self._order)
        self.conditions.append(f"({rows}) {sign} ({ends})")

    async def filter(self, db: Any) -> tuple[Place | None, bool]:
        """Add the conditions that the order does not serve, if there are any. Return the place of
        the last row that the page then looks at, and whether there may be rows behind it."""
        step, place, more = self.step, self.step.after, False
        others = step.equal.keys() - {*step.order[: step.given]}
        if not (step.one_of or step.least or step.below or step.begins or others):
            return None, False
        for tail, back in ((f"OFFSET {step.most - 1} LIMIT 1", False), ("LIMIT 1", True)):
            last = await db.fetchrow(self.select(self.places, tail, back=back), *self.values)
            if last is not None:
                place, more = tuple(map(decode, last)), not back
                self._behind("<=", place)
                break
        for name in others:
            value = self._value(name, step.equal[name])
            self.conditions.append(f't."{name}" IS NOT DISTINCT FROM {value}')
        for names, values in step.one_of.items():
            several = (names,) if isinstance(names, str) else names
            columns = ", ".join(f't."{name}"' for name in several)
            column = f"coalesce({columns})"
            value = self._value(several[0], values, "[]")
            or_null = f" OR {column} IS NULL" * (None in values)
            self.conditions.append(f"({column} = ANY({value}){or_null})")
        for sign, bounds in ((">=", step.least), ("<", step.below)):
            for name, bound in bounds.items():
                self.conditions.append(f't."{name}" {sign} {self._value(name, bound)}')
        for any_of, text in step.begins:
            likes = [f't."{x}" ILIKE {self._value(x, _pattern(text))}' for x in any_of]
            self.conditions.append(f"({' OR '.join(likes)})")
        return place, more

    def select(self, columns: str, tail: str, *, back: bool = False) -> str:
        """Return the query for the rows in order, or from the last one back."""
        where = " AND ".join(self.conditions) or "TRUE"
        way = " DESC" if self.step.reverse is not back else ""
        order = [form.format(f't."{name}"') + way for name, form in self._order] or ["NULL::int"]
        rows = f"{self.sql.name} t WHERE {where} ORDER BY {', '.join(order)}"
        return f"SELECT {columns} FROM {rows} {tail}"

    def rows(self) -> str:
        """Return the query for the rows of the page and one more, with their places."""
        sql, tail = self.sql, f"LIMIT {self.step.limit + 1}"
        columns = f"{sql.columns}, {self.places}"
        if not sql.large:
            return self.select(columns, tail)
        # Only those before which there is room.
        before = f"sum({sql.size}) OVER (ROWS UNBOUNDED PRECEDING) - ({sql.size})"
        rows = f"SELECT *, {before} AS before FROM ({self.select('*', tail)}) t"
        return f"SELECT {columns} FROM ({rows}) t WHERE before <= {MAX_PAGE_BYTES}"


def _pattern(beginning: str) -> str:
    """Return a pattern of each text with a beginning: its ASCII, if that is stored as it is."""
    certain = re.split("[\0\1]", beginning)[0]
    return "".join(x if x.isascii() and x not in "%_\\" else "_" for x in certain) + "%"


async def read_page(db: Any, step: Pages) -> Page:
    """Read a page."""
    query = _Query(step)
    end, more = await query.filter(db)
    sql, columns = query.sql, step.table.columns
    records = await db.fetch(query.rows(), *query.values)
    rows = [sql.row(record) for record in records[: step.limit]]
    is_full = len(records) > step.limit
    if sql.large:
        at = [columns.index(name) for name in sql.large]
        is_full |= sum(len(row[x] or b"") for row in rows for x in at) > MAX_PAGE_BYTES
    if rows and (is_full or end is None):
        end = tuple(map(decode, tuple(records[len(rows) - 1])[len(columns) :]))
    return Page(rows, step.after if end is None else end, more or is_full)
