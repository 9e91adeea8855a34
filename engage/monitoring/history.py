# SPDX-License-Identifier: Apache-2.0
"""Counters per minute, hour and day of this process, written to the store.

Their history survives a restart, and the processes of all hosts add up. A process writes the
*absolute* value of a counter in a minute, under an id that it makes when it starts: a write that
is repeated changes nothing, and one that is lost is made good by the next.

====================  ============================================================================
name of the counter   labels
====================  ============================================================================
:data:`EVENTS`        write key id, type, outcome; by workspace. A write key id is ``""`` for a
                      webhook delivery.
:data:`REFUSED`       write key id (:data:`UNKNOWN_KEY` if no known key was sent), route, reason
:data:`WEBHOOKS`      provider, outcome
:data:`REQUESTS`      upper bound of the duration in seconds; only requests that carry events and
                      were not answered 4xx: strangers are made to wait
:data:`WRITES`        upper bound of the duration in seconds
:data:`QUEUE`         none; the most events that waited for the storage (not a sum)
:data:`UP`            version of engage; 1 in every minute in which the process ran
:data:`STORED`        write key id; the events that were stored. Only per day
:data:`STORED_BYTES`  write key id; the bytes of these events. Only per day
====================  ============================================================================
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import engage
from engage.api import DAY_MS, Count, StorageError
from engage.monitoring.metrics import EVENT_ROUTES
from engage.monitoring.sampler import REFUSED_RECORD
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.monitoring.metrics import Metrics

__all__ = [
    "DAY",
    "EVENTS",
    "HOUR",
    "HOURS_KEPT",
    "INFINITE",
    "MINUTE",
    "MINUTES_KEPT",
    "QUEUE",
    "REFUSED",
    "REQUESTS",
    "STORED",
    "STORED_BYTES",
    "UNKNOWN_KEY",
    "UP",
    "WEBHOOKS",
    "WRITES",
    "History",
    "Values",
    "difference",
    "expire_history",
    "record_periodically",
]

_log = logging.getLogger(__name__)

EVENTS: Final = "events"
REFUSED: Final = "refused"
WEBHOOKS: Final = "webhooks"
REQUESTS: Final = "requests"
WRITES: Final = "writes"
QUEUE: Final = "queue"
UP: Final = "up"
STORED: Final = "stored"
STORED_BYTES: Final = "stored_bytes"

#: The write key id under which requests without a known key are counted.
UNKNOWN_KEY: Final = "?"
#: The upper bound of the last bucket.
INFINITE: Final = "inf"

#: Lengths of the steps in seconds.
MINUTE: Final = 60
HOUR: Final = 3600
DAY: Final = 86400
#: How long counters are kept: milliseconds. Those per day as long as those per minute.
MINUTES_KEPT: Final = 2 * DAY_MS
HOURS_KEPT: Final = 90 * DAY_MS

#: Counters of a process in one minute. Their labels come from closed sets; a config with hundreds
#: of write keys could still have many. Those beyond are not kept.
MAX_COUNTERS: Final = 5000
#: Counters in one write.
MAX_ROWS: Final = 1000
#: Minutes that are kept in memory while the store cannot be written.
MAX_UNWRITTEN: Final = 60

#: Seconds between two writes of the history. A process that is killed loses at most these.
WRITE_SECONDS: Final = 5.0
#: Seconds between two looks at the clock and at the refused requests.
TURN_SECONDS: Final = 1.0
#: Seconds for the last write of a process that stops.
LAST_SECONDS: Final = 1.0
#: Seconds between two expirations, and the rows that one step deletes.
EXPIRE_SECONDS: Final = 600.0
EXPIRE_ROWS: Final = 2000

#: (Workspace id, name, labels) → number.
Values = dict[tuple[str, str, tuple[str, ...]], int]


class History:
    """Turns the table of a process into counters per minute, hour and day.

    :param metrics: the table.
    """

    def __init__(self, metrics: Metrics) -> None:
        #: The table that it reads.
        self.metrics = metrics
        #: The id of this process.
        self.process = secrets.token_hex(8)
        #: Its id in the history: another one after the clock was set back, because a counter of
        #: the same id would replace what was counted when the clock was at this time before.
        self._series = self.process
        #: Milliseconds since 1970 UTC: when :meth:`turn` was called last.
        self.now = time.time_ns() // 1_000_000
        #: What :meth:`stored` was when the day began.
        self.day_began: Values = {}
        #: What :meth:`stored` was at the last write, or when the day began; ``None`` after a write
        #: that failed, because the store may have more.
        self.written: Values | None = {}
        # Step → its start.
        self._starts = dict.fromkeys((MINUTE, HOUR, DAY), 0)
        # The numbers of the table at the start of the minute, and what the hour had by then.
        self._before: Values = {}
        self._in_hour: Values = {}
        # Id, step, its start → its values, oldest first; those of the current steps are not here.
        self._unwritten: dict[tuple[str, int, int], Values] = {}
        # The same of the current steps, as they were written last.
        self._current: dict[tuple[str, int, int], Values] = {}

    def turn(self, now: int) -> None:
        """Begin a new minute, hour and day, if the time has come.

        :param now: milliseconds since 1970 UTC.
        """
        self.now = now
        starts = {step: now - now % (step * 1000) for step in self._starts}
        before = self._starts if any(self._starts.values()) else starts
        self._starts = starts
        if starts == before:
            return
        set_back = starts[MINUTE] < before[MINUTE]
        values = self._values()
        self._in_hour = values[HOUR]
        for step, at in before.items():
            if at != starts[step] or set_back:
                self._unwritten[self._series, step, at] = values[step]
                if step == HOUR:
                    self._in_hour = {}
                elif step == DAY:
                    self.day_began = self.stored()
        while len(self._unwritten) > MAX_UNWRITTEN:
            del self._unwritten[next(iter(self._unwritten))]
        if starts[DAY] != before[DAY]:
            self.written = self.day_began
        if set_back:
            self._series = f"{self.process}-{now}"
        self._before = self._totals()
        for counts in self.metrics.minute.values():
            counts.clear()
        self.metrics.longest_queue = 0

    async def write_to(self, store: Storage) -> None:
        """Write the numbers that have changed since the last call.

        :raises StorageUnavailable: if it could not be written; the next call tries again.
        """
        stored, self.written = self.stored(), None
        current = {
            (self._series, step, self._starts[step]): values
            for step, values in self._values().items()
        }
        counts = [
            Count(
                step=step,
                at=at,
                process=process,
                name=name,
                workspace_id=workspace_id,
                labels=labels,
                value=value,
            )
            for (process, step, at), values in {**self._unwritten, **current}.items()
            for (workspace_id, name, labels), value in values.items()
            if self._current.get((process, step, at), {}).get((workspace_id, name, labels)) != value
        ]
        for start in range(0, len(counts), MAX_ROWS):
            await store.put_counts(counts[start : start + MAX_ROWS])
        self._unwritten.clear()
        self._current, self.written = current, stored

    def stored(self) -> Values:
        """Return what this process has stored since it started, by workspace and write key."""
        return {
            (workspace_id, name, (key_id,)): number
            for (workspace_id, key_id), numbers in self.metrics.stored_by_key.items()
            for name, number in zip((STORED, STORED_BYTES), numbers, strict=True)
        }

    def _values(self) -> dict[int, Values]:
        """Return the values of the current minute, hour and day."""
        minute = self._in_minute()
        hour = dict(self._in_hour)
        for name, value in minute.items():
            before = hour.get(name, 0)
            hour[name] = max(before, value) if name[1] in (QUEUE, UP) else before + value
        return {MINUTE: minute, HOUR: hour, DAY: difference(self.stored(), self.day_began)}

    def _in_minute(self) -> Values:
        """Return the values of the current minute."""
        metrics = self.metrics
        values: Values = {("", UP, (engage.__version__,)): 1}
        for (workspace_id, *labels), count in metrics.minute["events"].items():
            values[workspace_id, EVENTS, tuple(labels)] = count
        for (workspace_id, key_id, *labels), count in metrics.minute["refused_requests"].items():
            values[workspace_id, REFUSED, (key_id or UNKNOWN_KEY, *labels)] = count
        values.update(difference(self._totals(), self._before))
        if metrics.longest_queue:
            values["", QUEUE, ()] = metrics.longest_queue
        return dict(itertools.islice(values.items(), MAX_COUNTERS))

    def _totals(self) -> Values:
        """Return the numbers of the table since the start of the process."""
        metrics = self.metrics
        totals: Values = collections.Counter()
        for (provider, outcome), count in metrics.numbers["webhook_deliveries"].items():
            totals["", WEBHOOKS, (str(provider), str(outcome))] = int(count)
        histograms = [
            (REQUESTS, histogram)
            for (route, status), histogram in metrics.histograms["request_seconds"].items()
            if route in EVENT_ROUTES and status != "4xx"
        ]
        histograms += [
            (WRITES, metrics.histograms[name][()])
            for name in ("write_seconds", "log_append_seconds")
        ]
        for name, histogram in histograms:
            bounds = (*(f"{bound:g}" for bound in histogram.bounds), INFINITE)
            for bound, count in zip(bounds, histogram.counts, strict=True):
                totals["", name, (bound,)] += count
        return totals


def difference(values: Values, before: Values) -> Values:
    """Return by how much values have grown, of those that have."""
    grown = ((name, value - before.get(name, 0)) for name, value in values.items())
    return {name: value for name, value in grown if value}


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
            if (changes := refusals.changes) != written:
                with contextlib.suppress(StorageError):
                    await store.put_record(refusals.record(history.process, now))
                    written = changes
            if since_write >= WRITE_SECONDS or now // (MINUTE * 1000) != minute:
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


async def expire_history(store: Storage, clock: Callable[[], int]) -> None:
    """Delete what is too old every ten minutes, until cancelled.

    These are the counters, and the refused requests of processes that had none for a day.

    :param clock: returns milliseconds since 1970 UTC.
    """
    while True:
        now = clock()
        try:
            for step, kept in ((MINUTE, MINUTES_KEPT), (HOUR, HOURS_KEPT), (DAY, MINUTES_KEPT)):
                deleted = EXPIRE_ROWS
                while deleted == EXPIRE_ROWS:
                    deleted = await store.expire_counts(step, now - kept, limit=EXPIRE_ROWS)
            await store.expire_records(REFUSED_RECORD, now - DAY_MS, limit=EXPIRE_ROWS)
        except StorageError as error:
            _log.debug("the history could not be expired: %s", error)
        await asyncio.sleep(EXPIRE_SECONDS)
