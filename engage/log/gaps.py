# SPDX-License-Identifier: Apache-2.0
"""Gaps: records that the log deleted before a loader read them. Acknowledged events may be lost.

The loaders keep each gap as a record in the store, for the operators.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final

import orjson

from engage.api import DAY_MS, Record
from engage.store.facade import Storage

__all__ = ["NAMED", "gap_record", "past_gaps"]

#: The kind of the records.
_KIND: Final = "log_gap"
#: Milliseconds for which a gap is shown after the loaders have gone on.
_SHOWN: Final = 14 * DAY_MS
#: Gaps, or partitions, that a message names.
NAMED: Final = 5


def gap_record(partition: int, expected: int, first: int, *, now: int) -> Record:
    """Return the record of a gap.

    :param expected: the offset that the loader expected.
    :param first: the first offset that is there.
    :param now: milliseconds since 1970 UTC.
    """
    return Record(
        kind=_KIND,
        workspace_id="",
        id=f"{partition}-{expected}",
        body=orjson.dumps({"partition": partition, "expected": expected, "first": first}),
        at=now,
    )


async def past_gaps(store: Storage, *, now: int) -> Sequence[str]:
    """Return the gaps that the loaders met in the last days, newest first, each in one line.

    :param now: milliseconds since 1970 UTC.
    :raises StorageUnavailable: if the store does not answer.
    """
    page = await store.list_records(_KIND, limit=1000)
    recent = [record for record in page.items if record.at >= now - _SHOWN]
    lines = []
    for record in sorted(recent, key=lambda record: record.at, reverse=True)[:NAMED]:
        body = orjson.loads(record.body)
        partition, expected, first = body["partition"], body["expected"], body["first"]
        when = datetime.datetime.fromtimestamp(record.at / 1000, datetime.UTC)
        lines.append(
            f"acknowledged events may be lost: {max(first - expected, 0)} records of partition"
            f" {partition}, from {expected} on, were no longer in the log when a loader came to"
            f" them ({when:%Y-%m-%d %H:%M} UTC)"
        )
    if len(recent) > NAMED:
        lines.append(f"{len(recent) - NAMED} more gaps in the log")
    return lines
