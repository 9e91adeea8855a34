# SPDX-License-Identifier: Apache-2.0
"""How many connections each worker has, in memory that the workers of a server share.

All workers accept connections of the same socket, and the kernel wakes all of them for each. The
first to wake could accept everything that waits, while the others have nothing to do. So a worker
that has more than another leaves a new connection to it; see :mod:`engage.http1.acceptor`.

A count may be out of date: a worker notices only between two turns of its event loop that clients
have hung up. The others then accept what should have been its share. So a worker that finds itself
far behind asks for connections, and a worker that has more than its share hands some over; see
:mod:`engage.http1.balancer`.

The memory is a file without a name, with two numbers for each worker: its connections, and whether
it asks for more. Each is one machine word, so no lock is needed. A number that is out of date, or
that two workers write at once, costs balance and nothing else.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Final

from engage.http1.sockets import can_open_files

if TYPE_CHECKING:
    from engage.http1.handover import Handover

__all__ = ["Shares", "make_shares"]

_BYTES: Final = 4
#: In place of the count of a worker that does not accept connections.
_ABSENT: Final = 0xFFFFFFFF
#: A worker that lacks this part of its share is far behind.
_FAR: Final = 0.25


class Shares:
    """The connections of one worker, compared with those of the others.

    :param descriptor: of a file that :func:`make_shares` made; it may be closed afterwards.
    :param number: the number of this worker.
    :param handover: where workers hand connections to each other; ``None`` if they do not.
    """

    def __init__(self, descriptor: int, number: int, handover: Handover | None = None) -> None:
        numbers = memoryview(mmap.mmap(descriptor, 0)).cast("I")
        workers = len(numbers) // 2
        self._counts = numbers[:workers]
        self._asking = numbers[workers:]
        self.handover = handover
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
        """Note that a worker accepts no more connections.

        :param number: a worker that died; ``None`` is this worker.
        """
        if number is None:
            number = self._number
            self._present = False
        self._counts[number] = _ABSENT
        self._asking[number] = 0

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

    def surplus(self) -> float:
        """Return by how many connections this worker exceeds its share; negative if it has fewer.

        All workers that accept connections have the same share.
        """
        counts = [count for count in self._counts if count != _ABSENT]
        return self._own - sum(counts) / len(counts) if self._present else 0.0

    def ask(self) -> None:
        """Ask the others for connections if this worker has much less than its share.

        A worker that can open no file does not ask: what it is given would wait until the others
        take it back, again and again.
        """
        missing = -self.surplus()
        behind = missing > 0 and missing >= (self._own + missing) * _FAR
        self._asking[self._number] = behind and can_open_files()

    def answer(self) -> bool:
        """Return whether another worker asks for connections, and note that it has been answered.

        It asks again if it needs more. If it hangs, it does not, and so it gets no more.
        """
        asked = False
        for number, asking in enumerate(self._asking):
            if asking and number != self._number:
                self._asking[number] = 0
                asked = True
        return asked

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

    def ahead(self, without: int = 0) -> bool:
        """Return whether another worker should accept the next connection.

        Small numbers are kept equal. An eighth more is accepted of large ones: under load, a turn
        of the event loop takes long, and many connections may have to be accepted in each.

        :param without: how many connections of this worker do not count.
        """
        return self.lead() - without >= max(1, self._own >> 3)


def make_shares(workers: int) -> IO[bytes]:
    """Return a file without a name for the counts of this many workers, all of them absent."""
    file = tempfile.TemporaryFile(prefix="engage-shares-")  # noqa: SIM115 (the caller closes it)
    file.write(_ABSENT.to_bytes(_BYTES, sys.byteorder) * workers)
    file.write(bytes(_BYTES) * workers)
    file.flush()
    return file
