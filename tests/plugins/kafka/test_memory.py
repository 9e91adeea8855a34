# SPDX-License-Identifier: Apache-2.0
"""What a loader holds of a long backlog."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Collection
from pathlib import Path

import pytest

from engage.api import Event, LogRecord, record_of
from support import kafka
from support.kafka_log import opened, topic_name
from support.loaders import start_loader
from support.pipeline import make_event
from support.server_inprocess import Valve
from support.sqlite import config_file, open_store
from support.tcp_proxy import TcpProxy
from support.waiting import eventually

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600, func_only=True)]

EVENTS = 16_000
SIZE = 1000
PARTITIONS = 4
#: What a loader fetches of a partition at once.
FETCH = 1 << 20
PORTION = 500
#: Bytes of everything else that the nodes answer: what the topics are, and that a loader is alive.
REST = 1 << 20


def event(number: int) -> Event:
    made = make_event(f"{number}", b'{"padding":"%s"}' % (b"x" * SIZE))
    return dataclasses.replace(made, user_id=f"{number % 100}")


def records() -> int:
    """Return how many records of the log are in the memory of this process."""
    found = sum(type(thing) is LogRecord for thing in gc.get_objects())
    if found > 2 * PORTION and gc.collect():
        # Some were garbage already.
        found = sum(type(thing) is LogRecord for thing in gc.get_objects())
    return found


async def received(proxies: Collection[TcpProxy]) -> int:
    """Return how many bytes came from the nodes, when no more come for half a second."""
    last, same = -1, 0
    while same < 10:
        now = sum(proxy.answered for proxy in proxies)
        # A sign of life has less.
        same = same + 1 if now - last < 1000 else 0
        last = now
        await asyncio.sleep(0.05)
    return last


async def test_a_loader_holds_two_batches_and_one_fetch_of_each_partition(
    kafka_nodes: kafka.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the backlog is, and however slow the storage."""
    monkeypatch.setattr("engage.log.loading.PORTION_RECORDS", PORTION)
    config = {"max.message.bytes": str(FETCH)}
    topic = kafka_nodes.make_topic(topic_name(), partitions=PARTITIONS, config=config)
    peak = 0
    async with opened(kafka_nodes.servers(), topic, seconds=30) as log:
        for first in range(0, EVENTS, 2000):
            await log.append([record_of(event(first + n)) for n in range(2000)])
    valve = Valve("write")
    with kafka_nodes.proxies() as proxies:
        async with (
            open_store(config_file(tmp_path)) as store,
            opened(kafka_nodes.servers("advertised"), topic, seconds=30) as log,
        ):
            valve(store)
            valve.gate.clear()
            before = await received(proxies.values())
            running = start_loader(log, store, timeout=60)
            await eventually(lambda: records() > 0)
            fetched = await received(proxies.values()) - before
            assert fetched < PARTITIONS * FETCH + PORTION * 2 * SIZE + REST
            assert records() <= 2 * PORTION
            valve.gate.set()
            while running.metrics.loads["stored"] < EVENTS:
                peak = max(peak, records())
                await asyncio.sleep(0.05)
            await running.stop()
            assert running.metrics.loads == {"stored": EVENTS}
    assert 0 < peak <= 2 * PORTION
