# SPDX-License-Identifier: Apache-2.0
"""Rows of subscription choices and their history."""

from __future__ import annotations

import dataclasses
import sqlite3
import uuid
from collections.abc import Iterable
from typing import Any, Final

from engage.api import (
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
)

from ..connection import KEY_BYTES, insert, key_of, look_up
from ..schema import USER
from .paging import Window
from .people import person_of

#: Changes without effect that are remembered of one user.
MAX_IDLE: Final = 16

_RECORD: Final = (
    "change_id, workspace, user_id, group_id, before, after, at, how, secret, user_agent, address"
)


def apply(db: sqlite3.Connection, change: SubscriptionChange) -> dict[str, bool]:
    """Apply a change, once for each id; see :meth:`SubscriptionStore.apply`.

    :return: all choices of the person.
    """
    key = key_of(change.workspace_id, change.id)
    idle = _IdleChanges(db, change)
    if key in idle or db.execute("SELECT 1 FROM changes WHERE key = ?", (key,)).fetchone():
        return state(db, change.workspace_id, change.user_id)
    db.execute(
        "INSERT INTO profiles (workspace, kind, name, traits, trait_bytes, links, memberships, "
        "chosen_first, chosen_last) VALUES (?, ?, ?, 0, 0, 0, 0, ?4, ?4) "
        "ON CONFLICT (workspace, kind, name) DO UPDATE SET "
        "chosen_first = min(ifnull(chosen_first, ?4), ?4), "
        "chosen_last = max(ifnull(chosen_last, ?4), ?4)",
        (change.workspace_id, USER, change.user_id, change.at),
    )
    kept = {
        group: (bool(subscribed), at)
        for group, subscribed, at in db.execute(
            "SELECT group_id, subscribed, updated_at FROM choices "
            "WHERE workspace = ? AND user_id = ?",
            (change.workspace_id, change.user_id),
        )
    }
    choices = {
        group: wanted
        for group, wanted in change.choices.items()
        if not (change.dated and group in kept and kept[group][1] >= change.at)
    }
    before = state(db, change.workspace_id, change.user_id)
    insert(
        db,
        "INSERT INTO choices (workspace, user_id, group_id, subscribed, updated_at, change_id)",
        [
            (change.workspace_id, change.user_id, group, wanted, change.at, change.id)
            for group, wanted in choices.items()
        ],
        "ON CONFLICT (workspace, user_id, group_id) DO UPDATE SET "
        "subscribed = excluded.subscribed, change_id = excluded.change_id, "
        "updated_at = max(excluded.updated_at, updated_at + 1)",
    )
    rows = [
        (
            change.id,
            change.workspace_id,
            change.user_id,
            group,
            before.get(group),
            wanted,
            change.at,
            change.how,
            change.secret,
            change.user_agent,
            change.address,
        )
        for group, wanted in choices.items()
        if group not in kept or kept[group][0] is not wanted or before.get(group) is not wanted
    ]
    if rows:
        db.execute("INSERT INTO changes (key) VALUES (?)", (key,))
    else:
        idle.add(key)
    insert(db, f"INSERT INTO history ({_RECORD})", rows)
    return state(db, change.workspace_id, change.user_id)


class _IdleChanges:
    """The changes of a user that had no effect.

    They are remembered, because one that is repeated after a later change must not undo that one.
    Only the latest are: anyone who has a user's link can send any number of them.

    Their rows in the table ``changes`` have longer keys than those of other changes: the user, a
    number that grows, and the key of the change.
    """

    def __init__(self, db: sqlite3.Connection, change: SubscriptionChange) -> None:
        self._db = db
        self._user = key_of(change.workspace_id, change.user_id)
        self._rows = _idle_rows(db, change.workspace_id, change.user_id)

    def __contains__(self, key: bytes) -> bool:
        return any(row.endswith(key) for row in self._rows)

    def add(self, key: bytes) -> None:
        """Remember a change, and forget the oldest if there are too many."""
        size = len(self._user)
        number = int.from_bytes(self._rows[-1][size : size + 8], "big") + 1 if self._rows else 0
        row = self._user + number.to_bytes(8, "big") + key
        self._db.execute("INSERT INTO changes (key) VALUES (?)", (row,))
        self._db.executemany(
            "DELETE FROM changes WHERE key = ?", [(old,) for old in self._rows[: 1 - MAX_IDLE]]
        )


def _idle_rows(db: sqlite3.Connection, workspace_id: str, user_id: str) -> list[bytes]:
    """Return the rows of the changes of a user that had no effect, the oldest first."""
    user = key_of(workspace_id, user_id)
    query = "SELECT key FROM changes WHERE key > ? AND key < ? ORDER BY key"
    return [row for (row,) in db.execute(query, (user + bytes(8), user + b"\xff" * 8))]


