# SPDX-License-Identifier: Apache-2.0
"""A log in memory, whose broker fails as a test wants.

A :class:`MemoryBroker` has the records, the groups and the faults. Several :class:`MemoryLog`
objects can be connected to one broker, as several processes are connected to one Kafka::

    broker = MemoryBroker(partitions=3)
    serving, loading = MemoryLog(broker), MemoryLog(broker)
    broker.leaderless.add(1)

The module is a plugin, too: ``[log] backend = "memory"`` with ``[log.memory] name = "x"`` connects
to ``BROKERS["x"]``, which is made if there is none.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import dataclasses
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from engage.api import (
    Backlog,
    Batch,
    EventLog,
    LogContext,
    LogFactory,
    LogReader,
    LogRecord,
    Outcome,
    ReadRecord,
    Register,
    Status,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
    hookimpl,
)

#: Seconds between two looks at something that is waited for.
TICK = 0.005


@dataclasses.dataclass
class _Partition:
    #: What is still there, in order. Offsets grow, and may have gaps.
    records: list[ReadRecord] = dataclasses.field(default_factory=list)
    #: The offset of the oldest record that was not deleted, and of the next record.
    first: int = 0
    end: int = 0
    #: What is not appended yet, because there is no leader or because it is slow.
    queue: collections.deque[tuple[Sequence[LogRecord], asyncio.Future[None]]] = dataclasses.field(
        default_factory=collections.deque
    )
    pump: asyncio.Task[None] | None = None


@dataclasses.dataclass
class _Group:
    committed: dict[int, int] = dataclasses.field(default_factory=dict)
    #: In the order in which they joined. Partition ``n`` belongs to member ``n % len(members)``.
    members: list[MemoryReader] = dataclasses.field(default_factory=list)


class MemoryBroker:
    """The records, the groups of readers, and the faults. A test sets the public attributes.

    :param partitions: their number.
    :param retention: how long records are kept, in milliseconds. Nothing deletes them except
        :meth:`expire`.
    :param clock: returns the time of the log: milliseconds since 1970 UTC.
    :param exists: whether the log was created before.
    """

    def __init__(
        self,
        partitions: int = 3,
        *,
        retention: int | None = None,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        exists: bool = True,
    ) -> None:
        self.retention = retention
        self.clock = clock
        self.exists = exists
        #: The dead letters, in order.
        self.dead: list[LogRecord] = []
        #: Method of a log or a reader → number of calls; a reader's begin with ``reader.``, such as
        #: ``reader.commit``.
        self.calls: collections.Counter[str] = collections.Counter()
        #: Every commit that was not ignored: (group, offsets).
        self.commits: list[tuple[str, dict[int, int]]] = []
        # The faults.
        #: Every call fails, and what is being appended waits.
        self.down = False
        #: Methods that fail, named as in :attr:`calls`.
        self.failing: set[str] = set()
        #: Partitions without a leader: an append to them waits until there is one, and fails after
        #: ``write_timeout``. Nothing is read from them. ``check`` fails.
        self.leaderless: set[int] = set()
        #: Seconds that each append to a partition takes. Meanwhile others wait for their turn.
        self.slow = 0.0
        #: The largest value of a dead letter; ``None``: as of other records.
        self.max_dead: int | None = None
        #: Whether what a call left in the queue when it ended (its time was over, or it was
        #: cancelled) is appended later, as a client's library may do.
        self.late = True
        #: A setting that could lose records, such as ``min.insync.replicas``; ``None``: none.
        self.weak: str | None = None
        #: Called with the name of each call before it works. It may raise, or return something to
        #: wait for.
        self.before: Callable[[str], Awaitable[object] | None] | None = None
        self._partitions = [_Partition() for _ in range(partitions)]
        self._groups: dict[str, _Group] = collections.defaultdict(_Group)

    # --------------------------------------------------------------------------- what tests look at
    @property
    def records(self) -> list[ReadRecord]:
        """Everything that is in the log, partition by partition."""
        return [record for partition in self._partitions for record in partition.records]

    def partition_of(self, key: bytes) -> int:
        """Return the number of the partition of a key."""
        return zlib.crc32(key) % len(self._partitions)

    def ends(self) -> dict[int, int]:
        """Return partition → the offset of its next record."""
        return {number: partition.end for number, partition in enumerate(self._partitions)}

    def committed(self, group: str) -> dict[int, int]:
        """Return partition → the committed offset of a group."""
        return dict(self._groups[group].committed)

    # --------------------------------------------------------------------------- what tests can do
    def inject(self, record: LogRecord, *, partition: int | None = None) -> ReadRecord:
        """Append a record past every fault, such as one that engage would not write.

        :param partition: its number; by default that of the key.
        """
        number = self.partition_of(record.key) if partition is None else partition
        self._store(number, [record])
        return self._partitions[number].records[-1]

    def skip(self, partition: int, offsets: int = 1) -> None:
        """Leave offsets out, as the marker of a transaction does."""
        self._partitions[partition].end += offsets

    def expire(self, partition: int, before: int) -> None:
        """Delete the records of a partition whose offset is less than this: retention is over."""
        one = self._partitions[partition]
        one.records = [record for record in one.records if record.offset >= before]
        one.first = max(one.first, min(before, one.end))

    def commit(self, group: str, offsets: Mapping[int, int]) -> None:
        """Set the committed offsets of a group."""
        self._groups[group].committed.update(offsets)

    # ------------------------------------------------------------------------- for logs and readers
    async def enter(self, name: str) -> None:
        """Begin a call.

        :raises StorageUnavailable: if it fails.
        """
        self.calls[name] += 1
        if self.before is not None:
            waited = self.before(name)
            if waited is not None:
                await waited
        if self.down or name in self.failing:
            raise StorageUnavailable("the broker is down")

    def put(self, number: int, records: Sequence[LogRecord]) -> asyncio.Future[None]:
        """Append records to a partition, after those that wait already."""
        partition = self._partitions[number]
        done = asyncio.get_running_loop().create_future()
        if partition.queue or number in self.leaderless or self.slow:
            partition.queue.append((records, done))
            if partition.pump is None or partition.pump.done():
                partition.pump = asyncio.ensure_future(self._pump(number))
        else:
            self._store(number, records)
            done.set_result(None)
        return done

    async def _pump(self, number: int) -> None:
        queue = self._partitions[number].queue
        while queue:
            while self.down or number in self.leaderless:  # noqa: ASYNC110
                await asyncio.sleep(TICK)
            if self.slow:
                await asyncio.sleep(self.slow)
            records, done = queue.popleft()
            if self.late or not done.done():
                self._store(number, records)
            if not done.done():
                done.set_result(None)

    def _store(self, number: int, records: Sequence[LogRecord]) -> None:
        partition = self._partitions[number]
        for record in records:
            read = ReadRecord(
                partition=number, offset=partition.end, appended_at=self.clock(), record=record
            )
            partition.records.append(read)
            partition.end += 1

    def join(self, reader: MemoryReader) -> None:
        """Add a member to its group, and divide the partitions again."""
        members = self._groups[reader.group].members
        if reader not in members:
            members.append(reader)
            self._divide(reader.group)

    def leave(self, reader: MemoryReader) -> None:
        """Remove a member from its group, and divide the partitions again."""
        members = self._groups[reader.group].members
        if reader in members:
            members.remove(reader)
            reader.assign(set())
            self._divide(reader.group)

    def _divide(self, group: str) -> None:
        members = self._groups[group].members
        for number, member in enumerate(members):
            member.assign(set(range(number, len(self._partitions), len(members))))

    def start(self, group: str, number: int, since: int | None) -> int | None:
        """Return where a group continues a partition; ``None``: at its first record."""
        if (offset := self._groups[group].committed.get(number)) is not None or since is None:
            return offset
        partition = self._partitions[number]
        later = (record.offset for record in partition.records if record.appended_at >= since)
        return next(later, partition.end)

    def after(self, number: int, offset: int, limit: int) -> list[ReadRecord]:
        """Return records of a partition from an offset on."""
        records = self._partitions[number].records
        index = bisect.bisect_left(records, offset, key=lambda record: record.offset)
        return records[index : index + limit]

    def first(self, number: int) -> int:
        """Return the oldest offset of a partition that was not deleted."""
        return self._partitions[number].first


class MemoryLog(EventLog):
    """A connection to a broker.

    :param broker: by default a new one.
    :param write_timeout: see :class:`LogContext`.
    :param max_value_bytes: a record with a larger value is refused.
    """

    def __init__(
        self,
        broker: MemoryBroker | None = None,
        *,
        write_timeout: float = 8.0,
        max_value_bytes: int = 1024 * 1024,
    ) -> None:
        self.broker = MemoryBroker() if broker is None else broker
        self.write_timeout = write_timeout
        self.max_value_bytes = max_value_bytes
        #: How often the log was opened and closed.
        self.opened = 0
        self.closed = 0
        #: What :meth:`reader` makes.
        self.reader_class: type[MemoryReader] = MemoryReader
        self._create: bool | None = None
        self._readers: list[MemoryReader] = []
        self._appending: set[asyncio.Future[None]] = set()

    async def open(self, *, create: bool) -> None:
        self.opened += 1
        if self.broker.weak is not None:
            raise StorageIncompatible(f"{self.broker.weak} is too low")
        try:
            await self.broker.enter("open")
            if not create and not self.broker.exists:
                raise StorageMissing("there is no log")
        except StorageUnavailable:
            if not create:
                raise
        else:
            self.broker.exists = True
        self._create = create

    async def close(self) -> None:
        self.closed += 1
        if self._create is None:
            return
        self._create = None
        for reader in self._readers:
            await reader.close()
        if self._appending:
            await asyncio.wait(self._appending, timeout=self.write_timeout)

    async def enter(self, name: str) -> None:
        """Begin a call.

        :raises StorageUnavailable: if it fails.
        """
        if self._create is None:
            raise StorageUnavailable("the log is not open")
        await self.broker.enter(name)
        self.broker.exists = True

    async def check(self) -> None:
        await self.enter("check")
        if self.broker.leaderless:
            raise StorageUnavailable(f"no leader: partitions {sorted(self.broker.leaderless)}")
        if self.broker.weak is not None:
            raise StorageUnavailable(f"{self.broker.weak} is too low")

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        await self.enter("append")
        outcomes = []
        parts: dict[int, list[LogRecord]] = collections.defaultdict(list)
        for record in records:
            if len(record.value) > self.max_value_bytes:
                outcomes.append(Outcome(Status.REFUSED, "the record is too large"))
            else:
                outcomes.append(Outcome(Status.STORED))
                parts[self.broker.partition_of(record.key)].append(record)
        await self._wait([self.broker.put(number, part) for number, part in parts.items()])
        return outcomes

    async def append_dead(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        await self.enter("append_dead")
        most = self.max_value_bytes if self.broker.max_dead is None else self.broker.max_dead
        self.broker.dead.extend(record for record in records if len(record.value) <= most)
        return [
            Outcome(Status.STORED)
            if len(record.value) <= most
            else Outcome(Status.REFUSED, "the record is too large")
            for record in records
        ]

    async def _wait(self, waiting: Sequence[asyncio.Future[None]]) -> None:
        pending = {one for one in waiting if not one.done()}
        if pending:
            self._appending |= pending
            try:
                _, late = await asyncio.wait(pending, timeout=self.write_timeout)
            finally:
                self._appending -= pending
                for record in pending:
                    record.cancel()
            if late:
                raise StorageUnavailable("a partition has no leader")

    async def ends(self) -> Mapping[int, int]:
        await self.enter("ends")
        return self.broker.ends()

    async def firsts(self) -> Mapping[int, int]:
        await self.enter("firsts")
        return {number: self.broker.first(number) for number in self.broker.ends()}

    async def committed(self, group: str) -> Mapping[int, int]:
        await self.enter("committed")
        return self.broker.committed(group)

    async def backlog(self, group: str) -> Backlog:
        await self.enter("backlog")
        committed = self.broker.committed(group)
        records, oldest, gaps = 0, [], {}
        for number, end in self.broker.ends().items():
            offset = max(committed.get(number, 0), self.broker.first(number))
            if number in committed and committed[number] < offset:
                gaps[number] = (committed[number], offset)
            records += end - offset
            oldest += [one.appended_at for one in self.broker.after(number, offset, 1)]
        return Backlog(
            records=records,
            oldest_at=min(oldest, default=None),
            retention=self.broker.retention,
            gaps=gaps,
        )

    def reader(self, group: str, *, since: int | None = None) -> LogReader:
        made = self.reader_class(self, group, since)
        self._readers.append(made)
        return made

    def gauges(self) -> Mapping[str, float]:
        return {"leaderless_partitions": len(self.broker.leaderless)}


class MemoryReader(LogReader):
    """A member of a group of readers; made by :meth:`MemoryLog.reader`."""

    def __init__(self, log: MemoryLog, group: str, since: int | None) -> None:
        self.group = group
        self.log = log
        self.since = since
        self._open = False
        #: Where each partition of this member continues; ``None``: at its first record.
        self.offsets: dict[int, int | None] = {}
        self._paused: set[int] = set()
        self._turn = 0

    async def open(self) -> None:
        await self.log.enter("reader.open")
        self._open = True
        self.log.broker.join(self)

    async def close(self) -> None:
        self._open = False
        self.log.broker.leave(self)

    @property
    def partitions(self) -> list[int]:
        """The partitions that this member has now."""
        return sorted(self.offsets)

    def assign(self, partitions: set[int]) -> None:
        """Take over the partitions that are new, and forget those that are lost."""
        for lost in self.offsets.keys() - partitions:
            del self.offsets[lost]
        for new in partitions - self.offsets.keys():
            self.offsets[new] = self.log.broker.start(self.group, new, self.since)

    async def _enter(self, name: str) -> None:
        if not self._open:
            raise StorageUnavailable("the reader is not open")
        await self.log.enter(f"reader.{name}")

    async def read(self, *, max_records: int, max_bytes: int, wait: float) -> Batch:
        end = time.monotonic() + wait
        await self._enter("read")
        await asyncio.sleep(0)  # before the records are taken: the call can be cancelled here
        while True:
            self.log.broker.join(self)  # again, if its session had timed out
            batch = self._take(max_records, max_bytes)
            if batch.records or batch.gaps or (left := end - time.monotonic()) <= 0:
                return batch
            await asyncio.sleep(min(TICK, left))
            if not self._open or self.log.broker.down:
                raise StorageUnavailable("the reader was closed, or the broker is down")

    def _take(self, max_records: int, max_bytes: int) -> Batch:
        broker = self.log.broker
        found: list[ReadRecord] = []
        gaps: dict[int, tuple[int, int]] = {}
        self._turn += 1
        mine = self.partitions
        turn = self._turn % len(mine) if mine else 0
        for number in (*mine[turn:], *mine[:turn]):
            if number in self._paused or number in broker.leaderless:
                continue
            offset, first = self.offsets[number], broker.first(number)
            if offset is not None and offset < first:
                gaps[number] = (offset, first)
            self.offsets[number] = offset = max(offset or 0, first)
            for one in broker.after(number, offset, max_records):
                max_bytes -= one.record.size
                if len(found) == max_records or (max_bytes < 0 and found):
                    return Batch(records=found, gaps=gaps)
                found.append(one)
                self.offsets[number] = one.offset + 1
        return Batch(records=found, gaps=gaps)

    async def commit(self, offsets: Mapping[int, int]) -> None:
        await self._enter("commit")
        kept = {number: offset for number, offset in offsets.items() if number in self.offsets}
        self.log.broker.commit(self.group, kept)
        if kept:
            self.log.broker.commits.append((self.group, kept))

    async def rewind(self) -> None:
        await self._enter("rewind")
        for number in self.offsets:
            self.offsets[number] = self.log.broker.start(self.group, number, self.since)

    def pause(self, partitions: Sequence[int]) -> None:
        self._paused.update(partitions)


def unknown_record(key: bytes = b"acme:someone") -> LogRecord:
    """Return a record of a version of the format that does not exist yet."""
    return LogRecord(key=key, value=b"?", headers={"engage": b"event/99"})


def damaged_record(key: bytes = b"acme:someone") -> LogRecord:
    """Return a record whose version is known, and which cannot be read."""
    return LogRecord(key=key, value=b"{}", headers={"engage": b"event/1", "meta": b"{"})


#: The brokers to which the plugin connects, by the option ``name``.
BROKERS: dict[str, MemoryBroker] = {}


def make(options: Mapping[str, Any], context: LogContext) -> MemoryLog:
    """Return a log that is connected to the broker of the options."""
    name = options["name"]
    broker = BROKERS.setdefault(name, MemoryBroker(options.get("partitions", 3), exists=False))
    return MemoryLog(
        broker, write_timeout=context.write_timeout, max_value_bytes=context.max_value_bytes
    )


@hookimpl
def engage_register_log(register: Register[LogFactory]) -> None:
    """Register the log ``memory``."""
    properties = {"name": {"type": "string"}, "partitions": {"type": "integer", "minimum": 1}}
    schema = {"type": "object", "required": ["name"], "properties": properties}
    register("memory", make, {**schema, "additionalProperties": False})
