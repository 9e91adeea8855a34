# SPDX-License-Identifier: Apache-2.0
"""Looks for damage in the file that only this storage can see.

Everything is read in steps, and each step sees one state of the store: writes continue.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import orjson

from engage.api import ERASED, StorageUnavailable, StoreProblem, identifier_value
from engage.store.events import ERASED_TYPE
from engage.store.keys import key_of
from engage.store.profiles import GROUP, VISITOR

from .writer import operations
from .writer.writer import Writer

#: Rows of one step. The process that writes looks up the keys of the events of one at once.
_STEP: Final = 1000

#: Table → the columns that lead to a profile.
_OF_PROFILES: Final = ("traits", "memberships", "links", "identifiers", "claims")

#: What a step found: problems, how many rows it looked at, and where the next one begins.
_Step = tuple[list[StoreProblem], int, int | None]


def _problem(what: str, message: str, **fields: Any) -> StoreProblem:
    return StoreProblem(what=what, message=message, **fields)


async def problems(
    read: Callable[..., Awaitable[Any]], writer: Writer
) -> AsyncIterator[StoreProblem | int]:
    """Yield what is wrong with the file.

    :param read: calls a function with a connection and other arguments.
    """
    for step in (*map(_integrity, await read(_tables)), _profiles, _history, _totals):
        after: int | None = 0
        while after is not None:
            problems, count, after = await read(step, after)
            yield count
            for problem in problems:
                yield problem
    after, with_keys = 0, True
    while after is not None:
        problems, keys, after = await read(_events, after)
        yield len(keys)
        if with_keys:
            try:
                # Only the process that writes has the newest keys, and the filters.
                lost = await writer.call(operations.MISSED, list(keys.items()))
            except StorageUnavailable as error:
                with_keys = False
                yield _problem("keys", str(error), doubt="unknown")
            else:
                # An event may have expired meanwhile.
                problems += await read(_of_lost_keys, lost) if lost else ()
        for problem in problems:
            yield problem


# -------------------------------------------------------------------------------------------- file
def _tables(db: sqlite3.Connection) -> list[str]:
    rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return [name for (name,) in rows if not name.startswith("sqlite_")]


def _integrity(table: str) -> Callable[[sqlite3.Connection, int], _Step]:
    """Return SQLite's own check of a table and its indexes."""

    def check(db: sqlite3.Connection, _: int) -> _Step:
        rows = db.execute(f"PRAGMA integrity_check('{table}')")
        return [_problem("file", f"{table}: {row}") for (row,) in rows if row != "ok"], 1, None

    return check


# ------------------------------------------------------------------------------------------ events
def _events(
    db: sqlite3.Connection, after: int
) -> tuple[list[StoreProblem], dict[int, bytes], int | None]:
    """Look at some events, and return the key of each."""
    problems: list[StoreProblem] = []
    rows = db.execute(
        "SELECT seq, key, workspace, origin, message_id, type = ?, "
        "(length(body) = 0 OR substr(body, 1, ?) = ?) AND "
        "ifnull(user_id, anonymous_id) IS NULL FROM events WHERE seq > ? ORDER BY seq LIMIT ?",
        (ERASED_TYPE, len(ERASED), ERASED, after, _STEP),
    ).fetchall()
    last = after
    for seq, key, workspace, origin, message_id, is_erased, is_empty in rows:
        if last and seq != last + 1:
            message = f"{last + 1} to {seq - 1} are missing"
            problems.append(_problem("numbers of events", message, doubt="expired"))
        last = seq
        whose = f"the event {seq} ({workspace}: {origin} {message_id!r})"
        if is_erased and (message_id or not is_empty):
            problems.append(_problem("events", f"{whose} is erased, but not all of it"))
        elif not is_erased and key != key_of(workspace, origin, message_id):
            problems.append(_problem("keys", f"{whose} has the key of another event"))
    return problems, {row[0]: row[1] for row in rows}, last if len(rows) == _STEP else None


def _of_lost_keys(db: sqlite3.Connection, numbers: Sequence[int]) -> list[StoreProblem]:
    """Return those events that are still stored as problems."""
    query = "SELECT workspace, origin, message_id FROM events WHERE seq = ?"
    return [
        _problem("keys", f"that of the event {seq} {row} is missing, or leads to another event")
        for seq in numbers
        if (row := db.execute(query, (seq,)).fetchone()) is not None
    ]


