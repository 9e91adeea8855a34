# SPDX-License-Identifier: Apache-2.0
"""The writer: transactions, what happens when they fail, and the write-ahead log (WAL).

Synchronous, and all that goes in and out are plain values: it can run in a thread or in a process.
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
    DeadLetter,
    Outcome,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
    SubscriptionChange,
)

from . import dead_letters, events, profiles, schema, subscriptions
from .connection import (
    Session,
    Settings,
    connect,
    file_identity,
    in_our_words,
    is_disk_error,
    make_file,
    primary_code,
)

#: Seconds between two looks at a lock that another process has.
LOCK_PAUSE: Final = 0.0005
#: Bytes of WAL from which it is copied into the database, without waiting for anybody. Long: random
#: keys dirty a page each, and a page that changed often is then copied once.
CHECKPOINT_BYTES: Final = 80 * 1024 * 1024
#: Bytes of WAL from which readers are waited for, so that it can start anew.
FORCED_CHECKPOINT_BYTES: Final = 256 * 1024 * 1024
#: Bytes of the WAL file that are kept for reuse.
KEPT_BYTES: Final = 64 * 1024 * 1024
#: Seconds that readers are waited for then; writers wait, too.
FORCED_CHECKPOINT_WAIT: Final = 1.0
#: Seconds between checkpoints: while a reader holds one up, trying at each write is of no use.
CHECKPOINT_PAUSE: Final = 1.0


class Engine(Session):
    """Writes, one transaction at a time, each durable when the method returns."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, readonly=False)
        self._profiles = profiles.Profiles(settings.limits, settings.identifiers)
        #: After an I/O error: what earlier commits wrote may be only in memory. A checkpoint reads
        #: and syncs all of it.
        self._doubtful = False
        #: Whether this connection has committed. Until then frames of a killed process may be read
        #: that were written but never synced, and a duplicate of them must not be acknowledged.
        self._proven = False
        self._next_checkpoint = 0.0
        self._serves = False

    # ------------------------------------------------------------------------------ life
    def open(self, create: bool, serves: bool) -> None:
        """Open the store, make it if allowed and needed; see :meth:`EventStore.open`.

        :param serves: the traits that users are looked up by are those of our config from now on.
        """
        self._serves = serves
        path = self.settings.path
        deadline = time.monotonic() + self.settings.timeout * 0.75
        with in_our_words(path, opening=True):
            while True:
                try:
                    self._open(path, create, prove=serves)
                    return
                except sqlite3.Error as error:
                    # Two that turn on WAL at once get BUSY without being made to wait.
                    busy = primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                    self._failed(error)
                    if not busy or time.monotonic() > deadline:
                        raise
                time.sleep(0.05)

    def _open(self, path: str, create: bool, *, prove: bool) -> None:
        if create:
            # Asked first: whoever makes the store at the same time has no log before it has tables.
            orphan = schema.has_log(path)
            try:
                file_identity(path)
            except StorageMissing:
                self._no_orphan(orphan)
                make_file(path)
            self._create(orphan)
        self.connection()
        if prove:
            # One that only reads must be able to when the disk is full: it proves when it writes.
            self._prove()

    def _no_orphan(self, orphan: bool) -> None:
        if orphan:
            path = self.settings.path
            raise StorageIncompatible(
                f"{path}: gone or empty, but its log {path}-wal holds what was acknowledged: put "
                "the file back, or move the log away to begin anew"
            )

    def _create(self, orphan: bool) -> None:
        try:
            schema.look_at(self.settings.path)
        except StorageMissing:
            # SQLite would delete the log.
            self._no_orphan(orphan)
        else:
            if not os.path.exists(self.settings.path + "-journal"):
                return
        db = connect(self.settings, readonly=False)
        try:
            # Before WAL is turned on: the first page is then in the file itself, where it is looked
            # at. The file becomes a store in one transaction, or not at all.
            db.execute("BEGIN IMMEDIATE")
            if schema.is_empty(db):
                schema.create(db)
            db.execute("COMMIT")
        finally:
            db.close()

    def prepare(self, db: sqlite3.Connection) -> None:
        super().prepare(db)
        self._proven = False
        self._tune(db)
        self._profiles.forget()
        if self._serves:
            self._profiles.index(db)
        else:
            self._profiles.keep_index(db)
        # From here on nothing waits for a lock but _begin.
        db.execute("PRAGMA busy_timeout = 0")

    def _tune(self, db: sqlite3.Connection) -> None:
        if self.settings.max_bytes:
            (page,) = db.execute("PRAGMA page_size").fetchone()
            db.execute(f"PRAGMA max_page_count = {max(1, self.settings.max_bytes // page)}")
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StorageUnavailable(
                f"{self.settings.path}: this file system cannot hold a write-ahead log"
            )
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA journal_size_limit = {KEPT_BYTES}")

    def _prove(self) -> None:
        if not self._proven or self._doubtful:
            with self._transaction(needs_space=False):
                pass

    def check(self) -> None:
        """Commit something. :raises StorageUnavailable: it was not possible."""
        with in_our_words(self.settings.path), self._transaction() as db:
            db.execute("UPDATE store SET value = value + 1 WHERE name = 'opens'")

    def doubt(self) -> None:
        """Acknowledge nothing until a checkpoint: somebody else may have seen an I/O error."""
        self._doubtful = True

    # --------------------------------------------------------------------- transactions
    @contextlib.contextmanager
    def _transaction(self, *, needs_space: bool = True) -> Iterator[sqlite3.Connection]:
        """A write transaction: committed at the end, or nothing of it happened."""
        try:
            if needs_space:
                self._require_space()
            db = self.connection()
            if self._doubtful:
                self._trust_again(db)
            self._begin(db)
            if not self._proven:
                db.execute("UPDATE store SET value = value + 1 WHERE name = 'opens'")
            yield db
            db.execute("COMMIT")
            self._proven = True
        except BaseException as error:
            self._failed(error)
            raise

    def _begin(self, db: sqlite3.Connection) -> None:
        """Wait for the one write lock. SQLite itself would sleep longer each time, up to 100 ms:
        under load whoever writes next door takes the lock again meanwhile, for seconds.
        """
        deadline = time.monotonic() + self.settings.timeout * 0.75
        while True:
            try:
                db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(LOCK_PAUSE)

    def _failed(self, error: BaseException) -> None:
        """Roll back. After anything but a lock, the next call starts with a new connection."""
        if is_disk_error(error):
            self._doubtful = True
        db = self._db
        if db is not None and db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        if primary_code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            self.drop()

    def _trust_again(self, db: sqlite3.Connection) -> None:
        if not self._checkpoint(db, "TRUNCATE", self.settings.timeout / 4):
            raise StorageUnavailable(
                f"{self.settings.path}: waiting for a checkpoint after an error of the disk"
            )
        self._doubtful = False

    def _require_space(self) -> None:
        least = self.settings.min_free_bytes
        if least:
            free = shutil.disk_usage(os.path.dirname(self.settings.path)).free
            if free < least:
                raise StorageUnavailable(
                    f"{self.settings.path}: {free >> 20} MiB free on the disk, "
                    f"less than storage.sqlite.min_free_bytes ({least >> 20} MiB)"
                )

    # ------------------------------------------------------------------------------ WAL
    def maintain(self) -> None:
        """Keep the WAL short. Called when nobody waits for an answer; never raises."""
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
        """:return: whether all of the WAL is now in the database, synced."""
        db.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
        busy, frames, copied = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        db.execute("PRAGMA busy_timeout = 0")
        return not busy and bool(copied == frames)

    # --------------------------------------------------------------------------- events
    def write(self, rows: Sequence[events.Row]) -> tuple[Sequence[Outcome], int]:
        """Store events and apply their changes, in one transaction.

        :param rows: by :func:`events.values_of`.
        :return: the outcomes, and how many changes of profiles were dropped.
        """
        prepared = events.prepare(rows)
        if not prepared.rows:
            return prepared.outcomes({}), 0
        with in_our_words(self.settings.path):
            with self._transaction() as db:
                stored, duplicates = events.insert_new(db, prepared.rows)
                changes = prepared.changes(stored, self._profiles.is_linked)
                applied = self._profiles.apply(db, changes)
            self._profiles.remember(applied)
        return prepared.outcomes(duplicates), applied.dropped

    def expire(self, before: int, limit: int, force: bool) -> int:
        """See :meth:`EventStore.expire`."""
        with in_our_words(self.settings.path), self._transaction(needs_space=False) as db:
            return events.expire(db, before, limit, force)

    # ---------------------------------------------------- subscriptions and dead letters
    def apply(self, change: SubscriptionChange) -> dict[str, bool]:
        """See :meth:`SubscriptionStore.apply`."""
        with in_our_words(self.settings.path), self._transaction() as db:
            if subscriptions.apply(db, change):
                self._profiles.see(db, change.workspace_id, change.user_id, change.at)
            return subscriptions.state(db, change.workspace_id, change.user_id)

    def put(self, batch: Sequence[DeadLetter]) -> int:
        """See :meth:`DeadLetterStore.put`."""
        with in_our_words(self.settings.path), self._transaction() as db:
            return dead_letters.put(db, batch, self.settings.budget)

    def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        """See :meth:`DeadLetterStore.remove`."""
        with in_our_words(self.settings.path), self._transaction(needs_space=False) as db:
            return dead_letters.remove(db, workspace_id, ids)

    def expire_letters(self, before: int, limit: int) -> int:
        """See :meth:`DeadLetterStore.expire_dead_letters`."""
        with in_our_words(self.settings.path), self._transaction(needs_space=False) as db:
            return dead_letters.expire(db, before, limit)
