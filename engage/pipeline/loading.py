# SPDX-License-Identifier: Apache-2.0
"""Reads the log and has its records written to the storage, for a loader.

In this order: read a portion, write it to the storage, append the dead letters of what the storage
refuses, commit the places after what was written. A loader that dies at any point repeats, and the
storage knows what it has already. Nothing else moves the places.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import orjson

from engage.api import (
    DamagedRecord,
    DeadLetter,
    Event,
    EventLog,
    EventStore,
    LogReader,
    Portion,
    ReadRecord,
    Record,
    RecordStore,
    StorageError,
    UnknownRecord,
    unpack,
)
from engage.pipeline.load_letters import letter_of_damage
from engage.pipeline.portion_writer import Damage, PortionWriter, Unpacked
from engage.pipeline.retries import Retries, Stopped
from engage.storage.log_progress import GAP_RECORD

if TYPE_CHECKING:
    from engage.config import LogConfig
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.ingest import Ingest

__all__ = ["Loader", "Span"]

_log = logging.getLogger(__name__)

#: Seconds that a reader waits for the first record.
READ_WAIT: Final = 1.0
#: Seconds between two log lines about partitions that are paused.
LINE_PAUSE: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of the log that `engage load --from` reads again."""

    #: The group, which is not that of the loaders.
    group: str
    #: When the first records were appended: milliseconds since 1970 UTC.
    since: int
    #: Partition → the place at which it ends.
    ends: Mapping[int, int]
    #: Returns whether something is not to be stored again.
    skips: Callable[[Event | DeadLetter], bool]


