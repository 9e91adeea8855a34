# SPDX-License-Identifier: Apache-2.0
"""The queues of the partitions, with senders that fail as a test wants."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engage.api import LogRecord, Outcome, Status, StorageUnavailable
from engage_plugins.kafka import appending
from engage_plugins.kafka.appending import Appender
from engage_plugins.kafka.client import SendFailed
from support.kafka_log import record

OK = Outcome(Status.STORED)


class Broker:
    """Keeps what was sent; fails, waits or breaks on demand."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], list[list[str]]] = collections.defaultdict(list)
        #: How the next batches fail; ``None``: it succeeds.
        self.failures: list[Exception | None] = []
        self.starts: list[Exception] = []
        self.open = asyncio.Event()
        self.open.set()
        self.senders = 0
        self.stopped = 0
        #: A sender waits for it when it is stopped.
        self.stops = asyncio.Event()
        self.stops.set()


class FakeBatch:
    """What aiokafka's batches do."""

    def __init__(self) -> None:
        self.values: list[str] = []

    def append(self, *, timestamp: int, key: bytes, value: bytes, headers: object) -> object:
        if value == b"broken":
            raise TypeError
        self.values.append(value.decode())
        return self


class FakeSender:
    """What ``client.Sender`` does."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.sent = 0
        self.in_flight = 0
        self.batch = FakeBatch
        broker.senders += 1

    async def start(self, seconds: float) -> None:
        if self.broker.starts:
            raise self.broker.starts.pop()

    async def send(self, batch: FakeBatch, topic: str, partition: int) -> None:
        self.in_flight += 1
        self.sent += len(batch.values)
        try:
            await self.broker.open.wait()
            await asyncio.sleep(0)
            if self.broker.failures and (failure := self.broker.failures.pop(0)):
                raise failure
            self.broker.kept[topic, partition].append(batch.values)
        finally:
            self.in_flight -= 1

    async def stop(self, seconds: float) -> None:
        await self.broker.stops.wait()
        self.broker.stopped += 1


Make = Callable[..., Any]


@asynccontextmanager
async def appender(
    broker: Broker, *, seconds: float = 5, too_large: Callable[[], None] = lambda: None
) -> AsyncIterator[Appender]:
    """Make an appender to the broker, and close it."""
    make: Any = lambda: FakeSender(broker)  # noqa: E731
    made = Appender(make, timeout=seconds, too_large=too_large)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appending, "PAUSE", 0.001)


def numbered(count: int, *, size: int = 1) -> list[LogRecord]:
    """Return records of one key."""
    return [record(f"{number:0{size}}") for number in range(count)]


async def test_calls_that_wait_share_the_next_batch(broker: Broker) -> None:
    async with appender(broker) as log:
        broker.open.clear()
        first = asyncio.create_task(log.append("t", 1, [record("a")]))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(log.append("t", 1, [record(f"{n}")])) for n in range(9)]
        await asyncio.sleep(0.01)
        assert log.gauges()["waiting_calls"] == 9
        assert log.gauges()["sending_batches"] == 1
        broker.open.set()
        assert await asyncio.gather(first, *others) == [[OK]] * 10
    assert broker.kept["t", 0] == [["a"], [f"{n}" for n in range(9)]]
    assert (broker.senders, broker.stopped) == (1, 1)


async def test_a_large_call_takes_several_batches(broker: Broker) -> None:
    async with appender(broker) as log:
        records = numbered(5, size=400_000)
        assert await log.append("t", 1, records) == [OK] * 5
    assert [len(batch) for batch in broker.kept["t", 0]] == [2, 2, 1]
    assert [int(value[-9:]) for batch in broker.kept["t", 0] for value in batch] == list(range(5))


async def test_a_batch_that_failed_is_sent_again_by_another_sender(broker: Broker) -> None:
    async with appender(broker) as log:
        broker.failures = [None, SendFailed("x", permanent=False), SendFailed("x", permanent=False)]
        calls = [log.append("t", 1, numbered(5, size=400_000)), log.append("t", 1, [record("9")])]
        assert await asyncio.gather(*calls) == [[OK] * 5, [OK]]
        assert log.gauges()["replaced_senders"] == 2
    kept = [int(value[-9:]) for batch in broker.kept["t", 0] for value in batch]
    assert kept == [0, 1, 2, 3, 4, 9]
    assert broker.senders == broker.stopped == 3


async def test_a_batch_that_is_refused_for_good_fails_its_calls_only(broker: Broker) -> None:
    called: list[int] = []
    async with appender(broker, too_large=lambda: called.append(1)) as log:
        broker.failures = [SendFailed("too large", permanent=True)]
        with pytest.raises(StorageUnavailable, match="too large"):
            await log.append("t", 1, [record("a")])
        assert called == [1]
        assert await log.append("t", 1, [record("b")]) == [OK]
    assert broker.kept["t", 0] == [["b"]]


async def test_a_record_that_was_refused_alone_shows_how_much_a_topic_takes(broker: Broker) -> None:
    """If the settings of the topic cannot be read, nothing else does."""
    large = record("x" * 1000)
    async with appender(broker) as log:
        broker.failures = [SendFailed("too large", permanent=True, too_large=True)]
        with pytest.raises(StorageUnavailable, match="too large"):
            await log.append("t", 1, [large])
        (outcome,) = await log.append("t", 1, [large])
        assert outcome.status is Status.REFUSED
        assert await log.append("other", 1, [large]) == [OK]
        assert await log.append("t", 1, [record("x" * 900)]) == [OK]
        log.set_limit("t", 2000)
        assert await log.append("t", 1, [large]) == [OK]


async def test_a_batch_of_several_records_that_is_too_large_is_divided(broker: Broker) -> None:
    async with appender(broker) as log:
        broker.failures = [SendFailed("too large", permanent=True, too_large=True)] * 2
        assert await log.append("t", 1, numbered(6)) == [OK] * 6
        assert broker.kept["t", 0] == [["0"], ["1"], ["2"], ["3"], ["4"], ["5"]]
        log.set_limit("t", 2000)
        assert await log.append("t", 1, numbered(6)) == [OK] * 6
        assert len(broker.kept["t", 0]) == 7


async def test_a_sender_that_failed_is_stopped_although_the_log_is_closed_at_once(
    broker: Broker,
) -> None:
    async with appender(broker) as log:
        broker.failures = [SendFailed("no", permanent=True)]
        with pytest.raises(StorageUnavailable):
            await log.append("t", 1, [record("a")])
    assert broker.stopped == broker.senders == 1


async def test_a_call_waits_only_for_its_own_partitions(broker: Broker) -> None:
    async with appender(broker, seconds=0.3) as log:
        broker.open.clear()
        stuck = asyncio.create_task(log.append("t", 1, [record("a")]))
        await asyncio.sleep(0.01)
        broker.open.set()
        broker.open = asyncio.Event()
        broker.open.set()
        assert await log.append("other", 1, [record("b")]) == [OK]
        await asyncio.gather(stuck, return_exceptions=True)


async def test_the_records_of_a_call_that_ended_are_not_sent(broker: Broker) -> None:
    async with appender(broker, seconds=0.05) as log:
        broker.open.clear()
        calls = [log.append("t", 1, [record(f"{n}")]) for n in range(3)]
        first = asyncio.create_task(calls[0])
        await asyncio.sleep(0.01)
        done = await asyncio.gather(first, *calls[1:], return_exceptions=True)
        assert all(isinstance(one, StorageUnavailable) for one in done)
        cancelled = asyncio.create_task(log.append("t", 1, [record("cancelled")]))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        broker.open.set()
        assert await log.append("t", 1, [record("last")]) == [OK]
        assert log.gauges()["waiting_calls"] == 0
    assert broker.kept["t", 0] == [["0"], ["last"]]


async def test_an_unexpected_error_stops_no_partition(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with appender(broker) as log:
        with pytest.raises(StorageUnavailable):
            await log.append("t", 1, [record("broken")])
        assert await log.append("t", 1, [record("a")]) == [OK]
    assert broker.kept["t", 0] == [["a"]]
    assert "was not sent" in caplog.text


async def test_kafka_is_tried_until_it_answers(broker: Broker) -> None:
    broker.starts = [StorageUnavailable("x")] * 3
    async with appender(broker) as log:
        assert await log.append("t", 1, [record("a")]) == [OK]
    assert (broker.senders, broker.stopped) == (4, 4)


async def test_the_next_attempt_does_not_wait_until_the_last_one_is_closed(broker: Broker) -> None:
    broker.starts = [StorageUnavailable("not yet")] * 2
    broker.stops.clear()
    async with appender(broker) as log:
        assert await log.append("t", 1, [record("a")]) == [OK]
        assert (broker.senders, broker.stopped) == (3, 0)
        broker.stops.set()
    assert broker.stopped == 3


async def test_a_sender_is_replaced_before_its_numbers_overflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(appending, "_MAX_SENT", 10)
    broker = Broker()
    async with appender(broker) as log:
        for _ in range(5):
            assert await log.append("t", 1, numbered(5)) == [OK] * 5
        assert broker.senders == 3
    assert broker.stopped == 3


async def test_closing_finishes_what_calls_wait_for(broker: Broker) -> None:
    async with appender(broker) as log:
        broker.open.clear()
        call = asyncio.create_task(log.append("t", 1, [record("a")]))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(log.close())
        await asyncio.sleep(0.03)
        with pytest.raises(StorageUnavailable, match="closing"):
            await log.append("t", 1, [record("b")])
        broker.open.set()
        await closing
        assert await call == [OK]
