# SPDX-License-Identifier: Apache-2.0
"""Moves keys from memory into the table ``event_keys``, and deletes old parts, in small steps.

A step is part of a transaction that the caller makes. Its effect here is confirmed after the
commit, so a step whose transaction failed is made again.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Final

from ..connection import insert
from .parts import Parts

#: How many keys are merged for each new event. Above 1, a merge ends before the next one is due.
RATE: Final = 1.5
#: The least number of keys in a step: a statement for fewer would cost more than the keys.
LEAST_KEYS: Final = 64
#: For each key that a step would merge, how many stale keys it deletes instead.
_DELETE_RATE: Final = 4
#: For each key that a step would merge, how many it puts into buckets instead.
_BUCKET_RATE: Final = 16
#: Seconds until a merge is tried again after a failure: the first pause, doubled each time, and the
#: longest.
BACK_OFF: Final = (1.0, 60.0)


class Frozen:
    """Keys that are ready to be merged, in order.

    In the order of the table, several keys of a step are on one page. Sorting all of them at once
    would take too long, so they are first spread over 256 buckets by their first byte.
    """

    def __init__(self, keys: Mapping[bytes, int], last: int) -> None:
        """
        :param keys: key → number of the event.
        :param last: the greatest of the numbers.
        """
        self.keys = keys
        self.last = last
        #: The part that its keys are moved to, once that is decided: the number of the first event.
        self.part: int | None = None
        self._remaining = iter(keys)
        self._are_buckets_filled = False
        self._buckets: list[list[bytes]] = [[] for _ in range(256)]
        #: Bucket and index of the first key that is not merged.
        self._position = self._next = (0, 0)

    def fill_buckets(self, count: int) -> bool:
        """Put the next keys into buckets, and return whether all were in buckets before."""
        if not self._are_buckets_filled:
            buckets, keys = self._buckets, list(itertools.islice(self._remaining, count))
            for key in keys:
                buckets[key[0]].append(key)
            self._are_buckets_filled = len(keys) < count
            return False
        return True

    def take(self, count: int) -> list[bytes]:
        """Return the next keys in order: the same ones again, unless :meth:`confirm` was called."""
        taken: list[bytes] = []
        bucket, index = self._position
        while bucket < len(self._buckets) and len(taken) < count:
            keys = self._buckets[bucket]
            if index == 0:
                keys.sort()
            chunk = keys[index : index + count - len(taken)]
            taken += chunk
            index += len(chunk)
            if index == len(keys):
                bucket, index = bucket + 1, 0
        self._next = (bucket, index)
        return taken

    @property
    def is_taken(self) -> bool:
        """Whether the keys that were taken last are the last ones."""
        return self._next[0] == len(self._buckets)

    def confirm(self) -> None:
        """Let the next :meth:`take` return the keys after those that were taken last."""
        self._position = self._next


class Merger:
    """The keys that wait to be merged, oldest first, and the deletion of stale keys.

    A key is stale when its event has been deleted. Deleting it at the same time would change a
    random page for each event, so the keys of a part are deleted when all of them are stale.
    """

    def __init__(self, merged: int = 0) -> None:
        """:param merged: the keys of all events up to this number are in the table."""
        self.merged = merged
        self.waiting: deque[Frozen] = deque()
        self._least = 0
        #: The parts that must be deleted.
        self._stale: deque[int] = deque()
        self._is_deleted = False
        self._credit = 0.0
        self._pause = 0.0
        self._not_before = 0.0

    # --------------------------------------------------------------- when a step is due
    @property
    def has_work(self) -> bool:
        """Whether there is anything to merge or to delete, now or after a pause."""
        return bool(self.waiting or self._stale)

    @property
    def is_pausing(self) -> bool:
        """Whether merging pauses after a failure."""
        return bool(self._pause) and monotonic() < self._not_before

    def due(self, new: int) -> int:
        """Return how many keys to merge with a number of new events."""
        if not self.has_work or self.is_pausing:
            return 0
        self._credit += new * RATE
        return int(self._credit) if self._credit >= LEAST_KEYS else 0

    def plan(self, least: int, parts: Parts) -> None:
        """Begin to delete the parts whose keys are all stale.

        :param least: the number of the oldest event, in a transaction that is committed.
        """
        self._least = least
        self._stale += parts.drop(least)

    # ------------------------------------------------------------------------ the steps
    def step(self, db: sqlite3.Connection, count: int, parts: Parts) -> None:
        """Merge the next keys, or delete stale ones, in a transaction of the caller.

        :raises sqlite3.Error: if that is not possible.
        """
        if self.waiting:
            frozen = self.waiting[0]
            if frozen.fill_buckets(count * _BUCKET_RATE):
                self._merge(db, frozen, frozen.take(count), parts)
        elif self._stale:
            self._delete(db, self._stale[0], count * _DELETE_RATE)

    def _merge(
        self, db: sqlite3.Connection, frozen: Frozen, keys: list[bytes], parts: Parts
    ) -> None:
        if frozen.part is None:
            frozen.part = parts.begin(self.merged + 1, frozen.last, self._least)
        # A key is here twice if its event was deleted and stored again.
        insert(
            db,
            "INSERT INTO event_keys (part, key, seq)",
            [(frozen.part, key, frozen.keys[key]) for key in keys],
            "ON CONFLICT (part, key) DO UPDATE "
            "SET seq = excluded.seq WHERE excluded.seq > event_keys.seq",
        )
        # Before the commit: a key too many does no harm.
        parts.add(keys)
        if frozen.is_taken:
            db.execute("UPDATE store SET value = ? WHERE name = 'merged'", (frozen.last,))

    def _delete(self, db: sqlite3.Connection, part: int, count: int) -> None:
        end = db.execute(
            "SELECT key FROM event_keys WHERE part = ? ORDER BY key LIMIT 1 OFFSET ?", (part, count)
        ).fetchone()
        if end is None:
            db.execute("DELETE FROM event_keys WHERE part = ?", (part,))
            self._is_deleted = True
        else:
            db.execute("DELETE FROM event_keys WHERE part = ? AND key < ?", (part, *end))

    # ------------------------------------------------------------ after the transaction
    def confirm(self) -> None:
        """Continue after the last step, whose transaction is committed."""
        self._credit = self._pause = 0.0
        if self.waiting:
            frozen = self.waiting[0]
            frozen.confirm()
            if frozen.is_taken:
                self.merged = frozen.last
                self.waiting.popleft()
        elif self._is_deleted:
            self._stale.popleft()
            self._is_deleted = False

    def failed(self) -> None:
        """Try again after a pause: a transaction with a step failed."""
        self._is_deleted = False
        self._credit = 0.0
        self._pause = min(self._pause * 2 or BACK_OFF[0], BACK_OFF[1])
        self._not_before = monotonic() + self._pause
