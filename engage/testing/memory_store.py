# SPDX-License-Identifier: Apache-2.0
"""A storage in memory, for tests of plugins and of one's own code.

:class:`MemoryStore` keeps all promises of the conformance suite that do not need a disk: another
process does not see what it stores, and the end of the process loses it. It reads a page by looking
at everything: it is for some thousands of events. A test that needs one method to behave
differently makes a subclass. Each interface is a class of its own, so that a test can also have a
storage without profiles or without dead letters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from engage import api
from engage.store import changes
from engage.store.facade import (
    PlannedChoices,
    PlannedCounts,
    PlannedLetters,
    PlannedProfiles,
    PlannedRecords,
    PlannedSuppressions,
)
from engage.store.letters import HEADS
from engage.store.profiles import REMOVED, TRAITS

from .memory_base import Memory, Stored, delete, stored

__all__ = ["MemoryStore", "Stored", "stored"]


class MemoryEvents(Memory, api.EventStore):
    """Events only."""

    async def write(self, events: Sequence[api.Event]) -> Sequence[api.Outcome]:
        self.contents()
        return [self._write(event) for event in events]

    def _write(self, event: api.Event) -> api.Outcome:
        texts = (*event.identity, event.user_id, event.anonymous_id, event.name)
        try:
            "".join(text for text in texts if text is not None).encode()
        except UnicodeEncodeError:
            return api.Outcome(api.Status.REFUSED, reason="an id is not Unicode text")
        known = self.stored.events.get(event.identity)
        if event.identity in self.stored.erased:
            return api.Outcome(api.Status.DUPLICATE, stored=self.stored.erased[event.identity][1])
        if known is not None:
            return api.Outcome(api.Status.DUPLICATE, stored=known.body)
        self.stored.events[event.identity] = event
        self.apply_changes(event)
        return api.Outcome(api.Status.STORED)

    async def find(self, workspace_id: str, origin: str, message_id: str) -> api.Event | None:
        return self.contents().events.get((workspace_id, origin, message_id))

    async def scan(
        self, wanted: api.EventFilter, *, after: str | None, limit: int
    ) -> api.Page[api.Event]:
        return self.contents().events.page(wanted.matches, after, limit)

    async def recent(
        self, wanted: api.EventFilter, *, before: str | None = None, limit: int
    ) -> api.Page[api.Event]:
        return self.contents().events.page(wanted.matches, before, limit, back=True)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        events = self.contents().events
        times = sorted((event.received_at, key) for key, event in events.items())
        if not times or (times[-1][0] < before and not force):
            return 0
        erased = self.contents().erased
        gone = delete(erased, [key for key, (at, _) in erased.items() if at < before][:limit])
        limit -= gone
        return gone + delete(events, [key for at, key in times if at < before][:limit])

    async def erase_events(self, events: Sequence[api.Event], marks: Sequence[bytes]) -> int:
        known = self.contents()
        known.erased |= {
            event.identity: (known.events[event.identity].received_at, mark)
            for event, mark in zip(events, marks, strict=True)
            if event.identity in known.events
        }
        return delete(known.events, [event.identity for event in events])

    async def settle(self) -> bool:
        self.contents()
        return True


class MemoryProfiles(Memory, PlannedProfiles):
    """Users, visitors and groups, merged from the stored events."""

    def apply_changes(self, event: api.Event) -> None:
        changed = [*map(changes.encode, api.changes_of(event))]
        steps = changes.apply([(event, changed)], self.context.identifiers, {}, {})
        self.dropped_changes += self.stored.tables.execute(steps, self.context).dropped

    async def reapply(self, events: Sequence[api.Event]) -> None:
        self.contents()
        for event in events:
            self.apply_changes(event)


class MemorySubscriptions(Memory, PlannedChoices):
    """Subscription choices and their history."""


class MemoryDeadLetters(Memory, PlannedLetters):
    """Dead letters, within their budgets."""


class MemoryRecords(Memory, PlannedRecords):
    """Records."""


class MemoryCounts(Memory, PlannedCounts):
    """Counters."""


class MemorySuppressions(Memory, PlannedSuppressions):
    """Suppressed addresses."""


class MemoryVerification(Memory):
    """What only this storage knows of itself."""

    async def problems(self) -> AsyncIterator[api.StoreProblem | int]:
        data = self.contents()
        traits = data.tables.rows(TRAITS)
        yield len(data.events) + len(data.tables.rows(HEADS)) + len(traits)
        for key, event in data.events.items():
            if key != event.identity:
                yield api.StoreProblem(what="keys", message=f"{key} leads to {event.identity}")
        for _, _, name, trait, _, value, *_, size in traits:
            if size and value == REMOVED:
                yield api.StoreProblem(what="sizes", message=f"{name}: of no trait {trait}")


class MemoryStore(
    MemoryEvents,
    MemoryProfiles,
    MemorySubscriptions,
    MemorySuppressions,
    MemoryDeadLetters,
    MemoryRecords,
    MemoryCounts,
    MemoryVerification,
    api.VerifiableStore,
    api.ErasureStore,
):
    """A storage in memory with all interfaces."""


@api.hookimpl
def engage_register_storage(register: api.Register[api.StorageFactory]) -> None:
    """Register the storage ``memory``, for a conformance suite; no entry point names this."""
    register("memory", MemoryStore, {"type": "object", "required": ["name"]})
