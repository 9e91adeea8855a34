# SPDX-License-Identifier: Apache-2.0
"""What the only writer of a store remembers of profiles between its transactions."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from engage.store.changes import Applied, Pair, Searched
from engage.store.profiles import USER

from .tables import identifiers

#: How many stored links are remembered: most events of a visitor then need no look-up of the link.
_MAX_LINKS: Final = 100_000


class Known:
    """What is remembered.

    :param declared: workspace id → the traits by which the config looks users up.
    """

    def __init__(self, declared: Mapping[str, Sequence[str]]) -> None:
        #: Workspace id → the traits by which the store looks users up.
        self.identifiers = identifiers.declared(declared)
        #: Stored links, and when the first event that made each was received.
        self.links: OrderedDict[Pair, int] = OrderedDict()
        #: Where the next search for visitors that give way begins.
        self.searched: Searched = {}

    def prepare(self, db: sqlite3.Connection, *, serving: bool) -> None:
        """Make this object fit a newly opened store.

        :param serving: make the store's look-ups those of this config; otherwise use the store's.
        """
        # Another file may be at the path now.
        self.links.clear()
        if serving:
            identifiers.index(db, self.identifiers)
        else:
            self.identifiers = identifiers.indexed(db)

    def is_linked(self, workspace_id: str, user_id: str, anonymous_id: str, at: int) -> bool:
        """Return whether this link is known to be stored with an event received before ``at``."""
        return self.links.get(((workspace_id, USER, user_id), anonymous_id), at) < at

    def remember(self, applied: Applied) -> None:
        """Remember what a write changed, whose transaction is committed."""
        self.searched = applied.searched
        self.links.update(applied.links)
        while len(self.links) > _MAX_LINKS:
            self.links.popitem(last=False)
