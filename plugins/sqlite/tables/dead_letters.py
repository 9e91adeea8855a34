# SPDX-License-Identifier: Apache-2.0
"""Rows of dead letters, and their budgets."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api import API_ORIGIN, CONFLICT, BudgetName, BudgetUse, DeadLetter, DeadLetterBudget

from ..connection import is_text, key_of, look_up
from .paging import ReverseWindow, Window

_COLUMNS: Final = (
    "id, workspace, origin, write_key_id, user_id, anonymous_id, message_id, reason, message, "
    "errors, item, truncated, headers, received_at, operation, envelope"
)

#: Budget → the column ``api`` of ``letter_totals``.
_NUMBERS: Final[Mapping[BudgetName, int]] = {"webhook": 0, "api": 1, "conflict": 2}
#: The same number, of a row of ``letters``.
_NUMBER: Final = (
    f"CASE WHEN origin <> '{API_ORIGIN}' THEN 0 WHEN reason = '{CONFLICT}' THEN 2 ELSE 1 END"
)


def keep(
    db: sqlite3.Connection, letters: Sequence[DeadLetter], budget: DeadLetterBudget
) -> list[bool]:
    """Store dead letters within the budgets, each id once, and return whether each is stored.

    :param letters: made by :func:`storable`.
    """
    totals = {
        (workspace, number): (count, size)
        for workspace, number, count, size in db.execute(
            "SELECT workspace, api, count, size FROM letter_totals"
        )
    }
    kept = []
    for letter in letters:
        key = key_of(letter.workspace_id, letter.id)
        if db.execute("SELECT 1 FROM letters WHERE key = ?", (key,)).fetchone():
            kept.append(True)
            continue
        number = _NUMBERS[letter.budget]
        max_count, max_bytes = budget.of(letter.budget)
        errors, headers = orjson.dumps(list(letter.errors)), orjson.dumps(list(letter.headers))
        size = letter.size
        count, total = totals.get((letter.workspace_id, number), (0, 0))
        kept.append(count < max_count and total + size <= max_bytes)
        if not kept[-1]:
            continue
        totals[letter.workspace_id, number] = (count + 1, total + size)
        db.execute(
            f"INSERT INTO letters (key, {_COLUMNS}, size) VALUES ({','.join('?' * 18)})",
            (
                key,
                letter.id,
                letter.workspace_id,
                letter.origin,
                letter.write_key_id,
                letter.user_id,
                letter.anonymous_id,
                letter.message_id,
                letter.reason,
                letter.message,
                errors,
                letter.item,
                letter.truncated,
                headers,
                letter.received_at,
                letter.operation,
                letter.envelope,
                size,
            ),
        )
    db.executemany(
        "INSERT OR REPLACE INTO letter_totals (workspace, api, count, size) VALUES (?, ?, ?, ?)",
        [(workspace, number, *total) for (workspace, number), total in totals.items()],
    )
    return kept


def use(db: sqlite3.Connection) -> list[BudgetUse]:
    """Return how much of each budget is used."""
    names = {number: name for name, number in _NUMBERS.items()}
    return [
        BudgetUse(workspace_id=workspace, budget=names[number], count=count, size=size)
        for workspace, number, count, size in db.execute(
            "SELECT workspace, api, count, size FROM letter_totals ORDER BY workspace, api"
        )
    ]


def storable(letter: DeadLetter) -> DeadLetter:
    """Return a dead letter without lone surrogates: one may be the reason why the event was
    refused, and must not prevent the dead letter from being stored."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(letter):
        value = getattr(letter, field.name)
        if isinstance(value, str):
            values[field.name] = _storable_text(value)
    return dataclasses.replace(
        letter,
        **values,
        errors=[
            {name: _storable_text(text) for name, text in error.items()} for error in letter.errors
        ],
        headers=[(_storable_text(name), _storable_text(value)) for name, value in letter.headers],
    )


def _storable_text(value: str) -> str:
    return value if is_text(value) else value.encode(errors="replace").decode()


def scan(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[DeadLetter], int | None]:
    """Return a page of dead letters in order of arrival, and its cursor."""
    window = Window(db, "letters", "seq", after)
    condition = "" if workspace_id is None else "AND +workspace = :workspace"
    rows = db.execute(
        f"SELECT seq, {_COLUMNS} FROM letters "
        f"WHERE seq > :after AND seq <= :last {condition} ORDER BY seq",
        {"after": window.after, "last": window.last, "workspace": workspace_id},
    )
    return window.page(rows, _dead_letter, limit)


def recent(
    db: sqlite3.Connection, workspace_id: str | None, before: int | None, limit: int
) -> tuple[list[DeadLetter], int | None]:
    """Return a page of dead letters, newest first, and its cursor."""
    window = ReverseWindow(db, "letters", "seq", before)
    condition = "" if workspace_id is None else "AND +workspace = :workspace"
    rows = db.execute(
        f"SELECT seq, {_COLUMNS} FROM letters "
        f"WHERE seq >= :first AND seq < :before {condition} ORDER BY seq DESC",
        {"first": window.first, "before": window.before, "workspace": workspace_id},
    )
    return window.page(rows, _dead_letter, limit)


def find(db: sqlite3.Connection, workspace_id: str, letter_id: str) -> DeadLetter | None:
    """Return the letter with this id, or ``None``."""
    if not is_text(workspace_id + letter_id):
        return None
    key = key_of(workspace_id, letter_id)
    query = f"SELECT seq, {_COLUMNS} FROM letters WHERE key = ?"
    row = db.execute(query, (key,)).fetchone()
    return None if row is None else _dead_letter(row)[0]


def _dead_letter(row: Any) -> tuple[DeadLetter, int]:
    return (
        DeadLetter(
            id=row[1],
            workspace_id=row[2],
            origin=row[3],
            write_key_id=row[4],
            user_id=row[5],
            anonymous_id=row[6],
            message_id=row[7],
            reason=row[8],
            message=row[9],
            errors=orjson.loads(row[10]),
            item=row[11],
            truncated=bool(row[12]),
            headers=[(name, value) for name, value in orjson.loads(row[13])],
            received_at=row[14],
            operation=row[15],
            envelope=row[16],
        ),
        len(row[11]) + len(row[16] or b""),
    )


def remove(db: sqlite3.Connection, workspace_id: str, ids: Sequence[str]) -> int:
    """Delete dead letters, and return how many existed."""
    keys = {(key_of(workspace_id, one),) for one in ids}
    query = "SELECT l.seq FROM {keys} k CROSS JOIN letters l ON l.key = k.column1"
    return _delete(db, [seq for (seq,) in look_up(db, query, keys)])


def expire(db: sqlite3.Connection, before: int, limit: int) -> int:
    """Delete the oldest dead letters received before ``before``, and return how many."""
    query = "SELECT seq FROM letters WHERE received_at < ? ORDER BY received_at, seq LIMIT ?"
    return _delete(db, [seq for (seq,) in db.execute(query, (before, limit))])


def _delete(db: sqlite3.Connection, numbers: Iterable[int]) -> int:
    deleted = 0
    for seq in numbers:
        workspace, number, size = db.execute(
            f"SELECT workspace, {_NUMBER}, size FROM letters WHERE seq = ?", (seq,)
        ).fetchone()
        db.execute("DELETE FROM letters WHERE seq = ?", (seq,))
        db.execute(
            "UPDATE letter_totals SET count = count - 1, size = size - ? "
            "WHERE workspace = ? AND api = ?",
            (size, workspace, number),
        )
        deleted += 1
    return deleted
