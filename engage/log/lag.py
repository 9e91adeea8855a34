# SPDX-License-Identifier: Apache-2.0
"""The lag: how far the storage is behind the log.

A log keeps a record for a limited time. If the loaders are down for longer, the log deletes events
that were acknowledged and are stored nowhere else. So a server accepts no events while the oldest
record that is not stored is older than half of that time.

Servers, one loader and the console read the lag continuously, ``engage check`` once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import Backlog, EventLog, StorageError
from engage.log.gaps import NAMED
from engage.monitoring.metrics import Metrics
from engage.reading.time_limit import log_within

if TYPE_CHECKING:
    from engage.config import LogConfig

__all__ = ["Lag"]

_log = logging.getLogger(__name__)

#: Seconds between two readings.
POLL_SECONDS: Final = 5.0
#: What the gauges are.
_TEXTS: Final = {
    "backlog_records": "Records of the log that are not loaded yet",
    "backlog_seconds": "Age of the oldest record that is not loaded yet",
    "retention_seconds": "How long the log keeps a record",
}


class Lag:
    """Reads the backlog of the loaders, and computes from it whether the storage is too far behind.

    While the log does not answer, the last reading counts, and grows older.

    :param timeout: seconds that a reading may take.
    :param clock: returns milliseconds since 1970 UTC.
    :param refuses: whether this process refuses events when the lag is too large, and logs that.
    :param opens: whether this opens the log, before a reading, and closes it.
    """

    def __init__(
        self,
        log: EventLog,
        config: LogConfig,
        *,
        timeout: float,
        clock: Callable[[], int],
        metrics: Metrics | None = None,
        refuses: bool = False,
        opens: bool = False,
    ) -> None:
        self._from = log
        self._config = config
        self._timeout = timeout
        self._clock = clock
        self._metrics = Metrics() if metrics is None else metrics
        self._refuses = refuses
        self._opens = opens
        #: The last reading; ``None``: there was none yet.
        self.backlog: Backlog | None = None
        #: Why the log does not answer, in one line.
        self.error: str | None = None
        #: All records that were appended before this time are known to be loaded.
        self._oldest = 0
        #: When the lag is too large; computed by each reading, so that a request only compares.
        self._overdue_at: float | None = None
        self._was_overdue = False
        self._task: asyncio.Task[None] | None = None

    @property
    def records(self) -> int:
        """The number of records that are not stored."""
        return 0 if self.backlog is None else self.backlog.records

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

    @property
    def gaps(self) -> Mapping[int, tuple[int, int]]:
        """Where acknowledged events may be lost; see :attr:`engage.api.Backlog.gaps`."""
        return {} if self.backlog is None else self.backlog.gaps

    @property
    def alarms(self) -> Sequence[str]:
        """The troubles for an operator to attend to, most important first, each in one line."""
        if self.error is not None:
            return [f"the log is not available: {self.error}"]
        alarms = []
        if gaps := self.gaps:
            named = [
                f"partition {number} (expected {expected}, begins at {first})"
                for number, (expected, first) in sorted(gaps.items())[:NAMED]
            ]
            if len(gaps) > NAMED:
                named.append(f"{len(gaps) - NAMED} more")
            alarms.append(
                "acknowledged events may be lost: the next records of the loaders are no longer"
                f" in the log: {', '.join(named)}"
            )
        if self.overdue:
            alarms.append(
                "events are answered 503: the oldest record that is not loaded is too old;"
                " run engage load, or more loaders"
            )
        return alarms

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
        if self._opens:
            await self._from.close()

    async def read(self) -> None:
        """Read the backlog once. If the log does not answer, :attr:`error` says why."""
        now = self._clock()
        try:
            async with log_within(self._timeout):
                if self._opens:
                    await self._from.open(create=False)
                backlog = await self._from.backlog(self._config.group)
        except Exception as error:
            expected = isinstance(error, StorageError)
            if self.error is None:
                _log.warning(
                    "the backlog of the log cannot be read: %s", error, exc_info=not expected
                )
            self.error = str(error) if expected else type(error).__name__
            return
        self.error = None
        self.backlog = backlog
        # If nothing is unread, any later record was appended after this reading began.
        self._oldest = now if backlog.oldest_at is None else backlog.oldest_at
        self._overdue_at = (
            None if backlog.retention is None else self._oldest + backlog.retention / 2
        )

    # ---------------------------------------------------------------------------------- internals
    async def _follow(self) -> None:
        while True:
            await self.read()
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
        self._metrics.report("log", gauges, {**self._from.gauge_texts, **_TEXTS})
        overdue = self._refuses and self.overdue
        if overdue and not self._was_overdue:
            _log.error(
                "events are answered 503: the oldest record that is not in the storage is %.0f s"
                " old, more than half of the time for which the log keeps records; is engage load"
                " running?",
                self.seconds,
            )
        elif self._was_overdue and not overdue:
            _log.warning("events are accepted again: the storage has caught up with the log")
        self._was_overdue = overdue
