# SPDX-License-Identifier: Apache-2.0
"""The reading connection: separate from the writing one, so that reading never waits for writing.

It calls the functions that know the tables.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from engage.api import StorageMissing

from .connection import (
    FileConnection,
    Settings,
    is_lock_error,
    lack_of_space,
    translating_errors,
)
from .schema import has_log, refuse_orphaned, require_current, require_readable
from .writer.lock import require_writable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Reader(FileConnection):
    """Reads. Each call sees one state of the store, and holds nothing when it returns."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, readonly=True)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        with translating_errors(self.settings.path):
            try:
                db = self.connection()
                db.execute("BEGIN")
                require_readable(db)
                yield db
            except sqlite3.Error as error:
                if not is_lock_error(error):
                    self.drop()
                raise
            finally:
                if self._db is not None and self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def prepare(self, db: sqlite3.Connection) -> None:
        super().prepare(db)
        require_current(db, self.settings.path)

    def open(self) -> None:
        """Open the store; see :meth:`Storage.open`."""
        with translating_errors(self.settings.path, opening=True):
            try:
                self.connection()
            except StorageMissing as error:
                require_writable(self.settings.path)
                refuse_orphaned(self.settings.path, has_log(self.settings.path))
                # Not for a server: if its file was moved, it must be put back.
                problem = lack_of_space(self.settings)
                raise StorageMissing(
                    f"{error}; `engage serve` creates one" + (f", but {problem}" if problem else "")
                ) from None

    def call(
        self,
        function: Callable[Concatenate[sqlite3.Connection, Parameters], Result],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Return what a function that reads a table returns for one state of the store."""
        with self._snapshot() as db:
            return function(db, *arguments, **options)
