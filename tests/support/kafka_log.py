# SPDX-License-Identifier: Apache-2.0
"""Kafka logs for tests, writers that note what was acknowledged, and a reader to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from engage.api import EventLog, LogContext, LogReader, LogRecord, Status, StorageUnavailable
from engage_plugins.kafka import _make
from support.exactly_once import check_exactly_once
from support.kafka import Cluster, read_all


def topic_name() -> str:
    """Return the name of a topic that does not exist yet."""
    return f"t{uuid.uuid4().hex}"


def make_log(servers: str, topic: str, *, timeout: float = 8.0, **options: Any) -> EventLog:
    """Return a log that is not opened."""
    context = LogContext(base_dir=Path(), write_timeout=timeout)
    made: EventLog = _make({"servers": servers, "topic": topic, **options}, context)
    return made


@contextlib.asynccontextmanager
async def opened(
    servers: str, topic: str, *, seconds: float = 8.0, **options: Any
) -> AsyncIterator[EventLog]:
    """Open a log, which creates the topic, and close it.

    :param seconds: how long a call may take.
    """
    log = make_log(servers, topic, timeout=seconds, **options)
    await log.open(create=True)
    try:
        yield log
    finally:
        await log.close()


async def connections_closed() -> None:
    """Wait until the loop has no open connection.

    aiokafka does not wait for the end of a connection that failed. With TLS, that takes a moment;
    if the loop ended before, Python would warn that the connection is still open.
    """
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    async with asyncio.timeout(120):
        # The loop itself has one, to wake it up.
        while len(selector.get_map()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)


def record(name: str, key: str = "user") -> LogRecord:
    """Return a record whose value is its name."""
    return LogRecord(key=f"main:{key}".encode(), value=name.encode(), headers={"engage": b"test/1"})


async def read_records(reader: LogReader, count: int) -> list[LogRecord]:
    """Read this number of records, as the loader reads: again after a failure."""
    found: list[LogRecord] = []
    async with asyncio.timeout(120):
        while len(found) < count:
            with contextlib.suppress(StorageUnavailable):
                batch = await reader.read(max_records=10, max_bytes=1 << 20, wait=0.5)
                found += [record.record for record in batch.records]
    return found


@dataclasses.dataclass
class Noted:
    """What became of the records of :func:`writing`."""

    sent: set[str] = dataclasses.field(default_factory=set)
    acknowledged: set[str] = dataclasses.field(default_factory=set)
    failures: int = 0
    #: Seconds of the slowest call that succeeded.
    slowest: float = 0.0

    async def more(self, count: int, *, seconds: float = 180) -> None:
        """Wait until this number of further records is acknowledged."""
        target = len(self.acknowledged) + count
        async with asyncio.timeout(seconds):
            while len(self.acknowledged) < target:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def judge(self, nodes: Cluster, topic: str) -> None:
        """Check with another client that nothing is lost, and that nothing else is there.

        While no call failed, each record is there once: what the client sent twice is ignored.
        """
        found = [message.value().decode() for message in read_all(nodes.servers(), topic)]
        check_exactly_once(found, self.acknowledged, self.sent, once=not self.failures)


@contextlib.asynccontextmanager
async def writing(log: EventLog, *, writers: int = 8, batch: int = 20) -> AsyncIterator[Noted]:
    """Append records of many keys inside of the context, a batch in each call."""
    noted = Noted()
    stop = False

    async def write(writer: int) -> None:
        turn = 0
        while not stop:
            turn += 1
            names = [f"{writer}-{turn}-{number}" for number in range(batch)]
            noted.sent.update(names)
            started = time.monotonic()
            try:
                outcomes = await log.append(
                    [record(name, f"{writer}-{number}") for number, name in enumerate(names)]
                )
            except StorageUnavailable:
                noted.failures += 1
                await asyncio.sleep(0.1)
            else:
                assert {outcome.status for outcome in outcomes} == {Status.STORED}
                noted.slowest = max(noted.slowest, time.monotonic() - started)
                noted.acknowledged.update(names)
                # Not as fast as possible: the tests share two cores.
                await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(write(writer)) for writer in range(writers)]
    try:
        yield noted
    finally:
        stop = True
        await asyncio.gather(*tasks)


async def until(condition: Callable[[], Awaitable[object]], *, seconds: float = 180) -> float:
    """Call until it does not raise :class:`StorageUnavailable`.

    :return: how long that took.
    """
    started = time.monotonic()
    while True:
        try:
            await condition()
        except StorageUnavailable:
            assert time.monotonic() - started < seconds
            await asyncio.sleep(0.05)
        else:
            return time.monotonic() - started


# -------------------------------------------------------------------------- a reader to be killed
async def start_reader(job: Mapping[str, Any]) -> asyncio.subprocess.Process:
    """Start a process that reads as a member of a group, until it is killed.

    :param job: ``servers``, ``topic``, ``group``, and ``file``: what it has read is added to it, a
        line for each record, before it commits.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {_CHILD}"),
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(orjson.dumps(job))
    process.stdin.close()
    return process


_CHILD = "from support.kafka_log import child; child()"


def child() -> None:
    """Be the process of :func:`start_reader`."""
    asyncio.run(_read(orjson.loads(sys.stdin.read())))


async def _read(job: dict[str, Any]) -> None:
    log = make_log(job["servers"], job["topic"])
    await until(lambda: log.open(create=False))
    reader = log.reader(job["group"])
    await until(reader.open)
    with Path(job["file"]).open("ab", buffering=0) as file:  # noqa: ASYNC230
        while True:
            try:
                portion = await reader.read(max_records=200, max_bytes=1 << 20, wait=0.5)
                assert not portion.gaps
                # One call of the system: a line is there as a whole or not at all.
                file.write(b"".join(record.record.value + b"\n" for record in portion.records))
                places = {record.partition: record.offset + 1 for record in portion.records}
                await reader.commit(places)
            except StorageUnavailable as error:
                print(error, file=sys.stderr)
                await asyncio.sleep(0.1)
