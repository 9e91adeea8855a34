# SPDX-License-Identifier: Apache-2.0
"""Threads that send events to a server while a test breaks what is behind it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Senders:
    """Threads that run :meth:`_send` until the test has seen enough.

    :param count: how many threads.
    """

    def __init__(self, count: int) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(count)]

    def _send(self, number: int) -> None:
        """Send events until ``self._stop`` is set.

        :param number: of the thread.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send until the block ends."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()
