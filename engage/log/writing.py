# SPDX-License-Identifier: Apache-2.0
"""Writes records of the log to the storage, and keeps dead letters of those that it refuses.

It writes, finds out why an event was not stored, and keeps letters with the functions of a server
without a log: :class:`~engage.pipeline.ingest.Ingest` and
:class:`~engage.pipeline.conflicts.Conflicts`. One difference: these events are acknowledged, so
their letters are appended to the log of dead letters first, which has no budget.

When :meth:`Writer.write` returns, each event is in the storage or in the log of dead letters. When
it raises, the same records can be written again, all or some of them.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engage.api import (
    DeadLetter,
    Event,
    EventLog,
    LogRecord,
    Outcome,
    ReadRecord,
    Status,
    StorageError,
    StorageUnavailable,
    is_restated,
    record_of,
)
from engage.errors import ApiError
from engage.log.letters import letter_of_damage, letter_of_event, shortened_record
from engage.log.retries import Stopped
from engage.pipeline.dead_letters import Conflict
from engage.reading.time_limit import within

if TYPE_CHECKING:
    from engage.log.retries import Retries
    from engage.monitoring.metrics import Metrics
    from engage.people.tombstones import Tombstones
    from engage.pipeline.conflicts import Conflicts
    from engage.pipeline.ingest import Ingest

__all__ = ["Damage", "Item", "Unpacked", "Writer"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A record that cannot be read."""

    letter: DeadLetter


#: The contents of a record: an event, a letter of a server, or ``None`` if it is not loaded.
Item = Event | DeadLetter | Damage | None
Unpacked = tuple[ReadRecord, Item]
#: The record that a letter is about, the letter, and its record for the log of dead letters.
_DeadRecord = tuple[ReadRecord, DeadLetter, LogRecord]


