# SPDX-License-Identifier: Apache-2.0
"""Writes a portion of the log to the storage, and keeps what the storage refuses.

All of it is acknowledged. When :meth:`PortionWriter.write` returns, each event is in the storage or
in the log of dead letters. While the storage is away, it waits. An exception that does not mean
"away" must not stop a partition: the events are divided until the one that causes it is alone, and
that one becomes a dead letter.

An overloaded storage fails with a large write however often it is repeated. So what fails is
repeated in smaller writes, down to single events. What was stored although its write failed is a
duplicate then. Fast writes become larger again.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import (
    DeadLetter,
    Event,
    EventLog,
    EventStore,
    Outcome,
    ReadRecord,
    Status,
    StorageError,
    StorageUnavailable,
    is_restated,
)
from engage.errors import ApiError
from engage.pipeline.dead_letters import Conflict, find_conflict
from engage.pipeline.kept_letters import PortionLetters, ReadLetter
from engage.pipeline.load_letters import letter_of_damage, letter_of_event
from engage.pipeline.normalise import weight_of
from engage.pipeline.retries import Retries, Stopped
from engage.pipeline.write_queue import GROUP_WEIGHT

if TYPE_CHECKING:
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.ingest import Ingest

__all__ = ["Damage", "Item", "PortionWriter", "Unpacked"]

_log = logging.getLogger(__name__)

#: The weight of the first write.
_FIRST_WEIGHT: Final = 500
#: Parts of the time limit: writes that take less become larger, those that take more smaller.
_FAST: Final = 1 / 8
_SLOW: Final = 1 / 2
#: Writes after a failure that are not larger than those before them.
_STEADY: Final = 10
#: Seconds between two log lines about events that the storage fails with.
_LINE_PAUSE: Final = 60.0

_Read = tuple[ReadRecord, Event]


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A record that cannot be read."""

    letter: DeadLetter


#: What is in a record: an event, a letter of a server, or ``None`` for what is not loaded.
Item = Event | DeadLetter | Damage | None
Unpacked = tuple[ReadRecord, Item]


