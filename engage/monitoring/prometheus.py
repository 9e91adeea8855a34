# SPDX-License-Identifier: Apache-2.0
"""The numbers for Prometheus.

``prometheus_client`` is imported only when a :class:`PrometheusMetrics` is made, because that
library decides at import time whether several processes share their numbers (environment variable
``PROMETHEUS_MULTIPROC_DIR``, set by :mod:`engage.server.serve`).
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final

from engage.monitoring.metrics import REQUEST_BUCKETS, TYPES, WRITE_BUCKETS, Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import CollectorRegistry, Gauge, Histogram
    from prometheus_client.metrics_core import Metric

    from engage.monitoring.refusals import Refusal

__all__ = ["PrometheusMetrics"]

#: Events in one write.
SIZE_BUCKETS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)

#: What becomes of a record that a loader reads.
LOAD_OUTCOMES = (
    *("stored", "duplicate", "conflict", "refused"),
    *("damaged", "letter", "skipped"),
)
#: Seconds until what was counted is passed on to ``prometheus_client``.
FLUSH_SECONDS: Final = 0.1


class _Appends:
    """What is counted about the calls of a log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Histogram

        self.seconds = Histogram(
            "engage_log_append_seconds",
            "Duration of one call that appended events to the log",
            buckets=WRITE_BUCKETS,
            registry=registry,
        )
        self.events = Histogram(
            "engage_log_append_events",
            "Events of one call that appended to the log",
            buckets=SIZE_BUCKETS,
            registry=registry,
        )
        self.errors = Counter(
            "engage_log_errors", "Calls of the log that failed", registry=registry
        )


