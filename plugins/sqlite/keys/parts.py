# SPDX-License-Identifier: Apache-2.0
"""The parts of the table ``event_keys``, and the Bloom filters over their keys.

The events of a part are newer than those of the part before it. So new keys change only the pages
of the newest part, however many events are stored, and a part is deleted as a whole when retention
has deleted its events.

The filters recognise nearly all new events. Without them each event would cost a look-up of a
random page in each part. There are few filters, each of which covers some parts: an event is looked
up in all of them, which takes 0.4 µs for each. They are saved when the store is closed
(``saved.py``), and otherwise built again in pages.
"""

from __future__ import annotations

import importlib.metadata
import operator
import sqlite3
import struct
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from rbloom import Bloom

#: With it a key takes 15.8 bits.
_FALSE_POSITIVES: Final = 0.0005

#: The least number of events that a part has room for. The filter of the smallest part takes 2 MB.
_LEAST_CAPACITY: Final = 1 << 20

#: A new part has room for this part of the events that are stored. So there are few parts: 11 for
#: 20 million events.
_SHARE: Final = 4

#: If there are more filters, one for all parts but the newest is built in their place.
_MOST_FILTERS: Final = 4

#: Keys that one step of building reads: about 5 ms.
BUILD_KEYS: Final = 5000

#: The first keys of a filter are read in smaller steps. Each key sets bits all over its memory, and
#: the system provides a page of memory when it is first used: 5000 keys in one step take 15 ms in a
#: filter for 25 million.
_FIRST_STEPS: Final = 10

#: Another version of the library may set other bits for a key, and then a key is not found.
VERSION: Final = importlib.metadata.version("rbloom")

#: A key is a hash already, of which 64 bits are enough here. Python's ``hash`` of it would depend
#: on a seed of the process.
_FIRST_BITS: Final = struct.Struct(">q8x")

#: The parts, without a look at each of their keys.
_PARTS: Final = """WITH RECURSIVE parts (part) AS (
    SELECT min(part) FROM event_keys
    UNION ALL SELECT (SELECT min(part) FROM event_keys WHERE part > parts.part)
    FROM parts WHERE part IS NOT NULL)"""

#: Finds the numbers of the events that may be stored with a key, newest first.
NUMBERS: Final = (
    f"{_PARTS} SELECT k.seq FROM parts CROSS JOIN event_keys k "
    "ON k.part = parts.part AND k.key = ?1 ORDER BY k.seq DESC"
)


class _Filter:
    """A Bloom filter over the keys of some parts."""

    def __init__(self, parts: Collection[int], capacity: int, bloom: Bloom | None = None) -> None:
        self.parts = list(parts)
        self.capacity = capacity
        self.bloom = Bloom(capacity, _FALSE_POSITIVES, operator.index) if bloom is None else bloom


class _Building:
    """A filter that is being built."""

    def __init__(self, parts: Collection[int], capacity: int) -> None:
        #: It has no parts yet.
        self.filter = _Filter((), capacity)
        self.parts = parts
        #: The parts that are still to be read, and the last key that was read of the first of them.
        self.left = deque(parts)
        self.position = b""
        #: How many keys were read.
        self.keys = 0


