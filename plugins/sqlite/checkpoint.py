# SPDX-License-Identifier: Apache-2.0
"""Keeps the write-ahead log (WAL) short: copies it into the database file."""

from __future__ import annotations

import os
import sqlite3
import time
from typing import Final

#: Size of the WAL in bytes from which it is copied into the database, without waiting for readers.
CHECKPOINT_BYTES: Final = 80 * 1024 * 1024
#: Size of the WAL in bytes from which the writer waits for readers, so that it can be restarted.
FORCED_CHECKPOINT_BYTES: Final = 256 * 1024 * 1024
#: Size in bytes to which SQLite cuts the file of the WAL when it is restarted. It reuses the rest.
KEPT_WAL_BYTES: Final = 64 * 1024 * 1024
#: Seconds that a forced checkpoint waits for readers; writers wait meanwhile.
FORCED_CHECKPOINT_WAIT: Final = 1.0
#: Seconds between checkpoints: while a reader prevents one, an attempt at each write is of no use.
CHECKPOINT_PAUSE: Final = 1.0


class Checkpoints:
    """When the log of a store is copied."""

    def __init__(self, path: str) -> None:
        """:param path: the file of the store."""
        self._log = path + "-wal"
        self._not_before = 0.0

    def step(self, db: sqlite3.Connection) -> None:
        """Copy the log if it is long.

        :raises sqlite3.Error: if that fails: what was committed may be in memory only.
        """
        try:
            size = os.stat(self._log).st_size
        except OSError:
            return
        if size < CHECKPOINT_BYTES or time.monotonic() < self._not_before:
            return
        try:
            done = run(db, "PASSIVE", 0)
            if not done and size >= FORCED_CHECKPOINT_BYTES:
                run(db, "RESTART", FORCED_CHECKPOINT_WAIT)
        finally:
            # The file shrinks at the next commit, if no reader needs it.
            self._not_before = time.monotonic() + CHECKPOINT_PAUSE


def run(db: sqlite3.Connection, mode: str, wait: float) -> bool:
    """Copy the log into the database.

    :param wait: seconds to wait for readers.
    :return: whether all of the log is now in the database, synced.
    """
    db.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
    busy, frames, copied = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    db.execute("PRAGMA busy_timeout = 0")
    return not busy and bool(copied == frames)