# ---------------------------------------------------------------------------------------- profiles
def _profiles(db: sqlite3.Connection, after: int) -> _Step:
    """Look at the counters and the identifiers of some profiles, and at rows without one."""
    problems: list[StoreProblem] = []
    rows = db.execute(
        "SELECT p.id, p.workspace, p.name, p.traits = (SELECT count(*) FROM traits t "
        "WHERE t.profile = p.id AND t.size > 0) AND p.trait_bytes = (SELECT ifnull(sum(t.size), 0) "
        "FROM traits t WHERE t.profile = p.id) AND p.links = (SELECT count(*) FROM links l "
        "WHERE l.profile = p.id AND l.received_at IS NOT NULL) AND p.memberships = "
        "(SELECT count(*) FROM memberships m WHERE m.profile = p.id) "
        "FROM profiles p WHERE p.id > ? ORDER BY p.id LIMIT ?",
        (after, _STEP),
    ).fetchall()
    last = rows[-1][0] if len(rows) == _STEP else sys.maxsize
    for _, workspace, name, is_right in rows:
        if not is_right:
            problems.append(_problem("counters of profiles", f"{workspace}: those of {name!r}"))
    for table in _OF_PROFILES:
        lost = db.execute(
            f"SELECT DISTINCT profile FROM {table} t WHERE profile > ? AND profile <= ? "
            "AND NOT EXISTS (SELECT 1 FROM profiles p WHERE p.id = t.profile)",
            (after, last),
        )
        for (number,) in lost:
            problems.append(_problem(table, f"the profile {number} is missing"))
    values = db.execute(
        "SELECT p.workspace, p.name, d.trait, t.value, i.value, p.kind, i.kind, i.workspace "
        "FROM profiles p CROSS JOIN indexed d ON d.workspace = p.workspace "
        "LEFT JOIN traits t ON t.profile = p.id AND t.trait = d.trait "
        "LEFT JOIN identifiers i ON i.profile = p.id AND i.trait = d.trait "
        "WHERE p.id > ? AND p.id <= ? AND p.kind <> ? AND (t.value NOT NULL OR i.value NOT NULL)",
        (after, last, GROUP),
    )
    for workspace, name, trait, encoded, value, *places in values:
        form = None if encoded is None else identifier_value(trait, orjson.loads(encoded))
        kind, its_kind, its_workspace = places
        if form != value or (value is not None and (its_kind, its_workspace) != (kind, workspace)):
            message = f"{workspace}: {name!r} is not found by its {trait!r}"
            problems.append(_problem("identifiers", message))
    return problems, len(rows), last if len(rows) == _STEP else None


def _totals(db: sqlite3.Connection, _: int) -> _Step:
    """Look at the number of visitors, the keys of dead letters, and the last number of an event."""
    query = f"SELECT workspace, count(*) FROM profiles WHERE kind = {VISITOR} GROUP BY workspace"
    counted = dict(db.execute(query).fetchall())
    kept = {name: count for name, count in db.execute("SELECT * FROM visitor_totals") if count}
    problems = [
        _problem("visitor_totals", f"{name}: {kept.get(name, 0)}, not {counted.get(name, 0)}")
        for name in sorted(kept.keys() | counted.keys())
        if kept.get(name) != counted.get(name)
    ]
    (given,) = db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'events'").fetchone()
    (last,) = db.execute("SELECT max(seq) FROM events").fetchone()
    if (last or 0) > (given or 0):
        problems.append(_problem("numbers of events", f"{last} could be given again"))
    elif (last or 0) < (given or 0):
        message = f"{(last or 0) + 1} to {given}, of the newest events, are missing"
        problems.append(_problem("numbers of events", message, doubt="expired"))
    for key, workspace, name in db.execute("SELECT key, workspace, id FROM letters"):
        if key != key_of(workspace, name):
            problems.append(_problem("letters", f"{workspace}: {name} has the key of another one"))
    return problems, len(counted), None


def _history(db: sqlite3.Connection, after: int) -> _Step:
    """Look whether the changes of some records are remembered."""
    rows = db.execute(
        "SELECT seq, workspace, change_id FROM history WHERE seq > ? ORDER BY seq LIMIT ?",
        (after, _STEP),
    ).fetchall()
    problems = [
        _problem("changes", f"{workspace}: {change!r} would be applied again")
        for _, workspace, change in rows
        if not _is_remembered(db, key_of(workspace, change))
    ]
    return problems, len(rows), rows[-1][0] if len(rows) == _STEP else None


def _is_remembered(db: sqlite3.Connection, key: bytes) -> bool:
    return db.execute("SELECT 1 FROM changes WHERE key = ?", (key,)).fetchone() is not None
