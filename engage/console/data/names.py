# SPDX-License-Identifier: Apache-2.0
"""The names of the newest events, counted: nothing counts names while events arrive."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import EventFilter, StorageUnavailable
from engage.console.data.badge import FRESH
from engage.console.data.reader import PATIENCE

if TYPE_CHECKING:
    from engage.console.data.reader import Reader
    from engage.store.facade import Storage

__all__ = ["Counted", "Names"]

#: Events that one read of the store returns at most: enough for shares, and a tenth of a second.
EVENTS: Final = 10_000
#: Names that are shown.
MOST: Final = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """The most frequent names of the newest events of a workspace."""

    #: How many events were counted. A storage can return fewer than there are.
    events: int
    #: (type, name, events), the most frequent first; the name of some types is ``""``.
    names: Sequence[tuple[str, str, int]]


class Names:
    """Counts names, at most once in :data:`~engage.console.data.badge.FRESH` for a workspace.

    :param clock: the time in seconds since 1970.
    """

    def __init__(self, store: Storage, reader: Reader, clock: Callable[[], float]) -> None:
        self._store = store
        self._reader = reader
        self._clock = clock
        self._known: dict[str, tuple[float, Counted | None]] = {}

    async def newest(self, workspace_id: str) -> Counted | None:
        """Return the names; ``None``: the storage cannot return its newest events in time."""
        now = self._clock()
        at, counted = self._known.get(workspace_id, (0.0, None))
        if not 0 <= now - at < FRESH:
            criteria = EventFilter(workspace_id=workspace_id)
            try:
                page = await self._reader.read(
                    self._store.recent(criteria, limit=EVENTS), within=PATIENCE
                )
            except StorageUnavailable:
                page = None
            if page is not None:
                count = collections.Counter((event.type, event.name or "") for event in page.items)
                most = [(*name, number) for name, number in count.most_common(MOST)]
                counted = Counted(len(page.items), most)
            self._known[workspace_id] = (now, counted)
        return counted
