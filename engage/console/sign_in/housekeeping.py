# SPDX-License-Identifier: Apache-2.0
"""Deletes the console's records when they are old: links, and sessions that ended.

The audit is deleted by :mod:`engage.upkeep.retention`, which first checks that the time can be
trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engage.api import StorageUnavailable
from engage.console.sign_in.links import KIND as LINK
from engage.console.sign_in.sessions import ENDED_KIND, LONGEST_SECONDS
from engage.reading.scans import PAGE

if TYPE_CHECKING:
    from engage.console.data.reader import Reader
    from engage.store.facade import Storage

__all__ = ["KINDS", "expire_once", "expire_periodically"]

#: The kinds of the records. They are kept as long as a session may last.
KINDS: Final = (LINK, ENDED_KIND)
#: Seconds between two deletions.
PERIOD: Final = 3600.0


async def expire_periodically(records: Storage, reader: Reader, clock: Callable[[], float]) -> None:
    """Delete old records every hour, until the task is cancelled.

    :param clock: the time in seconds since 1970.
    """
    while True:
        await asyncio.sleep(PERIOD)
        with contextlib.suppress(StorageUnavailable):
            await expire_once(records, reader, clock)


async def expire_once(records: Storage, reader: Reader, clock: Callable[[], float]) -> None:
    """Delete old records.

    :raises StorageUnavailable: if the storage does not answer.
    """
    before = round((clock() - LONGEST_SECONDS) * 1000)
    for kind in KINDS:
        while await reader.read(records.expire_records(kind, before, limit=PAGE)) == PAGE:
            pass
