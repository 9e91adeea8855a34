# SPDX-License-Identifier: Apache-2.0
"""Which events are stored, by their keys: in memory, in filters, and in the table ``event_keys``.

A unique index on random keys would change a page for each event. Instead, the table has the keys of
all events up to the number ``merged``, in parts; those of the newer events are in memory, and
``merge.py`` moves them into the newest part.

The keys in memory and the filters only show that an event is surely new. An event is a duplicate
only if its row of ``events`` is read in the same transaction: another program may have replaced the
content of the file by a backup, and retention deletes events and leaves their keys.

One writer at a time can use this. Each writer sets the number ``epoch`` of the store to a random
one when it takes the store over, and compares it and the number of the last event in each
transaction with what its own last transaction left.
"""

from __future__ import annotations

import itertools
import secrets
import sqlite3
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from engage.api import StorageUnavailable
from engage.store.keys import KEY_BYTES

from ..connection import look_up
from . import parts, saved
from .merge import Frozen, Merger
from .parts import Parts

#: The keys in memory are merged when they reach this number. A smaller merge changes more pages of
#: the table for each key. A larger one needs more memory, and reads more keys again after a crash.
#: A dict doubles its own table at 174,763 keys.
MERGE_KEYS: Final = 170_000

#: Keys of a step that is a separate transaction.
ALONE_KEYS: Final = 300

#: While keys cannot be merged, memory holds at most this many times the number of keys from which
#: they are merged.
_MAX_WAITING: Final = 4

#: Version of what :meth:`Keys.save` writes.
_SAVED_FORMAT: Final = 2

_FIND: Final = (
    "SELECT k.key, k.seq FROM {keys} w "
    "CROSS JOIN event_keys k ON k.part = w.column1 AND k.key = w.column2"
)


