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

import bisect
import collections
import secrets
import time
from collections.abc import Mapping
from typing import Final

import engage
from engage.api import Count, CountStore
from engage.monitoring.metrics import REQUEST_BUCKETS, TYPES, WRITE_BUCKETS, Metrics
from engage.monitoring.refusals import Refusal, Refusals

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
MINUTES_KEPT: Final = 48 * 3600 * 1000
HOURS_KEPT: Final = 90 * 24 * 3600 * 1000

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

_REQUEST_LABELS: Final = (*(f"{bound:g}" for bound in REQUEST_BUCKETS), INFINITE)
_WRITE_LABELS: Final = (*(f"{bound:g}" for bound in WRITE_BUCKETS), INFINITE)

#: Workspace id, name, labels.
_Name = tuple[str, str, tuple[str, ...]]
_Values = dict[_Name, int]


class History(Metrics):
    """Counts for the history, and passes everything on to another :class:`Metrics`.

    :param inner: counts for Prometheus, or nothing.
    :param refusals: collects the requests that were refused.
    """

    def __init__(self, inner: Metrics, refusals: Refusals) -> None:
        self._inner = inner
        self._refusals = refusals
        #: The id of this process in the history.
        self.process = secrets.token_hex(8)
        #: Milliseconds since 1970 UTC: when :meth:`turn` was called last.
        self.now = time.time_ns() // 1_000_000
        self._minute = 0
        self._hour = 0
        self._events: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
        self._others: collections.Counter[_Name] = collections.Counter()
        self._requests = [0] * len(_REQUEST_LABELS)
        self._writes = [0] * len(_WRITE_LABELS)
        self._queue = 0
        self._in_hour: _Values = {}
        # Start of a step → its values, oldest first; those of the current steps are not here.
        self._unwritten: dict[tuple[int, int], _Values] = {}
        self._written: dict[tuple[int, int], _Values] = {}

    # ------------------------------------------------------------------------------------ counting
    def request(self, route: str, status: int, seconds: float) -> None:
        self._inner.request(route, status, seconds)
        if route in EVENT_ROUTES:
            self._requests[bisect.bisect_left(REQUEST_BUCKETS, seconds)] += 1

    def event(
        self,
        kind: str,
        outcome: str,
        count: int = 1,
        workspace_id: str = "",
        write_key_id: str | None = None,
    ) -> None:
        self._inner.event(kind, outcome, count)
        if kind not in TYPES:
            kind = "other"
        self._events[workspace_id, write_key_id or "", kind, outcome] += count

    def write(self, seconds: float, events: int) -> None:
        self._inner.write(seconds, events)
        self._writes[bisect.bisect_left(WRITE_BUCKETS, seconds)] += 1

    def append(self, seconds: float, events: int) -> None:
        self._inner.append(seconds, events)
        self._writes[bisect.bisect_left(WRITE_BUCKETS, seconds)] += 1

    def log_error(self) -> None:
        self._inner.log_error()

    def loaded(self, outcome: str, count: int = 1) -> None:
        self._inner.loaded(outcome, count)

    def gap(self, records: int) -> None:
        self._inner.gap(records)

    def paused(self, partitions: int) -> None:
        self._inner.paused(partitions)

    def log(self, gauges: Mapping[str, float]) -> None:
        self._inner.log(gauges)

    def queue(self, events: int) -> None:
        self._inner.queue(events)
        if events > self._queue:
            self._queue = events

    def refused(self, refusal: Refusal) -> None:
        self._inner.refused(refusal)
        self._refusals.add(refusal, self.now)
        key = refusal.write_key_id or UNKNOWN_KEY
        self._others[refusal.workspace_id, REFUSED, (key, refusal.route, refusal.reason)] += 1

    def webhook(self, provider: str, outcome: str) -> None:
        self._inner.webhook(provider, outcome)
        self._others["", WEBHOOKS, (provider, outcome)] += 1

    def storage_error(self) -> None:
        self._inner.storage_error()

    def dead_letter(self, reason: str, count: int = 1) -> None:
        self._inner.dead_letter(reason, count)

    def dropped(self, what: str, count: int = 1) -> None:
        self._inner.dropped(what, count)

    def dead_letter_budget(self, budget: str, used: float) -> None:
        self._inner.dead_letter_budget(budget, used)

    def storage(self, gauges: Mapping[str, float]) -> None:
        self._inner.storage(gauges)

    # ------------------------------------------------------------------------------------- writing
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
        """Write what has changed since the last call.

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
        values: _Values = {("", UP, (engage.__version__,)): 1}
        for (workspace_id, key_id, kind, outcome), count in self._events.items():
            values[workspace_id, EVENTS, (key_id, kind, outcome)] = count
        values.update(self._others)
        for labels, buckets, name in (
            (_REQUEST_LABELS, self._requests, REQUESTS),
            (_WRITE_LABELS, self._writes, WRITES),
        ):
            values.update(
                {("", name, (label,)): n for label, n in zip(labels, buckets, strict=True) if n}
            )
        if self._queue:
            values["", QUEUE, ()] = self._queue
        if len(values) > MAX_COUNTERS:
            values = dict(list(values.items())[:MAX_COUNTERS])
        return values

    def _take(self) -> _Values:
        """Return the values of the current minute, and begin again at 0."""
        values = self._values()
        self._events.clear()
        self._others.clear()
        self._requests = [0] * len(_REQUEST_LABELS)
        self._writes = [0] * len(_WRITE_LABELS)
        self._queue = 0
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
