# SPDX-License-Identifier: Apache-2.0
"""The erasures that a store knows: what a log brings back of an erased person is dropped.

See :mod:`engage.store.erasures`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Final

import orjson

from engage.api import Kind, Record
from engage.config.erasures_file import Erasure
from engage.reading.scans import PAGE, all_pages
from engage.store.erasures import ERASURE, put
from engage.store.facade import Storage
from engage.store.keys import hash_of

__all__ = [
    "PSEUDONYM",
    "Tombstones",
    "is_done",
    "put_tombstones",
]

#: Begins the pseudonym to which the history of an erased person's choices is given.
PSEUDONYM: Final = "erased-"


class Tombstones:
    """Tells what was received of an erased person before the erasure.

    :param store: an open store.
    :param key: of the hashes; ``None``: nothing can have been erased.
    :param done: whether to look only at those of which all is erased.
    """

    def __init__(self, store: Storage, key: str | None, *, done: bool = False) -> None:
        self._only_done = done
        self._records = store if key is not None else None
        self._key = key or ""
        self._version = -1
        #: (workspace, id of the record) → time.
        self._times: dict[tuple[str, str], int] = {}
        self._newest = 0

    async def refresh(self) -> None:
        """Look for erasures since the last call.

        :raises StorageUnavailable: if the store does not answer.
        """
        if self._records is None:
            return
        version = await self._records.records_version(ERASURE)
        if version != self._version:
            read = functools.partial(self._records.list_records, ERASURE)
            self._times = {
                (record.workspace_id, record.id): record.at
                async for record in all_pages(read, attempts=1)
                if not self._only_done or _is_done(record)
            }
            self._newest = max(self._times.values(), default=0)
            self._version = version

    def cover(
        self, workspace_id: str, user_id: str | None, anonymous_id: str | None, received_at: int
    ) -> bool:
        """Return whether what was received at a time for these ids is erased."""
        if received_at >= self._newest:  # So an event that has just been received costs nothing.
            return False
        if user_id is not None:
            return received_at < self.erased_at(workspace_id, Kind.USER, user_id)
        if anonymous_id is None:
            return False
        return received_at < self.erased_at(workspace_id, Kind.VISITOR, anonymous_id)

    def erased_at(self, workspace_id: str, kind: Kind, name: str) -> int:
        """Return the time before which all is erased that was received for an id; 0: nothing.

        :param kind: user or visitor.
        """
        if not self._times:
            return 0
        record_id = f"{kind}:{hash_of(self._key, workspace_id, name)}"
        return self._times.get((workspace_id, record_id), 0)

    def newest(self) -> Mapping[str, int]:
        """Return the time of the newest erasure of each workspace that has any."""
        times: dict[str, int] = {}
        for (workspace, _), at in self._times.items():
            times[workspace] = max(at, times.get(workspace, at))
        return times


async def put_tombstones(
    store: Storage, erasures: Collection[Erasure], *, done: bool = False
) -> bool:
    """Write tombstones.

    :param done: whether all that they stand for is erased.
    :return: whether nothing that they cover can be stored any more.
    :raises StorageUnavailable: if they may not be durable.
    """
    records = [
        Record(
            kind=ERASURE,
            workspace_id=erasure.workspace,
            id=f"{erasure.kind}:{erasure.hash}",
            body=orjson.dumps({"key": erasure.key, "done": done}),
            at=erasure.at,
        )
        for erasure in erasures
    ]
    size = PAGE if store.isolated else 1
    keys = {
        await store.run(put, records[start : start + size], done)
        for start in range(0, len(records), size)
    }
    return store.isolated and keys == {erasure.key for erasure in erasures}


async def is_done(store: Storage, erasure: Erasure) -> bool:
    """Return whether the store has nothing left of an erasure: it, or a later one, was carried
    out."""
    record = await store.get_record(ERASURE, erasure.workspace, f"{erasure.kind}:{erasure.hash}")
    if record is None or record.at < erasure.at:
        return False
    return _is_done(record)


def _is_done(record: Record) -> bool:
    return orjson.loads(record.body).get("done") is True
