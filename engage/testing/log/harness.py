# SPDX-License-Identifier: Apache-2.0
"""The class that the author of a log fills in, and the harness (``LogBench``) of the tests."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from engage.api import EventLog, LogContext, LogReader, LogRecord, Outcome, ReadRecord, Status

from ..harness import PATIENCE, Harness, find_factory, on_bench

#: The limits of a batch, where a test is not about them.
MAX_RECORDS = 1000
MAX_BYTES = 4 * 1024 * 1024


class LogSubject:
    """The members that a subclass of the suite defines about its log."""

    #: The module of the plugin, as its entry point names it.
    plugin: ClassVar[str]
    #: The name that the plugin registers; needed if it registers several logs.
    log: ClassVar[str | None] = None
    #: Seconds in which the members of a group divide the partitions, at most.
    patience: ClassVar[float] = 120

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        """Return the options of a log that does not exist yet.

        :param tmp_path: an empty folder. Each test has a different one.
        """
        raise NotImplementedError

    def can(self, feature: str) -> bool:
        """Return whether the server under the log has a feature; servers of one protocol differ.

        :param feature: ``durable`` (acknowledged records survive the end of every process, and
            another process can read them), ``break`` (:meth:`break_log` works), ``expire``
            (:meth:`expire` works), ``missing`` (a log can be absent), ``times`` (the log finds
            records by the time at which they were appended), ``partition`` (:meth:`break_partition`
            works; by default it does not).
        """
        return feature != "partition"

    def break_log(self, options: Mapping[str, Any]) -> None:
        """Make the server under the log fail: nothing can be appended until :meth:`mend_log`."""
        raise NotImplementedError

    def mend_log(self, options: Mapping[str, Any]) -> None:
        """Undo :meth:`break_log`. Records that were appended before must be there again."""
        raise NotImplementedError

    def break_partition(self, options: Mapping[str, Any], partition: int) -> None:
        """Make one partition fail, and no other, until :meth:`mend_log`."""
        raise NotImplementedError

    def expire(self, options: Mapping[str, Any], offsets: Mapping[int, int]) -> None:
        """Delete the oldest records, as the retention of the log does.

        :param offsets: partition → the first offset that stays.
        """
        raise NotImplementedError

    def too_large(self, record: LogRecord) -> LogRecord:
        """Return the record, changed so that this log can never take it."""
        return dataclasses.replace(record, value=bytes(64 * 1024 * 1024))


class LogBench(Harness[LogSubject]):
    """One log, which a test can open several times. Leaving the context closes all of them.

    :param subject: the suite's subclass.
    """

    def __init__(self, subject: LogSubject, tmp_path: Path) -> None:
        super().__init__(subject, tmp_path)
        self.context = LogContext(base_dir=tmp_path, write_timeout=PATIENCE)
        self._factory = find_factory(subject.plugin, subject.log, "log")[0]
        self._groups = itertools.count(1)

    def new(self, **context: Any) -> EventLog:
        """Return a log that is not opened yet.

        :param context: fields of :class:`~engage.api.LogContext` that differ from the defaults.
        """
        log: EventLog = self._factory(self.options, dataclasses.replace(self.context, **context))
        self._opened.append(log)
        return log

    async def open(self, *records: LogRecord, **context: Any) -> EventLog:
        """Return an opened log. The first one creates it.

        :param records: appended to it.
        :param context: see :meth:`new`.
        """
        log = self.new(**context)
        await log.open(create=True)
        await log.check()
        if records:
            await append_all(log, *records)
        return log

    async def reader(self, log: EventLog, group: str = "g", **options: Any) -> LogReader:
        """Return an opened reader.

        :param options: other parameters of :meth:`~engage.api.EventLog.reader`.
        """
        reader = log.reader(group, **options)
        self._opened.append(reader)
        await reader.open()
        return reader

    async def take(self, reader: LogReader, count: int) -> list[ReadRecord]:
        """Read this number of records, and check that no others follow.

        :raises AssertionError: if there are fewer or more of them.
        """
        entries: list[ReadRecord] = []
        end = time.monotonic() + self.subject.patience
        while len(entries) < count and time.monotonic() < end:
            entries += await read(reader, wait=1)
        entries += await read(reader, wait=0.2)
        assert len(entries) == count
        return entries

    async def everything(self, log: EventLog) -> list[ReadRecord]:
        """Return all records that are in the log now, read by a group of its own."""
        ends = {number: end for number, end in (await log.ends()).items() if end}
        reader = await self.reader(log, f"all{next(self._groups)}")
        entries: list[ReadRecord] = []
        quiet = time.monotonic() + self.subject.patience
        while ends and time.monotonic() < quiet:
            more = await read(reader, wait=0.5)
            for entry in more:
                if entry.offset + 1 >= ends.get(entry.partition, 0):
                    ends.pop(entry.partition, None)
            entries += more
            if more:
                quiet = time.monotonic() + 5
        await reader.close()
        return entries

    async def _break(self) -> None:
        await asyncio.to_thread(self.subject.break_log, self.options)

    async def _mend(self) -> None:
        await asyncio.to_thread(self.subject.mend_log, self.options)


on_log = on_bench(LogBench)


# ------------------------------------------------------------------------------- records for tests
def log_record(name: str, key: str = "user", value: bytes | None = None) -> LogRecord:
    """Return a record whose value is its name, unless another value is given.

    A log must not look into its records, so this is not an event.
    """
    return LogRecord(
        key=f"acme:{key}".encode(),
        value=name.encode() if value is None else value,
        headers={"engage": b"test/1", "meta": name.encode()},
    )


def numbered(count: int, *, keys: int = 50, name: str = "m") -> list[LogRecord]:
    """Return records ``m0``, ``m1``, … of several keys."""
    return [log_record(f"{name}{n}", f"user{n % keys}") for n in range(count)]


def names(records: Iterable[ReadRecord]) -> list[str]:
    """Return the names of records, in their order."""
    return [entry.record.headers["meta"].decode() for entry in records]


def by_partition(records: Iterable[ReadRecord]) -> dict[int, list[ReadRecord]]:
    """Return partition → its records, in the order in which they were read."""
    parts: dict[int, list[ReadRecord]] = {}
    for entry in records:
        parts.setdefault(entry.partition, []).append(entry)
    return parts


def offsets_after(records: Iterable[ReadRecord]) -> dict[int, int]:
    """Return the offsets to commit when these records are done with."""
    offsets: dict[int, int] = {}
    for entry in records:
        offsets[entry.partition] = max(offsets.get(entry.partition, 0), entry.offset + 1)
    return offsets


async def read(
    reader: LogReader, *, wait: float, max_records: int = MAX_RECORDS
) -> Sequence[ReadRecord]:
    """Return the next records, and check that no gap is reported."""
    batch = await reader.read(max_records=max_records, max_bytes=MAX_BYTES, wait=wait)
    assert not batch.gaps
    return batch.records


async def append_all(log: EventLog, *records: LogRecord) -> None:
    """Append records, and check that all of them are stored."""
    outcomes = await log.append(records)
    assert list(outcomes) == [Outcome(Status.STORED)] * len(records)
