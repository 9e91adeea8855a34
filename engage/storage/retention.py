# SPDX-License-Identifier: Apache-2.0
"""Delete records that are older than the config allows, in the background and in small steps."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from engage.api import (
    DeadLetterStore,
    EventStore,
    RecordStore,
    StorageUnavailable,
    render_time,
)
from engage.config import Retention
from engage.storage.audit import AUDIT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engage.pipeline.clock import Clock

__all__ = ["Guard", "expire", "expire_audit", "expire_periodically"]

_log = logging.getLogger(__name__)

#: Seconds between two rounds.
ROUND_SECONDS: Final = 600.0
#: Seconds before the first round, so that it does not slow down the start of the server.
FIRST_SECONDS: Final = 30.0
#: Seconds between two calls of the storage, during which it only serves writes.
PAUSE_SECONDS: Final = 0.05
#: Maximum number of records that one call deletes.
SLICE: Final = 500
#: Seconds without a step of the system's clock after which it is trusted.
TRUSTED_SECONDS: Final = 24 * 60 * 60.0
_DAY_MS: Final = 24 * 60 * 60 * 1000
#: Days for which the audit and the finished jobs of the console are kept.
AUDIT_DAYS: Final = 400
_AUDIT_KINDS: Final = (AUDIT, "job")


class Guard:
    """Decides whether the clock can be trusted enough to delete records.

    A process that has run for a day without a step of the system's clock trusts it. Before that,
    the events in the store must confirm the time: a clock that is years ahead leaves a gap between
    them, and makes all of them look old.

    :param clock: the time of this process.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged: set[str] = set()

    async def trusted(self, store: EventStore, days: int | None, now: int) -> int | None:
        """Return ``days``, or ``None`` if nothing may be deleted now; log why, once.

        :param days: the age of records to delete; ``None``: never.
        :param now: milliseconds since 1970 UTC.
        """
        doubt = None if days is None else await self._doubt(store, days, now)
        if doubt is None:
            return days
        if doubt not in self._logged:
            self._logged.add(doubt)
            _log.error("nothing is expired, because the time may be wrong: %s", doubt)
        return None

    async def _doubt(self, store: EventStore, days: int, now: int) -> str | None:
        if self._clock.steady_seconds >= TRUSTED_SECONDS:
            return None
        if self._clock.stepped:
            return "the system's clock was set less than a day ago"
        arrivals = await store.arrivals(now - days * _DAY_MS)
        if arrivals is None or arrivals.newest is None:
            return None
        if arrivals.newest > now + self._clock.step_ms:
            return "the newest event was received in the future"
        if arrivals.last_before is None:
            return None
        gap = (arrivals.first_after or now) - arrivals.last_before
        if gap > max(days, 1) * _DAY_MS:
            return (
                f"no event was received in the {gap // _DAY_MS} days after"
                f" {render_time(arrivals.last_before)}; if that is right, records expire when the"
                " server has run for a day"
            )
        return None


async def expire_periodically(
    store: EventStore,
    retention: Retention,
    clock: Clock,
    *,
    first: float = FIRST_SECONDS,
    every: float = ROUND_SECONDS,
) -> None:
    """Expire records in rounds until cancelled. After a failure, the next round tries again.

    :param clock: the time of this process; nothing is deleted while it cannot be trusted.
    :param first: seconds before the first round.
    :param every: seconds between two rounds.
    """
    days = (retention.events_days, retention.dead_letters_days)
    if days == (None, None) and not isinstance(store, RecordStore):
        return
    guard = Guard(clock)
    await asyncio.sleep(first)
    while True:
        try:
            now = clock()
            trusted = Retention(
                events_days=await guard.trusted(store, retention.events_days, now),
                dead_letters_days=await guard.trusted(store, retention.dead_letters_days, now),
            )
            await expire(store, trusted, now=now)
            if isinstance(store, RecordStore) and await guard.trusted(store, AUDIT_DAYS, now):
                await expire_audit(store, now=now)
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


async def expire_audit(store: RecordStore, *, now: int, slice_: int = SLICE) -> int:
    """Delete the records of the audit and the finished jobs that are too old.

    :param now: milliseconds since 1970 UTC.
    :param slice_: maximum number of records that one call of the storage deletes.
    :return: how many were deleted.
    :raises StorageUnavailable: if the storage fails.
    """
    before = now - AUDIT_DAYS * _DAY_MS
    deleted = 0
    for kind in _AUDIT_KINDS:
        deleted += await _of_kind(store, kind, before, slice_)
    return deleted


async def _of_kind(store: RecordStore, kind: str, before: int, slice_: int) -> int:
    return await _all(lambda: store.expire_records(kind, before, limit=slice_), slice_)


async def _all(delete: Callable[[], Awaitable[int]], slice_: int) -> int:
    total = 0
    while True:
        count = await delete()
        total += count
        if count < slice_:
            return total
        await asyncio.sleep(PAUSE_SECONDS)