class _Loads:
    """What is counted about the records that a loader reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge

        self.records = Counter(
            "engage_loaded_records",
            "Records of the log by what became of them",
            ["outcome"],
            registry=registry,
        )
        for outcome in LOAD_OUTCOMES:
            self.records.labels(outcome)
        self.gaps = Counter(
            "engage_log_gap_records",
            "Records that the log deleted before they were loaded",
            registry=registry,
        )
        self.paused = Gauge(
            "engage_log_paused_partitions",
            "Partitions that are not loaded because of a record of an unknown version",
            multiprocess_mode="livesum",
            registry=registry,
        )


class PrometheusMetrics(Metrics):
    """Counts with ``prometheus_client``.

    What happens for each request or write is counted in plain numbers, which :meth:`flush` passes
    on: with several processes, each increment of ``prometheus_client`` looks up the process id and
    writes to a file, and a single request has nine. The registry of this process is always exact,
    because it calls :meth:`flush` before it is read.

    :param registry: where the metrics are registered; ``None`` makes a new registry. With several
        processes it does not matter: each process writes files, and the parent reads them all.
    :param later: calls a function after some seconds (the event loop's ``call_later``). With
        several processes, it limits how long the files are behind: :data:`FLUSH_SECONDS`.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = registry = CollectorRegistry() if registry is None else registry
        self._later = later
        #: Whether a call of :meth:`flush` is due.
        self._flushing = False
        # The first one in the registry, so it is called before the others are read.
        registry.register(_Flusher(self.flush))
        self._requests = Counter(
            "engage_requests", "Answered requests", ["route", "status"], registry=registry
        )
        self._request_seconds = Histogram(
            "engage_request_seconds",
            "Time from the request to its answer",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._events = Counter(
            "engage_events", "Events by what became of them", ["type", "outcome"], registry=registry
        )
        self._write_seconds = Histogram(
            "engage_write_seconds",
            "Duration of one write to the storage",
            buckets=WRITE_BUCKETS,
            registry=registry,
        )
        self._write_events = Histogram(
            "engage_write_events", "Events of one write", buckets=SIZE_BUCKETS, registry=registry
        )
        self._queue = Gauge(
            "engage_queue_events",
            "Events that wait for the storage",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._storage_errors = Counter(
            "engage_storage_errors", "Calls of the storage that failed", registry=registry
        )
        self._dead_letters = Counter(
            "engage_dead_letters", "Refused events that were kept", ["reason"], registry=registry
        )
        self._refusals = Counter(
            "engage_refused_requests",
            "Requests that were refused as a whole, of which no dead letter exists",
            ["reason"],
            registry=registry,
        )
        self._webhooks = Counter(
            "engage_webhook_deliveries",
            "Deliveries of webhook providers",
            ["provider", "outcome"],
            registry=registry,
        )
        self._dropped = Counter(
            "engage_dropped", "What was dropped to stay within a limit", ["what"], registry=registry
        )
        self._budgets = Gauge(
            "engage_dead_letter_budget_used_ratio",
            "Part of a budget of dead letters that is used, of the fullest workspace",
            ["budget"],
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._storage: dict[str, Gauge] = {}
        # What was counted since the last flush.
        self._new_requests: dict[tuple[str, int], int] = {}
        self._new_events: dict[tuple[str, str], int] = {}
        self._new_seconds: dict[str, _Observations] = {}
        self._new_write_seconds = _Observations(self._write_seconds, WRITE_BUCKETS)
        self._new_write_events = _Observations(self._write_events, SIZE_BUCKETS)
        self._new_queue: int | None = None
        # Made by the first call, so that a server without a log does not show them.
        self._log: dict[str, Gauge] = {}
        self._appends: _Appends | None = None
        # Made by a loader only.
        self._loads: _Loads | None = None

    def request(self, route: str, status: int, seconds: float) -> None:
        key = route, status
        requests = self._new_requests
        requests[key] = requests.get(key, 0) + 1
        durations = self._new_seconds.get(route)
        if durations is None:
            durations = self._new_seconds[route] = _Observations(
                self._request_seconds.labels(route), REQUEST_BUCKETS
            )
        durations.add(seconds)
        if not self._flushing:
            self._flush_later()

    def event(
        self,
        kind: str,
        outcome: str,
        count: int = 1,
        workspace_id: str = "",
        write_key_id: str | None = None,
    ) -> None:
        # Clients choose the name of an unknown type, so the dictionary would have no bound.
        key = kind if kind in TYPES else "other", outcome
        events = self._new_events
        events[key] = events.get(key, 0) + count
        if not self._flushing:
            self._flush_later()

    def refused(self, refusal: Refusal) -> None:
        self._refusals.labels(refusal.reason).inc()

    def write(self, seconds: float, events: int) -> None:
        self._new_write_seconds.add(seconds)
        self._new_write_events.add(events)
        if not self._flushing:
            self._flush_later()

    def queue(self, events: int) -> None:
        self._new_queue = events
        if not self._flushing:
            self._flush_later()

    def storage_error(self) -> None:
        self._storage_errors.inc()

    def append(self, seconds: float, events: int) -> None:
        counted = self._appends or self._with_log()
        counted.seconds.observe(seconds)
        counted.events.observe(events)

    def log_error(self) -> None:
        (self._appends or self._with_log()).errors.inc()

    def loaded(self, outcome: str, count: int = 1) -> None:
        (self._loads or self._with_loads()).records.labels(outcome).inc(count)

    def gap(self, records: int) -> None:
        (self._loads or self._with_loads()).gaps.inc(records)

    def paused(self, partitions: int) -> None:
        (self._loads or self._with_loads()).paused.set(partitions)

    def dead_letter(self, reason: str, count: int = 1) -> None:
        self._dead_letters.labels(reason).inc(count)

    def webhook(self, provider: str, outcome: str) -> None:
        self._webhooks.labels(provider, outcome).inc()

    def dropped(self, what: str, count: int = 1) -> None:
        self._dropped.labels(what).inc(count)

    def dead_letter_budget(self, budget: str, used: float) -> None:
        self._budgets.labels(budget).set(used)

    def storage(self, gauges: Mapping[str, float]) -> None:
        self._set("engage_storage_", "A number of the storage's own", self._storage, gauges)

    def log(self, gauges: Mapping[str, float]) -> None:
        # From the start, so that the first error is an increase.
        _ = self._appends or self._with_log()
        self._set("engage_log_", "A number of the log", self._log, gauges)

    def _with_log(self) -> _Appends:
        self._appends = _Appends(self.registry)
        return self._appends

    def _with_loads(self) -> _Loads:
        self._loads = _Loads(self.registry)
        return self._loads

    def _set(
        self, prefix: str, text: str, known: dict[str, Gauge], gauges: Mapping[str, float]
    ) -> None:
        for name, value in gauges.items():
            gauge = known.get(name)
            if gauge is None:
                from prometheus_client import Gauge

                gauge = known[name] = Gauge(
                    prefix + name,
                    text,
                    # All processes read the same numbers, so the latest value is the right one.
                    multiprocess_mode="mostrecent",
                    registry=self.registry,
                )
            gauge.set(value)

    def flush(self) -> None:
        """Pass on to ``prometheus_client`` what was counted since the last call."""
        self._flushing = False
        events, self._new_events = self._new_events, {}
        for (kind, outcome), count in events.items():
            self._events.labels(kind, outcome).inc(count)
        self._new_write_seconds.flush()
        self._new_write_events.flush()
        if self._new_queue is not None:
            self._queue.set(self._new_queue)
            self._new_queue = None
        for durations in self._new_seconds.values():
            durations.flush()
        requests, self._new_requests = self._new_requests, {}
        for (route, status), count in requests.items():
            self._requests.labels(route, str(status)).inc(count)

    def _flush_later(self) -> None:
        if self._later is not None:
            self._flushing = True
            self._later(FLUSH_SECONDS, self.flush)


class _Observations:
    """What was observed for a histogram since the last flush.

    :param histogram: with its labels.
    :param bounds: the upper bounds of its buckets, except for the last one, which has none.
    """

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum")

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Pass the observations on to the histogram."""
        if not any(self._counts):
            return
        # ``observe`` takes one observation at a time, and the library has no other method.
        histogram = self._histogram
        histogram._sum.inc(self._sum)
        for bucket, count in zip(histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


class _Flusher:
    """A collector without metrics, which is called when a registry is read."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def collect(self) -> Iterable[Metric]:
        """Flush, and return no metrics."""
        self._flush()
        return ()

    def describe(self) -> Iterable[Metric]:
        """Return no metrics."""
        return ()
