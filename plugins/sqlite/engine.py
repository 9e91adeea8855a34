# SPDX-License-Identifier: Apache-2.0
"""The writing connection: transactions, what happens when they fail, the write-ahead log (WAL).

Synchronous, with plain values as arguments and results: it runs in a thread or in a process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Final

from engage.api import (
    Count,
    DeadLetter,
    Outcome,
    Record,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
    SubscriptionChange,
)

from . import counts, dead_letters, events, records, schema, subscriptions
from .batch import Batch
from .connection import (
    Session,
    Settings,
    connect,
    create_file,
    file_identity,
    is_disk_error,
    is_lock_error,
    primary_code,
    translating_errors,
)
from .profiles import Profiles

#: Seconds between two attempts to get a lock that another process holds.
LOCK_PAUSE: Final = 0.0005
#: Size of the WAL in bytes from which it is copied into the database, without waiting for readers.
#: It is large because random keys change a page each, and a page that changed often is then copied
#: once.
CHECKPOINT_BYTES: Final = 80 * 1024 * 1024
#: Size of the WAL in bytes from which the writer waits for readers, so that it can be restarted.
FORCED_CHECKPOINT_BYTES: Final = 256 * 1024 * 1024
#: Size in bytes to which SQLite cuts the file of the WAL when it is restarted. It reuses the rest.
KEPT_WAL_BYTES: Final = 64 * 1024 * 1024
#: Seconds that a forced checkpoint waits for readers; writers wait meanwhile.
FORCED_CHECKPOINT_WAIT: Final = 1.0
#: Seconds between checkpoints: while a reader prevents one, an attempt at each write is of no use.
CHECKPOINT_PAUSE: Final = 1.0

#: The part of a call's time that may be spent on waiting for a lock: the caller then gets the
#: reason, instead of a call that took too long.
_LOCK_SHARE: Final = 0.75


class Engine(Session):
    """Writes, one transaction at a time; what a method wrote is durable when it returns."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, readonly=False)
        self._profiles = Profiles(settings.limits, settings.identifiers)
        #: Set by an I/O error: earlier commits may be in memory only. A checkpoint reads and syncs
        #: all of them.
        self._needs_checkpoint = False
        #: Whether this connection has committed. Until then it may read what a killed process wrote
        #: and did not sync, and a duplicate of that must not be acknowledged.
        self._has_committed = False
        self._next_checkpoint = 0.0
        self._serving = False
        #: Whether the store is of an earlier version, because no server has opened it yet.
        self._outdated = False
        #: Whether the tables of the store are being changed, which takes a while if it is large.
        self.is_migrating = False

    # ----------------------------------------------------------------------------- opening
    def open(self, create: bool, serving: bool) -> None:
        """Open the store, and create it if that is allowed and needed; see :meth:`EventStore.open`.

        :param serving: from now on users are looked up by the traits that this config declares.
        """
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
                self._refuse_orphaned(has_log)
                create_file(path)
            self._create(has_log)
        self.connection()
        # A store that is only read must be readable while the disk is full: then the first write
        # commits.
        if self._serving and (not self._has_committed or self._needs_checkpoint):
            with self._transaction(needs_space=False):
                pass

    def _refuse_orphaned(self, has_log: bool) -> None:
        if has_log:
            path = self.settings.path
            raise StorageIncompatible(
                f"{path}: missing or empty, but its log {path}-wal contains acknowledged events: "
                "put the file back, or move the log away to start with an empty store"
            )

    def _create(self, has_log: bool) -> None:
        try:
            schema.inspect_file(self.settings.path)
        except StorageMissing:
            # SQLite would delete the log.
            self._refuse_orphaned(has_log)
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
        self._has_committed = False
        self._configure(db)
        self.is_migrating = self._serving
        try:
            if self._serving:
                schema.migrate(db)
            self._profiles.prepare(db, serving=self._serving)
        finally:
            self.is_migrating = False
        self._outdated = schema.version_of(db) < schema.VERSION
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
        db.execute(f"PRAGMA journal_size_limit = {KEPT_WAL_BYTES}")

    def check(self) -> None:
        """Commit a small change.

        :raises StorageUnavailable: if that is not possible.
        """
        with translating_errors(self.settings.path), self._transaction() as db:
            db.execute("UPDATE store SET value = value + 1 WHERE name = 'opens'")

    def require_checkpoint(self) -> None:
        """Acknowledge nothing before a checkpoint: another writer may have met an I/O error."""
        self._needs_checkpoint = True

    # --------------------------------------------------------------------- transactions
    @contextlib.contextmanager
    def _transaction(self, *, needs_space: bool = True) -> Iterator[sqlite3.Connection]:
        """A write transaction, which is committed at the end or has no effect at all."""
        try:
            if needs_space:
                self._require_space()
            db = self.connection()
            if self._needs_checkpoint:
                self._checkpoint_everything(db)
            self._begin(db)
            if not self._has_committed:
                db.execute("UPDATE store SET value = value + 1 WHERE name = 'opens'")
            yield db
            db.execute("COMMIT")
            self._has_committed = True
        except BaseException as error:
            self._failed(error)
            raise

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
            time.sleep(LOCK_PAUSE)

    def _failed(self, error: BaseException) -> None:
        """Roll back. After any error except a lock, the next call opens a new connection."""
        if is_disk_error(error):
            self._needs_checkpoint = True
        db = self._db
        if db is not None and db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        if not is_lock_error(error):
            self.drop()

    def _checkpoint_everything(self, db: sqlite3.Connection) -> None:
        if not self._checkpoint(db, "TRUNCATE", self.settings.timeout / 4):
            raise StorageUnavailable(
                f"{self.settings.path}: waiting for a checkpoint after an error of the disk"
            )
        self._needs_checkpoint = False

    def _require_space(self) -> None:
        least = self.settings.min_free_bytes
        if least:
            free = shutil.disk_usage(os.path.dirname(self.settings.path)).free
            if free < least:
                raise StorageUnavailable(
                    f"{self.settings.path}: {free >> 20} MiB free on the disk, "
                    f"less than storage.sqlite.min_free_bytes ({least >> 20} MiB)"
                )

    def _require_current(self) -> None:
        """Refuse to write what the tables of an earlier version have no place for.

        :raises StorageUnavailable: if no server has brought the store up to date yet.
        """
        if self._outdated:
            raise StorageUnavailable(
                f"{self.settings.path}: made by an earlier version of engage; start "
                "`engage serve` once, which brings the store up to date"
            )

    # ------------------------------------------------------------------------------ WAL
    def maintain(self) -> None:
        """Keep the WAL short. Called after each call, when its answer is on its way; never raises
        an error of SQLite."""
        try:
            size = os.stat(self.settings.path + "-wal").st_size
        except OSError:
            return
        if size < CHECKPOINT_BYTES or time.monotonic() < self._next_checkpoint or self._db is None:
            return
        try:
            done = self._checkpoint(self._db, "PASSIVE", 0)
            if not done and size >= FORCED_CHECKPOINT_BYTES:
                self._checkpoint(self._db, "RESTART", FORCED_CHECKPOINT_WAIT)
        except sqlite3.Error as error:
            self._failed(error)
        # The file shrinks at the next commit, if no reader needs it.
        self._next_checkpoint = time.monotonic() + CHECKPOINT_PAUSE

    def _checkpoint(self, db: sqlite3.Connection, mode: str, wait: float) -> bool:
        """Copy the WAL into the database.

        :param wait: seconds to wait for readers.
        :return: whether all of the WAL is now in the database, synced.
        """
        db.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
        busy, frames, copied = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        db.execute("PRAGMA busy_timeout = 0")
        return not busy and bool(copied == frames)

    # --------------------------------------------------------------------------- events
    def write(self, rows: Sequence[events.Row]) -> tuple[Sequence[Outcome], int]:
        """Store events and apply their changes to the profiles, in one transaction.

        :param rows: made by :func:`events.row_of`.
        :return: the outcomes, and how many changes of profiles were dropped.
        """
        batch = Batch(rows)
        if not batch.rows:
            return batch.outcomes({}), 0
        with translating_errors(self.settings.path):
            with self._transaction() as db:
                self._require_current()
                stored, duplicates = events.insert_new(db, batch.rows)
                changes = batch.changes(stored, self._profiles.is_linked)
                applied = self._profiles.apply(db, changes)
            self._profiles.remember_links(applied)
        return batch.outcomes(duplicates), applied.dropped

    def expire(self, before: int, limit: int, force: bool) -> int:
        """Delete the oldest events, and return how many; see :meth:`EventStore.expire`."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            return events.expire(db, before, limit, force)

    # ---------------------------------------------------- subscriptions and dead letters
    def apply(self, change: SubscriptionChange) -> dict[str, bool]:
        """Apply a change of a user's choices, and return all choices of the user."""
        with translating_errors(self.settings.path), self._transaction() as db:
            if subscriptions.apply(db, change):
                self._profiles.ensure_user(db, change.workspace_id, change.user_id, change.at)
            return subscriptions.state(db, change.workspace_id, change.user_id)

    def keep(self, letters: Sequence[DeadLetter]) -> list[bool]:
        """Store dead letters, and return whether each is stored."""
        with translating_errors(self.settings.path), self._transaction() as db:
            self._require_current()
            return dead_letters.keep(db, letters, self.settings.budget)

    def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        """Delete dead letters, and return how many existed."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            return dead_letters.remove(db, workspace_id, ids)

    def expire_dead_letters(self, before: int, limit: int) -> int:
        """Delete the oldest dead letters, and return how many."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            return dead_letters.expire(db, before, limit)

    # ------------------------------------------------------------- records and counters
    def put_record(self, record: Record, expected_version: int | None) -> int | None:
        """Write a record; see :meth:`RecordStore.put_record`."""
        with translating_errors(self.settings.path), self._transaction() as db:
            self._require_current()
            return records.put(db, record, expected_version)

    def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        """Delete a record, and return whether there was one."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            self._require_current()
            return records.delete(db, kind, workspace_id, record_id)

    def expire_records(self, kind: str, before: int, limit: int) -> int:
        """Delete the oldest records of a kind, and return how many."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            self._require_current()
            return records.expire(db, kind, before, limit)

    def put_counts(self, rows: Sequence[Count]) -> None:
        """Write registers of counters, in one transaction."""
        with translating_errors(self.settings.path), self._transaction() as db:
            self._require_current()
            counts.put(db, rows)

    def expire_counts(self, step: int, before: int, limit: int) -> int:
        """Delete the oldest registers of a step, and return how many."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            self._require_current()
            return counts.expire(db, step, before, limit)
