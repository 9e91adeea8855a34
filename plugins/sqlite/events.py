# SPDX-License-Identifier: Apache-2.0
"""Rows of events."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from engage.api import Event, EventFilter, Outcome, Status, changes_of

from .changes import EncodedChange, encode
from .connection import insert, key_of, look_up
from .paging import Window

#: SQLite's own limit of a value is 1 GB; no event comes near.
_MOST_BYTES: Final = 256 * 1024 * 1024
_INTEGERS: Final = range(-(2**63), 2**63)

_COLUMNS: Final = (
    "workspace, origin, message_id, type, user_id, anonymous_id, name, received_at, timestamp, body"
)
STORED: Final = Outcome(Status.STORED)

#: The values of ``_COLUMNS`` of one event: plain, so that they can cross to another process.
Row = tuple[Any, ...]


def values_of(event: Event) -> Row:
    """:return: an event as plain values, in the order of the columns."""
    return (
        event.workspace_id,
        event.origin,
        event.message_id,
        event.type,
        event.user_id,
        event.anonymous_id,
        event.name,
        event.received_at,
        event.timestamp,
        event.body,
    )


def event_of(values: Row) -> Event:
    """Undo :func:`values_of`."""
    return Event(
        workspace_id=values[0],
        origin=values[1],
        message_id=values[2],
        type=values[3],
        user_id=values[4],
        anonymous_id=values[5],
        name=values[6],
        received_at=values[7],
        timestamp=values[8],
        body=values[9],
    )


class UnstorableError(Exception):
    """This event can never be stored; the message is the reason, for the client."""


class Prepared:
    """The events of a write, ready to be inserted."""

    def __init__(self) -> None:
        #: What became of each event; where the database has to say: its key, and whether an event
        #: of the same identity stands before it.
        self._fates: list[Outcome | tuple[bytes, bool]] = []
        #: The rows of different identities, in order.
        self.rows: dict[bytes, Row] = {}
        #: Of those that may change profiles; ``None``: only by a link, and most of those are known.
        self._changes: dict[bytes, tuple[Event, Sequence[EncodedChange]] | None] = {}

    def add(self, row: Row) -> None:
        """Take one event in, or note why it cannot be."""
        try:
            key = _key(row)
            repeat = key in self.rows
            if not repeat:
                if row[3] in ("identify", "group", "alias"):
                    self._changes[key] = _changes(row)
                elif row[4] is not None and row[5] is not None:
                    self._changes[key] = None
                self.rows[key] = row
        except UnstorableError as reason:
            self._fates.append(Outcome(Status.REFUSED, str(reason)))
            return
        self._fates.append((key, repeat))

    def changes(
        self, stored: Iterable[bytes], is_linked: Callable[[str, str, str], bool]
    ) -> list[tuple[Event, Sequence[EncodedChange]]]:
        """:return: the changes of these events, in their order.

        :param is_linked: whether a workspace's user is known to be linked to an anonymous id.
        """
        found: list[tuple[Event, Sequence[EncodedChange]]] = []
        if not self._changes:
            return found
        for key in stored:
            if key not in self._changes:
                continue
            changing = self._changes[key]
            if changing is None:
                row = self.rows[key]
                if is_linked(row[0], row[4], row[5]):
                    continue
                changing = _changes(row)
            found.append(changing)
        return found

    def outcomes(self, duplicates: Mapping[bytes, bytes]) -> list[Outcome]:
        """:param duplicates: of those that were stored before: key → stored body."""
        if not duplicates and len(self.rows) == len(self._fates):
            return [STORED] * len(self._fates)
        result = []
        for fate in self._fates:
            if isinstance(fate, Outcome):
                result.append(fate)
                continue
            key, repeat = fate
            if key in duplicates:
                result.append(Outcome(Status.DUPLICATE, stored=duplicates[key]))
            elif repeat:
                result.append(Outcome(Status.DUPLICATE, stored=self.rows[key][-1]))
            else:
                result.append(STORED)
        return result


def prepare(rows: Iterable[Row]) -> Prepared:
    """Look at each event by itself, so that one that cannot be stored stands alone."""
    prepared = Prepared()
    for row in rows:
        prepared.add(row)
    return prepared


def _key(row: Row) -> bytes:
    """:raises UnstorableError: SQLite cannot hold one of the values."""
    workspace, origin, message_id, kind, user, anonymous, name, received_at, timestamp, body = row
    try:
        key = key_of(workspace, origin, message_id)
        # All at once: what is sought is in the whole if it is in a part.
        f"{kind}{user}{anonymous}{name}".encode()
    except UnicodeEncodeError:
        raise UnstorableError("a text holds a lone surrogate, which is not a character") from None
    if received_at not in _INTEGERS or timestamp not in _INTEGERS:
        raise UnstorableError("a time is outside of 64 bits")
    if len(body) > _MOST_BYTES:
        raise UnstorableError(f"the event is longer than {_MOST_BYTES} bytes")
    return key


def _changes(row: Row) -> tuple[Event, Sequence[EncodedChange]]:
    event = event_of(row)
    try:
        return event, [encode(change) for change in changes_of(event)]
    except Exception:
        # The body is the sender's; whatever is wrong with it, its neighbours are stored.
        raise UnstorableError("the event's body does not fit its type") from None


def insert_new(
    db: sqlite3.Connection, rows: Mapping[bytes, Row]
) -> tuple[Iterable[bytes], Mapping[bytes, bytes]]:
    """Insert the events that are not stored yet.

    :return: the keys of those, in order, and key → stored body of the others.
    """
    last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    count = insert(
        db,
        f"INSERT INTO events (key, {_COLUMNS})",
        [(key, *row) for key, row in rows.items()],
        "ON CONFLICT (key) DO NOTHING",
    )
    if count == len(rows):
        return rows, {}
    after = last[0] if last else 0
    new = [
        key for (key,) in db.execute("SELECT key FROM events WHERE seq > ? ORDER BY seq", (after,))
    ]
    known = rows.keys() - set(new)
    query = "SELECT e.key, e.body FROM {keys} k CROSS JOIN events e ON e.key = k.column1"
    return new, dict(look_up(db, query, [(key,) for key in known]))


def expire(db: sqlite3.Connection, before: int, limit: int, force: bool) -> int:
    """Delete the oldest events; see :meth:`EventStore.expire`."""
    (newest,) = db.execute("SELECT max(received_at) FROM events").fetchone()
    if newest is None or (newest < before and not force):
        return 0
    return db.execute(
        "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE received_at < ? "
        "ORDER BY received_at, seq LIMIT ?)",
        (before, limit),
    ).rowcount


def find(db: sqlite3.Connection, workspace_id: str, origin: str, message_id: str) -> Event | None:
    """See :meth:`EventStore.find`."""
    try:
        key = key_of(workspace_id, origin, message_id)
    except UnicodeEncodeError:
        return None
    row = db.execute(f"SELECT {_COLUMNS} FROM events WHERE key = ?", (key,)).fetchone()
    return None if row is None else event_of(row)


def scan(
    db: sqlite3.Connection, wanted: EventFilter, after: int | None, limit: int
) -> tuple[list[Event], int | None]:
    """See :meth:`EventStore.scan`."""
    if after is None and wanted.since is not None:
        after = _before_first(db, wanted.since)
    window = Window(db, "events", "seq", after)
    conditions, values = ["seq > ?", "seq <= ?"], [window.after, window.last]
    for condition, value in (
        ("workspace = ?", wanted.workspace_id),
        ("received_at >= ?", wanted.since),
        ("type = ?", wanted.type),
        ("user_id = ?", wanted.user_id),
    ):
        if value is not None:
            # The + keeps SQLite from leaving the order of seq for another index.
            conditions.append(f"+{condition}")
            values.append(value)
    rows = db.execute(
        f"SELECT seq, {_COLUMNS} FROM events WHERE {' AND '.join(conditions)} ORDER BY seq", values
    )
    return window.page(rows, lambda row: (event_of(row[1:]), len(row[-1])), limit)


def _before_first(db: sqlite3.Connection, since: int) -> int | None:
    """:return: a number below all events received since then; ``None`` when it is long to find."""
    first, count = db.execute(
        "SELECT min(seq), count(*) FROM "
        "(SELECT seq FROM events WHERE received_at >= ? LIMIT 1000000)",
        (since,),
    ).fetchone()
    if count == 1_000_000:
        return None
    if first is None:
        (first,) = db.execute("SELECT max(seq) + 1 FROM events").fetchone()
    return None if first is None else int(first) - 1