class Keys:
    """The keys of the stored events, for the one writer."""

    def __init__(self, path: str) -> None:
        """:param path: the file of the store."""
        self._saved = f"{path}-keys"
        self.reset()

    def reset(self) -> None:
        """Forget everything, for example because a commit failed and may still have succeeded."""
        #: ``None``: the store is not taken over.
        self._epoch: int | None = None
        #: The number of the last event.
        self._last = 0
        self._live: dict[bytes, int] = {}
        self.merger = Merger()
        self.parts = Parts()
        #: Whether a transaction with a step of the merge is running.
        self._is_merging = False

    # ------------------------------------------------------------------------- ownership
    @property
    def is_taken_over(self) -> bool:
        """Whether this writer has taken the store over."""
        return self._epoch is not None

    def is_current(self, db: sqlite3.Connection) -> bool:
        """Return whether the store is as the last transaction of this writer left it.

        :param db: a transaction.
        """
        return _state(db) == (self._epoch, self._last)

    def take_over(self, db: sqlite3.Connection) -> None:
        """Become the writer, and read the keys that are not in the table.

        :param db: a write transaction. If it is not committed, :meth:`is_current` will be false.
        """
        self.reset()
        before, last = _state(db)
        (merged,) = db.execute("SELECT value FROM store WHERE name = 'merged'").fetchone()
        self._last = last
        self.merger = Merger(merged)
        newest, filters = self._load(_identity(before, last, merged))
        self.parts = Parts.read(db, merged, filters)
        # The epoch is a new one if this transaction is committed.
        self.forget(self.oldest(db))
        if newest is None:
            query = "SELECT key, seq FROM events WHERE seq > ? ORDER BY seq"
            newest = db.execute(query, (merged,))
        for key, seq in newest:
            # In the order of the numbers, also if an event was deleted and stored again.
            self._live.pop(key, None)
            self._live[key] = seq
            if len(self._live) >= MERGE_KEYS:
                self._freeze(seq)
        self._renew(db)

    def _renew(self, db: sqlite3.Connection) -> None:
        self._epoch = secrets.randbits(62)
        db.execute("UPDATE store SET value = ? WHERE name = 'epoch'", (self._epoch,))

    def save(self) -> None:
        """Save the keys in memory for the next writer.

        :raises OSError: if it cannot be written.
        """
        if self._epoch is None:
            return
        mappings = [*(frozen.keys for frozen in self.merger.waiting), self._live]
        identity = _identity(self._epoch, self._last, self.merger.merged)
        numbers, blooms = self.parts.dump()
        head = {**identity, "parts": numbers}
        keys = b"".join(itertools.chain(*mappings))
        seqs = array("q", itertools.chain(*(mapping.values() for mapping in mappings))).tobytes()
        saved.write(self._saved, head, [keys, seqs, *blooms])

    def _load(
        self, identity: Mapping[str, Any]
    ) -> tuple[Iterable[tuple[bytes, int]], tuple[dict[str, Any], list[bytes]]] | tuple[None, None]:
        """Return the keys that are not in the table, and the filters over those that are.

        :return: ``None`` twice if nothing was saved for this state of the store.
        """
        content = saved.read(self._saved)
        if content is None:
            return None, None
        head, (keys, seqs, *blooms) = content
        if {name: head.get(name) for name in identity} != identity:
            return None, None
        size = KEY_BYTES
        split = (keys[start : start + size] for start in range(0, len(keys), size))
        return zip(split, array("q", seqs), strict=True), (head["parts"], blooms)

    # ---------------------------------------------------------------------------- events
    @property
    def next_number(self) -> int:
        """The number of the next event."""
        return self._last + 1

    def candidates(self, db: sqlite3.Connection, keys: AbstractSet[bytes]) -> dict[bytes, int]:
        """Return the numbers of the events that may be stored with these keys.

        All other keys are surely those of new events. An event of a number that is returned may
        have been deleted.
        """
        numbers: dict[bytes, int] = {}
        # The newest number counts: before an event is stored again, the older one was deleted.
        for mapping in self._newest_first():
            if not keys.isdisjoint(mapping.keys()):
                hits = {key: mapping[key] for key in keys if key in mapping}
                numbers |= hits
                keys = keys - hits.keys()
        if possible := self.parts.that_may_contain(keys):
            for key, number in look_up(db, _FIND, possible):
                numbers[key] = max(number, numbers.get(key, 0))
        return numbers

    def _newest_first(self) -> Iterator[Mapping[bytes, int]]:
        yield self._live
        for frozen in reversed(self.merger.waiting):
            yield frozen.keys

    def stored(self, keys: Collection[bytes]) -> None:
        """Remember the keys of new events. Call it when their transaction is committed.

        :param keys: in the order of their numbers, which began with :attr:`next_number`.
        """
        last = self._last + len(keys)
        if not self._live.keys().isdisjoint(keys):
            # A deleted event is stored again: the order is that of the numbers.
            for key in keys:
                self._live.pop(key, None)
        self._live.update(zip(keys, range(self._last + 1, last + 1), strict=True))
        self._last = last
        if len(self._live) >= MERGE_KEYS and len(self.merger.waiting) < _MAX_WAITING - 1:
            self._freeze(last)

    def _freeze(self, last: int) -> None:
        self.merger.waiting.append(Frozen(self._live, last))
        self._live = {}

    # --------------------------------------------------------------------------- merging
    def require_room(self) -> None:
        """Check that the keys of more events may be kept in memory.

        :raises StorageUnavailable: if there are many, because merging them fails.
        """
        if (
            self.merger.is_pausing
            and len(self.merger.waiting) >= _MAX_WAITING - 1
            and len(self._live) >= MERGE_KEYS
        ):
            raise StorageUnavailable(
                "the keys of the newest events cannot be moved into the table; see the log"
            )

    def merge_due(self, new: int) -> int:
        """Return how many keys to merge in a transaction with a number of new events."""
        return self.merger.due(new)

    def merge(self, db: sqlite3.Connection, count: int) -> None:
        """Move the next keys into the table, as a part of a write transaction.

        Call :meth:`merge_confirmed` when it is committed, and before :meth:`stored`; otherwise
        :meth:`merge_failed`.

        :raises sqlite3.Error: if it fails.
        """
        self._is_merging = True
        self.merger.step(db, count, self.parts)

    def merge_alone(self, db: sqlite3.Connection) -> None:
        """Do the same in a transaction that stores no event."""
        self.merge(db, ALONE_KEYS)
        # Without a new epoch, a backup from before this step would look like the store after it.
        self._renew(db)

    def merge_confirmed(self) -> None:
        """Continue after the last step, if there was one."""
        if self._is_merging:
            self._is_merging = False
            self.merger.confirm()

    def merge_failed(self) -> bool:
        """Let merging pause if a step was a part of the transaction that failed.

        :return: whether that was so: the same write may succeed without it.
        """
        was_merging, self._is_merging = self._is_merging, False
        if was_merging:
            self.merger.failed()
        return was_merging

    def merge_due_alone(self) -> bool:
        """Return whether there are keys to merge or to delete now."""
        return self.merger.has_work and not self.merger.is_pausing

    def oldest(self, db: sqlite3.Connection) -> int:
        """Return the number of the oldest event, or of the next one if there is none."""
        (least,) = db.execute("SELECT min(seq) FROM events").fetchone()
        return self._last + 1 if least is None else int(least)

    def forget(self, least: int) -> None:
        """Forget the parts whose events have all been deleted.

        Call it when a transaction with new events is committed: a backup of the state before it may
        have these events, and looks like what this writer left if nothing was committed since.

        :param least: the number of the oldest event in that transaction.
        """
        self.merger.plan(least, self.parts)

    def forget_due(self, new: int) -> bool:
        """Return whether :meth:`forget` should be called after a number of new events."""
        return len(self._live) + new >= MERGE_KEYS

    # ---------------------------------------------------------------------------- filter
    @property
    def build_filter_due(self) -> bool:
        """Whether a filter must be built."""
        return self.parts.building_is_due

    def build_filter(self, db: sqlite3.Connection) -> None:
        """Add a page of the table to the filter that is being built.

        :raises sqlite3.Error: if it cannot be read.
        """
        self.parts.build(db)


def _state(db: sqlite3.Connection) -> tuple[int, int]:
    """Return the epoch and the number of the last event."""
    epoch, last = db.execute(
        "SELECT (SELECT value FROM store WHERE name = 'epoch'), "
        "(SELECT seq FROM sqlite_sequence WHERE name = 'events')"
    ).fetchone()
    return epoch, last or 0


def _identity(epoch: int, last: int, merged: int) -> dict[str, Any]:
    """Return the facts that must be equal in the store and in the saved file."""
    return {
        "epoch": epoch,
        "last": last,
        "merged": merged,
        "filter_version": parts.VERSION,
        "format": _SAVED_FORMAT,
        "byte_order": sys.byteorder,
    }
