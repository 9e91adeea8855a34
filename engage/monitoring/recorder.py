# SPDX-License-Identifier: Apache-2.0
"""Writes the history and the refused requests of this process to the store, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import orjson

from engage.api import (
    DAY_MS,
    MAX_RECORD_BYTES,
    Record,
    StorageError,
)
from engage.monitoring.history import DAY, HOUR, HOURS_KEPT, MINUTE, MINUTES_KEPT, History
from engage.monitoring.refusals import Refusals
from engage.store.facade import Storage

__all__ = ["REFUSED_RECORD", "expire_history", "record_periodically"]

_log = logging.getLogger(__name__)

#: The kind of the records with the refused requests, one for each process.
REFUSED_RECORD: Final = "refused"
#: Seconds between two writes of the history. A process that is killed loses at most these.
WRITE_SECONDS: Final = 5.0
#: Seconds between two looks at the clock and at the refused requests.
TURN_SECONDS: Final = 1.0
#: Seconds for the last write of a process that stops.
LAST_SECONDS: Final = 1.0
#: Seconds between two expirations, and the rows that one step deletes.
EXPIRE_SECONDS: Final = 600.0
EXPIRE_ROWS: Final = 2000
#: Milliseconds for which the refused requests of a process are kept after the last one.
REFUSED_KEPT: Final = DAY_MS


async def record_periodically(
    store: Storage,
    history: History,
    clock: Callable[[], int],
    look: Callable[[History], Awaitable[None]] | None = None,
) -> None:
    """Write the history every five seconds, and the refused requests every second if there are any.

    It runs until it is cancelled, and then writes once more. An error of the storage is not logged:
    what could not be written is written later, and the storage reports its state elsewhere.

    :param clock: returns milliseconds since 1970 UTC.
    :param look: called every second, never while the history is written.
    """
    refusals = history.metrics.refusals
    written = 0
    since_write = 0.0
    try:
        while True:
            now = clock()
            minute = history.now // (MINUTE * 1000)
            history.turn(now)
            if refusals.changes != written:
                changes = refusals.changes
                with contextlib.suppress(StorageError):
                    await _write_refusals(store, history.process, refusals, now)
                    written = changes
            ended = now // (MINUTE * 1000) != minute
            if ended or since_write >= WRITE_SECONDS:
                since_write = 0.0
                with contextlib.suppress(StorageError):
                    await history.write_to(store)
            if look is not None:
                await look(history)
            # At the end of a minute, so that nothing is counted in the wrong one.
            pause = min(TURN_SECONDS, (MINUTE * 1000 - clock() % (MINUTE * 1000) + 1) / 1000)
            since_write += pause
            await asyncio.sleep(pause)
    except asyncio.CancelledError:
        history.turn(clock())
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await history.write_to(store)
        except (StorageError, TimeoutError):
            _log.debug("the last seconds of the history could not be written")
        raise


async def _write_refusals(store: Storage, process: str, refusals: Refusals, now: int) -> None:
    entries = refusals.entries()
    while len(body := orjson.dumps({"rows": entries})) > MAX_RECORD_BYTES:
        entries.pop()  # the oldest
    record = Record(kind=REFUSED_RECORD, workspace_id="", id=process, body=body, at=now)
    await store.put_record(record)


async def expire_history(store: Storage, clock: Callable[[], int]) -> None:
    """Delete numbers that are too old from the history, every ten minutes, until cancelled.

    :param clock: returns milliseconds since 1970 UTC.
    """
    while True:
        now = clock()
        try:
            for step, kept in ((MINUTE, MINUTES_KEPT), (HOUR, HOURS_KEPT), (DAY, MINUTES_KEPT)):
                deleted = EXPIRE_ROWS
                while deleted == EXPIRE_ROWS:
                    deleted = await store.expire_counts(step, now - kept, limit=EXPIRE_ROWS)
            await store.expire_records(REFUSED_RECORD, now - REFUSED_KEPT, limit=EXPIRE_ROWS)
        except StorageError as error:
            _log.debug("the history could not be expired: %s", error)
        await asyncio.sleep(EXPIRE_SECONDS)
