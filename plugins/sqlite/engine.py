# SPDX-License-Identifier: Apache-2.0
"""The operations of the writer: each is one transaction, and durable when its method returns.

Synchronous, with plain values as arguments and results: the writer calls it in its loop.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from engage.api import (
    Event,
    Outcome,
    StorageError,
    StorageUnavailable,
)
from engage.store import changes, people
from engage.store.keys import is_text, key_of
from engage.store.tables import Plan

from . import checkpoint, schema
from .batch import Batch
from .connection import Settings, translating_errors
from .steps import execute
from .tables import events
from .transactions import Transactions

Result = TypeVar("Result")

#: Seconds without an event after which :meth:`Engine.work` makes separate transactions.
IDLE: Final = 1.0


class Engine(Transactions):
    """The operations of the writer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        #: When events were written.
        self._last_write = 0.0

    def check(self) -> None:
        """Commit a small change.

        :raises StorageUnavailable: if that is not possible.
        """
        with translating_errors(self.settings.path), self._transaction() as db:
            db.execute("UPDATE store SET value = value + 1 WHERE name = 'opens'")

    def run(self, plan: Plan[..., Result], arguments: Sequence[Any]) -> Result:
        """Run a plan of :mod:`engage.store`."""
        if plan is people.erase:
            # What is remembered may be erased.
            self._known.links.clear()
        with translating_errors(self.settings.path):
            transaction = self._erasing() if plan.overwrites else self._transaction(not plan.frees)
            with transaction as db:
                return execute(db, plan(*arguments), self.settings.context)

    # -------------------------------------------------------------------------- background
    def work(self) -> bool:
        """Do a step of the background work, which takes at most about 5 ms.

        Call it when no request waits, and after every few requests under load.

        :return: whether there is more to do now. If not, call it again within about a second.
        """
        db = self._db
        if db is None or self._needs_checkpoint:
            return False
        try:
            self._checkpoints.step(db)
            if not self.keys.is_taken_over:
                return False
            if self.keys.build_filter_due:
                # Another program may have replaced the content of the file, even for a moment.
                db.execute("BEGIN")
                is_current = self.keys.is_current(db)
                if is_current:
                    self.keys.build_filter(db)
                db.execute("COMMIT")
                return is_current
            if self.keys.merge_due_alone() and time.monotonic() - self._last_write > IDLE:
                self._merge_alone()
                return self.keys.merge_due_alone()
        except (sqlite3.Error, StorageError, OSError) as error:
            self._failed(error)
        return False

    def _merge_alone(self) -> None:
        try:
            with self._transaction() as db:
                if self.keys.is_taken_over:
                    self.keys.merge_alone(db)
            self.keys.merge_confirmed()
        except BaseException:
            self.keys.merge_failed()
            raise

    def close(self) -> None:
        """Close the store, and save the keys so that it opens faster."""
        with contextlib.suppress(StorageUnavailable, OSError):
            self._checkpoints.wait()
        with contextlib.suppress(OSError):
            self.keys.save()
        self.keys.reset()
        self.drop()

    # --------------------------------------------------------------------------- events
    def write(self, rows: Sequence[events.Row]) -> tuple[Sequence[Outcome], int]:
        """Store events and apply their changes to the profiles, in one transaction.

        :param rows: made by :func:`events.row_of`.
        :return: the outcomes, and how many changes of profiles were dropped.
        """
        batch = Batch(rows)
        if not batch.rows:
            return batch.outcomes({}), 0
        self._last_write = time.monotonic()
        with translating_errors(self.settings.path):
            try:
                return self._write(batch, merging=True)
            except (sqlite3.Error, StorageUnavailable):
                # A step of the merge also needs space.
                if not self.keys.merge_failed():
                    raise
            return self._write(batch, merging=False)

    def _write(self, batch: Batch, *, merging: bool) -> tuple[Sequence[Outcome], int]:
        keys = self.keys
        keys.require_room()
        with self._transaction() as db:
            if not keys.is_taken_over:
                keys.take_over(db)
            duplicates = events.existing(db, keys.candidates(db, batch.rows.keys()))
            new = [key for key in batch.rows if key not in duplicates] if duplicates else batch.rows
            events.insert_new(db, [batch.rows[key] for key in new], keys.next_number)
            changed = batch.changes(new, self._known.is_linked)
            applied = self._apply(db, changed) if changed else None
            least = keys.oldest(db) if keys.forget_due(len(new)) else None
            if merging and (count := keys.merge_due(len(new))):
                keys.merge(db, count)
        keys.merge_confirmed()
        keys.stored(new)
        if new and least is not None:
            keys.forget(least)
        if applied is None:
            return batch.outcomes(duplicates), 0
        self._known.remember(applied)
        return batch.outcomes(duplicates), applied.dropped

    def _apply(self, db: sqlite3.Connection, changed: Sequence[Any]) -> changes.Applied:
        known = self._known
        steps = changes.apply(changed, known.identifiers, known.links, known.searched)
        return execute(db, steps, self.settings.context)

    def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """Return the event of this identity, or ``None``."""
        if not is_text(workspace_id + origin + message_id):
            return None
        key = key_of(workspace_id, origin, message_id)
        with translating_errors(self.settings.path):
            try:
                db = self.connection()
                db.execute("BEGIN")
                schema.require_readable(db)
                if not self.keys.is_taken_over or not self.keys.is_current(db):
                    found = events.find(db, key)
                else:
                    number = self.keys.candidates(db, {key}).get(key)
                    found = None if number is None else events.at(db, key, number)
                db.execute("COMMIT")
                return found
            except BaseException as error:
                self._failed(error)
                raise

    def missed(self, events_: Sequence[tuple[int, bytes]]) -> list[int]:
        """Return those numbers of stored events that are not found by their keys.

        :param events_: number and key.
        """
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            if not self.keys.is_taken_over:
                self.keys.take_over(db)
            found = self.keys.candidates(db, {key for _, key in events_})
            return [number for number, key in events_ if found.get(key) != number]

    def expire(self, before: int, limit: int, force: bool) -> int:
        """Delete the oldest events, and return how many; see :meth:`EventStore.expire`."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            return events.expire(db, before, limit, force)

    # ------------------------------------------------------------------------------ erasing
    @contextlib.contextmanager
    def _erasing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that overwrites what it deletes, also on pages that become free."""
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            db.execute("PRAGMA secure_delete = ON")
            try:
                yield db
            finally:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("PRAGMA secure_delete = FAST")

    def mark_erased(self, marks: Mapping[bytes, bytes]) -> int:
        """Erase events; see :meth:`ErasureStore.erase_events`.

        :param marks: key → mark.
        """
        with self._erasing() as db:
            if not self.keys.is_taken_over:
                self.keys.take_over(db)
            return events.erase(db, self.keys.candidates(db, marks.keys()), marks)

    def reapply(self, rows: Sequence[events.Row]) -> None:
        """Apply the changes of stored events again."""
        batch = Batch(rows)
        with translating_errors(self.settings.path), self._transaction() as db:
            applied = self._apply(db, batch.changes(batch.rows, lambda *_: False))
        self._known.remember(applied)

    def empty_log(self) -> bool:
        """Copy all of the log into the file and empty it, and return whether that was possible: a
        reader such as a backup may prevent it."""
        with translating_errors(self.settings.path):
            try:
                db = self._connected()
                self._checkpoints.wait()
                alive = self.settings.alive
                return checkpoint.beside(
                    alive, checkpoint.run, db, "TRUNCATE", checkpoint.FORCED_CHECKPOINT_WAIT
                )
            except BaseException as error:
                self._failed(error)
                raise
