# SPDX-License-Identifier: Apache-2.0
"""Records in a temporary file, in parts that are read one at a time.

The file has no name, so nothing is left of it when the process ends, however that happens.
"""

from __future__ import annotations

import marshal
import os
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["PARTS", "Spill", "part_of"]

#: How many parts there are. A part of a million users has 2,000 of them: about 10 MB in memory.
PARTS: Final = 512
#: Bytes of a part that are written at once.
_BLOCK: Final = 16 * 1024


def part_of(workspace_id: str, name: str) -> int:
    """Return the part of an id; it differs from process to process."""
    return hash((workspace_id, name)) % PARTS


class Spill:
    """Records of plain values, in parts."""

    def __init__(self) -> None:
        """:raises OSError: if there can be no temporary file, as for :meth:`add`."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        #: Part → encoded records that are not written yet, and their bytes.
        self._waiting: list[list[bytes]] = [[] for _ in range(PARTS)]
        self._sizes = [0] * PARTS
        #: Part → place and size of each block.
        self._blocks: list[list[tuple[int, int]]] = [[] for _ in range(PARTS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, part: int, record: tuple[Any, ...]) -> None:
        """Keep a record."""
        encoded = marshal.dumps(record)
        self._waiting[part].append(encoded)
        self._sizes[part] += len(encoded)
        if self._sizes[part] >= _BLOCK:
            block = marshal.dumps(self._waiting[part])
            self._blocks[part].append((self._file.seek(0, os.SEEK_END), len(block)))
            self._file.write(block)
            self._waiting[part], self._sizes[part] = [], 0

    def read(self, part: int) -> Iterator[Any]:
        """Read the records of a part, in the order in which they were kept."""
        for place, size in self._blocks[part]:
            self._file.seek(place)
            yield from map(marshal.loads, marshal.loads(self._file.read(size)))  # noqa: S302
        yield from map(marshal.loads, self._waiting[part])