class PortionWriter:
    """Writes what was read from a log to a storage.

    :param store: while it is not open, the calls wait.
    :param ingest: of the same store, without the log: counts the letters that are dropped.
    :param max_value_bytes: of a record in the log of dead letters.
    :param stored: called with the events that were newly stored.
    """

    def __init__(
        self,
        log: EventLog,
        store: EventStore,
        ingest: Ingest,
        *,
        log_calls: Retries,
        store_calls: Retries,
        max_value_bytes: int,
        metrics: Metrics,
        stored: Callable[[Sequence[Event]], None],
    ) -> None:
        self._store = store
        self._calls = store_calls
        self._metrics = metrics
        self._letters = PortionLetters(
            log,
            store,
            ingest,
            log_calls=log_calls,
            store_calls=store_calls,
            max_value_bytes=max_value_bytes,
            metrics=metrics,
            failed=self._failure,
        )
        self._stored = stored
        #: The weight of the next write. It follows what the storage can do within the time limit.
        self._weight = _FIRST_WEIGHT
        self._steady = 0
        self._logged_at: float | None = None

    @property
    def portion(self) -> int:
        """How many records the next portion should have at most."""
        return self._weight

    def fitting(self, items: Sequence[Item]) -> int:
        """Return how many of the next items fit into a write, which is not larger than one of a
        server: at least one."""
        weight = 0
        for number, item in enumerate(items):
            # The weight is not in the record; few types weigh more than 1.
            heavy = isinstance(item, Event) and item.type in ("identify", "group")
            weight += _weight(item) if heavy and isinstance(item, Event) else 1
            if number and weight > self._weight:
                return number
        return len(items)

    async def write(self, items: Sequence[Unpacked]) -> None:
        """Write what is in records of the log, in their order.

        :param items: as many as fit.
        :raises StorageError: if the storage could not write so many, after a pause. Fewer fit now.
        :raises Stopped: if the process drains and something could not be written.
        """
        events = [(read, item) for read, item in items if isinstance(item, Event)]
        letters = [(read, item) for read, item in items if isinstance(item, DeadLetter)]
        own = [(read, item.letter) for read, item in items if isinstance(item, Damage)]
        damaged = len(own)
        if events:
            own += await self._write_part(events)
        await self._letters.keep_own(own)
        if letters:
            await self._letters.keep_of_servers(letters)
        self._count("damaged", damaged)

    # ----------------------------------------------------------------------------------- events
    async def _write_part(self, part: Sequence[_Read]) -> list[ReadLetter]:
        """Write events.

        :return: the letters of those that are not stored.
        """
        outcomes = await self._write(part)
        letters = []
        found: collections.Counter[str] = collections.Counter()
        for (read, event), outcome in zip(part, outcomes, strict=True):
            if outcome.status is Status.STORED:
                found["stored"] += 1
                continue
            what, problem = await self._settle(read, event, outcome)
            found[what] += 1
            if problem is not None:
                letters.append((read, _letter(read, event, problem)))
        for what, count in found.items():
            self._count(what, count)
        return letters

    async def _settle(
        self, read: ReadRecord, event: Event, outcome: Outcome
    ) -> tuple[str, Conflict | ApiError | None]:
        """Find out why an event was not stored.

        :return: what became of it; for a letter, the reason.
        """
        while outcome.status is not Status.STORED:
            if outcome.status is Status.REFUSED:
                reason = outcome.reason or "the storage cannot store this event"
                return "refused", ApiError("event_refused", reason)
            try:
                conflict = find_conflict(event, await self._stored_body(event, outcome))
            except StorageError:
                # Perhaps it has just expired: then the next attempt stores this one.
                await self._calls.pause()
                (outcome,) = await self._write([(read, event)])
            except Stopped:
                raise
            except Exception as error:
                outcome = self._failure(error)
            else:
                if conflict is None or is_restated(read.record):
                    return "duplicate", None
                return "conflict", conflict
        return "stored", None

    async def _stored_body(self, event: Event, outcome: Outcome) -> bytes:
        if outcome.stored is not None:
            return outcome.stored
        found = await self._calls.once(lambda: self._store.find(*event.identity))
        if found is None:
            raise StorageUnavailable("the event with this message id has just expired")
        return found.body

    async def _write(self, part: Sequence[_Read]) -> list[Outcome]:
        """Write events, in several writes if necessary.

        :return: one outcome for each. An event that the storage fails with is refused.
        """
        try:
            return list(await self._attempt(part))
        except StorageError:
            self._shrink(sum(_weight(event) for _, event in part))
            raise
        except Stopped:
            raise
        except Exception:
            if len(part) == 1:
                return [await self._alone(part[0])]
        middle = len(part) // 2
        return [*await self._write(part[:middle]), *await self._write(part[middle:])]

    def _shrink(self, weight: int) -> None:
        """Make the next writes smaller than one of ``weight``, with which the storage failed."""
        self._weight = max(min(self._weight, weight) // 2, 1)
        self._steady = _STEADY

    async def _attempt(self, part: Sequence[_Read]) -> Sequence[Outcome]:
        """Write events at once. One event is written again until the storage answers.

        :raises StorageError: if the storage could not write several events; after a pause.
        """
        events = [event for _, event in part]
        started = time.monotonic()

        async def write() -> Sequence[Outcome]:
            nonlocal started
            started = time.monotonic()
            return await self._store.write(events)

        outcomes = await self._calls.call(write, repeat=len(events) == 1)
        if len(outcomes) != len(events):
            raise TypeError(f"{len(outcomes)} outcomes for {len(events)} events")
        seconds = time.monotonic() - started
        self._metrics.write(seconds, len(events))
        if seconds > self._calls.timeout * _SLOW:
            self._weight = max(self._weight // 2, 1)
        elif self._steady:
            self._steady -= 1
        elif seconds < self._calls.timeout * _FAST and (
            len(events) > 1 or self._weight < _FIRST_WEIGHT
        ):
            self._weight = min(2 * self._weight, GROUP_WEIGHT)
        new = zip(events, outcomes, strict=True)
        if stored := [event for event, outcome in new if outcome.status is Status.STORED]:
            self._stored(stored)
        return outcomes

    async def _alone(self, one: _Read) -> Outcome:
        """Write an event that the storage has failed with, once the storage works otherwise."""
        await self._until_it_works()
        try:
            (outcome,) = await self._attempt([one])
        except Stopped:
            raise
        except Exception as again:
            return self._failure(again)
        return outcome

    async def _until_it_works(self) -> None:
        """Wait until the storage could write. Otherwise a fault of the storage would turn all
        events into letters."""
        while True:
            try:
                await self._calls.call(self._store.check)
            except Stopped:
                raise
            except Exception:
                _log.exception("the check of the storage failed unexpectedly")
                await self._calls.pause()
            else:
                return

    def _failure(self, error: Exception) -> Outcome:
        """Return the outcome of an event that the storage fails with."""
        now = time.monotonic()
        if self._logged_at is None or now > self._logged_at + _LINE_PAUSE:
            self._logged_at = now
            _log.error(
                "the storage fails with an event, which becomes a dead letter", exc_info=error
            )
        return Outcome(
            Status.REFUSED, reason=f"the storage failed with this event ({type(error).__name__})"
        )

    def _count(self, outcome: str, count: int) -> None:
        if count:
            self._metrics.loaded(outcome, count)


def _weight(event: Event) -> int:
    try:
        return weight_of(event.type, event.document())
    except (TypeError, ValueError):  # another program may have written it
        return 1


def _letter(read: ReadRecord, event: Event, problem: Conflict | ApiError) -> DeadLetter:
    try:
        return letter_of_event(event, problem)
    except Exception as error:  # as above: a field that every event of a server has is not there
        return letter_of_damage(read, error)
