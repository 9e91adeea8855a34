# SPDX-License-Identifier: Apache-2.0
"""Small records that all processes of a server share, such as write keys and sessions."""

from __future__ import annotations

import abc
import dataclasses
from typing import Final

from engage.api.pages import Page

__all__ = ["MAX_RECORD_BYTES", "Record", "RecordStore"]

#: Maximum size of :attr:`Record.body`.
MAX_RECORD_BYTES: Final = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record. Its identity is (``kind``, ``workspace_id``, ``id``)."""

    #: The kind, such as ``key`` or ``audit``: at most 32 characters.
    kind: str
    #: The workspace that it belongs to; ``""``: the whole server.
    workspace_id: str
    #: At most 256 characters.
    id: str
    #: Compact UTF-8 JSON of an object: at most :data:`MAX_RECORD_BYTES`.
    body: bytes
    #: When it was last written: milliseconds since 1970 UTC.
    at: int
    #: How often it was written: 1, 2, … The store sets it, and ignores it in
    #: :meth:`RecordStore.put_record`.
    version: int = 0

    def check(self) -> None:
        """Check the limits. A store calls it before it writes the record.

        :raises ValueError: if the body, the kind or the id is too long, or if a text contains a
            lone surrogate.
        """
        if len(self.body) > MAX_RECORD_BYTES:
            raise ValueError(f"the body of a record has more than {MAX_RECORD_BYTES} bytes")
        if len(self.kind) > 32 or len(self.id) > 256:
            raise ValueError("the kind of a record has at most 32 characters, its id at most 256")
        (self.kind + self.workspace_id + self.id).encode()


class RecordStore(abc.ABC):
    """A storage that also keeps records. Every method may raise :class:`StorageUnavailable`.

    There are few records: some thousands of a kind.
    """

    @abc.abstractmethod
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

    @abc.abstractmethod
    async def get_record(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        """Return a record, or ``None``."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    async def records_version(self, kind: str) -> int:
        """Return a number that is greater after any record of this kind was written or deleted.

        It is read every two seconds by each process: one look-up by a key.
        """

    @abc.abstractmethod
    async def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        """Delete a record, and return whether there was one."""

    @abc.abstractmethod
    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        """Delete at most ``limit`` records of a kind with ``at`` below ``before`` (milliseconds).

        :return: how many were deleted.
        """
