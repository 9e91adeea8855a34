# SPDX-License-Identifier: Apache-2.0
"""Pages of a table in the order of a number that only grows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

Item = TypeVar("Item")

#: Rows that one page looks at, and bytes that it holds, at most: a page is a short call, however
#: few of the rows are wanted. Such a page may hold nothing and still have a cursor.
_ROWS: Final = 50_000
_BYTES: Final = 32 * 1024 * 1024


class Window:
    """The rows that one page looks at: those with ``after < number <= last``."""

    def __init__(self, db: sqlite3.Connection, table: str, number: str, after: int | None) -> None:
        """:param after: the cursor; ``None``: from the first row on."""
        (newest,) = db.execute(f"SELECT max({number}) FROM {table}").fetchone()
        if after is None:
            (first,) = db.execute(f"SELECT min({number}) FROM {table}").fetchone()
            after = (first or 1) - 1
        self.after = after
        self.last = min(after + _ROWS, newest or 0)
        self._newest = newest or 0

    def page(
        self, rows: Iterable[Any], make: Callable[[Any], tuple[Item, int]], limit: int
    ) -> tuple[list[Item], int | None]:
        """
        :param rows: the wanted ones of the window, in order; the number comes first.
        :param make: row → item and its size in bytes.
        :return: the items and the cursor.
        """
        items: list[Item] = []
        last, total = self.last, 0
        for row in rows:
            item, size = make(row)
            items.append(item)
            total += size
            if len(items) >= limit or total > _BYTES:
                last = row[0]
                break
        return items, (last if last < self._newest else None)