class Parts:
    """The parts of the table. Each is named by the number of its first event."""

    def __init__(self) -> None:
        """Begin with the parts of an empty table."""
        #: Oldest first.
        self._parts: list[int] = []
        #: The newest part has room for events below this number.
        self._end = 0
        self._filters: list[_Filter] = []
        #: The parts that no filter covers: each of their keys may be that of a new event.
        self._unfiltered: list[int] = []
        self._building: _Building | None = None

    @classmethod
    def read(
        cls,
        db: sqlite3.Connection,
        merged: int,
        saved: tuple[dict[str, Any], Sequence[bytes]] | None,
    ) -> Parts:
        """Return the parts of a table.

        :param merged: the number of the last event whose key is in the table.
        :param saved: what :meth:`dump` returned for this table, if that is known.
        :raises sqlite3.Error: if the table cannot be read.
        """
        made = cls()
        query = f"{_PARTS} SELECT part FROM parts WHERE part IS NOT NULL"
        made._parts = [part for (part,) in db.execute(query)]
        if made._parts:
            oldest, newest = made._parts[0], made._parts[-1]
            made._end = max(merged + 1, newest + capacity_of(merged - oldest))
        if saved is not None:
            numbers, blooms = saved
            filters = [
                _Filter(parts, capacity, Bloom.load_bytes(bloom, operator.index))
                for (parts, capacity), bloom in zip(numbers["filters"], blooms, strict=True)
            ]
            # A part whose first keys were not committed is not in the table.
            if {part for entry in filters for part in entry.parts} <= set(made._parts):
                made._filters, made._end = filters, numbers["end"]
        made._find_unfiltered()
        return made

    def dump(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return what describes the filters, as JSON values, and the bits of each."""
        filters = [entry for entry in self._filters if entry.parts]
        values = {"end": self._end, "filters": [(entry.parts, entry.capacity) for entry in filters]}
        return values, [entry.bloom.save_bytes() for entry in filters]

    def __len__(self) -> int:
        return len(self._parts)

    # ------------------------------------------------------------------------- look-ups
    def that_may_contain(self, keys: Collection[bytes]) -> list[tuple[int, bytes]]:
        """Return in which parts keys may be: nowhere, for nearly all new events.

        :return: parts and keys.
        """
        places = [(part, key) for part in self._unfiltered for key in keys]
        numbers = _numbers(keys)
        for entry in self._filters:
            if hits := set(filter(entry.bloom.__contains__, numbers)):
                possible = [
                    key for key, number in zip(keys, numbers, strict=True) if number in hits
                ]
                places += [(part, key) for part in entry.parts for key in possible]
        return places

    # -------------------------------------------------------------------------- changes
    def begin(self, first: int, last: int, least: int) -> int:
        """Return the part for the keys of the next events, which is a new one if they need it.

        :param first: the number of the first of these events.
        :param last: the number of the last of them.
        :param least: the number of the oldest event that is stored.
        """
        # A part that was begun before a crash may have the same number: it is used, full or not.
        if not self._parts or (last >= self._end and first > self._parts[-1]):
            capacity = capacity_of(first - least)
            self._parts.append(first)
            self._end = first + capacity
            self._filters.append(_Filter([first], capacity))
        return self._parts[-1]

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys that are, or may soon be, in the newest part."""
        newest, numbers = self._parts[-1], _numbers(keys)
        for entry in self._filters:
            if newest in entry.parts:
                entry.bloom.update(numbers)
        if self._building is not None and newest in self._building.left:
            self._building.filter.bloom.update(numbers)

    def drop(self, least: int) -> list[int]:
        """Forget the parts whose events have all been deleted.

        :param least: the number of the oldest event that is stored.
        :return: these parts, whose keys should be deleted.
        """
        dropped = []
        while len(self._parts) > 1 and self._parts[1] <= least:
            dropped.append(self._parts.pop(0))
        if dropped:
            for entry in self._filters:
                entry.parts = [part for part in entry.parts if part not in dropped]
            self._filters = [entry for entry in self._filters if entry.parts]
            self._find_unfiltered()
            # It is begun again, with the other parts.
            self._building = None
        return dropped

    def _find_unfiltered(self) -> None:
        covered = {part for entry in self._filters for part in entry.parts}
        self._unfiltered = [part for part in self._parts if part not in covered]

    # ------------------------------------------------------------------------- building
    @property
    def are_covered(self) -> bool:
        """Whether filters cover all parts."""
        return not self._unfiltered

    @property
    def building_is_due(self) -> bool:
        """Whether a filter must be built, because parts have none or because there are many."""
        return not self.are_covered or len(self._filters) > _MOST_FILTERS

    def build(self, db: sqlite3.Connection) -> None:
        """Read the next keys into the filter that is being built.

        :raises sqlite3.Error: if they cannot be read.
        """
        building = self._building = self._building or self._begin_building()
        part = building.left[0]
        count = BUILD_KEYS if building.keys >= BUILD_KEYS else BUILD_KEYS // _FIRST_STEPS + 1
        page = db.execute(
            "SELECT key FROM event_keys WHERE part = ? AND key > ? ORDER BY key LIMIT ?",
            (part, building.position, count),
        ).fetchall()
        building.filter.bloom.update(_numbers(key for (key,) in page))
        building.keys += len(page)
        if len(page) == count:
            building.position = page[-1][0]
            return
        building.left.popleft()
        building.position = b""
        if part in self._unfiltered:
            # This part is covered from now on.
            self._unfiltered.remove(part)
            building.filter.parts.append(part)
        if not building.left:
            self._building = None
            if not building.filter.parts:
                building.filter.parts = list(building.parts)
                others = [entry for entry in self._filters if {*entry.parts} - {*building.parts}]
                self._filters = [building.filter, *others]

    def _begin_building(self) -> _Building:
        newest = self._parts[-1]
        parts = list(self._unfiltered) or [
            part for entry in self._filters if newest not in entry.parts for part in entry.parts
        ]
        ends = dict(zip(self._parts, [*self._parts[1:], self._end], strict=True))
        building = _Building(parts, sum(ends[part] - part for part in parts))
        if self._unfiltered:
            self._filters.append(building.filter)
        return building


def _numbers(keys: Iterable[bytes]) -> list[int]:
    """Return a number for each key, from which all filters take their bits."""
    return [number for (number,) in _FIRST_BITS.iter_unpack(b"".join(keys))]


def capacity_of(events: int) -> int:
    """Return how many events a part has room for if so many are stored when it begins."""
    return max(_LEAST_CAPACITY, events // _SHARE)
