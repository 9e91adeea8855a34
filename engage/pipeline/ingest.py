# SPDX-License-Identifier: Apache-2.0
"""Writes events and dead letters to the storage; concurrent requests share a write.

A call returns only when the storage has acknowledged all its events: an event that is only in
memory is never acknowledged. :mod:`engage.pipeline.group_commit` combines the requests; this module
reopens a store that did not answer in time.

With a log in front of the storage, a subclass appends everything to the log instead
(:mod:`engage.log.ingest`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from engage.api import (
    CONFLICT,
    BudgetName,
    DeadLetter,
    Event,
    Outcome,
    Status,
    StorageError,
)
from engage.monitoring.sampler import Throttle
from engage.pipeline.admission import KEY_SHARE, QUEUE_WAIT, Admission
from engage.pipeline.group_commit import GROUP_WEIGHT, PART_BYTES, GroupCommit, WriteQueue
from engage.reading.time_limit import within
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.config import Limits
    from engage.monitoring.metrics import Metrics

__all__ = ["Ingest", "size_of_events", "size_of_letters"]

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: In Python 3.11, looking up a member of an enumeration takes as long as a call.
_STORED: Final = Status.STORED
#: Bytes that an event or letter needs in memory besides its body: objects, ids, the future.
_OVERHEAD: Final = 500
#: The weight of a dead letter: what storing it costs, in events.
_LETTER_WEIGHT: Final = 4
#: Seconds between two attempts to reopen the store, or to open the log.
REOPEN_PAUSE: Final = 1.0
#: Seconds between two log lines about the same budget of dead letters: it may be full for days.
_FULL_PAUSE: Final = 600.0


class Ingest:
    """Writes events and dead letters to a storage.

    :param store: an open store.
    :param write_timeout: seconds that a write may take, including its wait.
    :param stored: called after each write with the events that it newly stored (see
        :mod:`engage.pipeline.observers`); ``None`` if there are no observers.
    :param alive: called after each write that newly stored an event.
    :param failed: called after each write of events that failed.
    :param refuses: whether an event with which the storage raises an unexpected error is refused,
        and a dead letter dropped; otherwise the whole request fails.
    :param group_weight: see :class:`~engage.pipeline.group_commit.WriteQueue`; for events.
    """

    def __init__(
        self,
        store: Storage,
        *,
        limits: Limits,
        write_timeout: float,
        metrics: Metrics,
        stored: Callable[[Sequence[Event]], None] | None = None,
        alive: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
        refuses: bool = True,
        group_weight: int = GROUP_WEIGHT,
    ) -> None:
        self.store = store
        self._metrics = metrics
        #: Seconds that a call of the store may take.
        self.timeout = write_timeout
        self._stored = stored
        self._alive = alive
        self._failed = failed
        self._reopening: asyncio.Task[None] | None = None
        self._closing = False  # If true, the store is not opened again, which may take long.
        #: Whether the store is created if it is missing when it is opened again.
        self.creates = True
        #: (workspace, budget) → how often a line about letters that are dropped is logged.
        self._full: dict[tuple[str, BudgetName], Throttle] = {}
        self._events: GroupCommit[Event, Outcome] = GroupCommit(
            store.write,
            WriteQueue(
                max_weight=limits.queue_events,
                max_bytes=limits.queue_bytes,
                share=KEY_SHARE,
                group_weight=group_weight,
                writes=store.concurrent_writes,
            ),
            timeout=write_timeout,
            done=self._written,
            failed=self._write_failed,
            recover=self._recover,
            refuse=_refused_event if refuses else None,
        )
        self._letters: GroupCommit[DeadLetter, bool] = GroupCommit(
            self._keep,
            WriteQueue(max_weight=limits.queue_events, max_bytes=limits.queue_bytes),
            timeout=write_timeout,
            done=lambda _seconds, _letters, _results: None,
            failed=lambda: metrics.count("storage_errors"),
            recover=self._recover,
            refuse=_refused_letter if refuses else None,
        )
        #: Asked before a request is decoded.
        self.admission = Admission(self._events.queue.has_room, wait=QUEUE_WAIT)
        self._events.freed = self.admission.wake

    @property
    def waiting(self) -> int:
        """The number of events that wait or are being written."""
        return self._events.queue.items

    async def find(self, event: Event) -> Event | None:
        """Return the stored event that has the message id of an event, or ``None``.

        :raises StorageUnavailable: if the store does not answer within :attr:`timeout`.
        """
        async with within(self.timeout):
            return await self.store.find(*event.identity)

    def submit(
        self, events: Sequence[Event], key: str, *, restated: Collection[str] = ()
    ) -> Awaitable[Sequence[Outcome]]:
        """Queue events; the returned future completes once all of them are durable.

        Many, large or heavy events are written in parts: between two parts, the store writes the
        events of other keys.

        :param key: the write key, or another name for who sends the events.
        :param restated: the message ids of events that are never conflicts. Only a log is told:
            conflicts are found behind it.
        :return: one outcome per event, in their order. It raises :class:`StorageUnavailable` if an
            event may not be durable; it is safe to write all events again.
        :raises ApiError: 503 ``shutting_down``; nothing was written.
        """
        size, weight = size_of_events(events)
        heaviest = self._events.queue.part_weight
        if (weight <= heaviest and size <= PART_BYTES) or len(events) == 1:
            return self._events.submit(events, size, weight=weight, key=key)
        return _in_parts(self._events, events, size_of_events, key)

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
        kept = await self.put(letters)
        for letter, stored in zip(letters, kept, strict=True):
            if stored:
                self._metrics.count("dead_letters", letter.reason)
            else:
                self.dropped(letter)
        return kept

    async def put(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        """Store dead letters as :meth:`keep` does, but count none of them."""
        return await _in_parts(self._letters, letters, _weigh_letters)

    def reopen(self) -> asyncio.Task[None]:
        """Close and open the store in the background until it opens; return the task."""
        if self._reopening is None or self._reopening.done():
            self._reopening = asyncio.create_task(self._reopen(), name="open the storage")
        return self._reopening

    async def drain(self) -> None:
        """Wait until all submitted events and letters are written or have failed."""
        await self._events.drain()
        await self._letters.drain()

    async def close(self) -> None:
        """Refuse new items and write the submitted ones. The store stays open."""
        self._closing = True
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait([self._reopening])
        await self._events.close()
        await self._letters.close()

    def _write_failed(self) -> None:
        self._metrics.count("storage_errors")
        self._failed()

    def dropped(self, letter: DeadLetter) -> None:
        """Count a letter that is not kept, and log it unless a line was logged a moment ago."""
        conflict = letter.reason == CONFLICT
        self._metrics.count("dropped", "conflict" if conflict else "dead_letter")
        key = letter.workspace_id, letter.budget
        more = self._full.setdefault(key, Throttle(_FULL_PAUSE))()
        if more is not None:
            _log.warning(
                "a dead letter is not kept: %s%s",
                f"the {letter.budget} budget is full (limits.dead_letter_count,"
                " limits.dead_letter_bytes), or the storage failed with the letter",
                more,
                extra={"workspaceId": letter.workspace_id, "reason": letter.reason},
            )

    def _written(
        self, seconds: float, events: Sequence[Event], outcomes: Sequence[Outcome]
    ) -> None:
        if self._stored is not None:
            stored = [
                event
                for event, outcome in zip(events, outcomes, strict=True)
                if outcome.status is _STORED
            ]
            if stored:
                self._stored(stored)
        for outcome in outcomes:
            if outcome.status is _STORED:
                self._alive()
                break
        self._metrics.write(seconds, len(events), self._events.queue.waiting)

    async def _keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        return await self.store.keep(letters)

    async def _recover(self) -> None:
        """Open the store again after a call that did not return: its connection may be dead.

        The attempts go on in the background after the time of a write. Until one succeeds, the
        store rejects calls at once because it is not open.
        """
        if not self._closing:
            await asyncio.wait([self.reopen()], timeout=self.timeout)

    async def _reopen(self) -> None:
        await self._run(self.store.close())
        logged = False
        while (error := await self._run(self.store.open(create=self.creates))) is not None:
            if not logged:
                _log.error("the storage cannot be opened; retrying: %s", error)
                logged = True
            await asyncio.sleep(REOPEN_PAUSE)
        if logged:
            _log.warning("the storage is open")

    async def _run(self, step: Awaitable[None]) -> str | None:
        """Run a step with a time limit; return the error that it raised, if any."""
        try:
            async with asyncio.timeout(self.timeout):
                await step
        except StorageError as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {self.timeout:g} s"
        except Exception as error:
            return type(error).__name__
        return None


def _refused_event(event: Event, error: Exception) -> Outcome:
    _log.error(
        "the storage fails with an event, which is refused: %s",
        type(error).__name__,
        extra={"workspaceId": event.workspace_id, "type": event.type},
    )
    return Outcome(Status.REFUSED, f"the storage failed with this event ({type(error).__name__})")


def _refused_letter(letter: DeadLetter, error: Exception) -> bool:
    _log.error(
        "the storage fails with a dead letter, which is dropped: %s",
        type(error).__name__,
        extra={"workspaceId": letter.workspace_id, "reason": letter.reason},
    )
    return False


def size_of_events(events: Sequence[Event]) -> tuple[int, int]:
    """Return the bytes that events need in memory, and their weight."""
    size = _OVERHEAD * len(events)
    weight = 0
    for event in events:
        size += len(event.body)
        weight += event.weight
    return size, weight


def size_of_letters(letters: Sequence[DeadLetter]) -> int:
    """Return the bytes that letters need in memory."""
    return sum(_OVERHEAD + len(letter.item) + len(letter.envelope or b"") for letter in letters)


def _weigh_letters(letters: Sequence[DeadLetter]) -> tuple[int, int]:
    return size_of_letters(letters), _LETTER_WEIGHT * len(letters)


def _in_parts(
    group_commit: GroupCommit[_Item, _Result],
    items: Sequence[_Item],
    weigh: Callable[[Sequence[_Item]], tuple[int, int]],
    key: str = "",
) -> Awaitable[Sequence[_Result]]:
    """Queue items in parts within the limits of a part, except for a single item.

    :param weigh: returns the bytes and the weight of items.
    """
    parts: list[asyncio.Future[Sequence[_Result]]] = []
    heaviest = group_commit.queue.part_weight
    start = size = weight = 0
    for index, (item_size, item_weight) in enumerate([weigh((item,)) for item in items]):
        if index > start and (size + item_size > PART_BYTES or weight + item_weight > heaviest):
            part = items[start:index]
            parts.append(group_commit.submit(part, size, weight=weight, key=key, part=True))
            start, size, weight = index, 0, 0
        size += item_size
        weight += item_weight
    parts.append(group_commit.submit(items[start:], size, weight=weight, key=key, part=True))
    return _joined(parts)


async def _joined(parts: Sequence[asyncio.Future[Sequence[_Result]]]) -> Sequence[_Result]:
    """Return the results of all parts, in their order."""
    # All parts are waited for, also after one has failed: none of them is abandoned.
    done = await asyncio.gather(*parts, return_exceptions=True)
    results: list[_Result] = []
    for part in done:
        if isinstance(part, BaseException):
            raise part
        results += part
    return results
