# SPDX-License-Identifier: Apache-2.0
"""The pages that list: a filter, some rows or why there are none, and links to the other rows.

Such a page is a :class:`ListPage`. Its template extends ``templates/list.html``.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

from engage.api import Page
from engage.console.base import ConsoleHandler
from engage.console.display.formats import ROWS

__all__ = ["SEARCH_SECONDS", "Found", "ListPage", "find"]

#: Seconds after which a search begins no other read of the store, so that a page takes less than
#: one.
SEARCH_SECONDS: Final = 0.5

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, slots=True)
class Found(Generic[Item]):
    """Some rows of a list."""

    rows: Sequence[Item] = ()
    #: For the next page; ``None``: there is none.
    cursor: str | None = None
    #: Whether the search ended before it found enough.
    gave_up: bool = False
    #: Back to when it looked: milliseconds; ``None``: it looked at all, or it is not known.
    reached: int | None = None


async def find(
    handler: ConsoleHandler,
    read: Callable[..., Awaitable[Page[Item]]],
    fits: Callable[[Item], bool] = lambda _: True,
    *,
    by: str = "before",
    cursor: str | None = None,
    limit: int = ROWS,
    size: int | None = None,
    seconds: float | None = None,
) -> Found[Item]:
    """Read pages of the store until enough rows fit.

    :param read: makes the call of the store for a cursor and a ``limit``.
    :param by: the name of the cursor: ``before`` or ``after``.
    :param cursor: of the page before.
    :param limit: rows that are enough.
    :param size: rows of a call; by default as many as are missing.
    :param seconds: instead of :data:`SEARCH_SECONDS`.
    :return: what was read until then, if the store does not answer.
    """
    rows: list[Item] = []
    end = time.monotonic() + (SEARCH_SECONDS if seconds is None else seconds)
    while True:
        page = await handler.read(read(**{by: cursor}, limit=size or limit - len(rows)))
        if page is None:
            return Found(rows, cursor)
        rows += filter(fits, page.items)
        cursor = page.cursor
        if cursor is None or len(rows) >= limit:
            return Found(rows, cursor)
        if time.monotonic() > end:
            return Found(rows, cursor, gave_up=True)


class ListPage(ConsoleHandler):
    """A page that lists rows of the store.

    A subclass says what a row is, what reads rows, and which of them fit.
    """

    #: Its route, template and place in the navigation, and its title in small letters.
    name: ClassVar[str]
    #: Its rows in words.
    what: ClassVar[str]
    #: The name of the cursor in the query, and for the store.
    by: ClassVar[str] = "before"
    #: The parameters of the query that make the filter.
    parameters: ClassVar[Sequence[str]] = ()
    #: What the links to the first page and to the next one say.
    words: ClassVar[tuple[str, str]] = ("Newest", "Older")

    def rows(self, **page: Any) -> Awaitable[Page[Any]]:
        """Make the call of the store that reads rows.

        :param page: the cursor and the limit.
        """
        raise NotImplementedError

    def fits(self, row: Any) -> bool:
        """Return whether the filter selects a row that was read."""
        return True

    async def find(self) -> Found[Any]:
        """Return the rows that the query selects."""
        return await find(self, self.rows, self.fits, by=self.by, cursor=self.cursor(self.by))

    @staticmethod
    def shown(row: Any, /) -> Any:
        """Return what the template shows of a row."""
        return row

    async def beside(self, page: Found[Any]) -> Mapping[str, Any]:
        """Return other names for the template."""
        return {}

    @functools.cached_property
    def given(self) -> Mapping[str, str | None]:
        """The filter, as the links of the page repeat it."""
        return {name: text for name in self.parameters if (text := self.exact(name))}

    def other(self, cursor: str | None = None) -> str:
        """Return the link to the page after a cursor, or to the first page."""
        return self.link(self.name, **{self.by: cursor}, **self.given)

    async def get(self) -> None:
        """Show a page of the list."""
        page = await self.find()
        names = {
            "page": page,
            "rows": [*map(self.shown, page.rows)],
            "what": self.what,
            "given": self.given,
            "paged": self.cursor(self.by) is not None,
            "other": self.other,
            "words": self.words,
            "note": "",
        }
        names |= await self.beside(page)
        self.page(f"{self.name}.html", title=self.name.capitalize(), nav=self.name, **names)
