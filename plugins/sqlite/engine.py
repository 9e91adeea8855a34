# SPDX-License-Identifier: Apache-2.0
"""The operations of the writer: each is one transaction, and durable when its method returns.

Synchronous, with plain values as arguments and results: the writer calls it in its loop.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from engage.api import StorageError, StorageUnavailable
from engage.store.events import find
from engage.store.tables import Plan

from . import checkpoint, schema
from .connection import Settings, translating_errors
from .steps import Run, execute
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

    # -------------------------------------------------------------------------------- plans
    def run(self, plan: Plan[..., Result], arguments: Sequence[Any]) -> Result:
        """Run a plan of :mod:`engage.store`."""
        with translating_errors(self.settings.path):
            if plan is find:
                return self._read(plan, arguments)
            try:
                return self._run(plan, arguments, merging=True)
            except (sqlite3.Error, StorageUnavailable):
                # A step of the merge also needs space.
                if not self.keys.merge_failed():
                    raise
            return self._run(plan, arguments, merging=False)

    def _run(self, plan: Plan[..., Result], arguments: Sequence[Any], *, merging: bool) -> Result:
        keys, run = self.keys, Run(self.keys, self.remembered)
        least = None
        with self._erasing() if plan.overwrites else self._transaction(not plan.frees) as db:
            result = execute(db, plan.function(*arguments), self.context, run)
            new = run.added
            if new is not None:
                self._last_write = time.monotonic()
                if new and keys.forget_due(len(new)):
                    least = keys.oldest(db)
                if merging and (count := keys.merge_due(len(new))):
                    keys.merge(db, count)
        if run.new:
            self.remembered.keep(run.new)
        if new is not None:
            keys.merge_confirmed()
            keys.stored(new)
            if least is not None:
                keys.forget(least)
        return result

    def _read(self, plan: Plan[..., Result], arguments: Sequence[Any]) -> Result:
        """Run a plan that only reads. This process has the newest keys."""
        try:
            db = self.connection()
            db.execute("BEGIN")
            schema.require_readable(db)
            is_current = self.keys.is_taken_over and self.keys.is_current(db)
            run = Run(self.keys if is_current else None)
            result = execute(db, plan.function(*arguments), self.context, run)
            db.execute("COMMIT")
            return result
        except BaseException as error:
            self._failed(error)
            raise

    @contextlib.contextmanager
    def _erasing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that overwrites what it deletes, also on pages that become free."""
        with self._transaction(needs_space=False) as db:
            db.execute("PRAGMA secure_delete = ON")
            try:
                yield db
            finally:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("PRAGMA secure_delete = FAST")

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

    def missed(self, numbers: Sequence[tuple[int, bytes]]) -> list[int]:
        """Return those numbers of stored events that are not found by their keys.

        :param numbers: each with its key.
        """
        with translating_errors(self.settings.path), self._transaction(needs_space=False) as db:
            if not self.keys.is_taken_over:
                self.keys.take_over(db)
            candidates = self.keys.candidates(db, {key for _, key in numbers})
            return [number for number, key in numbers if candidates.get(key) != number]

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
