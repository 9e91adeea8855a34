# SPDX-License-Identifier: Apache-2.0
"""Pages of a table, in the order of a number that only grows, or in the reverse order."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from engage.store.tables import MAX_PAGE_BYTES as MAX_BYTES
from engage.store.tables import MAX_ROWS

Item = TypeVar("Item")


class Window:
    """The rows that one page examines: those with ``after < number <= last``."""

    def __init__(
        self,
        db: sqlite3.Connection,
        table: str,
        number: str,
        after: int | None,
    ) -> None:
        """
        :param number: the column that gives the order.
        :param after: the cursor of the page before; ``None`` starts at the first row.
        """
        (newest,) = db.execute(f"SELECT max({number}) FROM {table}").fetchone()
        if after is None:
            (first,) = db.execute(f"SELECT min({number}) FROM {table}").fetchone()
            after = (first or 1) - 1
        self.after = after
        self.last = min(after + MAX_ROWS, newest or 0)
        self._newest = newest or 0

    def page(
        self, rows: Iterable[Any], make: Callable[[Any], tuple[Item, int]], limit: int
    ) -> tuple[list[Item], int | None]:
        """Return the items of the page, and its cursor.

        :param rows: the wanted rows of the window, in order; the number is their first column.
        :param make: makes an item of a row, and returns it with its size in bytes.
        :param limit: the maximum number of items.
        """
        items, last = _take(rows, make, limit)
        if last is None:
            last = self.last
        return items, (last if last < self._newest else None)


class ReverseWindow:
    """The rows that one page in reverse order examines: those with ``first <= number < before``."""

    def __init__(
        self,
        db: sqlite3.Connection,
        table: str,
        number: str,
        before: int | None,
        least: int | None = None,
    ) -> None:
        """
        :param number: the column that gives the order.
        :param before: the cursor of the page before; ``None`` starts at the newest row.
        :param least: no row with a lower number is wanted.
        """
        (oldest,) = db.execute(f"SELECT min({number}) FROM {table}").fetchone()
        if before is None:
            (newest,) = db.execute(f"SELECT max({number}) FROM {table}").fetchone()
            before = (newest or 0) + 1
        self._oldest = max(before if oldest is None else oldest, least or 0)
        self.before = before
        self.first = max(before - MAX_ROWS, self._oldest)

    def page(
        self, rows: Iterable[Any], make: Callable[[Any], tuple[Item, int]], limit: int
    ) -> tuple[list[Item], int | None]:
        """Return the items of the page, and its cursor; see :meth:`Window.page`."""
        items, last = _take(rows, make, limit)
        if last is None:
            last = self.first
        return items, (last if last > self._oldest else None)


def _take(
    rows: Iterable[Any], make: Callable[[Any], tuple[Item, int]], limit: int
) -> tuple[list[Item], int | None]:
    """Return the items of a page, and the number of the last one if the page is full."""
    items: list[Item] = []
    total = 0
    for row in rows:
        item, size = make(row)
        items.append(item)
        total += size
        if len(items) >= limit or total > MAX_BYTES:
            return items, row[0]
    return items, None
