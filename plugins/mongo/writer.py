# SPDX-License-Identifier: Apache-2.0
"""Storing events with their changes, and completing what a crash cut off.

A write is one ``insertMany`` of its events. If they change profiles, the reads that the limits need
run beside it; then one update command runs for each collection that changes (users, groups, links,
memberships), all at once.

An event with changes is inserted with a mark, which is removed within a second of the
acknowledgement, for many writes at once. An event that still has its mark when a store is opened,
or when it is sent again, may have been cut off by a crash: its changes are applied before anything
is acknowledged. Applying them twice does no harm, because they are idempotent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Final

from engage.api import Event, Outcome, StorageUnavailable

from .batch import Batch
from .connection import Connection
from .documents import Sequencer, any_of
from .events import Events
from .profiles import Profiles
from .schema import EVENTS

#: Marked events that are completed at once.
_STEP: Final = 500


class Writer:
    """Stores events.

    :param work: is set when there is something to do later.
    """

    def __init__(
        self,
        connection: Connection,
        events: Events,
        profiles: Profiles,
        sequence: Sequencer,
        work: asyncio.Event,
    ) -> None:
        self._connection = connection
        self._events = events
        self._profiles = profiles
        self._sequence = sequence
        self._work = work
        #: How many changes were dropped.
        self.dropped_changes = 0
        #: How often :meth:`complete` must be called because writes failed.
        self.completions_due = 0
        #: The marks of this process: their prefix, how many there were, and those of the writes
        #: whose changes are durable.
        self._process = os.urandom(6).hex()
        self._writes = 0
        self._durable: set[str] = set()

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """Store events; see :meth:`EventStore.write`."""
        self._writes += 1
        mark = f"{self._process}.{self._writes}"
        batch = Batch(events, self._profiles.changes, self._sequence, mark)
        try:
            with self._connection.calling():
                await self._insert(batch)
                await self._apply(batch)
        except BaseException:
            # Events may be stored without their changes: complete them as soon as the server
            # answers, and again when the call must have ended, because the thread of the driver may
            # insert until then.
            self.completions_due = 2
            self._work.set()
            raise
        if batch.stored:
            self._durable.add(batch.mark)
            self._work.set()
        outcomes = batch.outcomes()
        repeats = batch.repeats_of_refused()
        if repeats:
            later = await self.write([events[index] for index in repeats])
            for index, outcome in zip(repeats, later, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _insert(self, batch: Batch) -> None:
        inserting = self._connection.insert(EVENTS, batch.documents)
        changing = batch.changing()
        if changing:
            reading = self._profiles.read_state(self._profiles.fold(changing))
            # Both run at once; both are awaited, so that neither continues after this call.
            codes, state = await asyncio.gather(inserting, reading, return_exceptions=True)
            if isinstance(codes, BaseException):
                raise codes
            if isinstance(state, BaseException):
                raise state
            batch.state = state
        else:
            codes = await inserting
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

    async def _apply(self, batch: Batch) -> None:
        changes = batch.stored
        if changes:
            self.dropped_changes += await self._profiles.apply(
                self._profiles.fold(changes), batch.state
            )
        cut_off = [
            (event, self._profiles.changes(event))
            for event, mark in batch.present.values()
            if mark is not None and mark not in self._durable
        ]
        if cut_off:
            # Changes dropped here were counted when the event was stored.
            await self._profiles.apply(self._profiles.fold(cut_off))

    async def remove_marks(self) -> None:
        """Remove the marks of the writes whose changes are durable. To be called within
        :meth:`Connection.calling`."""
        if self._durable:
            marks = sorted(self._durable)
            await self._remove_marks({"_mark": any_of(marks)})
            self._durable.difference_update(marks)

    async def complete(self) -> None:
        """Apply the changes of all marked events, and remove their marks."""
        while True:
            with self._connection.calling() as db:
                query = {"_mark": {"$exists": True}}
                cursor = db[EVENTS].find(query, {"_id": 1, "_seq": 1}).limit(_STEP)
                found = await cursor.to_list(None)
                if not found:
                    return
                found.sort(key=lambda document: document["_seq"])
                ids = [document["_id"] for document in found]
                stored = await self._events.stored(ids)
                changes = [
                    (stored[key][0], self._profiles.changes(stored[key][0]))
                    for key in ids
                    if key in stored
                ]
                await self._profiles.apply(self._profiles.fold(changes))
                await self._remove_marks({"_id": any_of(ids)})
            if len(found) < _STEP:
                return

    async def _remove_marks(self, query: dict[str, Any]) -> None:
        statement = {"q": query, "u": {"$unset": {"_mark": ""}}, "multi": True}
        await self._connection.update(EVENTS, [statement])