class Loader:
    """One member of the group of loaders.

    :param log: an open log.
    :param store: the store; while it is not open, the loader waits.
    :param ingest: of the same store, without the log. It opens a store that does not answer again.
    :param config: ``[log]``.
    :param timeout: seconds that a call may take.
    :param max_value_bytes: the largest value of a record.
    :param clock: returns milliseconds since 1970 UTC.
    :param stored: called with the events that were newly stored.
    :param span: read this part of the log, and then end; by default all of it, until :meth:`stop`.
    """

    def __init__(
        self,
        log: EventLog,
        store: EventStore,
        ingest: Ingest,
        *,
        config: LogConfig,
        timeout: float,
        max_value_bytes: int,
        clock: Callable[[], int],
        metrics: Metrics,
        stored: Callable[[Sequence[Event]], None] = lambda _: None,
        span: Span | None = None,
    ) -> None:
        self._log = log
        self._store = store
        self._config = config
        self._timeout = timeout
        self._clock = clock
        self._metrics = metrics
        self._span = span
        self._stopping = asyncio.Event()
        #: The calls of the log, and of the store.
        self.log_calls = Retries(
            "log",
            timeout=timeout,
            stopping=self._stopping,
            failed=metrics.log_error,
            any_error=True,
        )
        self.store_calls = Retries(
            "storage",
            timeout=timeout,
            # A storage ends a slow call itself. To open it again would only add to its load.
            grace=timeout,
            stopping=self._stopping,
            failed=metrics.storage_error,
            recover=ingest.reopen,
        )
        self._writer = PortionWriter(
            log,
            store,
            ingest,
            log_calls=self.log_calls,
            store_calls=self.store_calls,
            max_value_bytes=max_value_bytes,
            metrics=metrics,
            stored=stored,
        )
        #: Whether the loader is a member of the group.
        self.joined = False
        #: Partitions with a record of an unknown version → why it cannot be read.
        self.paused: dict[int, str] = {}
        #: Partition → the place after the last record that was handled.
        self.reached: dict[int, int] = {}
        #: Records that the log had deleted before they were read.
        self.lost = 0
        #: Calls that returned no record, in a row.
        self.empty_reads = 0
        self._paused_logged_at = 0.0

    def stop(self) -> None:
        """Stop after the current portion; stop at once if it cannot be written now."""
        self._stopping.set()

    async def run(self) -> None:
        """Load until :meth:`stop` is called, or until the span ends."""
        span = self._span
        self._metrics.paused(0)
        reader = (
            self._log.reader(self._config.group)
            if span is None
            else self._log.reader(span.group, since=span.since)
        )
        try:
            await self.log_calls.call(reader.open, interruptible=True, longer=self._timeout)
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
        span = self._span
        return span is not None and all(
            self.reached.get(partition, 0) >= end for partition, end in span.ends.items()
        )

    async def _turn(self, reader: LogReader) -> None:
        """Load one portion."""
        self._report_paused()
        config = self._config
        portion = await self.log_calls.call(
            lambda: reader.read(
                max_records=min(config.portion_records, self._writer.portion),
                max_bytes=config.portion_bytes,
                wait=READ_WAIT,
            ),
            interruptible=True,
            longer=READ_WAIT + self._timeout,
        )
        self.empty_reads = 0 if portion.records else self.empty_reads + 1
        for partition, (expected, first) in portion.gaps.items():
            await self._note_gap(partition, expected, first)
        items = self._unpacked(portion, reader)
        reached: set[int] = set()
        while items:
            part = items[: self._writer.fitting([item for _, item in items])]
            try:
                await self._writer.write(part)
            except StorageError:
                continue  # fewer fit now
            items = items[len(part) :]
            places = {read.partition: read.offset + 1 for read, _ in part}
            await self._commit(reader, places)
            reached |= places.keys()
        last: dict[int, int] = {}
        if self._span is None:
            # What is committed ends a gap, also if nothing was appended after it.
            gaps = portion.gaps.items()
            last = {partition: first for partition, (_, first) in gaps if partition not in reached}
        last |= {n: place for n, place in portion.passed.items() if n not in self.paused}
        await self._commit(reader, last)

    async def _commit(self, reader: LogReader, places: Mapping[int, int]) -> None:
        if places:
            await self.log_calls.call(lambda: reader.commit(places))
            self.reached.update(places)

    def _unpacked(self, portion: Portion, reader: LogReader) -> list[Unpacked]:
        """Return what is in the records of a portion that are to be loaded, in their order."""
        items: list[Unpacked] = []
        skipped = 0
        for read in portion.records:
            if read.partition in self.paused or self._is_beyond(read):
                continue
            item: Event | DeadLetter | Damage | None
            try:
                item = unpack(read.record)
            except UnknownRecord as error:
                self._pause(reader, read, error)
                continue
            except DamagedRecord as error:
                item = Damage(letter_of_damage(read, error))
            except Exception as error:
                _log.exception("a record of the log cannot be read")
                item = Damage(letter_of_damage(read, error))
            else:
                if self._span is not None and self._span.skips(item):
                    skipped += 1
                    item = None
            items.append((read, item))
        if skipped:
            self._metrics.loaded("skipped", skipped)
        return items

    def _is_beyond(self, read: ReadRecord) -> bool:
        """Return whether a record is after the end of the span."""
        span = self._span
        if span is None or read.offset < span.ends.get(read.partition, 0):
            return False
        self.reached[read.partition] = read.offset
        return True

    # ------------------------------------------------------------------------------- exceptions
    def _pause(self, reader: LogReader, read: ReadRecord, error: UnknownRecord) -> None:
        """Read no more of a partition: a newer version of engage must continue there."""
        reader.pause([read.partition])
        self.paused[read.partition] = f"{error} at {read.offset}"
        self._metrics.paused(len(self.paused))
        self._paused_logged_at = 0.0

    def _report_paused(self) -> None:
        if not self.paused:
            return
        now = asyncio.get_running_loop().time()
        if self._paused_logged_at and now < self._paused_logged_at + LINE_PAUSE:
            return
        self._paused_logged_at = now
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
        self._metrics.gap(lost)
        _log.error(
            "partition %d of the log: %d records from %d on were deleted before they were loaded;"
            " acknowledged events may be lost",
            partition,
            lost,
            expected,
        )
        store = self._store
        if not isinstance(store, RecordStore) or self._span is not None:
            return
        body = {"partition": partition, "expected": expected, "first": first}
        record = Record(
            kind=GAP_RECORD,
            workspace_id="",
            id=f"{partition}-{expected}",
            body=orjson.dumps(body),
            at=self._clock(),
        )
        try:
            await self.store_calls.call(lambda: store.put_record(record))
        except Stopped:
            raise
        except Exception:
            _log.exception("a gap in the log could not be recorded in the storage")
