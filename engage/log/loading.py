# SPDX-License-Identifier: Apache-2.0
"""Reads the log and has its records written to the storage, for a loader.

In this order: read a batch, write it to the storage, append the dead letters of the events that the
storage refuses, commit the offsets. If a loader dies at any point, the records without a commit are
read again, and the storage keeps each event once. Nothing else moves the offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import (
    API_ORIGIN,
    Batch,
    DamagedRecord,
    DeadLetter,
    Event,
    EventLog,
    LogReader,
    ReadRecord,
    StorageError,
    UnknownRecord,
    unpack,
)
from engage.log.gaps import gap_record
from engage.log.letters import letter_of_damage
from engage.log.retries import Retries, Stopped
from engage.log.writing import Damage, Unpacked, Writer
from engage.monitoring.sampler import Throttle
from engage.people.tombstones import Tombstones
from engage.pipeline.conflicts import Conflicts
from engage.pipeline.decode import text_too_deep
from engage.pipeline.explain import STAMP
from engage.pipeline.group_commit import GROUP_BYTES
from engage.pipeline.normalise import weight_of
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.config import Limits, LogConfig
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.ingest import Ingest

__all__ = ["PORTION_RECORDS", "Loader", "Range"]

_log = logging.getLogger(__name__)

#: Seconds that a reader waits for the first record; a drain waits as long.
READ_WAIT: Final = 0.25
#: Weight of one write at most, and so its records: no client waits for it.
PORTION_RECORDS: Final = 4000
#: Records of the first write: how fast the storage is, is not known yet.
_FIRST: Final = 500
#: The part of the time limit below which the next write may be twice as large: it then takes at
#: most half of the limit.
_FAST: Final = 1 / 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The part of the log that `engage load --from` reads again."""

    #: The group, which is not that of the loaders.
    group: str
    #: When the first records were appended: milliseconds since 1970 UTC.
    since: int
    #: Partition → the offset at which it ends.
    ends: Mapping[int, int]
    #: Returns whether something is not to be stored again.
    skips: Callable[[Event | DeadLetter], bool]


