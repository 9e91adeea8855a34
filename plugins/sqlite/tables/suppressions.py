# SPDX-License-Identifier: Apache-2.0
"""Rows of suppressed addresses: each is a register."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from engage.api import Suppression

from ..connection import insert, look_up
from .paging import Window

_COLUMNS: Final = "workspace, channel, address, group_id, reason, at, lifted, how, source_id"


def put(db: sqlite3.Connection, suppressions: Sequence[Suppression]) -> None:
    """Write those that are later than what is stored."""
    insert(
        db,
        f"INSERT INTO suppressions ({_COLUMNS})",
        [
            (
                one.workspace_id,
                one.channel,
                one.address,
                one.group_id,
                one.reason,
                one.at,
                one.lifted,
                one.how,
                one.source_id,
            )
            for one in suppressions
        ],
        "ON CONFLICT (workspace, channel, address, group_id, reason) DO UPDATE SET "
        "at = excluded.at, lifted = excluded.lifted, how = excluded.how, "
        "source_id = excluded.source_id "
        "WHERE (excluded.at, NOT excluded.lifted) > (at, NOT lifted)",
    )


def find(
    db: sqlite3.Connection, workspace_id: str, addresses: Sequence[tuple[str, str]]
) -> list[Suppression]:
    """Return the suppressions of addresses (channel, address) that are not lifted."""
    query = (
        f"SELECT number, {_COLUMNS} FROM {{keys}} k CROSS JOIN suppressions "
        "ON workspace = k.column1 AND channel = k.column2 AND address = k.column3 "
        "WHERE NOT lifted"
    )
    return [
        _suppression(row)[0]
        for row in look_up(db, query, [(workspace_id, *one) for one in addresses])
    ]


def erase(db: sqlite3.Connection, workspace_id: str, addresses: Sequence[tuple[str, str]]) -> int:
    """Delete the suppressions of addresses (channel, address), and return how many."""
    done = db.executemany(
        "DELETE FROM suppressions WHERE workspace = ? AND channel = ? AND address = ?",
        [(workspace_id, *one) for one in addresses],
    )
    return max(0, done.rowcount)


def scan(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[Suppression], int | None]:
    """Return a page of all, also of those that are lifted, and its cursor."""
    window = Window(db, "suppressions", "number", after)
    condition = "" if workspace_id is None else "AND +workspace = :workspace"
    rows = db.execute(
        f"SELECT number, {_COLUMNS} FROM suppressions "
        f"WHERE number > :after AND number <= :last {condition} ORDER BY number",
        {"after": window.after, "last": window.last, "workspace": workspace_id},
    )
    return window.page(rows, _suppression, limit)


def _suppression(row: Any) -> tuple[Suppression, int]:
    _, workspace, channel, address, group, reason, at, lifted, how, source = row
    return (
        Suppression(
            workspace_id=workspace,
            channel=channel,
            address=address,
            group_id=group,
            reason=reason,
            at=at,
            lifted=bool(lifted),
            how=how,
            source_id=source,
        ),
        len(address),
    )
