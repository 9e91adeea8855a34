# SPDX-License-Identifier: Apache-2.0
"""Keeps the dead letters of a portion: in the log of dead letters, and in the storage.

A letter of an acknowledged event is durable in the log of dead letters before the place of its
record is committed. No letter stops a partition: one that is too large is shortened, and one that
the storage fails with is in the log of dead letters only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import (
    DeadLetter,
    DeadLetterStore,
    EventLog,
    EventStore,
    LogRecord,
    Outcome,
    ReadRecord,
    Status,
    StorageError,
    record_of,
)
from engage.pipeline.load_letters import shortened_record
from engage.pipeline.retries import Retries, Stopped

if TYPE_CHECKING:
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.ingest import Ingest

__all__ = ["PortionLetters", "ReadLetter"]

_log = logging.getLogger(__name__)

#: Letters of one call of the storage; and those, and their bytes, of one call of the log.
_LETTERS: Final = 500
_LETTER_BYTES: Final = 4 * 1024 * 1024

#: What a letter is about, and the letter.
ReadLetter = tuple[ReadRecord, DeadLetter]
#: The record of a letter, what the letter is about, and the letter.
_DeadRecord = tuple[LogRecord, ReadRecord, DeadLetter]


class PortionLetters:
    """Keeps letters.

    :param store: the store. It need not be open: then the calls wait.
    :param ingest: of the same store, without the log: counts the letters that are dropped.
    :param max_value_bytes: of a record in the log of dead letters.
    :param failed: called with an exception with which the storage fails with a letter.
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
        failed: Callable[[Exception], object],
    ) -> None:
        self._log = log
        self._store = store
        self._ingest = ingest
        self._log_calls = log_calls
        self._calls = store_calls
        self._max_value_bytes = max_value_bytes
        self._metrics = metrics
        self._failed = failed
        #: How many letters the storage keeps in one call.
        self._at_once = _LETTERS

    async def keep_own(self, letters: Sequence[ReadLetter]) -> None:
        """Keep letters of acknowledged events in the log of dead letters, and in the storage if
        there is room."""
        if not letters:
            return
        await self._append_dead([(self._record(*one), *one) for one in letters])
        kept = await self._keep([letter for _, letter in letters])
        for (_, letter), there in zip(letters, kept, strict=True):
            if there:
                self._metrics.dead_letter(letter.reason)

    async def keep_of_servers(self, letters: Sequence[ReadLetter]) -> None:
        """Keep letters that servers appended to the log.

        One with which the storage fails goes to the log of dead letters. So does that of a delivery
        whose budget is full, because the delivery was acknowledged; a refused item was not.
        """
        kept = await self._keep([letter for _, letter in letters])
        elsewhere = [
            (read.record, read, letter)
            for (read, letter), there in zip(letters, kept, strict=True)
            if there is None or (not there and letter.budget != "api")
        ]
        await self._append_dead(elsewhere)
        if letters:
            self._metrics.loaded("letter", len(letters))

    def _record(self, read: ReadRecord, letter: DeadLetter) -> LogRecord:
        """Return the record of a letter, cut off if the log need not take all of it."""
        record = record_of(letter)
        whole, limit = len(record.value), self._max_value_bytes
        if whole > limit:
            record = shortened_record(letter, read, limit)
            _report(len(record.value), whole, read, f"{limit} are the most by the limits of engage")
        return record

    async def _append_dead(self, letters: Sequence[_DeadRecord]) -> None:
        part: list[_DeadRecord] = []
        size = 0
        for one in letters:
            added = one[0].size
            if part and (len(part) == _LETTERS or size + added > _LETTER_BYTES):
                await self._append_part(part)
                part, size = [], 0
            part.append(one)
            size += added
        if part:
            await self._append_part(part)

    async def _append_part(self, letters: Sequence[_DeadRecord]) -> None:
        outcomes = await self._append_records([record for record, _, _ in letters])
        for one, outcome in zip(letters, outcomes, strict=True):
            if outcome.status is Status.REFUSED:
                await self._append_shortened(*one, outcome.reason or "no reason")

    async def _append_records(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        async def append() -> Sequence[Outcome]:
            outcomes = await self._log.append_dead(records)
            if len(outcomes) != len(records):
                raise TypeError(f"{len(outcomes)} outcomes for {len(records)} letters")
            return outcomes

        return await self._log_calls.call(append)

    async def _append_shortened(
        self, record: LogRecord, read: ReadRecord, letter: DeadLetter, reason: str
    ) -> None:
        """Append as much of a letter as the log of dead letters takes."""
        whole = size = len(record.value)
        while True:
            shorter = shortened_record(letter, read, size // 2)
            if len(shorter.value) >= size:
                kept = 0
                break
            size = len(shorter.value)
            (outcome,) = await self._append_records([shorter])
            if outcome.status is not Status.REFUSED:
                kept = size
                break
        _report(kept, whole, read, reason)

    async def _keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool | None]:
        """Keep letters in the storage.

        :return: whether each is kept, or ``None`` if the storage fails with it. Those that are not
            kept are counted, and dropped from the storage.
        """
        kept: Sequence[bool | None] = [False] * len(letters)
        if isinstance(self._store, DeadLetterStore):
            kept = await self._keep_in(self._store, letters)
        for letter, there in zip(letters, kept, strict=True):
            if not there:
                self._ingest.dropped(letter)
        return kept

    async def _keep_in(
        self, store: DeadLetterStore, letters: Sequence[DeadLetter]
    ) -> list[bool | None]:
        """Keep letters, fewer at once if the storage is too slow for so many."""
        kept: list[bool | None] = []
        while len(kept) < len(letters):
            part = letters[len(kept) : len(kept) + self._at_once]
            try:
                kept += await self._keep_part(store, part)
            except StorageError:
                self._at_once = max(len(part) // 2, 1)
            else:
                self._at_once = min(2 * self._at_once, _LETTERS)
        return kept

    async def _keep_part(
        self, store: DeadLetterStore, letters: Sequence[DeadLetter]
    ) -> Sequence[bool | None]:
        """Keep letters at once; find the one that the storage fails with by halves.

        :raises StorageError: if the storage could not keep several letters; after a pause.
        """
        try:
            kept = await self._calls.call(lambda: store.keep(letters), repeat=len(letters) == 1)
            if len(kept) != len(letters):
                raise TypeError(f"{len(kept)} results for {len(letters)} letters")
        except (StorageError, Stopped):
            raise
        except Exception as error:
            if len(letters) == 1:
                self._failed(error)
                return [None]
            middle = len(letters) // 2
            return [
                *await self._keep_part(store, letters[:middle]),
                *await self._keep_part(store, letters[middle:]),
            ]
        return kept


def _report(kept: int, whole: int, read: ReadRecord, reason: str) -> None:
    _log.error(
        "the log of dead letters has %d of the %d bytes of the letter of offset %d in partition"
        " %d: %s",
        *(kept, whole, read.offset, read.partition, reason),
    )
