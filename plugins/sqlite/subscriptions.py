# SPDX-License-Identifier: Apache-2.0
"""Rows of subscription choices and their history."""

from __future__ import annotations

import sqlite3
from typing import Any

from engage.api import SubscriptionChange, SubscriptionRecord, SubscriptionState

from .connection import insert, key_of
from .paging import Window


def apply(db: sqlite3.Connection, change: SubscriptionChange) -> bool:
    """Apply a change, once for each id; a choice that already holds writes nothing.

    :return: whether the change is new.
    """
    # A change without effect is remembered, too: repeated after a later change it must not undo
    # that one.
    new = db.execute(
        "INSERT INTO changes (key) VALUES (?) ON CONFLICT (key) DO NOTHING",
        (key_of(change.workspace_id, change.id),),
    ).rowcount
    if not new:
        return False
    before = state(db, change.workspace_id, change.user_id)
    changed = [
        (group, wanted)
        for group, wanted in change.choices.items()
        if before.get(group) is not wanted
    ]
    insert(
        db,
        "INSERT INTO choices (workspace, user_id, group_id, subscribed, updated_at)",
        [
            (change.workspace_id, change.user_id, group, wanted, change.at)
            for group, wanted in changed
        ],
        "ON CONFLICT (workspace, user_id, group_id) DO UPDATE "
        "SET subscribed = excluded.subscribed, updated_at = excluded.updated_at",
    )
    insert(
        db,
        "INSERT INTO history (change_id, workspace, user_id, group_id, before, after, at, how)",
        [
            (
                change.id,
                change.workspace_id,
                change.user_id,
                group,
                before.get(group),
                wanted,
                change.at,
                change.how,
            )
            for group, wanted in changed
        ],
    )
    return True


def state(db: sqlite3.Connection, workspace_id: str, user_id: str) -> dict[str, bool]:
    """Return the choices of a user: group id → subscribed."""
    return {
        group: bool(subscribed)
        for group, subscribed in db.execute(
            "SELECT group_id, subscribed FROM choices WHERE workspace = ? AND user_id = ? "
            "ORDER BY group_id",
            (workspace_id, user_id),
        )
    }


def scan(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[SubscriptionState], int | None]:
    """Return a page of the current choices, and its cursor."""
    window = Window(db, "choices", "id", after)
    condition = "" if workspace_id is None else "AND +workspace = :workspace"
    rows = db.execute(
        "SELECT id, workspace, user_id, group_id, subscribed, updated_at FROM choices "
        f"WHERE id > :after AND id <= :last {condition} ORDER BY id",
        {"after": window.after, "last": window.last, "workspace": workspace_id},
    )
    return window.page(rows, _state, limit)


def _state(row: Any) -> tuple[SubscriptionState, int]:
    _, workspace, user, group, subscribed, at = row
    return (
        SubscriptionState(
            workspace_id=workspace,
            user_id=user,
            group_id=group,
            subscribed=bool(subscribed),
            updated_at=at,
        ),
        len(user),
    )


def history(
    db: sqlite3.Connection,
    workspace_id: str | None,
    user_id: str | None,
    after: int | None,
    limit: int,
) -> tuple[list[SubscriptionRecord], int | None]:
    """Return a page of audit records in the order in which they were written, and its cursor."""
    window = Window(db, "history", "seq", after)
    conditions = ""
    if workspace_id is not None:
        conditions += " AND workspace = :workspace"
    if user_id is not None:
        conditions += " AND user_id = :user"
    rows = db.execute(
        "SELECT seq, change_id, workspace, user_id, group_id, before, after, at, how FROM history "
        f"WHERE seq > :after AND seq <= :last {conditions} ORDER BY seq",
        {"after": window.after, "last": window.last, "workspace": workspace_id, "user": user_id},
    )
    return window.page(rows, _record, limit)


def _record(row: Any) -> tuple[SubscriptionRecord, int]:
    _, change, workspace, user, group, before, after, at, how = row
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
        ),
        len(user),
    )
