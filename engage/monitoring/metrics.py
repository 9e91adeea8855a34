# SPDX-License-Identifier: Apache-2.0
"""What the server counts.

Every step counts through :class:`Metrics`, which does nothing. With ``server.metrics_port`` set,
the steps get a :class:`~engage.monitoring.prometheus.PrometheusMetrics` instead.

Labels come from closed sets: a route's name, a status, an event type, an outcome, an error code,
the name of an installed provider. A value that a client chooses never becomes a label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engage.api import EVENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engage.monitoring.refusals import Refusal

__all__ = ["REQUEST_BUCKETS", "TYPES", "WRITE_BUCKETS", "Metrics"]

#: Seconds: from one write to a fast disk up to the write timeout.
WRITE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 8.0)
#: Seconds: from a small event on an idle machine up to the request timeout.
REQUEST_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
#: Values of the label ``type``; any other type is counted as ``other``.
TYPES = frozenset({*EVENT_TYPES, "subscription"})


class Metrics:
    """Counts nothing, for a server without metrics; ``PrometheusMetrics`` overrides it all.

    Every method is cheap, never raises and never blocks.
    """

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request.

        :param route: the route's name (``track``, ``batch``, ``webhook``, ``healthz`` …, or
            ``unknown``), never a path.
        :param seconds: from the first byte of the request to the last of the answer.
        """

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

    def refused(self, refusal: Refusal) -> None:
        """Count a request that was refused as a whole."""

    def write(self, seconds: float, events: int) -> None:
        """Count one successful write to the storage.

        :param seconds: how long it took.
        :param events: how many events it had.
        """

    def queue(self, events: int) -> None:
        """Set the number of events that are waiting for the storage."""

    def storage_error(self) -> None:
        """Count a storage call that failed."""

    def append(self, seconds: float, events: int) -> None:
        """Count one successful call that appended events to the log.

        :param seconds: how long it took.
        :param events: how many events it had.
        """

    def log_error(self) -> None:
        """Count a call of the log that failed."""

    def log(self, gauges: Mapping[str, float]) -> None:
        """Set gauges of the log: those that it reports, and how much of it is not stored yet.

        :param gauges: as in :meth:`storage`.
        """

    def loaded(self, outcome: str, count: int = 1) -> None:
        """Count records that a loader has read from the log.

        :param outcome: ``stored``, ``duplicate``, ``conflict``, ``refused``, ``damaged``,
            ``letter`` (a dead letter of a server) or ``skipped``.
        """

    def gap(self, records: int) -> None:
        """Count records that the log deleted before a loader had read them."""

    def paused(self, partitions: int) -> None:
        """Set the number of partitions that this loader cannot read on."""

    def dead_letter(self, reason: str, count: int = 1) -> None:
        """Count refused events that were kept as dead letters.

        :param reason: an error code.
        """

    def webhook(self, provider: str, outcome: str) -> None:
        """Count a delivery.

        :param provider: the name of an installed provider, or ``unknown``.
        :param outcome: ``accepted``, ``ignored``, ``probe``, ``untranslated`` or the error code.
        """

    def dropped(self, what: str, count: int = 1) -> None:
        """Count what was dropped to stay within a limit.

        :param what: ``dead_letter``, ``conflict``, ``observer_batch``, ``profile_change``,
            ``connection``, ``accept`` (no file descriptor was left) …
        """

    def dead_letter_budget(self, budget: str, used: float) -> None:
        """Set how much of a budget of dead letters is used.

        :param budget: ``api``, ``webhook`` or ``conflict``.
        :param used: 0 to 1, of the workspace that uses most of it.
        """

    def storage(self, gauges: Mapping[str, float]) -> None:
        """Set the gauges that the storage reports.

        :param gauges: name (``wal_bytes``, ``free_bytes`` …; the last word is the unit) → value.
        """
