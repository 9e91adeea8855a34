# SPDX-License-Identifier: Apache-2.0
"""Passes durable events to the observers.

Each observer has a separate task and a queue of limited length. A slow observer loses batches,
which are counted; a failing one is logged by name. Neither delays or changes an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import Event, Observer

if TYPE_CHECKING:
    from engage.monitoring.metrics import Metrics

__all__ = ["Observers"]

_log = logging.getLogger(__name__)

#: Maximum number of batches that wait for one observer.
QUEUE: Final = 1000
#: Seconds that one call of an observer may take.
TIMEOUT: Final = 10.0


class Observers:
    """The observers that the config enables.

    :param observers: the observers by name.
    :param timeout: seconds that one call of an observer may take.
    """

    def __init__(
        self, observers: Mapping[str, Observer], metrics: Metrics, *, timeout: float = TIMEOUT
    ) -> None:
        self._observers = dict(observers)
        self._metrics = metrics
        self._timeout = timeout
        self._queues: dict[str, asyncio.Queue[Sequence[Event]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def __bool__(self) -> bool:
        return bool(self._observers)

    def publish(self, events: Sequence[Event]) -> None:
        """Queue durable events for each observer. Never waits and never raises."""
        if not self._tasks:
            for name, observer in self._observers.items():
                self._queues[name] = asyncio.Queue(QUEUE)
                self._tasks.append(asyncio.create_task(self._serve(name, observer)))
        for queue in self._queues.values():
            try:
                queue.put_nowait(events)
            except asyncio.QueueFull:
                self._metrics.count("dropped", "observer_batch")

    async def drain(self) -> None:
        """Wait until the observers have handled all queued events."""
        for queue in self._queues.values():
            await queue.join()

    async def close(self, grace: float = 5.0) -> None:
        """Let the observers handle queued events for at most ``grace`` seconds, then stop."""
        try:
            async with asyncio.timeout(grace):
                await self.drain()
        except TimeoutError:
            left = sum(queue.qsize() for queue in self._queues.values())
            _log.warning("observers were stopped with %d batches in their queues", left)
            if left:
                self._metrics.count("dropped", "observer_batch", by=left)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._queues.clear()

    async def _serve(self, name: str, observer: Observer) -> None:
        queue = self._queues[name]
        while True:
            events = await queue.get()
            try:
                async with asyncio.timeout(self._timeout):
                    await observer(events)
            except TimeoutError:
                _log.error("observer %s took more than %g s", name, self._timeout)
            except Exception:
                _log.exception("observer %s failed", name)
            finally:
                queue.task_done()