class Writer:
    """Writes records of a log to a storage.

    :param ingest: of the storage, without the log.
    :param conflicts: of the same storage.
    :param tombstones: of the same storage.
    :param log_calls: for the calls of the log.
    """

    def __init__(
        self,
        log: EventLog,
        ingest: Ingest,
        conflicts: Conflicts,
        tombstones: Tombstones,
        *,
        log_calls: Retries,
        metrics: Metrics,
    ) -> None:
        self._log = log
        self._ingest = ingest
        self._conflicts = conflicts
        self._tombstones = tombstones
        self._log_calls = log_calls
        self._metrics = metrics

    async def write(self, items: Sequence[Unpacked]) -> None:
        """Write the contents of records, in their order.

        :raises StorageUnavailable: if not all is durable. If the storage failed in an unexpected
            way, the cause is its error.
        :raises Stopped: if the process drains, and not all is durable.
        """
        async with within(self._ingest.timeout):
            await self._tombstones.refresh()
        received, items = len(items), [item for item in items if not self._is_erased(item[1])]
        events = [(read, item) for read, item in items if isinstance(item, Event)]
        letters = [(read, item) for read, item in items if isinstance(item, DeadLetter)]
        own = [(read, item.letter) for read, item in items if isinstance(item, Damage)]
        counts = collections.Counter(
            damaged=len(own), letter=len(letters), erased=received - len(items)
        )
        if events:
            outcomes = await self._ingest.submit([event for _, event in events], "loader")
            for (read, event), outcome in zip(events, outcomes, strict=True):
                became, problem = await self._settle(read, event, outcome)
                counts[became] += 1
                if problem is not None:
                    own.append((read, _letter(read, event, problem)))
        await self._append_dead([(*item, record_of(item[1])) for item in own])
        kept = await self._ingest.put([letter for _, letter in (*own, *letters)])
        for (_, letter), is_kept in zip((*own, *letters), kept, strict=True):
            if not is_kept:
                self._ingest.dropped(letter)
        for (_, letter), is_kept in zip(own, kept, strict=False):
            if is_kept:
                self._metrics.count("dead_letters", letter.reason)
        # A delivery of a provider was acknowledged; a refused item of a client was not.
        await self._append_dead(
            [
                (read, letter, read.record)
                for (read, letter), is_kept in zip(letters, kept[len(own) :], strict=True)
                if not is_kept and letter.budget != "api"
            ]
        )
        self._count(counts)

    async def give_up(self, read: ReadRecord, item: Item, error: BaseException) -> None:
        """Keep an item with which the storage fails although it works otherwise: in the log of dead
        letters, and in the storage if that does not fail with the letter.

        :param error: the error of the storage.
        """
        _log.error("the storage fails with a record, which becomes a dead letter", exc_info=error)
        if isinstance(item, Event):
            reason = f"the storage failed with this event ({type(error).__name__})"
            letter = _letter(read, item, ApiError("event_refused", reason))
            self._count({"refused": 1})
        elif isinstance(item, DeadLetter):
            letter = item
            self._count({"letter": 1})
        else:
            assert item is not None
            letter = item.letter
            self._count({"damaged": 1})
        await self._append_dead([(read, letter, record_of(letter))])
        kept: Sequence[bool] = [False]
        try:
            if isinstance(item, Event):
                kept = await self._ingest.put([letter])
        except StorageError:
            _log.warning("the dead letter is in the log of dead letters only")
        if not all(kept):
            self._ingest.dropped(letter)

    # ---------------------------------------------------------------------------------- internals
    def _is_erased(self, item: Item) -> bool:
        return isinstance(item, Event | DeadLetter) and self._tombstones.cover(
            item.workspace_id, item.user_id, item.anonymous_id, item.received_at
        )

    async def _settle(
        self, read: ReadRecord, event: Event, outcome: Outcome
    ) -> tuple[str, Conflict | ApiError | None]:
        """Return the outcome of an event for the metrics, and the reason if it needs a letter."""
        if outcome.status is Status.STORED:
            return "stored", None
        try:
            problem = await self._conflicts.problem(event, outcome)
        except StorageError:
            raise
        except Exception as error:
            raise StorageUnavailable("the stored event cannot be compared") from error
        if problem is None or (isinstance(problem, Conflict) and is_restated(read.record)):
            return "duplicate", None
        return "conflict" if isinstance(problem, Conflict) else "refused", problem

    async def _append_dead(self, letters: Sequence[_DeadRecord]) -> None:
        """Append letters to the log of dead letters; shorten those that are too large for it."""
        while letters:
            records = [record for _, _, record in letters]
            outcomes = await self._append(records)
            shorter = []
            for (read, letter, record), outcome in zip(letters, outcomes, strict=True):
                if outcome.status is not Status.REFUSED:
                    continue
                size = len(record.value)
                cut = shortened_record(letter, read, size // 2)
                fits = len(cut.value) < size
                _log.error(
                    "the letter of offset %d in partition %d is too large for the log of dead"
                    " letters (%d bytes), and is %s: %s",
                    *(read.offset, read.partition, size, "shortened" if fits else "not in it"),
                    outcome.reason,
                )
                if fits:
                    shorter.append((read, letter, cut))
            letters = shorter

    async def _append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        async def append() -> Sequence[Outcome]:
            outcomes = await self._log.append_dead(records)
            if len(outcomes) != len(records):
                raise TypeError(f"{len(outcomes)} outcomes for {len(records)} letters")
            return outcomes

        try:
            return await self._log_calls.call(append, repeat=len(records) == 1)
        except Exception as error:
            if isinstance(error, Stopped):
                raise
            raise StorageUnavailable("the log of dead letters is unavailable") from None

    def _count(self, counts: collections.Counter[str] | dict[str, int]) -> None:
        for outcome, count in counts.items():
            if count:
                self._metrics.count("loaded_records", outcome, by=count)


def _letter(read: ReadRecord, event: Event, problem: Conflict | ApiError) -> DeadLetter:
    try:
        return letter_of_event(event, problem)
    except Exception as error:  # another program wrote it, without a field that servers write
        return letter_of_damage(read, error)
