# SPDX-License-Identifier: Apache-2.0
"""The numbers that a process counts: one table, which Prometheus and the console's history read.

Labels come from closed sets: a route's name, a status, an event type, an outcome, an error code,
the id of a write key, the name of an installed provider. A value that a client chooses never
becomes a label.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal

import engage
from engage.api import EVENT_TYPES
from engage.monitoring.sampler import Refusal, Refusals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

__all__ = [
    "EVENT_ROUTES",
    "REQUEST_BUCKETS",
    "TYPES",
    "WRITE_BUCKETS",
    "Family",
    "Histogram",
    "Labels",
    "Metrics",
]

#: Seconds: from one write to a fast disk up to the write timeout.
WRITE_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 8.0),
)
#: Seconds: from a small event on an idle machine up to the request timeout.
REQUEST_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
#: Events in one write.
SIZE_BUCKETS: Final = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)
#: Values of the label ``type``; any other type is counted as ``other``.
TYPES: Final = frozenset({*EVENT_TYPES, "subscription", "traits"})
#: The routes of requests that carry events.
EVENT_ROUTES: Final = frozenset({*EVENT_TYPES, "batch", "beacon", "webhook"})
#: What is dropped to stay within a limit; ``accept``: no file descriptor was left.
DROPPED: Final = (
    *("dead_letter", "conflict", "observer_batch", "profile_change", "connection", "accept"),
)
#: The outcomes of a record that a loader reads; ``letter`` is a dead letter of a server.
LOAD_OUTCOMES: Final = (
    *("stored", "duplicate", "conflict", "refused", "damaged", "letter", "skipped", "erased"),
)

#: The values of the labels of a number.
Labels = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """The numbers of one name, which differ in their labels."""

    #: In Prometheus after ``engage_``.
    name: str
    text: str
    labels: tuple[str, ...] = ()
    #: Of a histogram.
    buckets: tuple[float, ...] = ()
    #: Whether it is neither a histogram nor a counter.
    gauge: bool = False
    #: Whether a gauge is added up over the processes, and begins at 0. Of others the latest value
    #: counts: all processes read the same number.
    summed: bool = False
    #: ``log`` and ``loader``: shown as soon as a number of that part is counted.
    part: Literal["server", "log", "loader"] = "server"

    @property
    def kind(self) -> str:
        """The type of the numbers in Prometheus."""
        return "histogram" if self.buckets else "gauge" if self.gauge else "counter"


FAMILIES: Final = (
    Family("requests", "Answered requests", ("route", "status")),
    Family(
        "request_seconds",
        "Time from the request to its answer, by the class of its status",
        ("route", "status"),
        REQUEST_BUCKETS,
    ),
    Family("events", "Events by their outcome", ("type", "outcome")),
    Family("write_seconds", "Duration of one write to the storage", buckets=WRITE_BUCKETS),
    Family("write_events", "Events of one write", buckets=SIZE_BUCKETS),
    Family("queue_events", "Events that wait for the storage", gauge=True, summed=True),
    Family("storage_errors", "Calls of the storage that failed"),
    Family("dead_letters", "Refused events that were kept", ("reason",)),
    Family(
        "refused_requests",
        "Requests that were refused as a whole, of which no dead letter exists",
        ("reason",),
    ),
    Family("webhook_deliveries", "Deliveries of webhook providers", ("provider", "outcome")),
    Family("dropped", "Data dropped to stay within a limit", ("what",)),
    Family("build_info", "Always 1; the label is the version of engage", ("version",), gauge=True),
    Family(
        "process_restarts",
        "Processes that were started again since the server started",
        ("process",),
        gauge=True,
    ),
    Family(
        "last_backup_timestamp_seconds",
        "State that the last backup has, in seconds since 1970; 0 if there is none",
        gauge=True,
    ),
    Family(
        "quota_used_ratio",
        "Part of its quota of the day that the fullest key or workspace has used",
        gauge=True,
    ),
    Family(
        "dead_letter_budget_used_ratio",
        "Part of a budget of dead letters that is used, of the fullest workspace",
        ("budget",),
        gauge=True,
    ),
    Family(
        "log_append_seconds",
        "Duration of one call that appended events to the log",
        buckets=WRITE_BUCKETS,
        part="log",
    ),
    Family(
        "log_append_events",
        "Events of one call that appended to the log",
        buckets=SIZE_BUCKETS,
        part="log",
    ),
    Family("log_errors", "Calls of the log that failed", part="log"),
    Family("loaded_records", "Records of the log by their outcome", ("outcome",), part="loader"),
    Family(
        "log_gap_records", "Records that the log deleted before they were loaded", part="loader"
    ),
    Family(
        "log_paused_partitions",
        "Partitions that are not loaded because of a record of an unknown version",
        gauge=True,
        summed=True,
        part="loader",
    ),
)


class Histogram:
    """Counts observations by size.

    :param bounds: the upper bounds of the buckets, except for the last one, which has none.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        #: Observations in each bucket.
        self.counts = [0] * (len(bounds) + 1)
        #: The sum of the observed values.
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """The table of a process. Every method is cheap, never raises and never blocks."""

    def __init__(self) -> None:
        #: Name of a family → labels → number.
        self.numbers: dict[str, collections.defaultdict[Labels, float]] = {
            family.name: collections.defaultdict(
                int,
                {} if family.labels or (family.gauge and not family.summed) else {(): 0},
            )
            for family in FAMILIES
            if not family.buckets
        }
        self.numbers["build_info"][engage.__version__,] = 1
        self.begin("dropped", ((what,) for what in DROPPED))
        self.histograms: dict[str, dict[Labels, Histogram]] = {
            family.name: {} if family.labels else {(): Histogram(family.buckets)}
            for family in FAMILIES
            if family.buckets
        }
        #: Events and refused requests of this minute, by workspace, write key and two more labels.
        self.minute = {
            name: collections.Counter[tuple[str, str, str, str]]()
            for name in ("events", "refused_requests")
        }
        #: Workspace and write key → the events that were stored, and their bytes.
        self.stored_by_key: collections.defaultdict[tuple[str, str], list[int]]
        self.stored_by_key = collections.defaultdict(lambda: [0, 0])
        #: The latest requests that were refused.
        self.refusals = Refusals()
        #: The most events that waited since it was last set to 0.
        self.longest_queue = 0
        self._parts = {"server"}
        self._own: dict[str, Family] = {}
        # Counted for each request.
        self._requests = self.numbers["requests"]
        self._events, self._minute = self.numbers["events"], self.minute["events"]

    # ------------------------------------------------------------------------------------ counting
    def begin(self, name: str, labels: Iterable[Labels]) -> None:
        """Show a counter with these labels as 0: Prometheus sees its first increase only then.

        :param name: of a family.
        """
        for values in labels:
            self.numbers[name][values] += 0

    def begin_requests(self, codes: Collection[str], providers: Iterable[str]) -> None:
        """Begin the counters of a server that answers requests, as :meth:`begin`.

        :param codes: the error codes of answers.
        :param providers: the names of the providers whose webhooks are accepted.
        """
        statuses = (HTTPStatus.OK, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
        self.begin("requests", itertools.product(EVENT_ROUTES, map(int, statuses)))
        self.begin("events", itertools.product(EVENT_TYPES, ("stored", "duplicate", "conflict")))
        self.begin("dead_letters", ((code,) for code in codes))
        self.begin("refused_requests", ((code,) for code in codes))
        left_out = ("ignored", "invalid_signature", "not_understood", "test", "untranslated")
        outcomes = itertools.product(providers, ("accepted", *left_out))
        self.begin("webhook_deliveries", outcomes)

    def restarts(self, counts: Mapping[str, int]) -> None:
        """Set how many processes the parent has started again, by kind."""
        for kind, count in counts.items():
            self.gauge("process_restarts", count, kind)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add to a counter that has no method of its own here.

        :param name: of a family.
        :param labels: never what a client chose. ``dropped`` has one of :data:`DROPPED`;
            ``webhook_deliveries`` has an installed provider or ``unknown``, and an outcome.
        """
        self.numbers[name][labels] += by

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge.

        :param name: of a family.
        """
        self.numbers[name][labels] = value

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request.

        :param route: the route's name (``track``, ``batch``, ``webhook``, ``healthz`` …, or
            ``unknown``), never a path.
        :param seconds: from the first byte of the request to the last of the answer.
        """
        self._requests[route, status] += 1
        labels, durations = (route, f"{status // 100}xx"), self.histograms["request_seconds"]
        if labels not in durations:
            durations[labels] = Histogram(REQUEST_BUCKETS)
        durations[labels].add(seconds)

    def event(
        self,
        kind: str,
        outcome: str,
        count: int = 1,
        workspace_id: str = "",
        write_key_id: str | None = None,
    ) -> None:
        """Count events.

        :param kind: ``identify`` …; anything else is counted as ``other``.
        :param outcome: ``stored``, ``duplicate``, ``conflict``, ``dropped`` (by a transform) or the
            error code of a refusal.
        :param workspace_id: the workspace of the events.
        :param write_key_id: the id of their write key; ``None``: a webhook delivery.
        """
        # Clients choose the name of an unknown type, so the table would have no bound.
        kind = kind if kind in TYPES else "other"
        self._events[kind, outcome] += count
        self._minute[workspace_id, write_key_id or "", kind, outcome] += count

    def stored(self, events: int, size: int, workspace_id: str, write_key_id: str | None) -> None:
        """Count events that were stored, for the quotas.

        :param size: their bytes.
        :param write_key_id: as in :meth:`event`.
        """
        if write_key_id is not None and events:
            total = self.stored_by_key[workspace_id, write_key_id]
            total[0] += events
            total[1] += size

    def refused(self, refusal: Refusal) -> None:
        """Count a request that was refused as a whole."""
        self.refusals.add(refusal, time.time_ns() // 1_000_000)
        labels = (refusal.workspace_id, refusal.write_key_id, refusal.route, refusal.reason)
        self.minute["refused_requests"][labels] += 1
        self.numbers["refused_requests"][refusal.reason,] += 1

    def write(self, seconds: float, events: int, waiting: int, *, to: str = "write") -> None:
        """Count one successful write of events to the storage.

        :param seconds: how long it took.
        :param events: how many events it had.
        :param waiting: how many events wait for the next writes.
        :param to: ``log_append``: to the log instead; then ``waiting`` are being appended.
        """
        self.histograms[f"{to}_seconds"][()].add(seconds)
        self.histograms[f"{to}_events"][()].add(events)
        self.numbers["queue_events"][()] = waiting
        self.longest_queue = max(self.longest_queue, waiting)

    def paused(self, partitions: int) -> None:
        """Set the number of partitions that this loader cannot read on."""
        if "loader" not in self._parts:
            self._parts.add("loader")
            self.begin("loaded_records", ((outcome,) for outcome in LOAD_OUTCOMES))
        self.numbers["log_paused_partitions"][()] = partitions

    def report(self, part: str, gauges: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Set the gauges that the storage or the log reports.

        :param part: ``storage`` or ``log``.
        :param gauges: name (``wal_bytes``, ``free_bytes`` …; the last word is the unit) → value.
        :param texts: name → what it is.
        """
        self._parts.add(part)
        for gauge, value in gauges.items():
            name = f"{part}_{gauge}"
            if name not in self._own:
                text = texts.get(gauge, gauge.replace("_", " "))
                self._own[name] = Family(name, text, gauge=True)
                self.numbers[name] = collections.defaultdict(int)
            self.numbers[name][()] = value

    # ------------------------------------------------------------------------------------- reading
    def rows(self) -> Iterator[tuple[Family, tuple[str, ...], float | Histogram]]:
        """Yield family, labels and value of each number for Prometheus."""
        for family in (*FAMILIES, *self._own.values()):
            if family.part not in self._parts:
                continue
            table: Mapping[Labels, float | Histogram]
            table = (self.histograms if family.buckets else self.numbers)[family.name]
            for labels, value in table.items():
                yield family, tuple(map(str, labels)), value
