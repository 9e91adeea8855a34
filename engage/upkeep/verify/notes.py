# SPDX-License-Identifier: Apache-2.0
"""What was read of a store, by the ids that it is about, in a temporary database on the disk.

The database has no name, so nothing is left of it when the process ends, however that happens.
"""

from __future__ import annotations

import marshal
import sqlite3
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["Notes"]

#: Bytes that the database may have in memory.
_MEMORY: Final = 4 * 1024 * 1024


class Notes:
    """Records of plain values. Each is about an id of a workspace: that of a user, a visitor or a
    group.

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
        self._db.execute("CREATE TABLE notes (workspace, name, user, visitor, record)")
        self._db.execute("BEGIN")
        #: Ends it, and its files.
        self.close = self._db.close

    def add(
        self,
        workspace: str,
        name: str,
        record: tuple[Any, ...],
        user: str | None = None,
        *,
        visitor: bool = False,
    ) -> None:
        """Keep a record.

        :param user: of a link: its user; ``name`` is its anonymous id.
        :param visitor: whether it says that there is, or was, a visitor with this id.
        :raises UnicodeEncodeError: if an id is not Unicode text.
        """
        row = (workspace, name, user, visitor, marshal.dumps(record))
        self._db.execute("INSERT INTO notes VALUES (?, ?, ?, ?, ?)", row)

    def sort(self) -> None:
        """Prepare the other methods, when all is kept."""
        self._db.execute("CREATE INDEX notes_name ON notes (workspace, name)")
        query = "CREATE INDEX notes_user ON notes (workspace, user, name) WHERE user NOT NULL"
        self._db.execute(query)
        self._db.execute("CREATE INDEX notes_visitor ON notes (workspace, name) WHERE visitor")

    def full(self, visitors: int) -> set[str]:
        """Return the workspaces that have, or had, at least so many visitors."""
        query = (
            "SELECT workspace FROM notes WHERE visitor GROUP BY workspace "
            "HAVING count(DISTINCT name) >= ?"
        )
        return {workspace for (workspace,) in self._db.execute(query, (visitors,))}

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the workspace and the id of everything that a record is about, and of all users of
        links."""
        return self._db.execute(
            "SELECT workspace, name FROM notes UNION "
            "SELECT workspace, user FROM notes WHERE user NOT NULL ORDER BY 1, 2"
        )

    def about(self, workspace: str, name: str) -> Iterator[Any]:
        """Yield the records about an id, in the order in which they were kept."""
        query = "SELECT record FROM notes WHERE workspace = ? AND name = ? ORDER BY rowid"
        for (record,) in self._db.execute(query, (workspace, name)):
            yield marshal.loads(record)  # noqa: S302 - of this process

    def linked(self, workspace: str, user: str, most: int) -> list[str]:
        """Return the anonymous ids of the links of a user, and no more of them than ``most``."""
        query = "SELECT DISTINCT name FROM notes WHERE workspace = ? AND user = ? LIMIT ?"
        return [name for (name,) in self._db.execute(query, (workspace, user, most))]
