# SPDX-License-Identifier: Apache-2.0
"""How far the loaders are, as an operator sees it."""

from __future__ import annotations

import asyncio

from engage.api import LogRecord
from engage.config import LogConfig
from engage.storage.log_progress import LogProgress, read_progress
from support.memory_log import MemoryBroker, MemoryLog

CONFIG = LogConfig(lag_percent=50)


def record(key: str = "a") -> LogRecord:
    return LogRecord(key=key.encode(), value=b"{}", headers={})


class Time:
    """The time of the log and of the reading, in milliseconds."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


async def test_what_is_not_loaded_is_counted_and_aged() -> None:
    time = Time()
    broker = MemoryBroker(1, retention=100_000, clock=time)
    log = MemoryLog(broker)
    await log.open(create=True)
    found = await read_progress(log, CONFIG, now=time.now, seconds=1)
    assert (found.records, found.seconds, found.overdue, found.alarms) == (0, 0, False, [])
    broker.inject(record())
    time.now += 30_000
    broker.inject(record())
    found = await read_progress(log, CONFIG, now=time.now, seconds=1)
    assert (found.records, found.seconds, found.overdue, found.alarms) == (2, 30, False, [])
    found = await read_progress(log, CONFIG, now=time.now + 20_001, seconds=1)
    assert found.overdue
    assert [alarm[:27] for alarm in found.alarms] == ["events are answered 503: th"]
    broker.commit("engage", {0: 2})
    found = await read_progress(log, CONFIG, now=time.now + 20_001, seconds=1)
    assert (found.records, found.seconds, found.overdue) == (0, 0, False)
    await log.close()


async def test_gaps_are_named() -> None:
    broker = MemoryBroker(7)
    log = MemoryLog(broker)
    await log.open(create=True)
    for number in range(7):
        for _ in range(3):
            broker.inject(record(), partition=number)
        broker.commit("engage", {number: 1})
        broker.expire(number, 2)
    found = await read_progress(log, CONFIG, now=broker.clock(), seconds=1)
    assert found.gaps == dict.fromkeys(range(7), (1, 2))
    (alarm,) = found.alarms
    assert alarm.startswith("acknowledged events may be lost: ")
    assert "partition 0 (expected 1, begins at 2), " in alarm
    assert alarm.endswith("partition 4 (expected 1, begins at 2), 2 more")
    await log.close()


async def test_a_log_that_does_not_answer_is_part_of_the_result() -> None:
    broker = MemoryBroker()
    log = MemoryLog(broker)
    await log.open(create=True)
    broker.down = True
    found = await read_progress(log, CONFIG, now=0, seconds=1)
    assert (found.backlog, found.records, found.error) == (None, 0, "the broker is down")
    assert found.alarms == ["the log is not available: the broker is down"]
    await log.close()


async def test_pages_share_a_reading_and_do_not_wait_long() -> None:
    broker = MemoryBroker()
    progress = LogProgress(MemoryLog(broker), CONFIG, clock=broker.clock, timeout=5)
    together = await asyncio.gather(progress.read(), progress.read())
    assert [found.error for found in together] == [None, None]
    await progress.read()
    assert (broker.calls["open"], broker.calls["backlog"]) == (1, 1)
    await progress.close()

    async def never() -> None:
        await asyncio.sleep(60)

    broker.before = lambda name: never()
    progress = LogProgress(MemoryLog(broker), CONFIG, clock=broker.clock, timeout=1.7)
    began = asyncio.get_running_loop().time()
    assert (await progress.read()).error == "no answer yet"
    assert asyncio.get_running_loop().time() - began < 2.5
    assert (await progress.read()).error is not None
    await asyncio.sleep(0.3)
    assert (await progress.read()).error == "the log did not answer in time"
    await progress.close()
    await progress.close()


async def test_a_log_that_was_away_is_opened_later() -> None:
    broker = MemoryBroker()
    broker.down = True
    progress = LogProgress(MemoryLog(broker), CONFIG, clock=broker.clock, timeout=1)
    assert (await progress.read()).error == "the broker is down"
    broker.down = False
    # A failure is shown for some seconds without another attempt.
    assert (await progress.read()).error == "the broker is down"
    progress._fresh_until = 0
    assert (await progress.read()).error is None
    await progress.close()
