# SPDX-License-Identifier: Apache-2.0
"""Counters per minute and hour of this process, written to the store.

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
:data:`REQUESTS`      upper bound of the duration in seconds; only requests that carry events
:data:`WRITES`        upper bound of the duration in seconds
:data:`QUEUE`         none; the most events that waited for the storage (not a sum)
:data:`UP`            version of engage; 1 in every minute in which the process ran
====================  ============================================================================
"""

from __future__ import annotations

import collections
import itertools
import secrets
import time
from typing import TYPE_CHECKING, Final

import engage
from engage.api import DAY_MS, Count, CountStore

if TYPE_CHECKING:
    from engage.monitoring.metrics import Metrics

__all__ = [
    "EVENTS",
    "HOUR",
    "HOURS_KEPT",
    "INFINITE",
    "MINUTE",
    "MINUTES_KEPT",
    "QUEUE",
    "REFUSED",
    "REQUESTS",
    "UNKNOWN_KEY",
    "UP",
    "WEBHOOKS",
    "WRITES",
    "History",
]

EVENTS: Final = "events"
REFUSED: Final = "refused"
WEBHOOKS: Final = "webhooks"
REQUESTS: Final = "requests"
WRITES: Final = "writes"
QUEUE: Final = "queue"
UP: Final = "up"

#: The write key id under which requests without a known key are counted.
UNKNOWN_KEY: Final = "?"
#: The upper bound of the last bucket.
INFINITE: Final = "inf"

#: Lengths of the steps in seconds.
MINUTE: Final = 60
HOUR: Final = 3600
#: How long counters are kept: milliseconds.
MINUTES_KEPT: Final = 2 * DAY_MS
HOURS_KEPT: Final = 90 * DAY_MS

#: Counters of a process in one minute. Their labels come from closed sets; a config with hundreds
#: of write keys could still have many. Those beyond are not kept.
MAX_COUNTERS: Final = 5000
#: Counters in one write.
MAX_ROWS: Final = 1000
#: Minutes that are kept in memory while the store cannot be written.
MAX_UNWRITTEN: Final = 60

#: The routes whose durations are counted.
EVENT_ROUTES: Final = frozenset(
    {"identify", "track", "page", "screen", "group", "alias", "batch", "beacon", "webhook"}
)

#: Workspace id, name, labels.
_Name = tuple[str, str, tuple[str, ...]]
_Values = dict[_Name, int]


class History:
    """Turns the table of a process into counters per minute and hour.

    :param metrics: the table.
    """

    def __init__(self, metrics: Metrics) -> None:
        #: The table that it reads.
        self.metrics = metrics
        #: The id of this process in the history.
        self.process = secrets.token_hex(8)
        #: Milliseconds since 1970 UTC: when :meth:`turn` was called last.
        self.now = time.time_ns() // 1_000_000
        self._minute = 0
        self._hour = 0
        # The numbers of the table at the start of the minute.
        self._before: _Values = {}
        self._in_hour: _Values = {}
        # Start of a step → its values, oldest first; those of the current steps are not here.
        self._unwritten: dict[tuple[int, int], _Values] = {}
        self._written: dict[tuple[int, int], _Values] = {}

    def turn(self, now: int) -> None:
        """Begin a new minute, and a new hour, if the time has come.

        :param now: milliseconds since 1970 UTC.
        """
        minute = now - now % (MINUTE * 1000)
        hour = now - now % (HOUR * 1000)
        if self._minute == 0:
            self._minute, self._hour = minute, hour
        self.now = now
        if minute == self._minute:
            return
        values = self._take()
        self._keep((MINUTE, self._minute), values)
        _add(self._in_hour, values)
        if hour != self._hour:
            self._keep((HOUR, self._hour), self._in_hour)
            self._in_hour = {}
        self._minute, self._hour = minute, hour

    async def write_to(self, store: CountStore) -> None:
        """Write the numbers that have changed since the last call.

        :raises StorageUnavailable: if it could not be written; the next call tries again.
        """
        current = self._values()
        hour = dict(self._in_hour)
        _add(hour, current)
        steps = dict(self._unwritten)
        steps[MINUTE, self._minute] = current
        steps[HOUR, self._hour] = hour
        counts = [
            Count(
                step=step,
                at=at,
                process=self.process,
                name=name,
                workspace_id=workspace_id,
                labels=labels,
                value=value,
            )
            for (step, at), values in steps.items()
            for (workspace_id, name, labels), value in values.items()
            if self._written.get((step, at), {}).get((workspace_id, name, labels)) != value
        ]
        for start in range(0, len(counts), MAX_ROWS):
            await store.put_counts(counts[start : start + MAX_ROWS])
        self._unwritten.clear()
        self._written = {(MINUTE, self._minute): current, (HOUR, self._hour): hour}

    def _values(self) -> _Values:
        """Return the values of the current minute."""
        metrics = self.metrics
        metrics.fold()
        values: _Values = {("", UP, (engage.__version__,)): 1}
        for (workspace_id, *labels), count in metrics.minute["events"].items():
            values[workspace_id, EVENTS, tuple(labels)] = count
        for (workspace_id, key_id, *labels), count in metrics.minute["refused_requests"].items():
            values[workspace_id, REFUSED, (key_id or UNKNOWN_KEY, *labels)] = count
        for name, total in self._totals().items():
            if count := total - self._before.get(name, 0):
                values[name] = count
        if metrics.longest_queue:
            values["", QUEUE, ()] = metrics.longest_queue
        return dict(itertools.islice(values.items(), MAX_COUNTERS))

    def _totals(self) -> _Values:
        """Return the numbers of the table since the start of the process."""
        metrics = self.metrics
        totals: _Values = collections.Counter()
        for (provider, outcome), count in metrics.numbers["webhook_deliveries"].items():
            totals["", WEBHOOKS, (str(provider), str(outcome))] = int(count)
        histograms = [
            (REQUESTS, metrics.histograms["request_seconds"].get((route,)))
            for route in EVENT_ROUTES
        ]
        histograms += [
            (WRITES, metrics.histograms[name][()])
            for name in ("write_seconds", "log_append_seconds")
        ]
        for name, histogram in histograms:
            if histogram is not None:
                bounds = (*(f"{bound:g}" for bound in histogram.bounds), INFINITE)
                for bound, count in zip(bounds, histogram.counts, strict=True):
                    totals["", name, (bound,)] += count
        return totals

    def _take(self) -> _Values:
        """Return the values of the current minute, and begin again at 0."""
        values = self._values()
        self._before = self._totals()
        for counts in self.metrics.minute.values():
            counts.clear()
        self.metrics.longest_queue = 0
        return values

    def _keep(self, step: tuple[int, int], values: _Values) -> None:
        self._unwritten[step] = values
        while len(self._unwritten) > MAX_UNWRITTEN:
            del self._unwritten[next(iter(self._unwritten))]


def _add(total: _Values, values: _Values) -> None:
    for name, value in values.items():
        if name[1] in (QUEUE, UP):
            total[name] = max(total.get(name, 0), value)
        else:
            total[name] = total.get(name, 0) + value
