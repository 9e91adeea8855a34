# SPDX-License-Identifier: Apache-2.0
"""The writing connection: opening the store, transactions, and what happens when they fail."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import time
from collections.abc import Iterator
from typing import Final

from engage.api import StorageMissing, StorageUnavailable
from engage.store.keys import key_of
from engage.store.remembered import Remembered

from . import checkpoint, identifiers, schema
from .connection import (
    FileConnection,
    Settings,
    connect,
    create_file,
    file_identity,
    is_disk_error,
    is_lock_error,
    lack_of_space,
    primary_code,
    translating_errors,
)
from .keys.event_keys import Keys

#: Seconds between two attempts to get a lock that another process holds.
LOCK_PAUSE: Final = 0.0005

#: Steps of SQLite's virtual machine after which a statement reports that it goes on. Even if each
#: reads a page of a slow disk, this is less than a second; a small write has fewer.
PROGRESS_STEPS: Final = 1000

#: The part of a call's time that may be spent on waiting for a lock: the caller then gets the
#: reason, instead of a call that took too long.
_LOCK_SHARE: Final = 0.75


class Transactions(FileConnection):
    """The writing connection."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, readonly=False)
        self.keys = Keys(settings.path)
        #: The limits, and the traits by which users are looked up.
        self.context = settings.context
        self.remembered = Remembered()
        self._checkpoints = checkpoint.Checkpoints(settings)
        #: Set by an I/O error: earlier commits may be in memory only. A checkpoint reads and syncs
        #: all of them.
        self._needs_checkpoint = False
        #: Whether this connection has committed. Until then it may read data that a killed process
        #: wrote and did not sync, and a duplicate of that must not be acknowledged.
        self._has_committed = False
        self._serving = False
        #: Whether the tables or the log are being changed, which takes a while if they are large.
        self.is_preparing = False

    # ----------------------------------------------------------------------------- opening
    def open(self, create: bool, serving: bool) -> None:
        """Open the store, and create it if that is allowed and needed; see :meth:`Storage.open`.

        :param serving: from now on users are looked up by the traits that this config declares.
        """
        if serving and not self._serving:
            # A command opened it before.
            self.drop()
        self._serving = serving
        path = self.settings.path
        deadline = time.monotonic() + self.settings.timeout * _LOCK_SHARE
        with translating_errors(path, opening=True):
            while True:
                try:
                    self._open(path, create)
                    return
                except sqlite3.Error as error:
                    # SQLite does not wait when two processes turn on WAL at once: it returns BUSY.
                    self._failed(error)
                    if not is_lock_error(error) or time.monotonic() > deadline:
                        raise
                time.sleep(0.05)

    def _open(self, path: str, create: bool) -> None:
        if create:
            # Before the file is examined: another process that creates the store at this moment
            # has no log until the file has tables.
            has_log = schema.has_log(path)
            try:
                file_identity(path)
            except StorageMissing:
                schema.refuse_orphaned(path, has_log)
                create_file(path)
            self._create(has_log)
        self._connected()
        # A store that is only read must be readable while the disk is full: then the first write
        # commits.
        if self._serving and (not self._has_committed or self._needs_checkpoint):
            with self._transaction(needs_space=False) as db:
                self.keys.take_over(db)

    def _create(self, has_log: bool) -> None:
        try:
            schema.inspect_file(self.settings.path)
        except StorageMissing:
            # SQLite would delete the log.
            schema.refuse_orphaned(self.settings.path, has_log)
        else:
            if not os.path.exists(self.settings.path + "-journal"):
                return
        db = connect(self.settings, readonly=False)
        try:
            # Before WAL is turned on, so that the first page is in the file itself, where
            # inspect_file looks for it. The file becomes a store in one transaction, or not at all.
            db.execute("BEGIN IMMEDIATE")
            if schema.is_empty(db):
                schema.create(db)
            db.execute("COMMIT")
        finally:
            db.close()

    def prepare(self, db: sqlite3.Connection) -> None:
        super().prepare(db)
        db.set_progress_handler(self.settings.alive, PROGRESS_STEPS)
        self._has_committed = False
        self._configure(db)
        self.is_preparing = self._serving
        try:
            if self._serving:
                db.create_function("change_key", -1, key_of, deterministic=True)
                schema.migrate(db, self.settings.path)
            schema.require_current(db, self.settings.path)
            # Another file may be at the path now.
            self.remembered.forget()
            self.context = self.settings.context
            if self._serving:
                identifiers.index(db, self.context.identifiers)
            else:
                stored = identifiers.indexed(db)
                self.context = dataclasses.replace(self.context, identifiers=stored)
        finally:
            self.is_preparing = False
        # From here on only _begin waits for a lock.
        db.execute("PRAGMA busy_timeout = 0")

    def _configure(self, db: sqlite3.Connection) -> None:
        if self.settings.max_bytes:
            (page,) = db.execute("PRAGMA page_size").fetchone()
            db.execute(f"PRAGMA max_page_count = {max(1, self.settings.max_bytes // page)}")
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StorageUnavailable(
                f"{self.settings.path}: this file system does not support a write-ahead log"
            )
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA journal_size_limit = {checkpoint.KEPT_WAL_BYTES}")

    def require_checkpoint(self) -> None:
        """Acknowledge nothing before a checkpoint: another writer may have met an I/O error."""
        self._needs_checkpoint = True

    # --------------------------------------------------------------------- transactions
    @contextlib.contextmanager
    def _transaction(self, needs_space: bool = True) -> Iterator[sqlite3.Connection]:
        """A write transaction, which is committed at the end or has no effect at all."""
        committing = False
        try:
            if needs_space:
                self._require_space()
            db = self._begin_as_writer()
            if not self._has_committed:
                db.execute("UPDATE store SET value = value + 1 WHERE name = 'opens'")
            yield db
            committing = True
            db.execute("COMMIT")
            self._has_committed = True
        except BaseException as error:
            self._failed(error)
            if committing:
                # It may have succeeded.
                self.keys.reset()
            raise

    def _begin_as_writer(self) -> sqlite3.Connection:
        """Begin a transaction, on a new connection if another program has written to the store.

        :raises StorageIncompatible: if a newer version of engage has changed the tables.
        """
        db = self._connected()
        self._begin(db)
        if self.keys.is_taken_over and not self.keys.is_current(db):
            # Another writer wrote events, or another program replaced the content of the file.
            db.execute("ROLLBACK")
            self.keys.reset()
            self.drop()
            db = self._connected()
            self._begin(db)
        schema.require_readable(db)
        return db

    def _connected(self) -> sqlite3.Connection:
        db = self.connection()
        if self._needs_checkpoint:
            self.is_preparing = True
            try:
                self._checkpoint_everything(db)
            finally:
                self.is_preparing = False
        return db

    def _begin(self, db: sqlite3.Connection) -> None:
        """Wait for the only write lock.

        SQLite itself would sleep longer each time, up to 100 ms: under load another writer then
        takes the lock again and again, for seconds.
        """
        deadline = time.monotonic() + self.settings.timeout * _LOCK_SHARE
        while True:
            try:
                db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            self.settings.alive()
            time.sleep(LOCK_PAUSE)

    def _failed(self, error: BaseException) -> None:
        """Roll back. After any error except a lock, the next call opens a new connection."""
        if is_disk_error(error):
            self._needs_checkpoint = True
            # Before the connection is closed: SQLite copies the rest then, if it is the last one.
            with contextlib.suppress(StorageUnavailable, OSError):
                self._checkpoints.forget_copied()
        db = self._db
        if db is not None and db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        if not is_lock_error(error):
            self.drop()

    def _checkpoint_everything(self, db: sqlite3.Connection) -> None:
        # Also after a killed writer: it may have met an error that no one saw.
        self._checkpoints.forget_copied()
        alive = self.settings.alive
        if not checkpoint.beside(alive, checkpoint.run, db, "TRUNCATE", checkpoint.READERS_WAIT):
            # A reader, for example a backup, may prevent it for minutes.
            self._begin(db)
            try:
                checkpoint.beside(alive, checkpoint.rewrite_log, self.settings.path)
            finally:
                db.execute("ROLLBACK")
        self._needs_checkpoint = False

    def _require_space(self) -> None:
        if problem := lack_of_space(self.settings):
            raise StorageUnavailable(f"{self.settings.path}: {problem}")
