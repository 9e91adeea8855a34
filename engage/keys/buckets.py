# SPDX-License-Identifier: Apache-2.0
"""Token buckets in memory that the processes of a server share.

A bucket is one number: the time at which it will be full again (the generic cell rate algorithm,
ITU-T I.371). It is read and written as one machine word, without a lock. Two processes that change
one bucket in the same microsecond lose one of the two changes, which costs accuracy and nothing
else. A process that is stopped or killed cannot make the others wait.

The memory is bounded: a new bucket takes the place of the one nearby that was full first, and a
bucket that lost its place is full.
"""

from __future__ import annotations

import hashlib
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
#: Bytes of one table: two machine words for each bucket.
TABLE_BYTES: Final = 16 * SLOTS


class Buckets:
    """A table of buckets by name.

    :param memory: of :data:`TABLE_BYTES`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._names = memory[: TABLE_BYTES // 2].cast("Q")
        #: When each bucket will be full, in seconds of the monotonic clock.
        self._full = memory[TABLE_BYTES // 2 :].cast("d")

    def bucket(self, name: str, rate: float, size: float) -> Bucket:
        """Return the bucket of this name.

        :param rate: what flows into it in a second.
        :param size: what it holds when it is full.
        """
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return Bucket(self, self._names, self._full, int.from_bytes(digest) or 1, rate, size)

    def place_of(self, name: int) -> int:
        """Return the place of a bucket; a new one gets a place and is full."""
        names = self._names
        places = [(name + way) % SLOTS for way in range(WAYS)]
        for place in places:
            if names[place] == name:
                return place
        place = min(places, key=self._full.__getitem__)
        names[place] = name
        self._full[place] = 0.0
        return place


class Bucket:
    """One bucket. Made by :meth:`Buckets.bucket`."""

    __slots__ = ("_full", "_name", "_names", "_place", "_rate", "_seconds", "_table")

    def __init__(
        self,
        table: Buckets,
        names: memoryview[int],
        full: memoryview[float],
        name: int,
        rate: float,
        size: float,
    ) -> None:
        self._table = table
        self._names = names
        self._full = full
        self._name = name
        self._place = name % SLOTS
        self._rate = rate
        #: Seconds in which it becomes full.
        self._seconds = size / rate

    def wait(self) -> float:
        """Return for how many seconds the bucket will be empty; below 0: it is not."""
        return self._full[self._find()] - monotonic() - self._seconds

    def take(self, amount: float) -> None:
        """Take an amount out of the bucket, also more than it holds."""
        place = self._find()
        self._full[place] = max(self._full[place], monotonic()) + amount / self._rate

    def _find(self) -> int:
        place = self._place
        if self._names[place] != self._name:
            place = self._place = self._table.place_of(self._name)
        return place


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
