# SPDX-License-Identifier: Apache-2.0
"""Rows of subscription choices and their history."""

from __future__ import annotations

import sqlite3
import uuid
from typing import Any, Final

from engage.api import (
    Kind,
    Subject,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
)

from ..connection import KEY_BYTES, insert, is_text, key_of
from ..schema import USER
from .changes import KIND_OF, KINDS
from .paging import Window

#: Changes without effect that are remembered of one subject.
MAX_IDLE: Final = 16

_RECORD: Final = (
    "change_id, workspace, kind, name, group_id, before, after, at, how, secret, user_agent, "
    "address"
)
_OF_SUBJECT: Final = "WHERE workspace = ? AND kind = ? AND name = ?"


def apply(db: sqlite3.Connection, change: SubscriptionChange) -> dict[str, bool]:
    """Apply a change, once for each id; see :meth:`SubscriptionStore.apply`.

    :return: all choices of the subject.
    """
    subject = change.workspace_id, KINDS[change.subject.kind], change.subject.id
    key = key_of(change.workspace_id, change.id)
    idle = _IdleChanges(db, change)
    if key in idle or db.execute("SELECT 1 FROM changes WHERE key = ?", (key,)).fetchone():
        return state(db, change.workspace_id, change.subject)
    if subject[1] == USER:
        db.execute(
            "INSERT INTO profiles (workspace, kind, name, traits, trait_bytes, links, memberships, "
            "chosen_first, chosen_last) VALUES (?, ?, ?, 0, 0, 0, 0, ?4, ?4) "
            "ON CONFLICT (workspace, kind, name) DO UPDATE SET "
            "chosen_first = min(ifnull(chosen_first, ?4), ?4), "
            "chosen_last = max(ifnull(chosen_last, ?4), ?4)",
            (*subject, change.at),
        )
    kept = {
        group: (bool(subscribed), at)
        for group, subscribed, at in db.execute(
            f"SELECT group_id, subscribed, updated_at FROM choices {_OF_SUBJECT}", subject
        )
    }
    choices = {
        group: wanted
        for group, wanted in change.choices.items()
        if not (change.dated and group in kept and kept[group][1] >= change.at)
    }
    insert(
        db,
        "INSERT INTO choices (workspace, kind, name, group_id, subscribed, updated_at, change_id)",
        [(*subject, group, wanted, change.at, change.id) for group, wanted in choices.items()],
        "ON CONFLICT (workspace, kind, name, group_id) DO UPDATE SET "
        "subscribed = excluded.subscribed, change_id = excluded.change_id, "
        "updated_at = max(excluded.updated_at, updated_at + 1)",
    )
    rows = [
        (
            change.id,
            *subject,
            group,
            kept[group][0] if group in kept else None,
            wanted,
            change.at,
            change.how,
            change.secret,
            change.user_agent,
            change.address,
        )
        for group, wanted in choices.items()
        if group not in kept or kept[group][0] is not wanted
    ]
    if rows:
        db.execute("INSERT INTO changes (key) VALUES (?)", (key,))
    else:
        idle.add(key)
    insert(db, f"INSERT INTO history ({_RECORD})", rows)
    return state(db, change.workspace_id, change.subject)


class _IdleChanges:
    """The changes of a subject that had no effect.

    They are remembered, because one that is repeated after a later change must not undo that one.
    Only the latest are: anyone who has a link can send any number of them.

    Their rows in the table ``changes`` have longer keys than those of other changes: the subject, a
    number that grows, and the key of the change.
    """

    def __init__(self, db: sqlite3.Connection, change: SubscriptionChange) -> None:
        self._db = db
        self._subject = _key_of_subject(change.workspace_id, change.subject)
        self._rows = _idle_rows(db, self._subject)

    def __contains__(self, key: bytes) -> bool:
        return any(row.endswith(key) for row in self._rows)

    def add(self, key: bytes) -> None:
        """Remember a change, and forget the oldest if there are too many."""
        size = len(self._subject)
        number = int.from_bytes(self._rows[-1][size : size + 8], "big") + 1 if self._rows else 0
        row = self._subject + number.to_bytes(8, "big") + key
        self._db.execute("INSERT INTO changes (key) VALUES (?)", (row,))
        self._db.executemany(
            "DELETE FROM changes WHERE key = ?", [(old,) for old in self._rows[: 1 - MAX_IDLE]]
        )


def _key_of_subject(workspace_id: str, subject: Subject) -> bytes:
    # The key of a user is that of the stores of earlier versions.
    kind = [] if subject.kind is Kind.USER else [subject.kind.value]
    return key_of(workspace_id, subject.id, *kind)


