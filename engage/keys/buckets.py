# SPDX-License-Identifier: Apache-2.0
"""Token buckets in memory that the processes of a server share.

What is in a bucket is one number: the time at which it will be full again (the generic cell rate
algorithm, ITU-T I.371). It is read and written as one machine word, without a lock. Two processes
that change one bucket in the same microsecond lose one of the two changes, which costs accuracy and
nothing else. A process that is stopped or killed cannot make the others wait.

The memory is bounded: a new bucket takes the place of the one nearby that was full first, and a
bucket that lost its place is full.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import tempfile
from time import monotonic
from typing import Final

__all__ = ["Bucket", "Buckets", "make_buckets_file", "open_buckets"]

#: Buckets in one table: several for each of the 10,000 keys that a workspace may have. A power of
#: two.
SLOTS: Final = 65536
#: The places in which a bucket can be.
WAYS: Final = 8
#: Bytes of one table: three machine words for each bucket.
TABLE_BYTES: Final = 24 * SLOTS


class Buckets:
    """A table of buckets by name.

    :param memory: of :data:`TABLE_BYTES`.
    """

    def __init__(self, memory: memoryview) -> None:
        third = TABLE_BYTES // 3
        self._names = memory[:third].cast("Q")
        #: When each bucket will be full of the first and the second kind, in seconds of the
        #: monotonic clock.
        self._first = memory[third : 2 * third].cast("d")
        self._second = memory[2 * third :].cast("d")

    def bucket(
        self, name: str, first: tuple[float, float], second: tuple[float, float] = (0, 0)
    ) -> Bucket:
        """Return the bucket of this name.

        :param first: what flows into it in a second, and what it holds when it is full; (0, 0):
            anything can be taken.
        :param second: the same for another kind: a key has events and bytes.
        """
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        columns = (self._names, self._first, self._second)
        return Bucket(self, columns, int.from_bytes(digest) or 1, first, second)

    def place_of(self, name: int) -> int:
        """Return the place of a bucket; a new one gets a place and is full."""
        names = self._names
        places = [(name + way) % SLOTS for way in range(WAYS)]
        for place in places:
            if names[place] == name:
                return place
        place = min(places, key=lambda one: max(self._first[one], self._second[one]))
        names[place] = name
        self._first[place] = self._second[place] = 0.0
        return place


class Bucket:
    """One bucket. Made by :meth:`Buckets.bucket`."""

    __slots__ = ("_each", "_first", "_limits", "_name", "_names", "_place", "_second", "_table")

    def __init__(
        self,
        table: Buckets,
        columns: tuple[memoryview[int], memoryview[float], memoryview[float]],
        name: int,
        first: tuple[float, float],
        second: tuple[float, float],
    ) -> None:
        self._table = table
        self._names, self._first, self._second = columns
        self._name = name
        self._place = name % SLOTS
        kinds = (first, second)
        #: Seconds in which one of each kind flows in, and seconds in which the bucket becomes full.
        self._each = tuple(1 / rate if rate else 0.0 for rate, _ in kinds)
        self._limits = tuple(size / rate if rate else math.inf for rate, size in kinds)

    def take(self, first: float, second: float = 0) -> bool:
        """Take amounts out of the bucket, also more than it holds, unless it is empty."""
        place = self._place
        if self._names[place] != self._name:
            place = self._place = self._table.place_of(self._name)
        now = monotonic()
        full, also = self._first[place], self._second[place]
        limit, limit_also = self._limits
        if full - now >= limit or also - now >= limit_also:
            return False
        each, each_also = self._each
        self._first[place] = (full if full > now else now) + first * each
        self._second[place] = (also if also > now else now) + second * each_also
        return True

    def waits(self) -> tuple[float, float]:
        """Return for how many seconds each kind will be empty; below 0: it is not."""
        place = self._place = self._table.place_of(self._name)
        now, (limit, limit_also) = monotonic(), self._limits
        return self._first[place] - now - limit, self._second[place] - now - limit_also


def make_buckets_file() -> int:
    """Return a descriptor of empty memory for :func:`open_buckets`; the caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("engage-buckets")
    else:
        with tempfile.TemporaryFile(prefix="engage-buckets-") as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, 2 * TABLE_BYTES)
    return descriptor


def open_buckets(descriptor: int | None = None) -> tuple[Buckets, Buckets]:
    """Return the table of the write keys, and that of the addresses, which clients can fill.

    :param descriptor: what :func:`make_buckets_file` returned; ``None``: no other process has them.
    """
    shared = mmap.mmap(-1 if descriptor is None else descriptor, 2 * TABLE_BYTES)
    memory = memoryview(shared)
    return Buckets(memory[:TABLE_BYTES]), Buckets(memory[TABLE_BYTES:])
