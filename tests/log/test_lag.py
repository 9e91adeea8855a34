# SPDX-License-Identifier: Apache-2.0
"""How far the store is behind the log, and when that is too far."""

from __future__ import annotations

import asyncio

import pytest

from engage.api import record_of
from engage.config import LogConfig
from engage.log.lag import Lag
from support.memory_log import MemoryBroker, MemoryLog
from support.pipeline import CountingMetrics, make_event
from support.waiting import eventually

pytestmark = pytest.mark.virtual_time

DAY = 24 * 60 * 60 * 1000
START = 1_795_000_000_000


class Fixture:
    """A lag on a log in memory, whose time a test sets."""

    def __init__(
        self,
        *,
        retention: int | None = 2 * DAY,
        refuses: bool = True,
        partitions: int = 2,
    ) -> None:
        self.now = START
        self.broker = MemoryBroker(partitions, retention=retention, clock=lambda: self.now)
        self.log = MemoryLog(self.broker)
        self.metrics = CountingMetrics()
        self.lag = Lag(
            self.log,
            LogConfig(),
            timeout=5,
            clock=lambda: self.now,
            metrics=self.metrics,
            refuses=refuses,
        )

    async def __aenter__(self) -> Fixture:
        await self.log.open(create=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.lag.close()
        await self.log.close()

    def append(self, message_id: str) -> None:
        """Append an event now."""
        self.broker.inject(record_of(make_event(message_id)))


async def test_the_bound_is_half_of_the_retention() -> None:
    """A record as old as the bound is not overdue; one that is a millisecond older is."""
    async with Fixture(retention=2 * DAY) as one:
        one.append("a")
        one.now = START + DAY
        await one.lag.read()
        assert not one.lag.overdue
        assert one.lag.seconds == DAY / 1000
        one.now += 1
        assert one.lag.overdue  # without another reading
        await one.lag.read()
        assert one.lag.overdue
        one.broker.commit("engage", one.broker.ends())
        await one.lag.read()
        assert not one.lag.overdue
        assert one.lag.seconds == 0


async def test_only_what_the_group_has_not_committed_counts() -> None:
    async with Fixture() as one:
        one.append("a")
        one.now += 3 * DAY
        one.broker.commit("another", one.broker.ends())
        await one.lag.read()
        assert one.lag.overdue
        one.broker.commit("engage", one.broker.ends())
        one.append("b")
        await one.lag.read()
        assert not one.lag.overdue


async def test_a_log_without_retention_is_never_overdue() -> None:
    async with Fixture(retention=None) as one:
        one.append("a")
        one.now += 1000 * DAY
        await one.lag.read()
        assert not one.lag.overdue
        assert one.lag.seconds == 1000 * DAY / 1000


async def test_nothing_is_overdue_before_the_first_reading() -> None:
    async with Fixture() as one:
        one.append("a")
        one.now += 3 * DAY
        assert not one.lag.overdue
        assert one.lag.seconds == 0


@pytest.mark.parametrize("unread", [True, False])
async def test_a_reading_grows_older_while_the_log_does_not_answer(
    caplog: pytest.LogCaptureFixture, unread: bool
) -> None:
    """If all was read then, what is unread now may be as old as the reading."""
    async with Fixture() as one:
        if unread:
            one.append("a")
        await one.lag.start()
        await eventually(lambda: one.lag.backlog)
        one.broker.failing.add("backlog")
        calls = one.broker.calls["backlog"]
        await eventually(lambda: one.broker.calls["backlog"] > calls + 2)
        assert not one.lag.overdue
        one.now += DAY + 1
        assert one.lag.overdue
        await eventually(lambda: "events are answered 503" in caplog.text)
        one.broker.commit("engage", one.broker.ends())
        one.broker.failing.clear()
        await eventually(lambda: "events are accepted again" in caplog.text)
        assert not one.lag.overdue
    # Each is logged once.
    assert len(caplog.records) == 3
    assert "the backlog of the log cannot be read" in caplog.text


async def test_the_gauges_are_set() -> None:
    async with Fixture() as one:
        one.append("a")
        one.append("b")
        one.now += 1500
        await one.lag.start()
        await one.lag.start()
        await eventually(lambda: one.metrics.gauges)
        assert one.metrics.gauges == {
            "backlog_records": 2,
            "backlog_seconds": 1.5,
            "retention_seconds": 2 * DAY / 1000,
            "leaderless_partitions": 0,
        }
        await one.lag.close()
        await one.lag.close()
        calls = one.broker.calls["backlog"]
        await asyncio.sleep(300)
        assert one.broker.calls["backlog"] == calls


async def test_a_loader_does_not_log_that_events_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Servers do that, and refuse them. A loader has the gauges only."""
    async with Fixture(refuses=False) as one:
        one.append("a")
        one.now += DAY + 1
        await one.lag.start()
        await eventually(lambda: one.metrics.gauges.get("backlog_seconds", 0) > 0)
        assert one.lag.overdue
        assert "503" not in caplog.text


async def test_gaps_are_named() -> None:
    async with Fixture(partitions=7) as one:
        for number in range(7):
            for name in "abc":
                one.broker.inject(record_of(make_event(name)), partition=number)
            one.broker.commit("engage", {number: 1})
            one.broker.expire(number, 2)
        await one.lag.read()
        assert one.lag.gaps == dict.fromkeys(range(7), (1, 2))
        (alarm,) = one.lag.alarms
    assert alarm.startswith("acknowledged events may be lost: ")
    assert "partition 0 (expected 1, begins at 2), " in alarm
    assert alarm.endswith("partition 4 (expected 1, begins at 2), 2 more")


async def test_an_operator_is_told_that_events_are_refused() -> None:
    async with Fixture() as one:
        one.append("a")
        await one.lag.read()
        assert one.lag.alarms == []
        one.now += DAY + 1
        assert [alarm[:27] for alarm in one.lag.alarms] == ["events are answered 503: th"]


async def test_a_log_that_is_down_is_opened_later() -> None:
    """In the console, which begins to read whether the log answers or not."""
    broker = MemoryBroker()
    broker.down = True
    lag = Lag(MemoryLog(broker), LogConfig(), timeout=5, clock=broker.clock, opens=True)
    await lag.read()
    assert (lag.backlog, lag.records, lag.error) == (None, 0, "the broker is down")
    assert lag.alarms == ["the log is not available: the broker is down"]
    broker.down = False
    await lag.read()
    assert (lag.records, lag.error) == (0, None)
    await lag.close()
    await lag.close()
