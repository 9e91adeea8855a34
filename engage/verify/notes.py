# SPDX-License-Identifier: Apache-2.0
"""What was read of a store, by the people that it is about, in a temporary database on the disk.

The database has no name, so nothing is left of it when the process ends, however that happens.
"""

from __future__ import annotations

import itertools
import marshal
import operator
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, Final

from engage.store.profiles import VISITOR, Person

__all__ = ["Notes"]

#: Bytes that the database may have in memory.
_MEMORY: Final = 4 * 1024 * 1024


class Notes:
    """Records of plain values. Each is about a user, a visitor or a group.

    Every method may raise :class:`sqlite3.Error`, for example if the disk is full.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        for setting in (
            "journal_mode = OFF",
            "temp_store = FILE",
            f"cache_size = -{_MEMORY >> 10}",
        ):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute("CREATE TABLE notes (workspace, kind, name, record)")
        self._db.execute("BEGIN")
        #: Ends it, and its files.
        self.close = self._db.close

    def add(self, person: Person, record: tuple[Any, ...]) -> None:
        """Keep a record.

        :raises UnicodeEncodeError: if an id is not Unicode text.
        """
        self._db.execute("INSERT INTO notes VALUES (?, ?, ?, ?)", (*person, marshal.dumps(record)))

    def sort(self) -> None:
        """Prepare the other methods, when all is kept."""
        self._db.execute("CREATE INDEX people ON notes (kind DESC, workspace, name)")

    def full(self, visitors: int) -> set[str]:
        """Return the workspaces that have, or had, at least so many visitors."""
        query = (
            "SELECT workspace FROM notes WHERE kind = ? GROUP BY workspace "
            "HAVING count(DISTINCT name) >= ?"
        )
        return {workspace for (workspace,) in self._db.execute(query, (VISITOR, visitors))}

    def people(self) -> Iterator[tuple[Person, Iterable[Any]]]:
        """Yield all people with their records, in the order in which these were kept."""
        query = "SELECT * FROM notes ORDER BY kind DESC, workspace, name, rowid"
        rows = self._db.execute(query)
        for person, some in itertools.groupby(rows, operator.itemgetter(0, 1, 2)):
            yield person, (marshal.loads(row[-1]) for row in some)  # noqa: S302 - of this process

    def about(self, person: Person) -> Iterator[Any]:
        """Yield the records of a person."""
        query = (
            "SELECT record FROM notes WHERE workspace = ? AND kind = ? AND name = ? ORDER BY rowid"
        )
        for (record,) in self._db.execute(query, person):
            yield marshal.loads(record)  # noqa: S302 - of this process
