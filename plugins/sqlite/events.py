# SPDX-License-Identifier: Apache-2.0
"""The steps over events: their keys lead to numbers, and the numbers to the rows.

A row of the file has a hash as its key. An erased event leaves a row without origin and message id:
when it is read, its hash stands in place of the message id.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from engage.store.events import ERASED_TYPE, EVENTS
from engage.store.keys import key_of
from engage.store.tables import MAX_STORED_BYTES, Add, Delete, Get, Key, Put, Row, Table

from .connection import insert, look_up
from .keys import parts
from .keys.keys import Keys

_WIDTH: Final = len(EVENTS.columns)
_COLUMNS: Final = ", ".join(EVENTS.columns)
#: How the message id is read.
MESSAGE_ID: Final = f"CASE type WHEN '{ERASED_TYPE}' THEN key ELSE message_id END"
_FOUND: Final = "FROM {keys} w CROSS JOIN events ON seq = w.column2 AND key = w.column1"
_UPDATE: Final = f"UPDATE events SET ({_COLUMNS}) = ({', '.join('?' * _WIDTH)}) WHERE seq = ?"
#: Find the number of a key where it is looked for first, and then among the newest events, which
#: takes a while.
_NUMBER: Final = (
    f"SELECT seq FROM events WHERE key = ?1 AND seq IN ({parts.NUMBERS})",
    "SELECT seq FROM events WHERE key = ?1 "
    "AND seq > (SELECT value FROM store WHERE name = 'merged') ORDER BY seq DESC LIMIT 1",
)


def hash_of(row: Row) -> bytes:
    """Return the key in the file of a row or a key."""
    return row[2] if isinstance(row[2], bytes) else key_of(*row[:3])


def _select(table: Table) -> str:
    columns = ("key", *table.columns)
    return f"SELECT {', '.join(columns)} {_FOUND}".replace("message_id", MESSAGE_ID)


class Events:
    """The events that a plan meets.

    :param keys: of the process that writes; otherwise their table is read.
    """

    def __init__(self, keys: Keys | None) -> None:
        self.keys = keys
        #: Key in the file → number, of those that the plan has met.
        self.numbers: dict[bytes, int] = {}
        #: The keys of new events, in the order of their numbers. None: the plan adds none.
        self.added: list[bytes] | None = None

    def _found(self, db: sqlite3.Connection, wanted: AbstractSet[bytes]) -> list[tuple[bytes, int]]:
        """Return the keys and the numbers of events that may be stored."""
        found = {key: self.numbers[key] for key in wanted if key in self.numbers}
        missing = wanted - found.keys() if found else wanted
        if self.keys is None:
            for key in missing:
                rows = (db.execute(query, (key,)).fetchone() for query in _NUMBER)
                if (row := next(filter(None, rows), None)) is not None:
                    found[key] = row[0]
        elif missing:
            if not self.keys.is_taken_over:
                self.keys.take_over(db)
            found |= self.keys.candidates(db, missing)
        return [*found.items()]

    def get(self, db: sqlite3.Connection, step: Get) -> dict[Key, Row]:
        """Read rows by their keys."""
        keys = {hash_of(key): key for key in step.keys}
        rows = look_up(db, _select(step.table), self._found(db, keys.keys()))
        return {keys[row[0]]: row[1:] for row in rows}

    def add(self, db: sqlite3.Connection, step: Add) -> dict[Key, Row]:
        """Insert the rows whose key is new."""
        rows = [row if len(row) > _WIDTH else _in_file(row) for row in step.rows]
        if not (stored := self._add(db, rows)):
            return {}
        keys = zip(step.rows, rows, strict=True)
        return {row[:3]: stored[key] for row, (*_, key) in keys if key in stored}

    def put(self, db: sqlite3.Connection, step: Put) -> None:
        """Insert or replace rows."""
        rows = [_in_file(row) for row in step.rows]
        stored = self._add(db, rows)
        changed = [(*row, self.numbers[key]) for *row, key in rows if key in stored]
        db.executemany(_UPDATE, changed)

    def delete(self, db: sqlite3.Connection, step: Delete) -> int:
        """Delete rows by their keys."""
        found = self._found(db, {hash_of(key) for key in step.keys})
        for key, _ in found:
            self.numbers.pop(key, None)
        deleted = db.executemany("DELETE FROM events WHERE key = ? AND seq = ?", found)
        return max(0, deleted.rowcount)

    def _add(self, db: sqlite3.Connection, rows: Sequence[Row]) -> dict[bytes, Row]:
        """Insert the rows whose key, the last value, is new, and return those of the other keys."""
        assert self.keys is not None
        self.keys.require_room()
        by_key: dict[bytes, Row] = {}
        for row in rows:
            by_key.setdefault(row[-1], row)
        found = self._found(db, by_key.keys())
        stored = self._stored(db, found) if found else {}
        new = [key for key in by_key if key not in stored] if stored else [*by_key]
        self.added = [] if self.added is None else self.added
        first = self.keys.next_number + len(self.added)
        numbered = [(number, *by_key[key]) for number, key in enumerate(new, first)]
        insert(db, f"INSERT INTO events (seq, {_COLUMNS}, key)", numbered)
        self.numbers.update(zip(new, range(first, first + len(new)), strict=True))
        self.added += new
        return stored

    def _stored(
        self, db: sqlite3.Connection, found: Collection[tuple[bytes, int]]
    ) -> dict[bytes, Row]:
        """Return the rows that are stored; see :class:`Add` for their bodies."""
        # Without the bodies, which may take many pages.
        sizes = look_up(db, f"SELECT key, seq, length(body) {_FOUND}", found)
        self.numbers.update({key: number for key, number, _ in sizes})
        sizes.sort(key=lambda row: row[2])
        count = total = 0
        while count < len(sizes) and total <= MAX_STORED_BYTES:
            total += sizes[count][2]
            count += 1
        select = _select(EVENTS)
        some = [row[:2] for row in sizes]
        rows = look_up(db, select, some[:count])
        rows += look_up(db, select.replace(", body", ", NULL"), some[count:])
        return {row[0]: row[1:] for row in rows}


def _in_file(row: Row) -> Row:
    """Return a row as it is stored, with its key as the last value."""
    key = hash_of(row)
    return (row[0], "", "", *row[3:], key) if row[3] == ERASED_TYPE else (*row, key)


#: How the steps over events are executed.
STEPS: Final[dict[type, Callable[[Events, sqlite3.Connection, Any], Any]]] = {
    Get: Events.get,
    Add: Events.add,
    Put: Events.put,
    Delete: Events.delete,
}
