# SPDX-License-Identifier: Apache-2.0
"""Records, such as write keys, and how often those of a kind were changed."""

from __future__ import annotations

from typing import Final

from engage.api import Page, Record
from engage.store.keys import is_text
from engage.store.pages import expire as expire_rows
from engage.store.pages import page
from engage.store.tables import (
    Delete,
    Executor,
    Get,
    Put,
    Row,
    Steps,
    Table,
    plan,
)

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
    """Write a record; see :meth:`~engage.store.facade.Storage.put_record`."""
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
    """Return a page of records; see :meth:`~engage.store.facade.Storage.list_records`."""
    given = {"kind": kind, "workspace": workspace_id}
    equal = {name: value for name, value in given.items() if value is not None}
    return (yield from page(record_of, RECORDS, equal, after, limit, reverse=reverse))


# --------------------------------------------------------------------------------------- storage
class Records(Executor):
    """Small records with versions: there are some thousands of a kind."""

    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        """Write a record, and return when it is durable.

        The comparison and the write are one atomic step, across processes and hosts: of several
        callers that expect the same version, exactly one succeeds.

        :param expected_version: the version that the stored record must have; 0: there must be
            none. ``None``: whatever is stored is replaced.
        :return: the version of the record now; ``None`` if the stored version is not the expected
            one, and then nothing was written.
        :raises ValueError: see :meth:`Record.check`.
        """
        record.check()
        return await self.run(put, record, expected_version)

    async def get_record(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        """Return a record, or ``None``."""
        if not is_text(kind, workspace_id, record_id):
            return None
        return await self.read(get, kind, workspace_id, record_id)

    async def list_records(
        self,
        kind: str | None,
        workspace_id: str | None = None,
        *,
        after: str | None = None,
        limit: int,
        reverse: bool = False,
    ) -> Page[Record]:
        """Return one page of records, ordered by kind, workspace and id (by code points).

        :param kind: ``None``: all kinds.
        :param workspace_id: ``None``: all workspaces.
        :param after: the cursor of the previous page; ``None`` for the first page.
        :param limit: the maximum number of items.
        :param reverse: whether the order is descending.
        """
        return await self.read(scan, kind, workspace_id, after, limit, reverse)

    async def records_version(self, kind: str) -> int:
        """Return a number that is greater after any record of this kind was written or deleted.

        It is read every two seconds by each process: one look-up by a key.
        """
        return await self.read(version, kind)

    async def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        """Delete a record, and return whether there was one."""
        if not is_text(kind, workspace_id, record_id):
            return False
        return await self.run(delete, kind, workspace_id, record_id)

    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        """Delete at most ``limit`` records of a kind with ``at`` below ``before`` (milliseconds).

        :return: how many were deleted.
        """
        return await self.run(expire, kind, before, limit)
