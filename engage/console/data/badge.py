# SPDX-License-Identifier: Apache-2.0
"""The number beside "Rejected" in the navigation: the dead letters of the last 24 hours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engage.api import DAY_MS, DeadLetterStore

if TYPE_CHECKING:
    from engage.api import EventStore
    from engage.console.data.reader import Reader

__all__ = ["MOST", "Badge"]

#: A greater number is not counted.
MOST: Final = 200
#: Seconds for which a number is used again.
FRESH: Final = 10.0


class Badge:
    """Counts the newest dead letters of a workspace.

    :param clock: the time in seconds since 1970.
    """

    def __init__(self, store: EventStore, reader: Reader, clock: Callable[[], float]) -> None:
        self._store = store
        self._reader = reader
        self._clock = clock
        self._known: dict[str, tuple[float, int]] = {}

    async def count(self, workspace_id: str) -> int | None:
        """Return how many letters there are, at most :data:`MOST`; ``None``: unknown.

        :raises StorageUnavailable: if the store does not answer.
        """
        store = self._store
        if not isinstance(store, DeadLetterStore):
            return None
        now = self._clock()
        at, count = self._known.get(workspace_id, (0.0, 0))
        if not 0 <= now - at < FRESH:
            page = await self._reader.read(store.recent_dead_letters(workspace_id, limit=MOST))
            if page is None:
                return None
            since = now * 1000 - DAY_MS
            count = sum(letter.received_at >= since for letter in page.items)
            self._known[workspace_id] = (now, count)
        return count
