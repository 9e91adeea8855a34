# SPDX-License-Identifier: Apache-2.0
"""How far the store is behind the log, and when that is too far."""

from __future__ import annotations

import asyncio

import pytest

from engage.api import record_of
from engage.config import LogConfig
from engage.log.lag import Lag
from support.each import each
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
        percent: int = 50,
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
            LogConfig(lag_percent=percent),
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


@each("percent", [1, 50, 100])
async def test_the_bound_is_a_part_of_the_retention(percent: int) -> None:
    """A record as old as the bound is not overdue; one that is a millisecond older is."""
    async with Fixture(percent=percent) as fixture:
        fixture.append("a")
        bound = 2 * DAY * percent // 100
        fixture.now = START + bound
        await fixture.lag.read()
        assert not fixture.lag.overdue
        assert fixture.lag.seconds == bound / 1000
        fixture.now += 1
        assert fixture.lag.overdue  # without another reading
        await fixture.lag.read()
        assert fixture.lag.overdue
        fixture.broker.commit("engage", fixture.broker.ends())
        await fixture.lag.read()
        assert not fixture.lag.overdue
        assert fixture.lag.seconds == 0


async def test_only_what_the_group_has_not_committed_counts() -> None:
    async with Fixture() as fixture:
        fixture.append("a")
        fixture.now += 3 * DAY
        fixture.broker.commit("another", fixture.broker.ends())
        await fixture.lag.read()
        assert fixture.lag.overdue
        fixture.broker.commit("engage", fixture.broker.ends())
        fixture.append("b")
        await fixture.lag.read()
        assert not fixture.lag.overdue


async def test_a_log_without_retention_is_never_overdue() -> None:
    async with Fixture(retention=None) as fixture:
        fixture.append("a")
        fixture.now += 1000 * DAY
        await fixture.lag.read()
        assert not fixture.lag.overdue
        assert fixture.lag.seconds == 1000 * DAY / 1000


async def test_nothing_is_overdue_before_the_first_reading() -> None:
    async with Fixture() as fixture:
        fixture.append("a")
        fixture.now += 3 * DAY
        assert not fixture.lag.overdue
        assert fixture.lag.seconds == 0


@pytest.mark.parametrize("unread", [True, False])
async def test_a_reading_grows_older_while_the_log_does_not_answer(
    caplog: pytest.LogCaptureFixture, unread: bool
) -> None:
    """If all was read then, what is unread now may be as old as the reading."""
    async with Fixture() as fixture:
        if unread:
            fixture.append("a")
        await fixture.lag.start()
        await eventually(lambda: fixture.lag.backlog)
        fixture.broker.failing.add("backlog")
        calls = fixture.broker.calls["backlog"]
        await eventually(lambda: fixture.broker.calls["backlog"] > calls + 2)
        assert not fixture.lag.overdue
        fixture.now += DAY + 1
        assert fixture.lag.overdue
        await eventually(lambda: "events are answered 503" in caplog.text)
        fixture.broker.commit("engage", fixture.broker.ends())
        fixture.broker.failing.clear()
        await eventually(lambda: "events are accepted again" in caplog.text)
        assert not fixture.lag.overdue
    # Each is logged once.
    assert len(caplog.records) == 3
    assert "the backlog of the log cannot be read" in caplog.text


async def test_the_gauges_are_set() -> None:
    async with Fixture() as fixture:
        fixture.append("a")
        fixture.append("b")
        fixture.now += 1500
        await fixture.lag.start()
        await fixture.lag.start()
        await eventually(lambda: fixture.metrics.gauges)
        assert fixture.metrics.gauges == {
            "backlog_records": 2,
            "backlog_seconds": 1.5,
            "retention_seconds": 2 * DAY / 1000,
            "leaderless_partitions": 0,
        }
        await fixture.lag.close()
        await fixture.lag.close()
        calls = fixture.broker.calls["backlog"]
        await asyncio.sleep(300)
        assert fixture.broker.calls["backlog"] == calls


async def test_a_loader_does_not_log_that_events_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Servers do that, and refuse them. A loader has the gauges only."""
    async with Fixture(refuses=False) as fixture:
        fixture.append("a")
        fixture.now += DAY + 1
        await fixture.lag.start()
        await eventually(lambda: fixture.metrics.gauges.get("backlog_seconds", 0) > 0)
        assert fixture.lag.overdue
        assert "503" not in caplog.text


async def test_gaps_are_named() -> None:
    async with Fixture(partitions=7) as fixture:
        for number in range(7):
            for name in "abc":
                fixture.broker.inject(record_of(make_event(name)), partition=number)
            fixture.broker.commit("engage", {number: 1})
            fixture.broker.expire(number, 2)
        await fixture.lag.read()
        assert fixture.lag.gaps == dict.fromkeys(range(7), (1, 2))
        (alarm,) = fixture.lag.alarms
    assert alarm.startswith("acknowledged events may be lost: ")
    assert "partition 0 (expected 1, begins at 2), " in alarm
    assert alarm.endswith("partition 4 (expected 1, begins at 2), 2 more")


async def test_an_operator_is_told_that_events_are_refused() -> None:
    async with Fixture() as fixture:
        fixture.append("a")
        await fixture.lag.read()
        assert fixture.lag.alarms == []
        fixture.now += DAY + 1
        assert [alarm[:27] for alarm in fixture.lag.alarms] == ["events are answered 503: th"]


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
