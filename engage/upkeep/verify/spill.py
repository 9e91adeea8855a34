# SPDX-License-Identifier: Apache-2.0
"""Records in a temporary file, in parts that are read one at a time.

The file has no name, so nothing is left of it when the process ends, however that happens.
"""

from __future__ import annotations

import marshal
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["PARTS", "Spill", "part_of"]

#: How many parts there are. A part of a million users has 4,000 of them: about 20 MB in memory.
PARTS: Final = 256
#: Bytes of a part that are written at once.
_BLOCK: Final = 32 * 1024


def part_of(workspace_id: str, name: str) -> int:
    """Return the part of an id; it differs from process to process."""
    return hash((workspace_id, name)) % PARTS


class Spill:
    """Records of plain values, in parts."""

    def __init__(self) -> None:
        """:raises OSError: if there can be no temporary file, as for :meth:`add`."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self._buffers = [bytearray() for _ in range(PARTS)]
        self._places: list[list[tuple[int, int]]] = [[] for _ in range(PARTS)]
        self._end = 0

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
        buffer = self._buffers[part]
        buffer += len(encoded).to_bytes(4, "little")
        buffer += encoded
        if len(buffer) >= _BLOCK:
            self._file.seek(self._end)
            self._file.write(buffer)
            self._places[part].append((self._end, len(buffer)))
            self._end += len(buffer)
            self._buffers[part] = bytearray()

    def read(self, part: int) -> Iterator[Any]:
        """Read the records of a part, in the order in which they were kept."""
        for place, size in self._places[part]:
            self._file.seek(place)
            yield from _records(self._file.read(size))
        yield from _records(self._buffers[part])


def _records(block: bytes | bytearray) -> Iterator[Any]:
    start = 0
    while start < len(block):
        size = int.from_bytes(block[start : start + 4], "little")
        yield marshal.loads(memoryview(block)[start + 4 : start + 4 + size])  # noqa: S302 - our own
        start += 4 + size
