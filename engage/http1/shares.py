# SPDX-License-Identifier: Apache-2.0
"""How many connections each worker has, in memory that the workers of a server share.

All workers accept connections of the same socket, and the kernel wakes all of them for each. The
first to wake could accept everything that waits, while the others have nothing to do. So a worker
that has more than another leaves a new connection to it; see :mod:`engage.http1.acceptor`.

The memory is a file without a name, with one number for each worker. Each is one machine word, so
no lock is needed. A count may be out of date: a worker notices only between two turns of its event
loop that clients have hung up. That costs balance and nothing else.
"""

from __future__ import annotations

import array
import mmap
import tempfile
from collections.abc import Callable
from typing import IO, Final

__all__ = ["Shares", "make_shares"]

#: In place of the count of a worker that does not accept connections.
_ABSENT: Final = 0xFFFFFFFF


class Shares:
    """The connections of one worker, compared with those of the others.

    :param descriptor: of a file that :func:`make_shares` made; it may be closed afterwards.
    :param number: the number of this worker.
    """

    def __init__(self, descriptor: int, number: int) -> None:
        self._counts = memoryview(mmap.mmap(descriptor, 0)).cast("I")
        self._number = number
        self._own = 0
        self._present = False
        #: Called after :meth:`closed`.
        self.released: Callable[[], None] | None = None

    def join(self) -> None:
        """Note that this worker accepts connections."""
        self._present = True
        self._counts[self._number] = self._own

    def leave(self, number: int | None = None) -> None:
        """Note that a worker has stopped accepting connections.

        :param number: a worker that died; ``None`` is this worker.
        """
        if number is None:
            number = self._number
            self._present = False
        self._counts[number] = _ABSENT

    def opened(self) -> None:
        """Count a connection of this worker."""
        self._own += 1
        if self._present:
            self._counts[self._number] = self._own

    def closed(self) -> None:
        """Count a connection of this worker no longer."""
        self._own -= 1
        if self._present:
            self._counts[self._number] = self._own
        if self.released is not None:
            self.released()

    def least(self) -> int | None:
        """Return the fewest connections that another worker has; ``None`` if there is none."""
        least = min(
            (count for number, count in enumerate(self._counts) if number != self._number),
            default=_ABSENT,
        )
        return None if least == _ABSENT else least

    def lead(self) -> int:
        """Return by how many connections this worker is ahead; 0 if there is no other."""
        least = self.least()
        return 0 if least is None else self._own - least

    def ahead(self) -> bool:
        """Return whether another worker should accept the next connection.

        Small numbers are kept equal. An eighth more is accepted of large ones: under load, a turn
        of the event loop takes long, and many connections may have to be accepted in each.
        """
        return self.lead() >= max(1, self._own >> 3)


def make_shares(workers: int) -> IO[bytes]:
    """Return a file without a name for the counts of this many workers, all of them absent."""
    file = tempfile.TemporaryFile(prefix="engage-shares-")  # noqa: SIM115 (the caller closes it)
    file.write(array.array("I", [_ABSENT] * workers))
    file.flush()
    return file
