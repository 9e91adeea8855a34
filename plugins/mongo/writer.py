# SPDX-License-Identifier: Apache-2.0
"""Storing events with their changes, and completing writes that a crash cut off.

A write is one ``insertMany`` of its events. If they change profiles, the reads that the limits need
run beside it; then one update command runs for each collection that changes (users, groups, links,
memberships), all at once.

Several writes may run at the same time. Their inserts overlap; the unique ``_id`` decides which of
two equal events is stored. Profiles are changed by one write at a time, from the reads to the
updates: otherwise two writes could together exceed a limit that each of them keeps, and FerretDB 1
loses concurrent updates of one document.

An event with changes is inserted with a mark, which is removed within a second of the
acknowledgement, for many writes at once. An event that still has its mark when a store is opened,
or when it is sent again, may have been cut off by a crash: its changes are applied before anything
is acknowledged. Applying them twice does no harm, because they are idempotent.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from bson.objectid import ObjectId

from engage.api import Event, Outcome, Status, StorageUnavailable
from engage.store.changes import EncodedChange
from engage.store.events import Changing, UnstorableError

from .arrivals import Arrivals, Run
from .connection import BATCH, DUPLICATE, Connection
from .documents import Sequencer, encode_event, event_id
from .profiles import Cache
from .schema import EVENTS
from .steps import Steps
from .stored_events import Events

#: Marked events that are completed at once.
_STEP: Final = 500


class Batch:
    """The events of one write, encoded one by one: one that cannot be stored does not affect the
    others.

    :param changes: returns the changes of an event.
    :param mark: the mark of the events that have changes.
    """

    def __init__(
        self,
        events: Sequence[Event],
        changes: Callable[[Event], Sequence[EncodedChange]],
        sequence: Sequencer,
        mark: str,
    ) -> None:
        self.mark = mark
        self._events = events
        #: Position of an event → the reason why it is refused.
        self._refused: dict[int, str] = {}
        #: Position of a document → position of its event.
        self._positions: list[int] = []
        #: The places of the documents.
        self.run = Run(sequence())
        #: ``_id`` → position of its document.
        self._first: dict[str, int] = {}
        #: Events with the identity of an earlier one: position of the event, and of the document.
        self._repeats: list[tuple[int, int]] = []
        self._changes: list[Sequence[EncodedChange]] = []
        #: Position of a document that was not stored → code of the server.
        self._codes: Mapping[int, int] = {}
        self.documents: list[bytes] = []
        #: The ``_id`` of each document.
        self.ids: list[str] = []
        #: The events that were stored before this write: ``_id`` → event, and its mark if it has
        #: one.
        self.present: dict[str, tuple[Event, str | None, ObjectId]] = {}
        for index, event in enumerate(events):
            key = event_id(*event.identity)
            first = self._first.get(key)
            if first is not None:
                self._repeats.append((index, first))
                continue
            seq = sequence()
            try:
                event_changes = changes(event)
                document = encode_event(event, key, seq, mark if event_changes else None)
            except UnstorableError as error:
                self._refused[index] = str(error)
                continue
            self.run.add(seq, event.received_at)
            self._first[key] = len(self.documents)
            self._positions.append(index)
            self._changes.append(event_changes)
            self.documents.append(document)
            self.ids.append(key)

    def changing(self) -> list[Changing]:
        """Return all events that have changes, each with its changes, stored or not."""
        return [
            (self._events[index], event_changes)
            for index, event_changes in zip(self._positions, self._changes, strict=True)
            if event_changes
        ]

    def settle(self, codes: Mapping[int, int]) -> None:
        """Take in the result of the insert.

        :param codes: what :meth:`Connection.insert` returned.
        """
        self._codes = codes
        for position, code in codes.items():
            if code != DUPLICATE:
                self._refused[self._positions[position]] = (
                    f"the storage cannot store a value, or the size, of this event (code {code})"
                )

    @property
    def duplicates(self) -> list[int]:
        """Positions of the documents whose events were stored before this write."""
        return [position for position, code in self._codes.items() if code == DUPLICATE]

    @property
    def stored(self) -> list[Changing]:
        """The newly stored events that have changes, each with its changes."""
        return [
            (self._events[index], event_changes)
            for position, (index, event_changes) in enumerate(
                zip(self._positions, self._changes, strict=True)
            )
            if event_changes and position not in self._codes
        ]

    @property
    def marked(self) -> list[str]:
        """The ``_id`` of each newly stored event that has changes."""
        return [
            key
            for position, key in enumerate(self.ids)
            if self._changes[position] and position not in self._codes
        ]

    def repeats_of_refused(self) -> list[int]:
        """Return the positions of events that share their identity with a refused event of this
        write: nothing is stored under it yet."""
        return [index for index, first in self._repeats if self._positions[first] in self._refused]

    def outcomes(self) -> list[Outcome]:
        """Return one outcome per event, in their order."""
        outcomes = [Outcome(Status.STORED)] * len(self._events)
        for index, reason in self._refused.items():
            outcomes[index] = Outcome(Status.REFUSED, reason=reason)
        for position in self.duplicates:
            stored = self.present[self.ids[position]][0].body
            outcomes[self._positions[position]] = Outcome(Status.DUPLICATE, stored=stored)
        for index, first in self._repeats:
            before = outcomes[self._positions[first]]
            own = self._events[self._positions[first]].body
            body = own if before.stored is None else before.stored
            outcomes[index] = Outcome(Status.DUPLICATE, stored=body)
        return outcomes


class Writer:
    """Stores events.

    :param work: is set when there is something to do later.
    """

    def __init__(
        self,
        connection: Connection,
        events: Events,
        cache: Cache,
        steps: Steps,
        arrivals: Arrivals,
        sequence: Sequencer,
        work: asyncio.Event,
    ) -> None:
        self._connection = connection
        self._events = events
        self._cache = cache
        self._steps = steps
        self._arrivals = arrivals
        self._sequence = sequence
        self._work = work
        #: How many changes were dropped.
        self.dropped_changes = 0
        #: How often :meth:`complete` must be called because writes failed.
        self.completions_due = 0
        #: When :meth:`complete_due` does so next.
        self._complete_at = 0.0
        #: The marks of this process: their prefix, how many there were, and those of the writes
        #: whose changes are durable, with the ``_id`` of each event that has one.
        self._process = os.urandom(6).hex()
        self._writes = 0
        self._durable: dict[str, Sequence[str]] = {}
        #: Held by the write that changes profiles.
        self._changing = asyncio.Lock()

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """Store events; see :meth:`Storage.write`."""
        with self._connection.calling():
            await self._cache.look_for_erasures()
        self._writes += 1
        mark = f"{self._process}.{self._writes}"
        batch = Batch(events, self._cache.changes, self._sequence, mark)
        try:
            with self._connection.calling():
                await self._arrivals.begin(batch.run)
                if changing := batch.changing():
                    await self._insert_and_change(batch, changing)
                else:
                    await self._insert(batch)
                stored = batch.present.values()
                await self._arrivals.end(
                    batch.run, [(seq, event.received_at) for event, _, seq in stored]
                )
                self._work.set()
        except BaseException:
            # Events may be stored without their changes.
            self._arrivals.fail(batch.run)
            self.complete_later()
            raise
        outcomes = batch.outcomes()
        repeats = batch.repeats_of_refused()
        if repeats:
            later = await self.write([events[index] for index in repeats])
            for index, outcome in zip(repeats, later, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def reapply(self, events: Sequence[Event]) -> None:
        """Apply the changes of stored events again."""
        self._cache.forget()
        changes = [(event, self._cache.changes(event)) for event in events]
        with self._connection.calling():
            async with self._changing:
                await self._steps.apply(changes)

    def complete_later(self) -> None:
        """Have marked events completed as soon as the server answers, and again when a call that
        failed must have ended: the thread of the driver may insert until then."""
        self.completions_due = 2
        self._work.set()

    async def complete_due(self, complete: Callable[[], Awaitable[None]]) -> None:
        """Complete what failed writes left. To be called again if :attr:`completions_due` is not 0:
        then it does so when it is time.

        :param complete: completes it.
        :raises StorageUnavailable: if the server fails, or needs too long.
        """
        if time.monotonic() < self._complete_at:
            return
        # Counted before the work: a write that fails during it sets it to two again.
        self.completions_due -= 1
        try:
            await complete()
        except BaseException:
            self.completions_due = 2
            raise
        finally:
            self._complete_at = time.monotonic() + self._connection.timeout

    async def _insert(self, batch: Batch) -> None:
        """Insert events that have no changes."""
        await self._settle(batch, await self._connection.insert(EVENTS, batch.documents))
        if self._cut_off(batch):
            async with self._changing:
                await self._apply_cut_off(batch)

    async def _insert_and_change(self, batch: Batch, changing: Sequence[Changing]) -> None:
        """Insert events of which some have changes, and apply the changes."""
        inserting = asyncio.ensure_future(self._connection.insert(EVENTS, batch.documents))
        try:
            async with self._changing:
                people = await self._steps.prefetch(changing)
                await self._settle(batch, await inserting)
                if changes := batch.stored:
                    self.dropped_changes += await self._steps.apply(changes, people)
                    self._durable[batch.mark] = batch.marked
                    self._work.set()
                await self._apply_cut_off(batch)
        except BaseException as error:
            # The insert does not continue after this call.
            if isinstance(error, asyncio.CancelledError):
                inserting.cancel()
            await asyncio.gather(inserting, return_exceptions=True)
            raise

    async def _settle(self, batch: Batch, codes: Mapping[int, int]) -> None:
        """Take in the result of the insert, and read what duplicates are duplicates of."""
        batch.settle(codes)
        if batch.duplicates:
            ids = [batch.ids[position] for position in batch.duplicates]
            batch.present = await self._events.stored(ids)
            missing = [key for key in ids if key not in batch.present]
            if missing:
                # A unique index that is not engage's refused it, or it was deleted a moment ago.
                raise StorageUnavailable(
                    "an event is refused as a duplicate, but not stored (a unique index?)"
                )

    def _cut_off(self, batch: Batch) -> list[Changing]:
        """Return the duplicates whose changes may not be durable, each with its changes."""
        return [
            (event, self._cache.changes(event))
            for event, mark, _ in batch.present.values()
            if mark is not None and mark not in self._durable
        ]

    async def _apply_cut_off(self, batch: Batch) -> None:
        """Complete the changes of duplicates. To be called while no other write changes profiles:
        the one that stored an event may have been applying them until now."""
        if cut_off := self._cut_off(batch):
            # Changes dropped here were counted when the event was stored.
            await self._steps.apply(cut_off)

    async def remove_marks(self) -> None:
        """Remove the marks of the writes whose changes are durable. To be called within
        :meth:`Connection.calling`."""
        durable = [*self._durable.items()]
        await self._remove_marks((key, mark) for mark, keys in durable for key in keys)
        for mark, _ in durable:
            del self._durable[mark]

    async def complete(self) -> None:
        """Apply the changes of all marked events, and remove their marks.

        :raises StorageUnavailable: if the server fails.
        """
        while await self._complete_some() == _STEP:
            pass

    async def _complete_some(self) -> int:
        """Apply the changes of at most ``_STEP`` marked events; return how many there were."""
        with self._connection.calling() as db:
            query = {"_mark": {"$exists": True}}
            cursor = db[EVENTS].find(query, {"_id": 1, "_seq": 1}).limit(_STEP)
            documents = await cursor.to_list(None)
            if not documents:
                return 0
            documents.sort(key=lambda document: document["_seq"])
            ids = [document["_id"] for document in documents]
            stored = await self._events.stored(ids)
            changes = [
                (stored[key][0], self._cache.changes(stored[key][0]))
                for key in ids
                if key in stored
            ]
            async with self._changing:
                await self._steps.apply(changes)
            await self._remove_marks((key, mark) for key, (_, mark, _) in stored.items())
        return len(documents)

    async def _remove_marks(self, marks: Iterable[tuple[str, str | None]]) -> None:
        """Remove marks from events by their ``_id``: a sharded cluster sends that to few shards.

        Many at once, because FerretDB reads the whole collection for each statement.
        """
        marked = [(key, mark) for key, mark in marks if mark]
        statements = []
        for start in range(0, len(marked), BATCH):
            keys, same = zip(*marked[start : start + BATCH], strict=True)
            query = {"_id": {"$in": keys}, "_mark": {"$in": [*{*same}]}}
            statements.append({"q": query, "u": {"$unset": {"_mark": ""}}, "multi": True})
        await self._connection.update(EVENTS, statements)
