# SPDX-License-Identifier: Apache-2.0
"""Rows of records, and the version of each kind.

The primary key compares text byte by byte in UTF-8, which is the order of the code points.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from engage.api import Record

from . import paging

#: Kind, workspace and id of the last record of a page.
Place = tuple[str, str, str]

_KEY: Final = ("kind", "workspace", "id")
_COLUMNS: Final = "kind, workspace, id, body, at, version"


def put(db: sqlite3.Connection, record: Record, expected_version: int | None) -> int | None:
    """Write a record, unless another version than the expected one is stored.

    The caller's transaction makes the comparison and the write one step.

    :return: the version of the record now, or ``None`` if nothing was written.
    """
    key = (record.kind, record.workspace_id, record.id)
    row = db.execute(
        "SELECT version FROM records WHERE kind = ? AND workspace = ? AND id = ?", key
    ).fetchone()
    stored = 0 if row is None else int(row[0])
    if expected_version is not None and stored != expected_version:
        return None
    db.execute(
        f"INSERT INTO records ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (kind, workspace, id) DO UPDATE "
        "SET body = excluded.body, at = excluded.at, version = excluded.version",
        (*key, record.body, record.at, stored + 1),
    )
    _mark_changed(db, record.kind)
    return stored + 1


def delete(db: sqlite3.Connection, kind: str, workspace_id: str, record_id: str) -> bool:
    """Delete a record, and return whether there was one."""
    deleted = db.execute(
        "DELETE FROM records WHERE kind = ? AND workspace = ? AND id = ?",
        (kind, workspace_id, record_id),
    ).rowcount
    if deleted:
        _mark_changed(db, kind)
    return bool(deleted)


def expire(db: sqlite3.Connection, kind: str, before: int, limit: int) -> int:
    """Delete the oldest records of a kind, and return how many."""
    deleted = db.execute(
        "DELETE FROM records WHERE number IN "
        "(SELECT number FROM records WHERE kind = ? AND at < ? ORDER BY at LIMIT ?)",
        (kind, before, limit),
    ).rowcount
    if deleted:
        _mark_changed(db, kind)
    return deleted


def _mark_changed(db: sqlite3.Connection, kind: str) -> None:
    db.execute(
        "INSERT INTO record_versions (kind, version) VALUES (?, 1) "
        "ON CONFLICT (kind) DO UPDATE SET version = version + 1",
        (kind,),
    )


def version(db: sqlite3.Connection, kind: str) -> int:
    """Return how often records of a kind were written or deleted."""
    row = db.execute("SELECT version FROM record_versions WHERE kind = ?", (kind,)).fetchone()
    return 0 if row is None else int(row[0])


def get(db: sqlite3.Connection, kind: str, workspace_id: str, record_id: str) -> Record | None:
    """Return a record, or ``None``."""
    row = db.execute(
        f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND workspace = ? AND id = ?",
        (kind, workspace_id, record_id),
    ).fetchone()
    return None if row is None else _record(row)


def scan(
    db: sqlite3.Connection,
    kind: str | None,
    workspace_id: str | None,
    reverse: bool,
    after: Place | None,
    limit: int,
) -> tuple[list[Record], Place | None]:
    """Return a page of records in the order of the primary key, and where it ends."""
    # The columns of the primary key whose values are given: the index serves the rest of the order.
    given = [kind] if kind is not None else []
    if kind is not None and workspace_id is not None:
        given.append(workspace_id)
    conditions = [f"{column} = ?" for column in _KEY[: len(given)]]
    values: list[Any] = [*given]
    if after is not None:
        columns, rest = ", ".join(_KEY[len(given) :]), after[len(given) :]
        marks = ", ".join("?" * len(rest))
        conditions.append(f"({columns}) {'<' if reverse else '>'} ({marks})")
        values += rest
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    order = ", ".join(f"{column} {'DESC' if reverse else 'ASC'}" for column in _KEY)
    rows = db.execute(f"SELECT {_COLUMNS} FROM records {where} ORDER BY {order}", values)
    found: list[Record] = []
    total = 0
    for examined, row in enumerate(rows, start=1):
        # No index serves a workspace of all kinds, so the records of the others are passed over.
        if workspace_id is None or row[1] == workspace_id:
            found.append(_record(row))
        total += len(row[3])
        if len(found) >= limit or examined >= paging.MAX_ROWS or total > paging.MAX_BYTES:
            return found, (row[0], row[1], row[2])
    return found, None


def _record(row: Any) -> Record:
    kind, workspace, record_id, body, at, version = row
    return Record(
        kind=kind, workspace_id=workspace, id=record_id, body=body, at=at, version=version
    )
