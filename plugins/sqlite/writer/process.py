# SPDX-License-Identifier: Apache-2.0
"""``python -m engage_plugins.sqlite.writer.process``: the process that writes a store.

There is one for each store on a host, and it makes all writes: those of every worker, of the
console and of the command line. So larger groups of events share a commit, processes do not wait
for SQLite's only write lock, and writing does not share Python's lock with an event loop.

The first client that needs it takes the lock and starts it (``start.py``); it ends when its
last client has disconnected. It may be killed at any moment: what it acknowledged is durable, and
the clients send again what it did not acknowledge.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from typing import Final

from .host import WriterHost
from .lock import WriterLock
from .server import WriterServer

#: How many new containers make the garbage collector run.
GC_THRESHOLD: Final = 10_000


def main(store: str, descriptor: int) -> int:
    """Write a store until the last client has disconnected.

    :param store: its real path.
    :param descriptor: of the locked file, which this process inherits.
    :return: the exit status. If it is not 0, the last line on standard error is the reason.
    """
    # A terminal's ^C and a service manager's SIGTERM also reach this process, while its clients may
    # still have events to write. It ends when they have disconnected.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Otherwise the current folder of the client could not be unmounted.
    os.chdir("/")
    os.umask(0o077)
    os.set_inheritable(descriptor, False)
    lock = WriterLock(store, descriptor)
    try:
        server = WriterServer(lock, WriterHost(lock))
        server.listen()
    except Exception as error:
        print(error, file=sys.stderr)
        return 1
    _redirect(server)
    # Nothing here makes cycles, and the rows of a write are many containers that are soon freed.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    return 0 if server.run() else 1


class _ToClient(logging.Handler):
    """Sends what is logged here to a client, in whose log it belongs."""

    def __init__(self, server: WriterServer) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            self._server.log(record.name, record.levelno, self.format(record))


def _redirect(server: WriterServer) -> None:
    """Log to the clients, and close standard error: the client that started this process reads it
    to its end, and may be gone long before this process."""
    logger = logging.getLogger("engage")
    logger.setLevel(logging.INFO)
    logger.addHandler(_ToClient(server))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
