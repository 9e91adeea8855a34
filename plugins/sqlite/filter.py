# SPDX-License-Identifier: Apache-2.0
"""A Bloom filter over the table ``keys``: of nearly all new events it says that they are new.

Without it each new event costs a look-up of a random page. The filter is saved beside the file when
the store is closed, and otherwise built again in pages. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import sqlite3
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Any, Final

import orjson
from rbloom import Bloom

#: With it a key takes 15.8 bits.
_FALSE_POSITIVES: Final = 0.0005

#: The least number of keys that a part has room for; it takes 2 MB.
_LEAST_CAPACITY: Final = 1 << 20

#: Keys that one step of building reads: about 5 ms.
BUILD_KEYS: Final = 5000

#: Length of the checksum of a saved filter.
_DIGEST_BYTES: Final = 32

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
    """Tells which keys are surely not in the table.

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

    # --------------------------------------------------------------------------- the file
    def save(self, path: str, epoch: int, merged: int) -> None:
        """Write the filter to a file, if it is complete.

        :param epoch: see ``keys.py``; the filter is of no use in another one.
        :raises OSError: if it cannot be written.
        """
        if not self.is_complete:
            return
        blooms = [part.bloom.save_bytes() for part in self._parts]
        head = {
            **_identity(epoch, merged),
            "parts": [
                (part.capacity, part.added, part.last, len(bloom))
                for part, bloom in zip(self._parts, blooms, strict=True)
            ],
        }
        content = [orjson.dumps(head), b"\n", *blooms]
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(_checksum(content))
                file.writelines(content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str, epoch: int, merged: int) -> Filter | None:
        """Return the filter that was saved with these numbers.

        :return: ``None`` if there is no such filter, or if the file is damaged.
        """
        try:
            with open(path, "rb") as file:
                checksum, content = file.read(_DIGEST_BYTES), file.read()
        except OSError:
            return None
        if checksum != _checksum([content]):
            return None
        head, _, rest = content.partition(b"\n")
        found = orjson.loads(head)
        if {name: found.get(name) for name in _identity(0, 0)} != _identity(epoch, merged):
            return None
        made = cls()
        made._parts = []
        for capacity, added, last, size in found["parts"]:
            bloom, rest = Bloom.load_bytes(rest[:size], _hash), rest[size:]
            made._parts.append(_Part(capacity, bloom, added, last))
        made.is_complete = True
        return made


def _identity(epoch: int, merged: int) -> dict[str, Any]:
    """Return what a saved filter must agree with. Another version of the library may set other
    bits, and a key that is not found counts as new."""
    return {"epoch": epoch, "merged": merged, "rbloom": importlib.metadata.version("rbloom")}


def _checksum(content: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for one in content:
        digest.update(one)
    return digest.digest()
