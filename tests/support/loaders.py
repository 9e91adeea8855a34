# SPDX-License-Identifier: Apache-2.0
"""Loaders in the event loop of a test, on a log in memory and any store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engage.api import DeadLetter, Event, EventLog, record_of
from engage.config import DEFAULT_LIMITS, LogConfig
from engage.log.loading import PORTION_RECORDS, Loader, Range
from engage.pipeline.ingest import Ingest
from engage.store.facade import Storage
from support.memory_log import MemoryBroker, MemoryLog
from support.pipeline import CountingMetrics
from support.waiting import eventually

#: Seconds of a call.
TIMEOUT = 5.0


@dataclasses.dataclass
class Loading:
    """A loader that runs in a task."""

    loader: Loader
    metrics: CountingMetrics
    ingest: Ingest
    #: What the observers get.
    observed: list[str]
    task: asyncio.Task[None]

    async def stop(self) -> None:
        """Drain it."""
        self.loader.stop()
        await asyncio.wait_for(self.task, 120)

    async def kill(self) -> None:
        """End it wherever it is."""
        self.task.cancel()
        await asyncio.wait([self.task])


def start_loader(
    log: EventLog,
    store: Storage,
    *,
    timeout: float = TIMEOUT,
    range_: Range | None = None,
    erasures_key: str | None = None,
    **config: Any,
) -> Loading:
    """Start a loader; :class:`LogConfig` takes the other arguments.

    :param log: open.
    """
    metrics = CountingMetrics()
    observed: list[str] = []

    def stored(events: Sequence[Event]) -> None:
        observed.extend(event.message_id for event in events)

    ingest = Ingest(
        store,
        limits=DEFAULT_LIMITS,
        write_timeout=2 * timeout,
        metrics=metrics,
        stored=stored,
        refuses=False,
        group_weight=PORTION_RECORDS,
    )

    loader = Loader(
        log,
        store,
        ingest,
        config=LogConfig(**config),
        limits=DEFAULT_LIMITS,
        timeout=timeout,
        clock=lambda: time.time_ns() // 1_000_000,
        metrics=metrics,
        range_=range_,
        erasures_key=erasures_key,
    )
    return Loading(loader, metrics, ingest, observed, asyncio.create_task(loader.run()))


@contextlib.asynccontextmanager
async def loading(broker: MemoryBroker, store: Storage, **options: Any) -> AsyncIterator[Loading]:
    """Run a loader on a broker, and drain it at the end."""
    log = MemoryLog(broker)
    await log.open(create=True)
    running = start_loader(log, store, **options)
    try:
        yield running
        await running.stop()
        running.task.result()
    finally:
        await running.kill()
        await running.ingest.close()
        await log.close()


async def caught_up(broker: MemoryBroker, group: str = "engage") -> None:
    """Wait until a group has committed everything."""
    await eventually(
        lambda: {**dict.fromkeys(broker.ends(), 0), **broker.committed(group)} == broker.ends()
    )


async def load_all(broker: MemoryBroker, store: Storage) -> Loading:
    """Run a loader until everything is committed, and return it."""
    async with loading(broker, store) as running:
        await caught_up(broker)
    return running


def put(broker: MemoryBroker, *items: Event | DeadLetter, restated: bool = False) -> None:
    """Append events and letters to the log."""
    for item in items:
        broker.inject(record_of(item, restated=restated))
