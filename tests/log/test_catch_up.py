# SPDX-License-Identifier: Apache-2.0
"""Requests wait until the loaders have passed the ends that the log had when they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engage.api import StorageUnavailable, record_of
from engage.errors import ApiError
from engage.log import catch_up
from engage.log.catch_up import CatchUp
from support.memory_log import MemoryBroker, MemoryLog
from support.pipeline import make_event, turns
from support.waiting import eventually

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def catching_up(broker: MemoryBroker, seconds: float = 30.0) -> AsyncIterator[CatchUp]:
    log = MemoryLog(broker)
    await log.open(create=True)
    one = CatchUp(log, group="engage", timeout=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catch_up, "MAX_SECONDS", seconds)
        try:
            yield one
        finally:
            await one.close()
            await log.close()


def append(broker: MemoryBroker, partition: int) -> None:
    broker.inject(record_of(make_event("m")), partition=partition)


async def test_all_partitions_must_be_passed() -> None:
    broker = MemoryBroker(3)
    for partition in (0, 1, 1, 2):
        append(broker, partition)
    async with catching_up(broker) as one:
        waiting = asyncio.create_task(one())
        for offsets in ({0: 1}, {2: 1}, {1: 1}):
            broker.commit("engage", offsets)
            await asyncio.sleep(0.12)
            assert not waiting.done()
        # What is appended later does not matter.
        append(broker, 0)
        broker.commit("engage", {1: 2})
        await waiting


async def test_an_empty_log_and_one_without_backlog_are_passed_at_once() -> None:
    broker = MemoryBroker(3)
    async with catching_up(broker) as one:
        await one()
        append(broker, 1)
        broker.commit("engage", broker.ends())
        await one()


async def test_the_wait_ends_with_a_503() -> None:
    broker = MemoryBroker(3)
    append(broker, 1)
    async with catching_up(broker, seconds=0.1) as one:
        with pytest.raises(ApiError) as refused:
            await one()
        assert (refused.value.status, refused.value.code) == (503, "overloaded")
        assert refused.value.retry_after
        # Those who wait no more cost nothing.
        await asyncio.sleep(0.12)
        calls = broker.calls["committed"]
        await asyncio.sleep(0.12)
        assert broker.calls["committed"] == calls


async def test_requests_share_the_readings() -> None:
    broker = MemoryBroker(3)
    append(broker, 1)
    async with catching_up(broker) as one:
        waiting = [asyncio.create_task(one()) for _ in range(500)]
        await eventually(lambda: broker.calls["committed"] >= 4)
        assert broker.calls["ends"] == 1
        assert broker.calls["committed"] < 50
        broker.commit("engage", broker.ends())
        await asyncio.gather(*waiting)


async def test_a_request_that_comes_during_a_reading_needs_a_later_one() -> None:
    """Its events may have been appended after the ends were read."""
    broker = MemoryBroker(3)
    append(broker, 1)
    gate = asyncio.Event()
    broker.before = lambda name: gate.wait() if name == "committed" else None
    async with catching_up(broker) as one:
        first = asyncio.create_task(one())
        await turns()
        append(broker, 2)
        second = asyncio.create_task(one())
        broker.commit("engage", {1: 1})
        gate.set()
        await first
        await asyncio.sleep(0.12)
        assert not second.done()
        broker.commit("engage", {2: 1})
        await second
        assert broker.calls["ends"] == 2


@pytest.mark.parametrize("method", ["ends", "committed"])
async def test_a_log_that_does_not_answer_is_a_503_for_those_who_wait(method: str) -> None:
    broker = MemoryBroker(3)
    append(broker, 1)
    async with catching_up(broker) as one:
        broker.failing.add(method)
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await one()
        broker.failing.clear()
        broker.commit("engage", broker.ends())
        await one()


async def test_only_so_many_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "MAX_WAITING", 3)
    broker = MemoryBroker(3)
    append(broker, 1)
    async with catching_up(broker) as one:
        waiting = [asyncio.create_task(one()) for _ in range(3)]
        await turns()
        with pytest.raises(ApiError, match="still being stored"):
            await one()
        waiting.pop().cancel()
        await turns()
        waiting.append(asyncio.create_task(one()))
        await turns()
        broker.commit("engage", broker.ends())
        await asyncio.gather(*waiting)


async def test_closing_fails_those_who_wait() -> None:
    broker = MemoryBroker(3)
    append(broker, 1)
    async with catching_up(broker) as one:
        waiting = asyncio.create_task(one())
        await eventually(lambda: broker.calls["committed"])
    with pytest.raises(StorageUnavailable):
        await waiting


async def test_a_partition_whose_records_were_all_deleted_is_passed_at_once() -> None:
    """The loaders have nothing to commit there, however long a request waits."""
    broker = MemoryBroker(3)
    for partition in (0, 1, 1):
        append(broker, partition)
    broker.commit("engage", {0: 1})
    broker.expire(1, broker.ends()[1])
    async with catching_up(broker) as one:
        await one()
        assert broker.calls["firsts"] == 1


async def test_a_partition_whose_first_records_were_deleted_must_be_passed() -> None:
    """The group has not committed an offset in it yet."""
    broker = MemoryBroker(3)
    for _ in range(3):
        append(broker, 1)
    broker.expire(1, 2)
    async with catching_up(broker, seconds=0.5) as one:
        with pytest.raises(ApiError, match="still being stored"):
            await one()
        broker.commit("engage", {1: 3})
        await one()
