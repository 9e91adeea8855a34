# SPDX-License-Identifier: Apache-2.0
"""Delete records that are older than the config allows, in the background and in small steps."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from engage.api import (
    DAY_MS,
    EventFilter,
    StorageUnavailable,
    render_time,
)
from engage.audit import AUDIT
from engage.config import Retention
from engage.reading.scans import PAGE
from engage.store.facade import Storage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["expire", "expire_audit", "expire_periodically", "gap"]

_log = logging.getLogger(__name__)

#: Seconds between two rounds.
ROUND_SECONDS: Final = 600.0
#: Seconds before the first round, so that it does not slow down the start of the server.
FIRST_SECONDS: Final = 30.0
#: Seconds between two calls of the storage, during which it only serves writes.
PAUSE_SECONDS: Final = 0.05
#: Seconds after the start for which a gap between the events stops the deletion. Somebody has time
#: to set a clock that is wrong, and a server that was off for long deletes no later than that.
DOUBTFUL_SECONDS: Final = 24 * 60 * 60.0
#: Days for which the audit is kept.
AUDIT_DAYS: Final = 400


async def expire_periodically(
    store: Storage,
    retention: Retention,
    clock: Callable[[], int],
    *,
    first: float = FIRST_SECONDS,
    every: float = ROUND_SECONDS,
    doubtful: float = DOUBTFUL_SECONDS,
) -> None:
    """Expire records in rounds until cancelled. After a failure, the next round tries again.

    :param clock: returns milliseconds since 1970 UTC. It must not follow a step ahead: that would
        make all records look old.
    :param first: seconds before the first round.
    :param every: seconds between two rounds.
    :param doubtful: seconds for which a gap between the events makes the time doubtful.
    """
    loop = asyncio.get_running_loop()
    trusted_at = loop.time() + doubtful
    logged: set[str] = set()

    async def trusted(days: int | None, now: int) -> int | None:
        """Return ``days``, or ``None`` if nothing may be deleted now; log why, once."""
        doubt = None
        if days is not None and loop.time() < trusted_at:
            doubt = await gap(store, days, now)
        if doubt is not None and doubt not in logged:
            logged.add(doubt)
            _log.error("nothing is expired, because the time may be wrong: %s", doubt)
        return days if doubt is None else None

    await asyncio.sleep(first)
    while True:
        try:
            now = clock()
            due = Retention(
                events_days=await trusted(retention.events_days, now),
                dead_letters_days=await trusted(retention.dead_letters_days, now),
                visitors_days=await trusted(retention.visitors_days, now),
            )
            await expire(store, due, now=now)
            if await trusted(AUDIT_DAYS, now):
                await expire_audit(store, now=now)
        except StorageUnavailable as error:
            _log.warning("records could not be expired; the next round tries again: %s", error)
        except Exception:
            _log.exception("expiring records failed")
        await asyncio.sleep(every)


async def gap(store: Storage, days: int, now: int) -> str | None:
    """Return why the time may be wrong, or ``None``.

    A server that starts with a clock that is years ahead cannot notice it. But such a clock leaves
    a gap between the events, just where the deletion would begin.

    :param days: the age of records to delete, and the length of a gap that makes ``now`` doubtful.
    :param now: milliseconds since 1970 UTC.
    :return: a clause for the log. ``None`` also if the storage does not have
        :meth:`Storage.recent`.
    :raises StorageUnavailable: if the storage fails.
    """
    before = now - days * DAY_MS
    last = await _newest(store, EventFilter(until=before))
    if last is None:
        return None
    near = EventFilter(since=before, until=last + max(days, 1) * DAY_MS + 1)
    if await _newest(store, near) is not None:
        return None
    return (
        f"no event was received in the {days} days after {render_time(last)}; if that is right,"
        " records expire when the server has run for a day"
    )


async def _newest(store: Storage, criteria: EventFilter) -> int | None:
    """Return when the newest of some events was received."""
    page = await store.recent(criteria, limit=1)
    while page is not None and not page.items and page.cursor is not None:
        page = await store.recent(criteria, before=page.cursor, limit=1)
    return page.items[0].received_at if page is not None and page.items else None


async def expire(
    store: Storage, retention: Retention, *, now: int, slice_: int = PAGE
) -> tuple[int, int, int]:
    """Delete all records that are too old.

    :param now: milliseconds since 1970 UTC.
    :param slice_: maximum number of records that one call of the storage deletes.
    :return: the number of deleted events, dead letters and visitors.
    :raises StorageUnavailable: if the storage fails; some records may be deleted already.
    """
    events = letters = visitors = 0
    if retention.events_days is not None:
        before = now - retention.events_days * DAY_MS
        events = await _all(lambda: store.expire(before, limit=slice_), slice_)
    if retention.dead_letters_days is not None:
        letters_before = now - retention.dead_letters_days * DAY_MS
        letters = await _all(
            lambda: store.expire_dead_letters(letters_before, limit=slice_), slice_
        )
    if retention.visitors_days is not None:
        unchanged = now - retention.visitors_days * DAY_MS
        visitors = await _all(lambda: store.expire_visitors(unchanged, limit=slice_), slice_)
    if events or letters or visitors:
        extra = {"events": events, "deadLetters": letters, "visitors": visitors}
        _log.info("expired", extra=extra)
    return events, letters, visitors


async def expire_audit(store: Storage, *, now: int, slice_: int = PAGE) -> int:
    """Delete the entries of the audit that are too old.

    :param now: milliseconds since 1970 UTC.
    :param slice_: maximum number of records that one call of the storage deletes.
    :return: how many were deleted.
    :raises StorageUnavailable: if the storage fails.
    """
    before = now - AUDIT_DAYS * DAY_MS
    return await _all(lambda: store.expire_records(AUDIT, before, limit=slice_), slice_)


async def _all(delete: Callable[[], Awaitable[int]], slice_: int) -> int:
    total = 0
    while True:
        count = await delete()
        total += count
        if count < slice_:
            return total
        await asyncio.sleep(PAUSE_SECONDS)