class Loader:
    """One member of the group of loaders.

    :param log: an open log.
    :param store: the store; while it is not open, the loader waits.
    :param ingest: of the same store, without the log. It opens a store that does not answer again.
    :param config: ``[log]``.
    :param limits: those of the servers.
    :param timeout: seconds that a call may take.
    :param clock: returns milliseconds since 1970 UTC.
    :param erasures_key: ``[erasures] key``: what the log has of people who were erased is dropped,
        and what another has with the message id of an erased event is a conflict.
    :param range_: read this part of the log, and then end; by default all of it, until
        :meth:`stop`.
    """

    def __init__(
        self,
        log: EventLog,
        store: Storage,
        ingest: Ingest,
        *,
        config: LogConfig,
        limits: Limits,
        timeout: float,
        clock: Callable[[], int],
        metrics: Metrics,
        range_: Range | None = None,
        erasures_key: str | None = None,
    ) -> None:
        self._log = log
        self._store = store
        self._config = config
        self._limits = limits
        self._timeout = timeout
        self._clock = clock
        self._metrics = metrics
        self._range = range_
        self._stopping = asyncio.Event()
        #: The calls of the log, and those of the store that are not made by ``ingest``.
        self.log_calls = Retries(
            "log",
            timeout=timeout,
            stopping=self._stopping,
            failed=lambda: metrics.count("log_errors"),
        )
        self.store_calls = Retries(
            "storage",
            timeout=timeout,
            stopping=self._stopping,
            failed=lambda: metrics.count("storage_errors"),
        )
        self._writer = Writer(
            log,
            ingest,
            Conflicts(ingest, erasures_key),
            Tombstones(store, erasures_key),
            log_calls=self.log_calls,
            metrics=metrics,
        )
        #: Records that are written at once at most, each of a weight of at least 1. It follows what
        #: the storage can do.
        self._at_once = min(_FIRST, PORTION_RECORDS)
        #: Whether the loader is a member of the group.
        self.joined = False
        #: Partitions with a record of an unknown version → why it cannot be read.
        self.paused: dict[int, str] = {}
        #: Partition → the offset after the last record that was handled.
        self.reached: dict[int, int] = {}
        #: Records that the log had deleted before they were read.
        self.lost = 0
        #: Calls that returned no record, in a row.
        self.empty_reads = 0
        self._paused_line = Throttle()

    def stop(self) -> None:
        """Stop after the current batch; stop at once if it cannot be written now."""
        self._stopping.set()

    async def run(self) -> None:
        """Load until :meth:`stop` is called, or until the range ends."""
        bounds = self._range
        self._metrics.paused(0)
        reader = (
            self._log.reader(self._config.group)
            if bounds is None
            else self._log.reader(bounds.group, since=bounds.since)
        )
        try:
            await self.log_calls.call(reader.open, wait=self._timeout)
            self.joined = True
            while not self._stopping.is_set() and not self._at_end:
                await self._turn(reader)
        except Stopped:
            pass
        finally:
            self.joined = False
            with contextlib.suppress(StorageError, TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await reader.close()

    @property
    def _at_end(self) -> bool:
        bounds = self._range
        return bounds is not None and all(
            self.reached.get(partition, 0) >= end for partition, end in bounds.ends.items()
        )

    async def _turn(self, reader: LogReader) -> None:
        """Load one batch."""
        self._report_paused()
        batch = await self.log_calls.call(
            lambda: reader.read(
                max_records=min(PORTION_RECORDS, self._at_once),
                max_bytes=GROUP_BYTES,
                wait=READ_WAIT,
            ),
            wait=READ_WAIT,
        )
        self.empty_reads = 0 if batch.records else self.empty_reads + 1
        for partition, (expected, first) in batch.gaps.items():
            await self._note_gap(partition, expected, first)
        reached = await self._write(self._unpacked(batch, reader), reader)
        last: dict[int, int] = {}
        if self._range is None:
            # A commit ends a gap, also if nothing was appended after it.
            gaps = batch.gaps.items()
            last = {partition: first for partition, (_, first) in gaps if partition not in reached}
        last |= {n: offset for n, offset in batch.passed.items() if n not in self.paused}
        await self._commit(reader, last)

    async def _write(self, items: Sequence[Unpacked], reader: LogReader) -> set[int]:
        """Write the contents of records and commit their offsets, in parts if all at once fail.

        An overloaded storage fails with a large write however often it is repeated, and a poisonous
        event fails all events that are written with it. So a part that fails is divided, down to a
        single record. It waits for the end of an outage. A single record that fails twice in an
        unexpected way, while the storage works, is given up.

        :return: the partitions of the records.
        """
        reached: set[int] = set()
        failures = 0
        while items:
            part = items[: self._at_once]
            started = time.monotonic()
            try:
                await self._writer.write(part)
            except StorageError as error:
                self._at_once = max(len(part) // 2, 1)
                unexpected = error.__cause__
                if unexpected is None or isinstance(unexpected, StorageError):
                    await self.store_calls.pause()
                    continue
                if len(part) > 1:
                    continue
                # Otherwise a fault of the storage would turn all events into letters.
                await self.store_calls.call(lambda: self._store.check())
                failures += 1
                if failures < 2:
                    continue
                await self._writer.give_up(*part[0], unexpected)
            else:
                self.store_calls.succeeded()
                if time.monotonic() - started < self._timeout * _FAST:
                    self._at_once = min(2 * self._at_once, PORTION_RECORDS)
            failures = 0
            items = items[len(part) :]
            offsets = {read.partition: read.offset + 1 for read, _ in part}
            await self._commit(reader, offsets)
            reached |= offsets.keys()
        return reached

    async def _commit(self, reader: LogReader, offsets: Mapping[int, int]) -> None:
        if offsets:
            await self.log_calls.call(lambda: reader.commit(offsets))
            self.reached.update(offsets)

    def _unpacked(self, batch: Batch, reader: LogReader) -> list[Unpacked]:
        """Return the contents of the records of a batch, in their order."""
        items: list[Unpacked] = []
        skipped = 0
        for read in batch.records:
            if read.partition in self.paused or self._is_beyond(read):
                continue
            item: Event | DeadLetter | Damage | None
            try:
                item = unpack(read.record)
                if isinstance(item, Event):
                    _check_limits(item, self._limits)
            except UnknownRecord as error:
                self._pause(reader, read, error)
                continue
            except DamagedRecord as error:
                item = Damage(letter_of_damage(read, error))
            except Exception as error:
                _log.exception("a record of the log cannot be read")
                item = Damage(letter_of_damage(read, error))
            else:
                if self._range is not None and self._range.skips(item):
                    skipped += 1
                    item = None
                elif isinstance(item, Event):
                    item = _weighed(item)
            items.append((read, item))
        if skipped:
            self._metrics.count("loaded_records", "skipped", by=skipped)
        return items

    def _is_beyond(self, read: ReadRecord) -> bool:
        """Return whether a record is after the end of the range."""
        bounds = self._range
        if bounds is None or read.offset < bounds.ends.get(read.partition, 0):
            return False
        self.reached[read.partition] = read.offset
        return True

    # ------------------------------------------------------------------------------- exceptions
    def _pause(self, reader: LogReader, read: ReadRecord, error: UnknownRecord) -> None:
        """Stop reading a partition: a newer version of engage must continue there."""
        reader.pause([read.partition])
        self.paused[read.partition] = f"{error} at {read.offset}"
        self._metrics.paused(len(self.paused))
        self._paused_line = Throttle()

    def _report_paused(self) -> None:
        if not self.paused:
            return
        if self._paused_line() is None:
            return
        listed = "; ".join(f"partition {n}: {why}" for n, why in sorted(self.paused.items()))
        _log.error(
            "partitions of the log are not loaded, because a newer version of engage or another"
            " program wrote to them; update the loaders (%s)",
            listed,
        )

    async def _note_gap(self, partition: int, expected: int, first: int) -> None:
        """Report records that the log deleted before they were loaded, and keep that fact."""
        lost = max(first - expected, 0)
        self.lost += lost
        self._metrics.count("log_gap_records", by=lost)
        _log.error(
            "partition %d of the log: %d records from %d on were deleted before they were loaded;"
            " acknowledged events may be lost",
            partition,
            lost,
            expected,
        )
        store = self._store
        if self._range is not None:
            return
        record = gap_record(partition, expected, first, now=self._clock())
        await self.store_calls.call(lambda: store.put_record(record))


def _check_limits(event: Event, limits: Limits) -> None:
    """Check that an event is within the limits of requests; another program may have written it.

    :raises DamagedRecord: if it is not.
    """
    body, depth = event.body, limits.json_depth
    most = limits.event_bytes if event.origin == API_ORIGIN else limits.webhook_event_bytes
    if len(body) > most + STAMP:
        raise DamagedRecord(f"the event has {len(body)} bytes; the limit is {most}")
    # Counting brackets takes little time, and most events have fewer.
    if body.count(b"{") + body.count(b"[") > depth and text_too_deep(body, depth):
        raise DamagedRecord(f"the event is nested too deeply; the limit is {depth} levels")


def _weighed(event: Event) -> Event:
    """Return an event with its weight, which is not in its record; few types weigh more than 1."""
    if event.type not in ("identify", "group"):
        return event
    try:
        return dataclasses.replace(event, weight=weight_of(event.type, event.document()))
    except (TypeError, ValueError):  # another program may have written it
        return event
