# SPDX-License-Identifier: Apache-2.0
"""Rows of events: inserting, finding, scanning and expiring them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engage.api import Event, EventFilter, Outcome, Status
from engage.store.keys import is_text, key_of

from ..connection import insert, look_up
from ..keys import parts
from .paging import ReverseWindow, Window

_COLUMNS: Final = (
    "workspace, origin, message_id, type, user_id, anonymous_id, name, received_at, timestamp, body"
)
#: Rows that are counted at most to find the first event received since a given time.
_MAX_COUNTED: Final = 20_000_000

#: Rows near a time among which the first or the last event is looked for. Events are not stored in
#: the exact order of their times of receipt: several processes receive them, and a clock is set.
_MAX_NEAR: Final = 200_000

#: Bytes of stored events that one write returns for its duplicates. A small write of duplicates of
#: large events would need much memory otherwise; the core looks up the others one by one.
_MAX_RETURNED: Final = 16 * 1024 * 1024

#: The type of the row that an erased event leaves: it keeps the key, the workspace and the time of
#: receipt, so it expires as the event would have. Its body is the mark.
ERASED_TYPE: Final = "erased"

#: The outcome of every newly stored event: one object, because there are many of them.
STORED: Final = Outcome(Status.STORED)

#: The key and the values of ``_COLUMNS`` of one event: plain, so that they can be sent to another
#: process.
Row = tuple[Any, ...]

#: SQLite's own limit for a value is 1 GB; no event comes near this one.
_MAX_BYTES: Final = 256 * 1024 * 1024
_INTEGERS: Final = range(-(2**63), 2**63)


#: Characters of the beginning of a text that SQLite compares. Its own limit is 50,000 bytes.
_MAX_PATTERN: Final = 1000


class UnstorableError(Exception):
    """This event can never be stored; the message is the reason, for the client."""


def row_of(event: Event) -> Row:
    """Return the key and the values of an event, in the order of the columns.

    :raises UnstorableError: if SQLite cannot store one of the values.
    """
    try:
        key = key_of(event.workspace_id, event.origin, event.message_id)
        # One call for all four: a lone surrogate in any of them is one in the whole.
        f"{event.type}{event.user_id}{event.anonymous_id}{event.name}".encode()
    except UnicodeEncodeError:
        raise UnstorableError("a text contains a lone surrogate, not a character") from None
    if event.received_at not in _INTEGERS or event.timestamp not in _INTEGERS:
        raise UnstorableError("a time does not fit in 64 bits")
    if len(event.body) > _MAX_BYTES:
        raise UnstorableError(f"the event is longer than {_MAX_BYTES} bytes")
    return (
        key,
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


def event_of(row: Row) -> Event:
    """Return the event of a row; its first value, a key or a number, is not needed."""
    return Event(
        workspace_id=row[1],
        origin=row[2],
        message_id=row[3],
        type=row[4],
        user_id=row[5],
        anonymous_id=row[6],
        name=row[7],
        received_at=row[8],
        timestamp=row[9],
        body=row[10],
    )


def insert_new(db: sqlite3.Connection, rows: Sequence[Row], first: int) -> None:
    """Insert events that are not stored yet.

    :param first: the number of the first one.
    """
    numbered = [(number, *row) for number, row in enumerate(rows, first)]
    insert(db, f"INSERT INTO events (seq, key, {_COLUMNS})", numbered)


def existing(db: sqlite3.Connection, numbers: Mapping[bytes, int]) -> dict[bytes, bytes | None]:
    """Return which of some events are stored.

    :param numbers: key → number of the event, if it is stored.
    :return: key → stored body, or ``None`` for those that are too large together.
    """
    if not numbers:
        return {}
    join = "{keys} w CROSS JOIN events e ON e.seq = w.column2 AND e.key = w.column1"
    # Without the bodies of events, which may take many pages.
    query = f"SELECT e.key, e.seq, CASE e.type WHEN '{ERASED_TYPE}' THEN e.body END FROM {join}"
    bodies: dict[bytes, bytes | None] = {}
    found: dict[bytes, int] = {}
    for key, number, mark in look_up(db, query, list(numbers.items())):
        bodies[key] = mark
        if mark is None:
            found[key] = number
    size = 0
    for key, body in look_up(db, f"SELECT e.key, e.body FROM {join}", list(found.items())):
        bodies[key] = body
        size += len(body)
        if size > _MAX_RETURNED:
            break
    return bodies


def expire(db: sqlite3.Connection, before: int, limit: int, force: bool) -> int:
    """Delete the oldest events, and return how many; see :meth:`EventStore.expire`."""
    (newest,) = db.execute("SELECT max(received_at) FROM events").fetchone()
    if newest is None or (newest < before and not force):
        return 0
    return db.execute(
        "DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE received_at < ? "
        "ORDER BY received_at, seq LIMIT ?)",
        (before, limit),
    ).rowcount


def erase(
    db: sqlite3.Connection, numbers: Mapping[bytes, int], marks: Mapping[bytes, bytes]
) -> int:
    """Erase events, and return how many there were; see :meth:`ErasureStore.erase_events`.

    :param numbers: key → number of the event, if it is stored.
    :param marks: key → mark.
    """
    done = db.executemany(
        "UPDATE events SET origin = '', message_id = '', user_id = NULL, anonymous_id = NULL, "
        f"name = NULL, timestamp = 0, body = ?, type = '{ERASED_TYPE}' "
        f"WHERE seq = ? AND key = ? AND type <> '{ERASED_TYPE}'",
        [(marks[key], number, key) for key, number in numbers.items()],
    )
    return max(0, done.rowcount)


def find(db: sqlite3.Connection, key: bytes) -> Event | None:
    """Return the event of a key, or ``None``; this takes a while if it is among the newest ones."""
    for (number,) in db.execute(parts.NUMBERS, (key,)).fetchall():
        found = at(db, key, number)
        if found is not None:
            return found
    row = db.execute(
        f"SELECT key, {_COLUMNS} FROM events WHERE key = ? AND type <> '{ERASED_TYPE}' AND "
        "seq > (SELECT value FROM store WHERE name = 'merged') ORDER BY seq DESC LIMIT 1",
        (key,),
    ).fetchone()
    return None if row is None else event_of(row)


def at(db: sqlite3.Connection, key: bytes, number: int) -> Event | None:
    """Return the event of a number, if it is there and has this key."""
    row = db.execute(
        f"SELECT key, {_COLUMNS} FROM events WHERE seq = ? AND key = ? AND type <> '{ERASED_TYPE}'",
        (number, key),
    ).fetchone()
    return None if row is None else event_of(row)


def scan(
    db: sqlite3.Connection, wanted: EventFilter, after: int | None, limit: int
) -> tuple[list[Event], int | None]:
    """Return a page of events in order of arrival, and its cursor."""
    if after is None and wanted.since is not None:
        after = _before_first(db, wanted.since)
    window = Window(db, "events", "seq", after)
    where, values = _conditions(wanted)
    rows = db.execute(
        f"SELECT seq, {_COLUMNS} FROM events WHERE seq > ? AND seq <= ? {where} ORDER BY seq",
        (window.after, window.last, *values),
    )
    return window.page(rows, _sized, limit)


def recent(
    db: sqlite3.Connection, wanted: EventFilter, before: int | None, limit: int
) -> tuple[list[Event], int | None]:
    """Return a page of events, newest first, and its cursor."""
    if before is None and wanted.until is not None:
        before = _after_last(db, wanted.until)
    least = None if wanted.since is None else _first_near(db, wanted.since)
    window = ReverseWindow(db, "events", "seq", before, least)
    where, values = _conditions(wanted)
    rows = db.execute(
        f"SELECT seq, {_COLUMNS} FROM events WHERE seq >= ? AND seq < ? {where} ORDER BY seq DESC",
        (window.first, window.before, *values),
    )
    return window.page(rows, _sized, limit)


def _conditions(wanted: EventFilter) -> tuple[str, list[Any]]:
    """Return the conditions of a filter, each with an ``AND`` before it, and their values."""
    conditions, values = f" AND +type <> '{ERASED_TYPE}'", list[Any]()
    for condition, value in (
        ("workspace = ?", wanted.workspace_id),
        ("received_at >= ?", wanted.since),
        ("received_at < ?", wanted.until),
        ("type = ?", wanted.type),
        ("user_id = ?", wanted.user_id),
        ("name = ?", wanted.name),
        ("origin = ?", wanted.origin),
    ):
        if value is not None:
            # The + prevents SQLite from using another index than the one in the order of seq.
            conditions += f" AND +{condition}"
            values.append(value)
    if wanted.ids is not None:
        ids = [*filter(is_text, wanted.ids)]
        conditions += f" AND ifnull(user_id, anonymous_id) IN ({','.join('?' * len(ids))})"
        values += ids
    for fields, text in wanted.begins:
        conditions += f" AND ({' OR '.join(f'+{field} LIKE ?' for field in fields)})"
        values += [_pattern(text)] * len(fields)
    return conditions, values


def _pattern(beginning: str) -> str:
    """Return a pattern that every text with a beginning fits.

    ``LIKE`` knows the capitals of ASCII only, and ends at a NUL.
    """
    known = beginning[:_MAX_PATTERN].partition("\0")[0]
    return "".join(one if one.isascii() and one not in "%_" else "_" for one in known) + "%"


def _sized(row: Row) -> tuple[Event, int]:
    """Return the event of a row, and the size of its body."""
    return event_of(row), len(row[-1])


def _before_first(db: sqlite3.Connection, since: int) -> int | None:
    """Return a number below those of all events received since a time.

    :return: ``None`` if there are so many that looking for it takes long.
    """
    first, count = db.execute(
        "SELECT min(seq), count(*) FROM (SELECT seq FROM events WHERE received_at >= ? LIMIT ?)",
        (since, _MAX_COUNTED),
    ).fetchone()
    if count == _MAX_COUNTED:
        return None
    if first is None:
        (first,) = db.execute("SELECT max(seq) + 1 FROM events").fetchone()
    return None if first is None else int(first) - 1


def _after_last(db: sqlite3.Connection, until: int) -> int | None:
    """Return a number above those of the events received before a time.

    :return: ``None`` if that may be any number, because the newest event was received before it.
    """
    newest = db.execute(
        "SELECT received_at FROM events WHERE seq = (SELECT max(seq) FROM events)"
    ).fetchone()
    if newest is None or newest[0] < until:
        return None
    (last,) = db.execute(
        "SELECT max(seq) FROM (SELECT seq FROM events WHERE received_at < ? "
        "ORDER BY received_at DESC LIMIT ?)",
        (until, _MAX_NEAR),
    ).fetchone()
    return 0 if last is None else int(last) + 1


def _first_near(db: sqlite3.Connection, since: int) -> int:
    """Return the least number of the events received since a time, above all if there is none."""
    (first,) = db.execute(
        "SELECT min(seq) FROM (SELECT seq FROM events WHERE received_at >= ? "
        "ORDER BY received_at LIMIT ?)",
        (since, _MAX_NEAR),
    ).fetchone()
    if first is None:
        (first,) = db.execute("SELECT max(seq) + 1 FROM events").fetchone()
    return int(first or 0)