def erase(db: sqlite3.Connection, workspace_id: str, name: str, pseudonym: str) -> tuple[int, int]:
    """Erase the choices of an id; see :meth:`ErasureStore.erase_choices`."""
    # The rows of changes without effect begin with a hash of the id, which can be guessed.
    idle = _idle_rows(db, workspace_id, name)
    query = "INSERT OR IGNORE INTO changes (key) VALUES (?)"
    db.executemany(query, [(row[-KEY_BYTES:],) for row in idle])
    db.executemany("DELETE FROM changes WHERE key = ?", [(row,) for row in idle])
    of_id = "WHERE workspace = ? AND user_id = ?"
    records = 0
    found = db.execute(f"SELECT DISTINCT change_id FROM history {of_id}", (workspace_id, name))
    for (change,) in found.fetchall():
        new = str(uuid.uuid4())
        db.execute("INSERT INTO changes (key) VALUES (?)", (key_of(workspace_id, new),))
        records += db.execute(
            "UPDATE history SET user_id = ?, change_id = ?, secret = '', user_agent = '', "
            f"address = '' {of_id} AND change_id = ?",
            (pseudonym, new, workspace_id, name, change),
        ).rowcount
    return db.execute(f"DELETE FROM choices {of_id}", (workspace_id, name)).rowcount, records


def state(db: sqlite3.Connection, workspace_id: str, user_id: str) -> dict[str, bool]:
    """Return the choices of a person: group id → subscribed."""
    _, ids = person_of(db, workspace_id, user_id)
    return {group: chosen for group, (chosen, _) in _latest(db, workspace_id, ids).items()}


def _latest(
    db: sqlite3.Connection, workspace_id: str, ids: Iterable[str]
) -> dict[str, tuple[bool, int]]:
    """Return the latest choice that some ids have: group id → subscribed, time."""
    query = (
        "SELECT c.updated_at, c.change_id, c.group_id, c.subscribed FROM {keys} k "
        "CROSS JOIN choices c ON c.workspace = k.column1 AND c.user_id = k.column2"
    )
    rows = sorted(look_up(db, query, [(workspace_id, one) for one in ids]))
    return {group: (bool(subscribed), at) for at, _, group, subscribed in rows}


def scan(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[SubscriptionState], int | None]:
    """Return a page of the current choices, and its cursor."""
    window = Window(db, "choices", "id", after)
    condition = "" if workspace_id is None else "AND +workspace = :workspace"
    rows = db.execute(
        "SELECT id, workspace, user_id, group_id, subscribed, updated_at, change_id FROM choices "
        f"WHERE id > :after AND id <= :last {condition} ORDER BY id",
        {"after": window.after, "last": window.last, "workspace": workspace_id},
    )
    return window.page(rows, _state, limit)


def scan_choices(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[SubscriptionState], int | None]:
    """Return a page of the current choices as those of people, and its cursor."""
    states, cursor = scan(db, workspace_id, after, limit)
    people: dict[tuple[str, str], tuple[str | None, dict[str, tuple[bool, int]]]] = {}
    for index, one in enumerate(states):
        key = one.workspace_id, str(one.user_id)
        if key not in people:
            user, ids = person_of(db, *key)
            people[key] = user, _latest(db, one.workspace_id, ids)
        user, choices = people[key]
        subscribed, at = choices[one.group_id]
        states[index] = dataclasses.replace(
            one,
            user_id=user,
            anonymous_id=None if user == one.user_id else one.user_id,
            subscribed=subscribed,
            updated_at=at,
        )
    return states, cursor


def _state(row: Any) -> tuple[SubscriptionState, int]:
    _, workspace, user, group, subscribed, at, change = row
    return (
        SubscriptionState(
            workspace_id=workspace,
            user_id=user,
            group_id=group,
            subscribed=bool(subscribed),
            updated_at=at,
            change_id=change,
        ),
        len(user),
    )


def history(
    db: sqlite3.Connection,
    workspace_id: str | None,
    user_id: str | None,
    since: int,
    after: int | None,
    limit: int,
) -> tuple[list[SubscriptionRecord], int | None]:
    """Return a page of audit records in the order in which they were written, and its cursor."""
    # Only a user's own rows are examined for a user.
    is_indexed = workspace_id is not None and user_id is not None
    window = Window(db, "history", "seq", after, bounded=not is_indexed)
    conditions = " AND at >= :since" if since else ""
    if workspace_id is not None:
        conditions += " AND workspace = :workspace"
    if user_id is not None:
        conditions += " AND user_id = :user"
    rows = db.execute(
        f"SELECT seq, {_RECORD} FROM history "
        f"WHERE seq > :after AND seq <= :last {conditions} ORDER BY seq",
        {
            "after": window.after,
            "last": window.last,
            "workspace": workspace_id,
            "user": user_id,
            "since": since,
        },
    )
    return window.page(rows, _record, limit)


def _record(row: Any) -> tuple[SubscriptionRecord, int]:
    _, change, workspace, user, group, before, after, at, how, secret, user_agent, address = row
    return (
        SubscriptionRecord(
            change_id=change,
            workspace_id=workspace,
            user_id=user,
            group_id=group,
            before=None if before is None else bool(before),
            after=bool(after),
            at=at,
            how=how,
            secret=secret,
            user_agent=user_agent,
            address=address,
        ),
        len(user) + len(user_agent),
    )
