# SPDX-License-Identifier: Apache-2.0
"""How far the storage is behind the log, and whether the server may still accept events.

A log keeps a record for a limited time. If the loaders are away for longer, the log deletes events
that were acknowledged and are stored nowhere else. So no events are accepted while the oldest
record that is not stored is older than a part of that time (``log.lag_percent``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from engage.api import Backlog, EventLog, StorageError
from engage.monitoring.metrics import Metrics
from engage.storage.time_limit import log_within

__all__ = ["Lag"]

_log = logging.getLogger(__name__)

#: Seconds between two readings.
POLL_SECONDS: Final = 5.0


class Lag:
    """Reads the backlog of a group of loaders, and computes from it whether it is overdue.

    While the log does not answer, the last reading counts, and grows older.

    :param log: an open log.
    :param group: the group of the loaders.
    :param percent: how old the oldest unread record may be, as a part of the time for which the log
        keeps records.
    :param timeout: seconds that a reading may take.
    :param clock: returns milliseconds since 1970 UTC.
    :param refuses: whether this process refuses events when it is overdue, and logs that.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        group: str,
        percent: int,
        timeout: float,
        clock: Callable[[], int],
        metrics: Metrics | None = None,
        refuses: bool = True,
    ) -> None:
        self._refuses = refuses
        self._from = log
        self._group = group
        self._percent = percent
        self._timeout = timeout
        self._clock = clock
        self._metrics = Metrics() if metrics is None else metrics
        #: The last reading; ``None``: there was none yet.
        self.backlog: Backlog | None = None
        #: No record that was appended before is unread, as far as is known.
        self._oldest = 0
        #: When a record is overdue; computed by each reading, so that a request only compares.
        self._overdue_at: float | None = None
        self._was_overdue = False
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """The age of the oldest record that is not stored; 0 if there is none."""
        if self.backlog is None or self.backlog.oldest_at is None:
            return 0.0
        return max(0, self._clock() - self._oldest) / 1000

    @property
    def overdue(self) -> bool:
        """Whether the oldest record that is not stored is too old to accept more events."""
        return self._overdue_at is not None and self._clock() > self._overdue_at

    async def start(self) -> None:
        """Read the backlog in the background until :meth:`close`."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="lag of the log")

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def read(self) -> None:
        """Read the backlog once.

        :raises LogUnavailable: if the log does not answer; the last reading stays.
        """
        now = self._clock()
        async with log_within(self._timeout):
            backlog = await self._from.backlog(self._group)
        self.backlog = backlog
        # If nothing is unread, what is unread later was appended after this reading began.
        self._oldest = now if backlog.oldest_at is None else backlog.oldest_at
        self._overdue_at = (
            None
            if backlog.retention is None
            else self._oldest + backlog.retention * self._percent / 100
        )

    # ---------------------------------------------------------------------------------- internals
    async def _follow(self) -> None:
        while True:
            try:
                await self.read()
                self._failing = False
            except Exception as error:
                if not self._failing:
                    expected = isinstance(error, StorageError)
                    _log.warning(
                        "the backlog of the log cannot be read: %s", error, exc_info=not expected
                    )
                self._failing = True
            self._report()
            await asyncio.sleep(POLL_SECONDS)

    def _report(self) -> None:
        """Set the gauges, and log when events are refused and accepted again."""
        gauges = dict(self._from.gauges())
        if self.backlog is not None:
            gauges["backlog_records"] = self.backlog.records
            gauges["backlog_seconds"] = self.seconds
            if self.backlog.retention is not None:
                gauges["retention_seconds"] = self.backlog.retention / 1000
        self._metrics.log(gauges)
        if not self._refuses:
            return
        overdue = self.overdue
        if overdue and not self._was_overdue:
            _log.error(
                "events are answered 503: the oldest record that is not in the storage is %.0f s"
                " old, more than %d %% of the time for which the log keeps records"
                " (log.lag_percent); is engage load running?",
                self.seconds,
                self._percent,
            )
        elif self._was_overdue and not overdue:
            _log.warning("events are accepted again: the storage has caught up with the log")
        self._was_overdue = overdue
