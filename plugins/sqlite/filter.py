# SPDX-License-Identifier: Apache-2.0
"""A Bloom filter over the table ``keys``, which recognises nearly all new events.

Without it each new event costs a look-up of a random page. The filter is saved when the store is
closed (``saved.py``), and otherwise built again in pages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sqlite3
from collections.abc import Collection, Sequence
from typing import Final

from rbloom import Bloom

#: With it a key takes 15.8 bits.
_FALSE_POSITIVES: Final = 0.0005

#: The least number of keys that a part has room for; it takes 2 MB.
_LEAST_CAPACITY: Final = 1 << 20

#: Keys that one step of building reads: about 5 ms.
BUILD_KEYS: Final = 5000

#: Another version of the library may set other bits for a key, and then a key is not found.
VERSION: Final = importlib.metadata.version("rbloom")

#: A key is a hash already. Python's ``hash`` depends on a seed of the process.
_hash = functools.partial(int.from_bytes, byteorder="big", signed=True)


class _Part:
    """A filter for a fixed number of keys."""

    __slots__ = ("added", "bloom", "capacity", "last")

    def __init__(
        self, capacity: int, bloom: Bloom | None = None, added: int = 0, last: int = 0
    ) -> None:
        self.capacity = capacity
        self.bloom = Bloom(capacity, _FALSE_POSITIVES, _hash) if bloom is None else bloom
        self.added = added
        #: The greatest number of an event whose key is here.
        self.last = last


class Filter:
    """Shows which keys are surely not in the table.

    It grows by parts. The events of a part are newer than those of the part before it, so the
    oldest part is dropped when retention has deleted its events.
    """

    def __init__(self, expected: int = 0) -> None:
        """:param expected: about how many keys are in the table."""
        self._parts = [_Part(expected + _LEAST_CAPACITY)]
        #: Whether it has all keys of the table. Until then every key may be in the table.
        self.is_complete = False
        self._position = b""

    def may_contain(self, keys: Collection[bytes]) -> Collection[bytes]:
        """Return the keys that may be in the table."""
        if not self.is_complete:
            return keys
        if len(self._parts) == 1:
            bloom = self._parts[0].bloom
            return [key for key in keys if key in bloom]
        return {key for part in self._parts for key in keys if key in part.bloom}

    def add(self, keys: Collection[bytes], last: int) -> None:
        """Add keys that are, or may soon be, in the table.

        :param last: at least the numbers of their events.
        """
        part = self._parts[-1]
        if part.added >= part.capacity:
            total = sum(one.capacity for one in self._parts)
            part = _Part(max(_LEAST_CAPACITY, total // 2))
            self._parts.append(part)
        part.bloom.update(keys)
        part.added += len(keys)
        part.last = max(part.last, last)

    def forget(self, least: int) -> None:
        """Drop the parts whose events have all been deleted.

        :param least: the least number of an event.
        """
        while len(self._parts) > 1 and self.is_complete and self._parts[0].last < least:
            del self._parts[0]

    def build(self, db: sqlite3.Connection, last: int) -> None:
        """Read the next page of the table; the last page makes the filter complete.

        :param last: at least the numbers of the events whose keys are in the table.
        :raises sqlite3.Error: if it cannot be read.
        """
        page = db.execute(
            "SELECT key FROM keys WHERE key > ? ORDER BY key LIMIT ?", (self._position, BUILD_KEYS)
        ).fetchall()
        if page:
            self.add([key for (key,) in page], last)
            self._position = page[-1][0]
        self.is_complete = len(page) < BUILD_KEYS

    # --------------------------------------------------------------------------- saving
    def dump(self) -> tuple[list[tuple[int, int, int]], list[bytes]]:
        """Return the numbers and the bits of each part, for :meth:`load`.

        :return: two empty lists if the filter is not complete.
        """
        parts = self._parts if self.is_complete else []
        return (
            [(part.capacity, part.added, part.last) for part in parts],
            [part.bloom.save_bytes() for part in parts],
        )

    @classmethod
    def load(cls, numbers: Sequence[Sequence[int]], blooms: Sequence[bytes]) -> Filter:
        """Return the filter that :meth:`dump` described.

        :param numbers: the capacity, the number of keys and the greatest number of an event of each
            part.
        :param blooms: the bits of each part, made by the same :data:`VERSION`.
        """
        made = cls()
        made._parts = [
            _Part(capacity, Bloom.load_bytes(bloom, _hash), added, last)
            for (capacity, added, last), bloom in zip(numbers, blooms, strict=True)
        ]
        made.is_complete = True
        return made
