# SPDX-License-Identifier: Apache-2.0
"""Keeps the write-ahead log (WAL) short: copies it into the database file.

SQLite begins a new log only when all of the old one is copied, and writes continue during that
time. So a thread with another connection copies most of it, and the writer copies the rest between
two writes.

After a failed write or sync of the database file, the system may drop pages that were copied
before and not synced, and the next sync succeeds. The log still has these pages, so all of it is
copied again: see :meth:`WalIndex.forget_copied`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Final, ParamSpec, TypeVar

from engage.api import StorageUnavailable

from .connection import ALIVE_SECONDS, Settings, connect

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

#: Size of the WAL in bytes from which it is copied into the database, without waiting for readers.
CHECKPOINT_BYTES: Final = 80 * 1024 * 1024
#: Bytes that the writer copies itself: copying more would delay the next writes.
REST_BYTES: Final = 4 * 1024 * 1024
#: How often at most the thread copies, as long as more is left than the writer should copy.
_ROUNDS: Final = 4
#: Size of the WAL in bytes from which the writer waits: for the thread, and for readers, so that a
#: new log can begin.
FORCED_CHECKPOINT_BYTES: Final = 256 * 1024 * 1024
#: Size in bytes to which SQLite cuts the file of the WAL when a new log begins. It reuses the rest.
KEPT_WAL_BYTES: Final = 64 * 1024 * 1024
#: Seconds that the writer waits for the thread.
FORCED_CHECKPOINT_WAIT: Final = 1.0
#: Seconds that a checkpoint waits for readers, and writers wait for it.
READERS_WAIT: Final = 0.2
#: Seconds between checkpoints: while a reader prevents one, an attempt at each write is of no use.
CHECKPOINT_PAUSE: Final = 1.0
#: Bytes of the log that are written again at once.
_LOG_PART: Final = 1024 * 1024


class WalIndex:
    """The part of the log's index (``-shm``) that says how much of the log is copied.

    SQLite has no call that makes it copy frames again. The format is that of
    https://www.sqlite.org/walformat.html, section 2.2, in the byte order of the machine.

    :param path: of the store.
    """

    #: The number of frames in the log, and the number of those that are copied (``nBackfill``).
    _FRAMES: ClassVar = struct.Struct("=16xI76xI")
    #: Of the indexes of this process. They stay open as long as the file exists: closing one
    #: releases all locks that this process has on the file.
    _descriptors: ClassVar[set[int]] = set()

    def __init__(self, path: str) -> None:
        self._path = path + "-shm"

    def is_copied(self) -> bool:
        """Return whether all of the log is copied.

        :raises OSError: if the index cannot be read.
        """
        frames, copied = self._FRAMES.unpack(self._read(self._opened()))
        return bool(frames == copied)

    def forget_copied(self) -> None:
        """Make the next checkpoint copy all of the log. No checkpoint may run at this time.

        :raises OSError: if that is not possible.
        """
        with contextlib.suppress(FileNotFoundError):
            index = self._opened()
            if len(self._read(index)) == self._FRAMES.size:
                os.lseek(index, -4, os.SEEK_CUR)
                os.write(index, bytes(4))

    def _read(self, index: int) -> bytes:
        os.lseek(index, 0, os.SEEK_SET)
        return os.read(index, self._FRAMES.size)

    def _opened(self) -> int:
        descriptor, current = None, os.stat(self._path)
        for index in list(self._descriptors):
            status = os.fstat(index)
            if os.path.samestat(status, current):
                descriptor = index
            elif not status.st_nlink:
                self._descriptors.remove(index)
                os.close(index)
        if descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            self._descriptors.add(descriptor)
        return descriptor


class Checkpoints:
    """Decides when the log of a store is copied, and whether the thread or the writer does it."""

    def __init__(self, settings: Settings) -> None:
        """:param settings: of the store."""
        self._settings = settings
        self._log = settings.path + "-wal"
        self._index = WalIndex(settings.path)
        self._not_before = 0.0
        #: Size of the log from which the writer waits for readers.
        self._forced_from = FORCED_CHECKPOINT_BYTES
        self._copying: _Copying | None = None
        self._rounds = 0

    def step(self, db: sqlite3.Connection) -> None:
        """Copy the log if it is long.

        :param db: the writer's connection, between two transactions.
        :raises sqlite3.Error: if copying fails: commits may be in memory only.
        """
        copying = self._copying
        if copying is None and time.monotonic() < self._not_before:
            return
        try:
            size = os.stat(self._log).st_size
        except OSError:
            return
        if copying is not None:
            # Otherwise the log might grow faster than it is copied. One that a reader has made long
            # takes long to copy, without growing faster.
            grown = size - max(copying.size - CHECKPOINT_BYTES, 0)
            copying.join(FORCED_CHECKPOINT_WAIT if grown >= FORCED_CHECKPOINT_BYTES else 0)
            if not copying.is_alive():
                self._copied(db, copying, size)
        elif size >= CHECKPOINT_BYTES:
            self._copy(size)

    def _copy(self, size: int) -> None:
        # In versions of SQLite before 3.51.3, a commit is lost if it begins a new log while a
        # checkpoint of a log that is already copied begins: https://sqlite.org/wal.html#walresetbug.
        # In between, this thread commits nothing.
        if self._index.is_copied():
            return
        self._rounds += 1
        self._copying = _Copying(self._settings, size)
        self._copying.start()

    def _copied(self, db: sqlite3.Connection, copying: _Copying, size: int) -> None:
        self._copying = None
        try:
            if copying.error is not None:
                raise copying.error
            if size - copying.size > REST_BYTES and self._rounds < _ROUNDS:
                self._copy(size)
                return
            alive = self._settings.alive
            done = beside(alive, run, db, "PASSIVE", 0)
            if not done and size >= self._forced_from:
                done = beside(alive, run, db, "RESTART", READERS_WAIT)
                # A reader that stays, such as a backup, is not waited for all the time.
                self._forced_from = size + CHECKPOINT_BYTES
            if done:
                self._forced_from = FORCED_CHECKPOINT_BYTES
        finally:
            if self._copying is None:
                self._rounds = 0
                # The file shrinks at the next commit, if no reader needs it.
                self._not_before = time.monotonic() + CHECKPOINT_PAUSE

    def wait(self) -> None:
        """Wait until the thread has ended, if there is one.

        :raises StorageUnavailable: if it takes too long.
        :raises OSError: if all of the log is to be copied again, and that cannot be noted.
        """
        if self._copying is not None:
            beside(self._settings.alive, self._copying.join, self._settings.timeout)
            if self._copying.is_alive():
                raise StorageUnavailable(f"{self._settings.path}: the log cannot be copied in time")
            copied, self._copying = self._copying, None
            if copied.error is not None:
                self._index.forget_copied()

    def forget_copied(self) -> None:
        """Make the next checkpoint copy all of the log, because of an error of the disk.

        :raises StorageUnavailable: if the thread does not end.
        :raises OSError: if that is not possible.
        """
        self.wait()
        self._index.forget_copied()


class _Copying(threading.Thread):
    """Copies the log while writes continue. SQLite releases Python's lock for that."""

    def __init__(self, settings: Settings, size: int) -> None:
        """:param size: of the log when the thread begins."""
        super().__init__(name="engage-sqlite-checkpoint", daemon=True)
        self._settings = settings
        self.size = size
        self.error: sqlite3.Error | None = None

    def run(self) -> None:
        try:
            with contextlib.closing(connect(self._settings, readonly=False)) as db:
                db.execute("PRAGMA wal_autocheckpoint = 0")
                run(db, "PASSIVE", 0)
        except sqlite3.Error as error:
            self.error = error


