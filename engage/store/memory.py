# SPDX-License-Identifier: Apache-2.0
"""An executor in memory: the one of tests, and what steps mean."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from engage.api import StorageContext, begins_with
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
    Value,
    execute,
)

Result = TypeVar("Result")


class _Rows(dict[Key, tuple[int, Row]]):
    """The rows of a table by their keys, each with its number."""

    last = 0


class MemoryTables:
    """The tables of a store in memory."""

    def __init__(self) -> None:
        self._tables = collections.defaultdict[str, _Rows](_Rows)
        #: See :data:`engage.store.events.STORE`.
        incarnation = ("incarnation", random.getrandbits(62))
        self._tables["store"][incarnation[:1]] = (1, incarnation)
        #: What the running plan changed: rows, a key, and what it led to before.
        self._changes: list[tuple[_Rows, Key, tuple[int, Row] | None]] = []

    def execute(self, steps: Steps[Result], context: StorageContext) -> Result:
        """Execute the steps of a plan; if one raises an error, none has an effect.

        :param context: the settings that the plan learns.
        """
        self._changes.clear()
        try:
            return execute(steps, lambda step: self._EXECUTE[type(step)](self, step), context)
        except BaseException:
            for rows, key, before in reversed(self._changes):
                if before is not None:
                    rows[key] = before
                else:
                    rows.last = rows.pop(key)[0] - 1  # Nobody has seen the number.
            raise

    def rows(self, table: Table) -> list[Row]:
        """Return all rows of a table, in the order in which they arrived."""
        return [row for _, row in sorted(self._tables[table.name].values(), key=lambda x: x[0])]

    def _get(self, step: Get) -> dict[Key, Row]:
        rows = self._tables[step.table.name]
        width = len(step.table.columns)
        return {key: rows[key][1][:width] for key in step.keys if key in rows}

    def _under(self, step: Under) -> dict[Key, list[Row]]:
        by_prefix: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
        width = len(next(iter(by_prefix), ()))
        for place, row in self._ordered(Pages(step.table, 0, step.by, step.equal)):
            values = place if step.by else row
            if values[:width] in by_prefix and _has(step.table, row, step.equal):
                if step.by and None in place:
                    continue
                by_prefix[values[:width]].append(row)
        return {prefix: rows[:1] if step.first else rows for prefix, rows in by_prefix.items()}

    def _add(self, step: Add) -> dict[Key, Row]:
        if step.table.columns[0] == "number":  # No row has a key yet.
            for row in step.rows:
                self._store(step.table, row)
            return {}
        keys = [row[: step.table.key] for row in step.rows]
        stored = self._get(Get(step.table, keys))
        new = dict(zip(reversed(keys), reversed([*step.rows]), strict=True))
        for key, row in zip(keys, step.rows, strict=True):
            if key not in stored and new[key] is row:
                self._store(step.table, row)
        return stored

    def _put(self, step: Put) -> None:
        stored = self._get(Get(step.table, [row[: step.table.key] for row in step.rows]))
        for row in step.rows:
            before = stored.get(row[: step.table.key])
            if before is None or _wins(step.table, row, before):
                self._store(step.table, row if before is None else _added(step.table, row, before))

    def _store(self, table: Table, row: Row) -> None:
        rows = self._tables[table.name]
        before = rows.get(row[: table.key])
        rows.last += before is None
        number = rows.last if before is None else before[0]
        if "number" in table.columns:
            at = table.columns.index("number")
            row = (*row[:at], number, *row[at + 1 :])
        key = row[: table.key]
        self._changes.append((rows, key, before))
        rows[key] = (number, row)

    def _delete(self, step: Delete) -> int:
        rows, gone = self._tables[step.table.name], step.keys
        if isinstance(gone, Pages):
            gone = [row[: step.table.key] for row in self._page(gone).rows]
        keys = {key for key in gone if key in rows}
        self._changes += [(rows, key, rows.pop(key)) for key in keys]
        return len(keys)

    def _page(self, step: Pages) -> Page:
        step.check_number()
        rows: list[Row] = []
        place, looked, size = step.after, 0, 0
        for behind, row in self._ordered(step):
            if len(rows) == step.limit or looked == step.most or size > MAX_PAGE_BYTES:
                return Page(rows, place, more=True)
            looked, place = looked + 1, behind
            if _has(step.table, row, step.equal) and _is_wanted(step, row):
                rows.append(row)
                size += sum(len(value) for value in row if isinstance(value, bytes))
        return Page(rows, place, more=False)

    def _ordered(self, step: Pages) -> list[tuple[Place, Row]]:
        """Return the rows of a step between its bounds and behind its place, in order."""
        at = {name: index for index, name in enumerate(step.table.columns)}
        given = tuple(step.equal[name] for name in step.order[: step.given])
        after = None if step.after is None else _sortable(step.after)
        entries = []
        for number, whole in self._tables[step.table.name].values():
            row = whole[: len(at)]
            if step.table.within is not None:
                owner = step.table.within
                number, _ = self._tables[owner.name][row[: owner.key]]
            place = tuple(row[at[name]] if name in at else number for name in step.order)
            bounded = place[step.given : step.given + 1]
            if (
                place[: step.given] == given
                and (step.low is None or (None not in bounded and bounded >= (step.low,)))
                and (step.high is None or (None not in bounded and bounded < (step.high,)))
                and (after is None or (_sortable(place) < after) is step.reverse)
                and place != step.after
            ):
                entries.append((place, row))
        return sorted(entries, key=lambda entry: _sortable(entry[0]), reverse=step.reverse)

    _EXECUTE: Final[dict[type, Callable[[Any, Any], Any]]] = {
        Get: _get,
        Under: _under,
        Add: _add,
        Put: _put,
        Delete: _delete,
        Pages: _page,
        Recall: lambda _, __: {},
        Remember: lambda _, __: None,
    }


def _wins(table: Table, row: Row, before: Row) -> bool:
    """Return whether a row replaces another one in a table of registers."""
    for name in table.register:
        at = table.columns.index(name.removeprefix("-"))
        if row[at] != before[at]:
            return bool(row[at] < before[at]) is name.startswith("-")
    return not table.register


def _added(table: Table, row: Row, before: Row) -> Row:
    """Return a row with the sums of the one that it replaces."""
    names = zip(table.columns, row, before, strict=True)
    return tuple(new + old if name in table.sums else new for name, new, old in names)


def _has(table: Table, row: Row, equal: Mapping[str, Value]) -> bool:
    """Return whether a row has values."""
    return all(row[table.columns.index(name)] == value for name, value in equal.items())


def _is_wanted(step: Pages, row: Row) -> bool:
    """Return whether a row fits the conditions of a page that its order does not serve."""
    named = dict(zip(step.table.columns, row, strict=True))

    def first(names: str | tuple[str, ...]) -> Value:
        values = [named[name] for name in ((names,) if isinstance(names, str) else names)]
        return next((value for value in values if value is not None), None)

    return (
        all(first(names) in values for names, values in step.one_of.items())
        and all(named[x] is not None and named[x] >= y for x, y in step.least.items())
        and all(named[x] is not None and named[x] < y for x, y in step.below.items())
        and all(any(begins_with(named[x], text) for x in names) for names, text in step.begins)
    )


def _sortable(place: Place) -> tuple[tuple[bool, Any], ...]:
    # None is less than every other value.
    return tuple((value is not None, value) for value in place)
