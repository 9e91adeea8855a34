# SPDX-License-Identifier: Apache-2.0
"""Pages of a table, in the order of a number that only grows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

Item = TypeVar("Item")

#: The maximum number of rows that one page examines, and of bytes that it holds: a page is a short
#: call, even if few of the rows are wanted. So a page without items can have a cursor.
_MAX_ROWS: Final = 50_000
_MAX_BYTES: Final = 32 * 1024 * 1024


class Window:
    """The rows that one page examines: those with ``after < number <= last``."""

    def __init__(self, db: sqlite3.Connection, table: str, number: str, after: int | None) -> None:
        """
        :param number: the column that gives the order.
        :param after: the cursor of the page before; ``None`` starts at the first row.
        """
        (newest,) = db.execute(f"SELECT max({number}) FROM {table}").fetchone()
        if after is None:
            (first,) = db.execute(f"SELECT min({number}) FROM {table}").fetchone()
            after = (first or 1) - 1
        self.after = after
        self.last = min(after + _MAX_ROWS, newest or 0)
        self._newest = newest or 0

    def page(
        self, rows: Iterable[Any], make: Callable[[Any], tuple[Item, int]], limit: int
    ) -> tuple[list[Item], int | None]:
        """Return the items of the page, and its cursor.

        :param rows: the wanted rows of the window, in order; the number is their first column.
        :param make: makes an item of a row, and returns it with its size in bytes.
        :param limit: the maximum number of items.
        """
        items: list[Item] = []
        last, total = self.last, 0
        for row in rows:
            item, size = make(row)
            items.append(item)
            total += size
            if len(items) >= limit or total > _MAX_BYTES:
                last = row[0]
                break
        return items, (last if last < self._newest else None)
