# SPDX-License-Identifier: Apache-2.0
"""Reads all that a scan of a store finds, page by page."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from engage.api import Page, StorageUnavailable

__all__ = ["MAX_PAGE", "PAGE", "PAUSE", "all_pages"]

#: Records that one call of a storage returns or deletes: it answers soon, and the cost of a call is
#: small beside that of so many records.
PAGE: Final = 500
#: Records of the largest page of a scan. Pages grow to it, because a call can cost as much as all
#: records: FerretDB reads and sorts the whole collection for each.
MAX_PAGE: Final = 8000
#: How often a page is tried before a scan ends, and the seconds in between.
ATTEMPTS: Final = 4
PAUSE: Final = 1.0

Item = TypeVar("Item")


async def all_pages(
    read: Callable[..., Awaitable[Page[Item]]],
    cursor: str | None = None,
    *,
    attempts: int = ATTEMPTS,
    most: int = MAX_PAGE,
) -> AsyncGenerator[Item, None]:
    """Yield the items of a scan, from its first page to its last.

    A page that cannot be read is tried again with a quarter of its size.

    :param read: a method that scans: it reads the page after a cursor, with at most so many items.
    :param cursor: where the scan goes on; ``None``: it begins.
    :param attempts: how often a page is tried.
    :param most: records of the largest page.
    :raises StorageUnavailable: if a page cannot be read; it names the cursor of the page before.
    """
    limit, failures = PAGE, 0
    while True:
        try:
            page = await read(after=cursor, limit=limit)
        except StorageUnavailable as error:
            failures += 1
            if failures == attempts:
                read_up_to = "" if cursor is None else f"; read up to {shlex.quote(cursor)}"
                raise StorageUnavailable(f"{error}{read_up_to}") from error
            limit = max(limit // 4, 1)
            most = max(limit, PAGE)
            await asyncio.sleep(PAUSE)
            continue
        for item in page.items:
            yield item
        if page.cursor is None or (not page.items and page.cursor == cursor):
            return
        cursor = page.cursor
        limit, failures = min(2 * limit, most), 0
