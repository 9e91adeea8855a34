# SPDX-License-Identifier: Apache-2.0
"""Deletes the console's records when they are old: links, and sessions that ended.

The audit and the finished jobs are deleted by :mod:`engage.storage.retention`, which first checks
that the time can be trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engage.api import StorageUnavailable
from engage.console.links import KEPT_SECONDS
from engage.console.links import KIND as LINK
from engage.console.sessions import ENDED_KIND, LONGEST_SECONDS

if TYPE_CHECKING:
    from engage.api import RecordStore
    from engage.console.reader import Reader

__all__ = ["KEPT", "expire_once", "expire_periodically"]

#: Kind → seconds for which its records are kept.
KEPT: Final = {LINK: KEPT_SECONDS, ENDED_KIND: LONGEST_SECONDS}
#: Seconds between two deletions.
PERIOD: Final = 3600.0
#: Records that one call deletes.
ROWS: Final = 1000


async def expire_periodically(
    records: RecordStore, reader: Reader, clock: Callable[[], float]
) -> None:
    """Delete old records every hour, until the task is cancelled.

    :param clock: the time in seconds since 1970.
    """
    while True:
        await asyncio.sleep(PERIOD)
        with contextlib.suppress(StorageUnavailable):
            await expire_once(records, reader, clock)


async def expire_once(records: RecordStore, reader: Reader, clock: Callable[[], float]) -> None:
    """Delete old records.

    :raises StorageUnavailable: if the storage does not answer.
    """
    for kind, seconds in KEPT.items():
        before = round((clock() - seconds) * 1000)
        while await reader.read(records.expire_records(kind, before, limit=ROWS)) == ROWS:
            pass
