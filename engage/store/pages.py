# SPDX-License-Identifier: Apache-2.0
"""Pages of a table as pages of items, and deleting the oldest rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar

import orjson

from engage.api import Page
from engage.store.tables import MAX_ROWS, Delete, Pages, Place, Row, Steps, Table, Value

Item = TypeVar("Item")

#: Sorts behind every text of an id.
LAST_TEXT: Final = "\U0010ffff" * 2


def cursor_of(place: Place) -> str:
    """Return a place as a cursor: its values as a JSON array."""
    return orjson.dumps(place).decode()


#: The types of the numbers of rows in a place: a store without numbers has an order of its own.
NUMBER: Final = (int, str, list)


def place_of(cursor: str | None, *types: type | tuple[type, ...]) -> Place | None:
    """Return the place of a cursor.

    :param types: those of its values.
    :raises ValueError: if it is not such a cursor.
    """
    if cursor is None:
        return None
    values = orjson.loads(cursor)
    if (
        not isinstance(values, list)
        or len(values) != len(types)
        or not all(map(isinstance, values, types))
        or any(isinstance(value, bool) for value in values)
        or any(isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 for value in values)
    ):
        raise ValueError("not a cursor of this store")
    return tuple(values)


def page(
    make: Callable[[Row], Item],
    table: Table,
    equal: Mapping[str, Value],
    after: str | None,
    limit: int,
    *,
    by: tuple[str, ...] = (),
    least: Mapping[str, Value] = {},
    reverse: bool = False,
) -> Steps[Page[Item]]:
    """Read a page of rows as items. It may have fewer than ``limit``, or none, and a cursor."""
    step = Pages(table, limit, by, equal, least=least, reverse=reverse, most=MAX_ROWS)
    types = [NUMBER if name == "number" else table.types[name] for name in step.order]
    part = yield step._replace(after=place_of(after, *types))
    return Page([*map(make, part.rows)], cursor_of(part.place) if part.more else None)


def every(
    table: Table,
    *,
    by: tuple[str, ...] = (),
    equal: Mapping[str, Value] = {},
    one_of: Mapping[str, Collection[Value]] = {},
) -> Steps[list[Row]]:
    """Read all rows with some values. There must be few in the table, or few that ``by`` finds."""
    rows: list[Row] = []
    place: Place | None = None
    more = True
    while more:
        part = yield Pages(table, 1000, by, equal, one_of, after=place)
        rows += part.rows
        place, more = part.place, part.more
    return rows


def expire(
    table: Table, by: str, before: int, limit: int, equal: Mapping[str, Value] = {}
) -> Steps[int]:
    """Delete at most ``limit`` rows whose ``by`` is less than ``before``, the least first.

    :return: how many were deleted.
    """
    oldest = yield Pages(table, limit, by=(*equal, by), equal=equal, high=before)
    deleted: int = yield Delete(table, [row[: table.key] for row in oldest.rows])
    return deleted
