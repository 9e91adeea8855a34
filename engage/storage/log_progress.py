# SPDX-License-Identifier: Apache-2.0
"""How far the loaders are, for an operator: ``engage check`` and the console.

A reading never keeps a command or a page away: a log that does not answer is part of the result.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from typing import TYPE_CHECKING, Final

import orjson

from engage.api import Backlog, EventLog, EventStore, RecordStore, StorageError
from engage.storage.time_limit import log_within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engage.config import LogConfig

__all__ = ["GAP_DAYS", "GAP_RECORD", "LogProgress", "Progress", "past_gaps", "read_progress"]

#: The kind of the records in which the loaders keep the gaps that they met.
GAP_RECORD: Final = "log_gap"
#: Days for which a gap is shown after the loaders have gone on.
GAP_DAYS: Final = 14
#: Seconds for which pages show the same reading, and the same failure.
_FRESH: Final = 2.0
_FAILED: Final = 10.0
#: Seconds that a page waits for a reading, which goes on.
_PATIENCE: Final = 1.5
#: Partitions that a message names.
_NAMED: Final = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a group of loaders is."""

    #: What it has not loaded; ``None``: the log does not answer.
    backlog: Backlog | None
    #: The age of the oldest record that is not loaded, in seconds; 0 if there is none.
    seconds: float = 0.0
    #: Whether ``engage serve`` answers 503 because of that age.
    overdue: bool = False
    #: Why the log does not answer, in one line.
    error: str | None = None

    @property
    def records(self) -> int:
        """The number of records that are not loaded."""
        return 0 if self.backlog is None else self.backlog.records

    @property
    def gaps(self) -> Mapping[int, tuple[int, int]]:
        """Where acknowledged events may be lost; see :attr:`engage.api.Backlog.gaps`."""
        return {} if self.backlog is None else self.backlog.gaps

    @property
    def alarms(self) -> Sequence[str]:
        """What needs attention, most important first, each in one line."""
        if self.error is not None:
            return [f"the log is not available: {self.error}"]
        found = []
        gaps = self.gaps
        if gaps:
            named = [
                f"partition {number} (expected {expected}, begins at {first})"
                for number, (expected, first) in sorted(gaps.items())[:_NAMED]
            ]
            if len(gaps) > _NAMED:
                named.append(f"{len(gaps) - _NAMED} more")
            found.append(
                "acknowledged events may be lost: the next records of the loaders are not in the"
                f" log any more: {', '.join(named)}"
            )
        if self.overdue:
            found.append(
                "events are answered 503: the oldest record that is not loaded is too old"
                " (log.lag_percent); run engage load, or more of it"
            )
        return found


async def read_progress(log: EventLog, config: LogConfig, *, now: int, seconds: float) -> Progress:
    """Read how far the loaders are.

    :param log: an open log.
    :param now: milliseconds since 1970 UTC.
    :param seconds: seconds that the reading may take.
    :return: also if the log does not answer.
    """
    try:
        async with log_within(seconds):
            backlog = await log.backlog(config.group)
    except StorageError as error:
        return Progress(backlog=None, error=str(error))
    if backlog.oldest_at is None:
        return Progress(backlog=backlog)
    age = max(0, now - backlog.oldest_at)
    limit = None if backlog.retention is None else backlog.retention * config.lag_percent / 100
    return Progress(backlog=backlog, seconds=age / 1000, overdue=limit is not None and age > limit)


async def past_gaps(store: EventStore, *, now: int) -> Sequence[str]:
    """Return the gaps that the loaders met in the last days, newest first, each in one line.

    :param now: milliseconds since 1970 UTC.
    :raises StorageUnavailable: if the store does not answer.
    """
    if not isinstance(store, RecordStore):
        return []
    page = await store.list_records(GAP_RECORD, limit=1000)
    recent = [one for one in page.items if one.at >= now - GAP_DAYS * 86_400_000]
    lines = []
    for record in sorted(recent, key=lambda one: one.at, reverse=True)[:_NAMED]:
        body = orjson.loads(record.body)
        partition, expected, first = body["partition"], body["expected"], body["first"]
        when = datetime.datetime.fromtimestamp(record.at / 1000, datetime.UTC)
        lines.append(
            f"acknowledged events may be lost: {max(first - expected, 0)} records of partition"
            f" {partition}, from {expected} on, were not in the log any more when a loader came to"
            f" them ({when:%Y-%m-%d %H:%M} UTC)"
        )
    if len(recent) > _NAMED:
        lines.append(f"{len(recent) - _NAMED} more gaps in the log")
    return lines


class LogProgress:
    """Opens the log when it is first asked, and reads from it how far the loaders are.

    Requests that come within a moment share a reading.

    :param log: not opened.
    :param clock: returns milliseconds since 1970 UTC.
    :param timeout: seconds that opening and a reading may take.
    """

    def __init__(
        self, log: EventLog, config: LogConfig, *, clock: Callable[[], int], timeout: float
    ) -> None:
        self._log = log
        self._config = config
        self._clock = clock
        self._timeout = timeout
        self._open = False
        #: The last reading, and until when it counts, by the clock of the event loop.
        self._last: Progress | None = None
        self._fresh_until = 0.0
        self._reading: asyncio.Task[Progress] | None = None

    async def read(self) -> Progress:
        """Return how far the loaders are; it never raises because of the log."""
        if self._reading is None or self._reading.done():
            if self._last is not None and asyncio.get_running_loop().time() < self._fresh_until:
                return self._last
            self._reading = asyncio.create_task(self._read(), name="progress of the loaders")
        await asyncio.wait([self._reading], timeout=_PATIENCE)
        if self._reading.done():
            return self._reading.result()
        return self._last or Progress(backlog=None, error="no answer yet")

    async def _read(self) -> Progress:
        try:
            if not self._open:
                async with log_within(self._timeout):
                    await self._log.open(create=False)
                self._open = True
            found = await read_progress(
                self._log, self._config, now=self._clock(), seconds=self._timeout
            )
        except StorageError as error:
            found = Progress(backlog=None, error=str(error))
        self._last = found
        seconds = _FRESH if found.error is None else _FAILED
        self._fresh_until = asyncio.get_running_loop().time() + seconds
        return found

    async def close(self) -> None:
        """Close the log. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._log.close()
