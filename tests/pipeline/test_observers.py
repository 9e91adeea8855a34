# SPDX-License-Identifier: Apache-2.0
"""Observers get stored events and never delay or fail a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from engage.api import Event
from engage.pipeline.observers import QUEUE, Observers
from support.pipeline import CountingMetrics, make_event, turns

pytestmark = pytest.mark.virtual_time


async def test_each_observer_gets_all_events_in_order() -> None:
    heard: dict[str, list[str]] = {"a": [], "b": []}

    def observer(name: str) -> object:
        async def observe(events: Sequence[Event]) -> None:
            await asyncio.sleep(0)
            heard[name] += [event.message_id for event in events]

        return observe

    observers = Observers({name: observer(name) for name in heard}, CountingMetrics())  # type: ignore
    assert observers
    observers.publish([make_event("1"), make_event("2")])
    observers.publish([make_event("3")])
    await observers.close()
    assert heard == {"a": ["1", "2", "3"], "b": ["1", "2", "3"]}


async def test_a_failing_observer_is_logged_and_gets_later_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []

    async def observe(events: Sequence[Event]) -> None:
        heard.append(events[0].message_id)
        if len(heard) == 1:
            raise ValueError("oh")

    observers = Observers({"clumsy": observe}, CountingMetrics())
    with caplog.at_level(logging.ERROR):
        for number in "12":
            observers.publish([make_event(number)])
        await observers.drain()
    assert heard == ["1", "2"]
    assert "clumsy" in caplog.text
    await observers.close()


async def test_a_slow_observer_loses_batches_and_delays_nothing() -> None:
    gate = asyncio.Event()
    heard: list[int] = []

    async def slow(events: Sequence[Event]) -> None:
        await gate.wait()
        heard.append(len(events))

    quick: list[int] = []

    async def fast(events: Sequence[Event]) -> None:
        quick.append(len(events))

    metrics = CountingMetrics()
    observers = Observers({"slow": slow, "fast": fast}, metrics)
    batch = [make_event("1")]
    observers.publish(batch)
    await turns()  # one has left the queue
    for _ in range(QUEUE + 7):
        observers.publish(batch)
        await turns(2)
    assert metrics.lost["observer_batch"] == 7
    assert len(quick) == QUEUE + 8
    gate.set()
    await observers.close()
    assert len(heard) == QUEUE + 1


async def test_an_observer_that_never_returns_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []

    async def stuck(events: Sequence[Event]) -> None:
        heard.append(events[0].message_id)
        if len(heard) == 1:
            await asyncio.Event().wait()

    observers = Observers({"stuck": stuck}, CountingMetrics(), timeout=0.05)
    observers.publish([make_event("1")])
    observers.publish([make_event("2")])
    await observers.drain()
    assert heard == ["1", "2"]
    assert "stuck took more than" in caplog.text
    await observers.close()


async def test_closing_does_not_wait_indefinitely() -> None:
    metrics = CountingMetrics()

    async def stuck(events: Sequence[Event]) -> None:
        await asyncio.Event().wait()

    observers = Observers({"stuck": stuck}, metrics)
    for _ in range(3):
        observers.publish([make_event("1")])
    await turns()
    await observers.close(grace=0.05)
    assert metrics.lost["observer_batch"] == 2