def _idle_rows(db: sqlite3.Connection, subject: bytes) -> list[bytes]:
    """Return the rows of the changes of a subject that had no effect, the oldest first."""
    query = "SELECT key FROM changes WHERE key > ? AND key < ? ORDER BY key"
    return [row for (row,) in db.execute(query, (subject + bytes(8), subject + b"\xff" * 8))]


def erase(
    db: sqlite3.Connection, workspace_id: str, subject: Subject, pseudonym: str
) -> tuple[int, int]:
    """Erase the choices of a subject; see :meth:`ErasureStore.erase_choices`."""
    # The rows of changes without effect begin with a hash of the id, which can be guessed.
    idle = _idle_rows(db, _key_of_subject(workspace_id, subject))
    query = "INSERT OR IGNORE INTO changes (key) VALUES (?)"
    db.executemany(query, [(row[-KEY_BYTES:],) for row in idle])
    db.executemany("DELETE FROM changes WHERE key = ?", [(row,) for row in idle])
    whose, records = (workspace_id, KINDS[subject.kind], subject.id), 0
    found = db.execute(f"SELECT DISTINCT change_id FROM history {_OF_SUBJECT}", whose)
    for (change,) in found.fetchall():
        new = str(uuid.uuid4())
        db.execute("INSERT INTO changes (key) VALUES (?)", (key_of(workspace_id, new),))
        records += db.execute(
            "UPDATE history SET name = ?, change_id = ?, secret = '', user_agent = '', "
            f"address = '' {_OF_SUBJECT} AND change_id = ?",
            (pseudonym, new, *whose, change),
        ).rowcount
    return db.execute(f"DELETE FROM choices {_OF_SUBJECT}", whose).rowcount, records


def state(db: sqlite3.Connection, workspace_id: str, subject: Subject) -> dict[str, bool]:
    """Return the choices of a subject: group id → subscribed."""
    if not is_text(subject.id):
        return {}
    whose = workspace_id, KINDS[subject.kind], subject.id
    query = f"SELECT group_id, subscribed FROM choices {_OF_SUBJECT}"
    return {group: bool(subscribed) for group, subscribed in db.execute(query, whose)}


def scan(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[SubscriptionState], int | None]:
    """Return a page of the current choices, and its cursor."""
    window = Window(db, "choices", "id", after)
    condition = "" if workspace_id is None else "AND +workspace = :workspace"
    rows = db.execute(
        "SELECT id, workspace, kind, name, group_id, subscribed, updated_at, change_id "
        f"FROM choices WHERE id > :after AND id <= :last {condition} ORDER BY id",
        {"after": window.after, "last": window.last, "workspace": workspace_id},
    )
    return window.page(rows, _state, limit)


def _state(row: Any) -> tuple[SubscriptionState, int]:
    _, workspace, kind, name, group, subscribed, at, change = row
    return (
        SubscriptionState(
            workspace_id=workspace,
            subject=Subject(KIND_OF[kind], name),
            group_id=group,
            subscribed=bool(subscribed),
            updated_at=at,
            change_id=change,
        ),
        len(name),
    )


def history(
    db: sqlite3.Connection,
    workspace_id: str | None,
    subject: Subject | None,
    since: int,
    after: int | None,
    limit: int,
) -> tuple[list[SubscriptionRecord], int | None]:
    """Return a page of audit records in the order in which they were written, and its cursor."""
    # Only its own rows are examined for a subject.
    is_indexed = workspace_id is not None and subject is not None
    window = Window(db, "history", "seq", after, bounded=not is_indexed)
    conditions = " AND at >= :since" if since else ""
    if workspace_id is not None:
        conditions += " AND workspace = :workspace"
    if subject is not None:
        conditions += " AND kind = :kind AND name = :name"
    rows = db.execute(
        f"SELECT seq, {_RECORD} FROM history "
        f"WHERE seq > :after AND seq <= :last {conditions} ORDER BY seq",
        {
            "after": window.after,
            "last": window.last,
            "workspace": workspace_id,
            "kind": None if subject is None else KINDS[subject.kind],
            "name": None if subject is None else subject.id,
            "since": since,
        },
    )
    return window.page(rows, _record, limit)


def _record(row: Any) -> tuple[SubscriptionRecord, int]:
    _, change, workspace, kind, name, group, before, after, at, how, *source = row
    secret, user_agent, address = source
    return (
        SubscriptionRecord(
            change_id=change,
            workspace_id=workspace,
            subject=Subject(KIND_OF[kind], name),
            group_id=group,
            before=None if before is None else bool(before),
            after=bool(after),
            at=at,
            how=how,
            secret=secret,
            user_agent=user_agent,
            address=address,
        ),
        len(name) + len(user_agent),
    )