def rewrite_log(path: str) -> None:
    """Write the log again as it is, and sync it, so that writes that failed to sync are durable.

    For a store of which a reader prevents a checkpoint. The caller holds the write lock, so the log
    does not change; for readers it never does.

    :raises OSError: if that is not possible.
    """
    with open(f"{path}-wal", "r+b", buffering=0) as log:
        position = 0
        while data := log.read(_LOG_PART):
            log.seek(position)
            position += log.write(data)
            log.seek(position)
        sync(log.fileno())


def sync(descriptor: int) -> None:
    """Wait until all writes to a file are on the disk.

    :raises OSError: if that is not possible.
    """
    if sys.platform == "darwin":
        import fcntl

        # fsync does not reach the disk there.
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def beside(
    alive: Callable[[], None],
    work: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Return what a function returns that may keep the disk busy for long.

    It runs in a thread: SQLite reports no progress of a checkpoint.

    :param alive: called meanwhile; see :attr:`Settings.alive`.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "engage-sqlite-disk") as pool:
        running = pool.submit(work, *arguments, **options)
        while concurrent.futures.wait([running], timeout=ALIVE_SECONDS).not_done:
            alive()
        return running.result()


def run(db: sqlite3.Connection, mode: str, wait: float) -> bool:
    """Copy the log into the database.

    :param wait: seconds to wait for readers.
    :return: whether all of the log is now in the database, synced.
    """
    db.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
    busy, frames, copied = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    db.execute("PRAGMA busy_timeout = 0")
    return not busy and bool(copied == frames)
