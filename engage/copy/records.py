# SPDX-License-Identifier: Apache-2.0
"""Copy the console's data: write keys, its audit, and the counters of its plots.

Sessions, used links, signing secrets and refused requests belong to the server that made them. They
are not copied. Nor are the tombstones of erased people: ``engage erase --from`` writes those of the
target when it has erased them there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final

from engage.api import Count, Record
from engage.copy.report import Counts, OnProgress, same_json
from engage.reading.scans import PAGE, all_pages
from engage.store.facade import Storage

__all__ = ["COPIED_KINDS", "copy_counters", "copy_records"]

#: Name in the report → the kinds of records that are copied.
COPIED_KINDS: Final[Mapping[str, Sequence[str]]] = {
    "write keys": ("key", "key-override"),
    "audit records": ("audit", "erasure-request"),
}


async def copy_records(
    source: Storage, target: Storage, name: str, kinds: Sequence[str], report: OnProgress
) -> Counts:
    """Copy the records of some kinds.

    A record that the target has is replaced if that of the source was written later, so that a key
    which is disabled between two copies is also disabled at the target.

    :param name: their name in the counts.
    :return: the counts.
    """
    counts = Counts(name)
    for kind in kinds:
        async for record in all_pages(functools.partial(source.list_records, kind)):
            await _put(target, record, counts)
            report(counts)
    return counts


async def _put(target: Storage, record: Record, counts: Counts) -> None:
    existing = await target.get_record(record.kind, record.workspace_id, record.id)
    if existing is not None and existing.at == record.at and same_json(existing.body, record.body):
        counts.duplicate += 1
        return
    if existing is not None and existing.at >= record.at:
        counts.conflict("the target has a newer record with the same id")
        return
    expected = 0 if existing is None else existing.version
    if await target.put_record(record, expected_version=expected) is not None:
        counts.copied += 1
    else:
        counts.conflict("a record was changed at the target during the copy; run the copy again")


async def copy_counters(source: Storage, target: Storage, report: OnProgress) -> Counts:
    """Copy the registers of all counters.

    They are written again by each copy, because the greatest value of a register stays: none is
    reported as a duplicate.

    :return: the counts.
    """
    counts = Counts("counters")
    page: list[Count] = []
    async for count in all_pages(source.scan_counts):
        page.append(count)
        if len(page) >= PAGE:
            await _put_counts(target, page, counts)
            report(counts)
            page = []
    if page:
        await _put_counts(target, page, counts)
        report(counts)
    return counts


async def _put_counts(target: Storage, page: Sequence[Count], counts: Counts) -> None:
    await target.put_counts(page)
    counts.copied += len(page)
