# SPDX-License-Identifier: Apache-2.0
"""Delete records that are older than the config allows, in the background and in small steps."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from engage.api import DeadLetterStore, EventStore, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engage.config import Retention

__all__ = ["expire", "expire_periodically"]

_log = logging.getLogger(__name__)

#: Seconds between two rounds.
ROUND_SECONDS: Final = 600.0
#: Seconds before the first round, so that it does not slow down the start of the server.
FIRST_SECONDS: Final = 30.0
#: Seconds between two calls of the storage, during which it only serves writes.
PAUSE_SECONDS: Final = 0.05
#: Maximum number of records that one call deletes.
SLICE: Final = 500
_DAY_MS: Final = 24 * 60 * 60 * 1000


async def expire_periodically(
    store: EventStore,
    retention: Retention,
    *,
    first: float = FIRST_SECONDS,
    every: float = ROUND_SECONDS,
) -> None:
    """Expire records in rounds until cancelled. After a failure, the next round tries again.

    :param first: seconds before the first round.
    :param every: seconds between two rounds.
    """
    if retention.events_days is None and retention.dead_letters_days is None:
        return
    await asyncio.sleep(first)
    while True:
        try:
            await expire(store, retention, now=int(time.time() * 1000))
        except StorageUnavailable as error:
            _log.warning("records could not be expired; the next round tries again: %s", error)
        except Exception:
            _log.exception("expiring records failed")
        await asyncio.sleep(every)


async def expire(
    store: EventStore, retention: Retention, *, now: int, slice_: int = SLICE
) -> tuple[int, int]:
    """Delete all records that are too old.

    :param now: milliseconds since 1970 UTC.
    :param slice_: maximum number of records that one call of the storage deletes.
    :return: the number of deleted events and of deleted dead letters.
    :raises StorageUnavailable: if the storage fails; some records may be deleted already.
    """
    events = letters = 0
    if retention.events_days is not None:
        before = now - retention.events_days * _DAY_MS
        events = await _all(lambda: store.expire(before, limit=slice_), slice_)
    if retention.dead_letters_days is not None and isinstance(store, DeadLetterStore):
        letters_before = now - retention.dead_letters_days * _DAY_MS
        letters = await _all(
            lambda: store.expire_dead_letters(letters_before, limit=slice_), slice_
        )
    if events or letters:
        _log.info("expired", extra={"events": events, "deadLetters": letters})
    return events, letters


async def _all(delete: Callable[[], Awaitable[int]], slice_: int) -> int:
    total = 0
    while True:
        count = await delete()
        total += count
        if count < slice_:
            return total
        await asyncio.sleep(PAUSE_SECONDS)
