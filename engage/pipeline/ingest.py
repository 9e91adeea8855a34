# SPDX-License-Identifier: Apache-2.0
"""Hands events and dead letters to the storage, those of concurrent requests in one write.

A request returns only when the storage has acknowledged all its events: nothing that is merely in
memory is ever acknowledged. How requests are gathered stands in
:mod:`engage.pipeline.group_commit`; a store that did not answer in time is opened anew here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import (
    DeadLetter,
    DeadLetterStore,
    Event,
    EventStore,
    Outcome,
    Status,
)
from engage.pipeline.group_commit import Gatherer

if TYPE_CHECKING:
    from engage.config import Limits
    from engage.metrics import Metrics

__all__ = ["Ingest"]

_log = logging.getLogger(__name__)

#: What an event weighs beside its body: objects, ids, the future.
_OVERHEAD: Final = 500
#: Seconds between two tries to open the store anew.
_REOPEN_PAUSE: Final = 1.0


class Ingest:
    """Writes events and dead letters to a storage.

    :param store: open.
    :param write_timeout: seconds, the wait included.
    :param stored: told of the events that one write newly stored (see
        :mod:`engage.pipeline.observers`).
    """

    def __init__(
        self,
        store: EventStore,
        *,
        limits: Limits,
        write_timeout: float,
        metrics: Metrics,
        stored: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._write_timeout = write_timeout
        self._stored = stored
        self._reopening: asyncio.Task[None] | None = None
        self._events: Gatherer[Event, Outcome] = Gatherer(
            store.write,
            max_items=limits.queue_events,
            max_bytes=limits.queue_bytes,
            timeout=write_timeout,
            done=self._written,
            failed=metrics.storage_error,
            recover=self._reopen,
        )
        self._letters: Gatherer[DeadLetter, None] = Gatherer(
            self._put,
            max_items=limits.queue_events,
            max_bytes=limits.queue_bytes,
            timeout=write_timeout,
            done=lambda _seconds, _letters, _results: None,
            failed=metrics.storage_error,
            recover=self._reopen,
        )

    @property
    def waiting(self) -> int:
        """How many events wait or are being written."""
        return self._events.items

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """Write events; return once all of them are durable.

        :return: one outcome per event, in their order.
        :raises ApiError: 503 ``overloaded`` or ``shutting_down``: nothing was tried.
        :raises StorageUnavailable: at least one is not durable; all may be written again.
        """
        size = _OVERHEAD * len(events)
        for event in events:
            size += len(event.body)
        return await self._events.submit(events, size)

    async def put_dead_letters(self, letters: Sequence[DeadLetter]) -> bool:
        """Keep dead letters; return once they are durable. A storage without them: only counted.

        :return: whether they are kept.
        :raises ApiError: 503 ``overloaded`` or ``shutting_down``.
        :raises StorageUnavailable: not all are durable.
        """
        if not letters:
            return True
        if not isinstance(self._store, DeadLetterStore):
            self._metrics.dropped("dead_letter", len(letters))
            return False
        size = sum(_OVERHEAD + len(letter.item) for letter in letters)
        await self._letters.submit(letters, size)
        for letter in letters:
            self._metrics.dead_letter(letter.reason)
        return True

    def open_in_background(self) -> None:
        """Try to open the store, which could not be opened, until it can be."""
        tried = asyncio.Event()
        tried.set()
        self._reopening = asyncio.create_task(self._reopen_until_done(tried))

    async def drain(self) -> None:
        """Wait until nothing waits."""
        await self._events.drain()
        await self._letters.drain()

    async def close(self) -> None:
        """Take nothing more, and write what is there. The store stays open."""
        await self._events.close()
        await self._letters.close()
        if (reopening := self._reopening) is not None:
            reopening.cancel()
            await asyncio.wait([reopening])

    async def _put(self, letters: Sequence[DeadLetter]) -> Sequence[None]:
        assert isinstance(self._store, DeadLetterStore)
        dropped = await self._store.put(letters)
        if dropped:
            self._metrics.dropped("dead_letter", dropped)
        return [None] * len(letters)

    def _written(
        self, seconds: float, events: Sequence[Event], outcomes: Sequence[Outcome]
    ) -> None:
        self._metrics.write(seconds, len(events))
        self._metrics.queue(self._events.items - len(events))
        if self._stored is not None:
            stored = [
                event
                for event, outcome in zip(events, outcomes, strict=True)
                if outcome.status is Status.STORED
            ]
            if stored:
                self._stored(stored)

    async def _reopen(self) -> None:
        """Open the store anew: a call did not end, so the connection may be dead.

        What fails is tried again until it succeeds, but nobody has to wait for that: a store that
        is not open says so at once.
        """
        if self._reopening is not None:
            return
        first = asyncio.Event()
        self._reopening = asyncio.create_task(self._reopen_until_done(first))
        self._reopening.add_done_callback(lambda _: first.set())
        await first.wait()

    async def _reopen_until_done(self, first: asyncio.Event) -> None:
        """:param first: set after the first try; set before: somebody has tried and said so."""
        try:
            await self._tried(self._store.close())
            while (error := await self._tried(self._store.open(create=True))) is not None:
                if not first.is_set():
                    _log.error("opening the storage anew failed, trying again: %s", error)
                first.set()
                await asyncio.sleep(_REOPEN_PAUSE)
            if first.is_set():
                _log.warning("the storage is open again")
        finally:
            self._reopening = None

    async def _tried(self, step: Awaitable[None]) -> str | None:
        """:return: the name of what it raised."""
        try:
            async with asyncio.timeout(self._write_timeout):
                await step
        except Exception as error:
            return type(error).__name__
        return None
