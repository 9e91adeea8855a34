# SPDX-License-Identifier: Apache-2.0
"""Deletes what is older than the config keeps, in the background, a little at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from engage.api import DeadLetterStore, EventStore, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engage.config import Retention

__all__ = ["expire", "expire_for_ever"]

_log = logging.getLogger(__name__)

#: Seconds between two rounds.
ROUND_SECONDS: Final = 600.0
#: Seconds before the first: a server that just started has better things to do.
FIRST_SECONDS: Final = 30.0
#: Seconds between two slices, in which writes have the storage for themselves.
PAUSE_SECONDS: Final = 0.05
#: At most so many are deleted by one call.
SLICE: Final = 500
_DAY_MS: Final = 24 * 60 * 60 * 1000


async def expire_for_ever(
    store: EventStore,
    retention: Retention,
    *,
    first: float = FIRST_SECONDS,
    every: float = ROUND_SECONDS,
) -> None:
    """Expire again and again, until cancelled. What the storage cannot do now, the next round does.

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
            _log.warning("expiring has to wait: %s", error)
        except Exception:
            _log.exception("expiring failed")
        await asyncio.sleep(every)


async def expire(
    store: EventStore, retention: Retention, *, now: int, slice_: int = SLICE
) -> tuple[int, int]:
    """Delete all that is too old now.

    :param now: milliseconds since 1970 UTC.
    :param slice_: at most so many in one call of the storage.
    :return: how many events and how many dead letters are gone.
    :raises StorageUnavailable: not all of them are.
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
