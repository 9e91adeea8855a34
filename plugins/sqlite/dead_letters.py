# SPDX-License-Identifier: Apache-2.0
"""Rows of dead letters, and their budgets."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from engage.api import API_ORIGIN, DeadLetter, DeadLetterBudget

from .connection import is_text, key_of, look_up
from .paging import Window

_COLUMNS: Final = (
    "id, workspace, origin, write_key_id, user_id, anonymous_id, message_id, reason, message, "
    "errors, item, truncated, headers, received_at"
)


def put(db: sqlite3.Connection, letters: Sequence[DeadLetter], budget: DeadLetterBudget) -> int:
    """Store dead letters within the budget, each id once.

    :return: how many were dropped because a budget is used up.
    """
    totals = {
        (workspace, bool(api)): (count, size)
        for workspace, api, count, size in db.execute(
            "SELECT workspace, api, count, size FROM letter_totals"
        )
    }
    dropped = 0
    for letter in map(_storable, letters):
        key = key_of(letter.workspace_id, letter.id)
        if db.execute("SELECT 1 FROM letters WHERE key = ?", (key,)).fetchone():
            continue
        api = letter.origin == API_ORIGIN
        max_count, max_bytes = (
            (budget.api_count, budget.api_bytes)
            if api
            else (budget.webhook_count, budget.webhook_bytes)
        )
        errors, headers = orjson.dumps(list(letter.errors)), orjson.dumps(list(letter.headers))
        size = len(letter.item) + len(errors) + len(headers)
        count, total = totals.get((letter.workspace_id, api), (0, 0))
        if count >= max_count or total + size > max_bytes:
            dropped += 1
            continue
        totals[letter.workspace_id, api] = (count + 1, total + size)
        db.execute(
            f"INSERT INTO letters (key, {_COLUMNS}, size) VALUES ({','.join('?' * 16)})",
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
                size,
            ),
        )
    db.executemany(
        "INSERT OR REPLACE INTO letter_totals (workspace, api, count, size) VALUES (?, ?, ?, ?)",
        [(workspace, api, *total) for (workspace, api), total in totals.items()],
    )
    return dropped


def _storable(letter: DeadLetter) -> DeadLetter:
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
        f"SELECT seq, {_COLUMNS} FROM letters WHERE seq > :after AND seq <= :last {condition} "
        "ORDER BY seq",
        {"after": window.after, "last": window.last, "workspace": workspace_id},
    )
    return window.page(rows, _dead_letter, limit)


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
        ),
        len(row[11]),
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
    count = 0
    for number in numbers:
        workspace, origin, size = db.execute(
            "SELECT workspace, origin, size FROM letters WHERE seq = ?", (number,)
        ).fetchone()
        db.execute("DELETE FROM letters WHERE seq = ?", (number,))
        db.execute(
            "UPDATE letter_totals SET count = count - 1, size = size - ? "
            "WHERE workspace = ? AND api = ?",
            (size, workspace, origin == API_ORIGIN),
        )
        count += 1
    return count
