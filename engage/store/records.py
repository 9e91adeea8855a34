# SPDX-License-Identifier: Apache-2.0
"""Records, such as write keys, and how often those of a kind were changed."""

from __future__ import annotations

from typing import Final

from engage.api import Page, Record
from engage.store.pages import expire as expire_rows
from engage.store.pages import page
from engage.store.tables import Delete, Get, Put, Row, Steps, Table, plan

RECORDS: Final = Table(
    "records",
    {"kind": str, "workspace": str, "id": str, "body": bytes, "at": int, "version": int},
    key=3,
    indexes=(("kind", "at"),),
)
VERSIONS: Final = Table("record_versions", {"kind": str, "version": int}, key=1, sums=("version",))


def record_of(row: Row) -> Record:
    """Return the record of a row."""
    kind, workspace, record_id, body, at, version = row
    return Record(
        kind=kind, workspace_id=workspace, id=record_id, body=body, at=at, version=version
    )


# The second of two calls would find the version that the first one wrote.
@plan(repeatable=False)
def put(record: Record, expected_version: int | None) -> Steps[int | None]:
    """Write a record; see :meth:`~engage.api.RecordStore.put_record`."""
    key = (record.kind, record.workspace_id, record.id)
    stored = yield Get(RECORDS, [key])
    version: int = stored[key][-1] if key in stored else 0
    if expected_version not in (None, version):
        return None
    yield Put(RECORDS, [(*key, record.body, record.at, version + 1)])
    yield _changed(record.kind)
    return version + 1


# The second of two calls would return that there was no record.
@plan(repeatable=False, frees=True)
def delete(kind: str, workspace_id: str, record_id: str) -> Steps[bool]:
    """Delete a record, and return whether there was one."""
    deleted = yield Delete(RECORDS, [(kind, workspace_id, record_id)])
    if deleted:
        yield _changed(kind)
    return bool(deleted)


@plan(frees=True)
def expire(kind: str, before: int, limit: int) -> Steps[int]:
    """Delete the oldest records of a kind, and return how many."""
    deleted = yield from expire_rows(RECORDS, "at", before, limit, {"kind": kind})
    if deleted:
        yield _changed(kind)
    return deleted


def _changed(kind: str) -> Put:
    return Put(VERSIONS, [(kind, 1)])


@plan()
def version(kind: str) -> Steps[int]:
    """Return how often records of a kind were written or deleted."""
    stored = yield Get(VERSIONS, [(kind,)])
    number: int = stored[kind,][1] if stored else 0
    return number


@plan()
def get(kind: str, workspace_id: str, record_id: str) -> Steps[Record | None]:
    """Return a record, or ``None``."""
    stored = yield Get(RECORDS, [(kind, workspace_id, record_id)])
    return next(map(record_of, stored.values()), None)


@plan()
def scan(
    kind: str | None, workspace_id: str | None, after: str | None, limit: int, reverse: bool
) -> Steps[Page[Record]]:
    """Return a page of records; see :meth:`~engage.api.RecordStore.list_records`."""
    given = {"kind": kind, "workspace": workspace_id}
    equal = {name: value for name, value in given.items() if value is not None}
    return (yield from page(record_of, RECORDS, equal, after, limit, reverse=reverse))
