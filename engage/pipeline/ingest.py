# SPDX-License-Identifier: Apache-2.0
"""Writes events and dead letters to the storage; concurrent requests share a write.

A call returns only when the storage has acknowledged all its events: what is only in memory is
never acknowledged. :mod:`engage.pipeline.group_commit` combines the requests; this module reopens a
store that did not answer in time.

With a log in front of the storage, everything is appended to the log instead
(:mod:`engage.pipeline.appending`), and a call returns when it is durable there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import (
    CONFLICT,
    BudgetName,
    DeadLetter,
    DeadLetterStore,
    Event,
    EventStore,
    Outcome,
    Status,
)
from engage.pipeline.admission import Admission, GuardedAdmission
from engage.pipeline.group_commit import GroupCommit
from engage.pipeline.write_queue import GROUP_WEIGHT

if TYPE_CHECKING:
    from engage.api import EventLog
    from engage.config import Limits
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.appending import Appending

__all__ = ["Ingest"]

_log = logging.getLogger(__name__)

#: Bytes that an event or letter needs in memory besides its body: objects, ids, the future.
_OVERHEAD: Final = 500
#: Seconds between two attempts to reopen the store.
_REOPEN_PAUSE: Final = 1.0
#: Seconds between two log lines about the same budget of dead letters.
_FULL_PAUSE: Final = 600.0
#: The config keys of a budget, for the log.
_LIMITS: Final[Mapping[BudgetName, str]] = {
    "api": "dead_letter_count, limits.dead_letter_bytes",
    "conflict": "conflict_count, limits.conflict_bytes",
    "webhook": "webhook_dead_letter_count, limits.webhook_dead_letter_bytes",
}


class Ingest:
    """Writes events and dead letters to a storage.

    :param store: an open store.
    :param write_timeout: seconds that a write may take, including its wait.
    :param stored: called after each write with the events that it newly stored (see
        :mod:`engage.pipeline.observers`); ``None`` if there are no observers.
    :param alive: called after each write that newly stored an event.
    :param failed: called after each write of events that failed.
    :param log: takes everything in place of the store. ``stored`` is not called then: what is
        already stored is found behind the log.
    :param overdue: with a log, whether the store is too far behind it to accept more events.
    """

    def __init__(
        self,
        store: EventStore,
        *,
        limits: Limits,
        write_timeout: float,
        metrics: Metrics,
        stored: Callable[[Sequence[Event]], None] | None = None,
        alive: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
        log: EventLog | None = None,
        overdue: Callable[[], bool] | None = None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._write_timeout = write_timeout
        self._stored = stored
        self._alive = alive
        self._failed = failed
        self._reopening: asyncio.Task[None] | None = None
        self._closing = False  # If true, the store is not opened again, which may take long.
        #: Whether the store is created if it is missing when it is opened again.
        self.creates = True
        #: (workspace, budget) → when its last log line was written, and letters dropped since.
        self._full: dict[tuple[str, BudgetName], tuple[float, int]] = {}
        self._events: GroupCommit[Event, Outcome] | Appending[Event]
        #: If there is a log: what takes the events, and the letters.
        self._appending: Appending[Event] | None = None
        self._logged_letters: Appending[DeadLetter] | None = None
        self._letters: GroupCommit[DeadLetter, bool] = GroupCommit(
            self._keep,
            max_weight=limits.queue_events,
            max_bytes=limits.queue_bytes,
            timeout=write_timeout,
            done=lambda _seconds, _letters, _results: None,
            failed=metrics.storage_error,
            recover=self._reopen,
        )
        if log is None:
            self._events = GroupCommit(
                store.write,
                max_weight=limits.queue_events,
                max_bytes=limits.queue_bytes,
                share=limits.queue_percent_per_key / 100,
                calls=store.concurrent_writes,
                timeout=write_timeout,
                done=self._written,
                failed=self._write_failed,
                recover=self._reopen,
                freed=self._freed,
            )
        else:
            from engage.pipeline.appending import Appending

            self._events = self._appending = Appending(
                log,
                max_weight=limits.queue_events,
                max_bytes=limits.queue_bytes,
                share=limits.queue_percent_per_key / 100,
                timeout=write_timeout,
                done=self._appended,
                failed=self._append_failed,
                freed=self._freed,
            )
            self._logged_letters = Appending(
                log,
                max_weight=limits.queue_events,
                max_bytes=limits.queue_bytes,
                timeout=write_timeout,
                done=lambda _seconds, _letters, _outcomes: None,
                failed=metrics.log_error,
            )
        #: Asked before a request is decoded.
        self.admission = (
            Admission(self._events.has_room, wait=limits.queue_wait)
            if overdue is None
            else GuardedAdmission(self._events.has_room, wait=limits.queue_wait, overdue=overdue)
        )

    @property
    def waiting(self) -> int:
        """The number of events that wait or are being written."""
        return self._events.items

    def submit(
        self, events: Sequence[Event], key: str, *, restated: Collection[str] = ()
    ) -> Awaitable[Sequence[Outcome]]:
        """Queue events; what is returned completes once all of them are durable.

        Events that change very much are written to the store in several writes, so that no write
        needs much more memory than others.

        :param key: the write key, or another name for who sends the events.
        :param restated: the message ids of events that are never conflicts. Only a log is told:
            conflicts are found behind it.
        :return: one outcome per event, in their order. It raises :class:`StorageUnavailable` if an
            event may not be durable; it is safe to write all events again.
        :raises ApiError: 503 ``shutting_down``; nothing was written.
        """
        size = _OVERHEAD * len(events)
        weight = 0
        for event in events:
            size += len(event.body)
            weight += event.weight
        if self._appending is not None:
            return self._appending.submit(events, size, weight=weight, key=key, restated=restated)
        if weight <= GROUP_WEIGHT or len(events) == 1:
            return self._events.submit(events, size, weight=weight, key=key)
        return _joined([self._submit_part(part, key) for part in _parts(events)])

    def _submit_part(self, events: Sequence[Event], key: str) -> asyncio.Future[Sequence[Outcome]]:
        size = sum(_OVERHEAD + len(event.body) for event in events)
        weight = sum(event.weight for event in events)
        return self._events.submit(events, size, weight=weight, key=key)

    async def keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        """Store dead letters and return once they are durable.

        A letter is dropped and counted if its budget is full, or if the storage does not support
        dead letters.

        :return: whether each letter is stored, in their order. The caller must not acknowledge an
            event that neither the storage nor a letter keeps.
        :raises ApiError: 503 ``overloaded`` or ``shutting_down``.
        :raises StorageUnavailable: if a letter may not be durable.
        """
        if not letters:
            return ()
        kept: Sequence[bool]
        if isinstance(self._store, DeadLetterStore):
            if self._logged_letters is None:
                kept = await self._letters.submit(letters, _size(letters))
            else:
                kept = await self._keep_in_log(self._logged_letters, letters)
        else:
            kept = [False] * len(letters)
        for letter, stored in zip(letters, kept, strict=True):
            if stored:
                self._metrics.dead_letter(letter.reason)
            else:
                self.dropped(letter)
        return kept

    def open_in_background(self) -> None:
        """Retry opening a store that could not be opened, until it opens."""
        tried = asyncio.Event()
        tried.set()
        self._reopening = asyncio.create_task(self._reopen_until_done(tried))

    async def open_soon(self, seconds: float) -> bool:
        """Open the store in the background, however long that takes.

        :param seconds: after which this returns although the store is not open.
        :return: whether it is.
        """
        self.reopen()
        assert self._reopening is not None
        done, _ = await asyncio.wait([self._reopening], timeout=seconds)
        return bool(done)

    def reopen(self) -> None:
        """Open the store again in the background, unless that is being done."""
        if self._reopening is None:
            self._reopening = asyncio.create_task(self._reopen_until_done(asyncio.Event()))

    async def drain(self) -> None:
        """Wait until all submitted events and letters are written or have failed."""
        await self._events.drain()
        if self._logged_letters is not None:
            await self._logged_letters.drain()
        await self._letters.drain()

    async def close(self) -> None:
        """Refuse new items and write the submitted ones. The store stays open."""
        self._closing = True
        if (reopening := self._reopening) is not None:
            reopening.cancel()
            await asyncio.wait([reopening])
        await self._events.close()
        if self._logged_letters is not None:
            await self._logged_letters.close()
        await self._letters.close()

    def _write_failed(self) -> None:
        self._metrics.storage_error()
        self._failed()

    def _freed(self) -> None:
        self.admission.wake()

    def _append_failed(self) -> None:
        self._metrics.log_error()
        self._failed()

    def _appended(
        self, seconds: float, events: Sequence[Event], _outcomes: Sequence[Outcome]
    ) -> None:
        self._metrics.append(seconds, len(events))
        self._metrics.queue(self._events.items)

    async def _keep_in_log(
        self, queue: Appending[DeadLetter], letters: Sequence[DeadLetter]
    ) -> Sequence[bool]:
        """Append letters to the log; keep those that it can never take in the store.

        A letter of a large delivery can be larger than a record of the log.
        """
        outcomes = await queue.submit(letters, _size(letters))
        kept = [outcome.status is Status.STORED for outcome in outcomes]
        refused = [index for index, durable in enumerate(kept) if not durable]
        if refused:
            left = [letters[index] for index in refused]
            for index, durable in zip(
                refused, await self._letters.submit(left, _size(left)), strict=True
            ):
                kept[index] = durable
        return kept

    async def _keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        assert isinstance(self._store, DeadLetterStore)
        return await self._store.keep(letters)

    def dropped(self, letter: DeadLetter) -> None:
        """Count a letter that is not kept, and log it unless a line was logged a moment ago."""
        conflict = letter.reason == CONFLICT
        self._metrics.dropped("conflict" if conflict else "dead_letter")
        key = letter.workspace_id, letter.budget
        now = time.monotonic()
        logged, count = self._full.get(key, (-_FULL_PAUSE, 0))
        if now < logged + _FULL_PAUSE:
            self._full[key] = logged, count + 1
            return
        self._full[key] = now, 0
        _log.warning(
            "a dead letter is not kept: %s%s",
            f"the {letter.budget} budget is full (limits.{_LIMITS[letter.budget]})"
            if isinstance(self._store, DeadLetterStore)
            else "the storage keeps no dead letters",
            f"; {count} more since the last line" if count else "",
            extra={"workspaceId": letter.workspace_id, "reason": letter.reason},
        )

    def _written(
        self, seconds: float, events: Sequence[Event], outcomes: Sequence[Outcome]
    ) -> None:
        self._metrics.write(seconds, len(events))
        self._metrics.queue(self._events.waiting)
        new = Status.STORED
        if self._stored is not None:
            stored = [
                event
                for event, outcome in zip(events, outcomes, strict=True)
                if outcome.status is new
            ]
            if stored:
                self._stored(stored)
        if any(outcome.status is new for outcome in outcomes):
            self._alive()

    async def _reopen(self) -> None:
        """Reopen the store after a call that did not return: its connection may be dead.

        Returns after the first attempt. Further attempts run in the background; until one succeeds,
        the store rejects calls at once because it is not open.
        """
        if self._reopening is not None or self._closing:
            return
        first = asyncio.Event()
        self._reopening = asyncio.create_task(self._reopen_until_done(first))
        self._reopening.add_done_callback(lambda _: first.set())
        await first.wait()

    async def _reopen_until_done(self, first: asyncio.Event) -> None:
        """Close and open the store until it opens.

        :param first: set after the first attempt. If it is set already, the first attempt was made
            and logged elsewhere.
        """
        try:
            await self._run(self._store.close())
            while (error := await self._run(self._store.open(create=self.creates))) is not None:
                if not first.is_set():
                    _log.error("the storage cannot be opened; retrying: %s", error)
                first.set()
                await asyncio.sleep(_REOPEN_PAUSE)
            if first.is_set():
                _log.warning("the storage is open")
        finally:
            self._reopening = None

    async def _run(self, step: Awaitable[None]) -> str | None:
        """Run a step with a time limit; return the name of the exception it raised, if any."""
        try:
            async with asyncio.timeout(self._write_timeout):
                await step
        except Exception as error:
            return type(error).__name__
        return None


def _size(letters: Sequence[DeadLetter]) -> int:
    """Return the bytes that letters need in memory."""
    return sum(_OVERHEAD + len(letter.item) + len(letter.envelope or b"") for letter in letters)


def _parts(events: Sequence[Event]) -> list[list[Event]]:
    """Split events into parts of at most the weight of one write, where one event does not exceed
    it."""
    parts: list[list[Event]] = [[]]
    weight = 0
    for event in events:
        if parts[-1] and weight + event.weight > GROUP_WEIGHT:
            parts.append([])
            weight = 0
        parts[-1].append(event)
        weight += event.weight
    return parts


async def _joined(parts: Sequence[asyncio.Future[Sequence[Outcome]]]) -> Sequence[Outcome]:
    """Return the outcomes of all parts, in their order."""
    # All parts are waited for, also after one has failed: none of them is abandoned.
    done = await asyncio.gather(*parts, return_exceptions=True)
    outcomes: list[Outcome] = []
    for part in done:
        if isinstance(part, BaseException):
            raise part
        outcomes += part
    return outcomes
