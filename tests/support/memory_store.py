# SPDX-License-Identifier: Apache-2.0
"""A storage in memory that does what a test wants: it refuses events, fails, or waits.

:class:`MemoryStore` implements all interfaces of a storage. Each interface is one class, so
that a test can have a storage without profiles or without dead letters. A test that needs one
method to behave differently makes a subclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from engage.api import (
    BudgetName,
    Count,
    CountStore,
    CountSum,
    DeadLetter,
    DeadLetterStore,
    Event,
    EventFilter,
    EventStore,
    GroupProfile,
    Outcome,
    Page,
    ProfileStore,
    Record,
    RecordStore,
    Status,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
    SubscriptionStore,
    UserProfile,
)

Item = TypeVar("Item")


class MemoryEvents(EventStore):
    """Events only."""

    def __init__(self) -> None:
        super().__init__()
        #: In order of arrival.
        self.events: dict[tuple[str, str, str], Event] = {}
        #: The message ids of each write.
        self.writes: list[list[str]] = []
        #: How many events each call of ``expire`` deleted.
        self.expired: list[int] = []
        #: How often the store was opened and closed.
        self.opened = 0
        self.closed = 0
        #: Called before a write, with its events. It may raise, or return something to wait for.
        self.before: Callable[[Sequence[Event]], Awaitable[object] | None] | None = None
        #: Events that are refused: message id → reason.
        self.refuse: dict[str, str] = {}
        #: Whether the outcome of a duplicate carries the stored event.
        self.with_stored = True

    async def open(self, *, create: bool) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def check(self) -> None:
        pass

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        self.writes.append([event.message_id for event in events])
        if self.before is not None:
            waited = self.before(events)
            if waited is not None:
                await waited
        return [self._write(event) for event in events]

    def _write(self, event: Event) -> Outcome:
        stored = self.events.get(event.identity)
        if event.message_id in self.refuse:
            return Outcome(Status.REFUSED, reason=self.refuse[event.message_id])
        if stored is not None:
            return Outcome(Status.DUPLICATE, stored=stored.body if self.with_stored else None)
        self.events[event.identity] = event
        return Outcome(Status.STORED)

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        return self.events.get((workspace_id, origin, message_id))

    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        return _page([one for one in self.events.values() if wanted.matches(one)], after, limit)

    async def recent(
        self, wanted: EventFilter, *, before: str | None = None, limit: int
    ) -> Page[Event]:
        return _page_back([*filter(wanted.matches, self.events.values())], before, limit)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        newest = max((event.received_at for event in self.events.values()), default=0)
        old = [key for key, event in self.events.items() if event.received_at < before]
        old = sorted(old, key=lambda key: self.events[key].received_at)[:limit]
        if newest < before and not force:
            old = []
        for key in old:
            del self.events[key]
        self.expired.append(len(old))
        return len(old)


class MemoryProfiles(ProfileStore):
    """Finds the users that a test put there; nothing else."""

    def __init__(self) -> None:
        super().__init__()
        #: (workspace, trait, value) → user ids.
        self.users: dict[tuple[str, str, str], list[str]] = {}
        #: The arguments of each call of ``find_users``.
        self.searches: list[tuple[str, str, Sequence[str]]] = []

    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        return None

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        self.searches.append((workspace_id, trait, values))
        found = {value: self.users.get((workspace_id, trait, value)) for value in values}
        return {value: users for value, users in found.items() if users}

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[str]:
        self.searches.append((workspace_id, trait, [value]))
        return _page(self.users.get((workspace_id, trait, value), []), after, limit)

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        return Page([], None)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        return Page([], None)


class MemorySubscriptions(SubscriptionStore):
    """The subscriptions of users, without scans."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[SubscriptionChange] = []
        #: (workspace, user) → group → subscribed.
        self.choices: dict[tuple[str, str], dict[str, bool]] = {}

    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        choices = self.choices.setdefault((change.workspace_id, change.user_id), {})
        if all(change.id != other.id for other in self.changes):
            self.changes.append(change)
            choices.update(change.choices)
        return dict(choices)

    async def state(self, workspace_id: str, user_id: str) -> Mapping[str, bool]:
        return self.choices.get((workspace_id, user_id), {})

    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionState]:
        return Page([], None)

    async def history(
        self, workspace_id: str | None, user_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionRecord]:
        return Page([], None)


class MemoryDeadLetters(DeadLetterStore):
    """Dead letters; a budget is full if the test says so."""

    def __init__(self) -> None:
        super().__init__()
        #: The budgets that have no room for another letter.
        self.full: set[BudgetName] = set()
        self.letters: dict[tuple[str, str], DeadLetter] = {}
        #: Called before dead letters are put; may raise.
        self.before_put: Callable[[], Any] | None = None

    async def put(self, letters: Sequence[DeadLetter]) -> int:
        return sum(not kept for kept in await self.keep(letters))

    async def keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        if self.before_put is not None:
            self.before_put()
        kept = []
        for letter in letters:
            key = (letter.workspace_id, letter.id)
            if letter.budget not in self.full:
                self.letters.setdefault(key, letter)
            kept.append(key in self.letters)
        return kept

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        letters = self.letters.values()
        wanted = [one for one in letters if workspace_id in (None, one.workspace_id)]
        return _page(wanted, after, limit)

    async def recent_dead_letters(
        self, workspace_id: str | None, *, before: str | None = None, limit: int
    ) -> Page[DeadLetter]:
        letters = self.letters.values()
        wanted = [one for one in letters if workspace_id in (None, one.workspace_id)]
        return _page_back(wanted, before, limit)

    async def dead_letter(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        return self.letters.get((workspace_id, letter_id))

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        found = [self.letters.pop((workspace_id, one), None) for one in ids]
        return sum(letter is not None for letter in found)

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        old = [key for key, letter in self.letters.items() if letter.received_at < before][:limit]
        for key in old:
            del self.letters[key]
        return len(old)


class MemoryRecords(RecordStore):
    """Records."""

    def __init__(self) -> None:
        super().__init__()
        #: (kind, workspace, id) → record.
        self.records: dict[tuple[str, str, str], Record] = {}
        #: Kind → how often its records were changed.
        self.versions: dict[str, int] = {}
        #: Called before records are read or written; may raise, or return something to wait for.
        self.before_record: Callable[[], Awaitable[object] | None] | None = None

    async def _wait(self) -> None:
        waited = None if self.before_record is None else self.before_record()
        if waited is not None:
            await waited

    def _mark_changed(self, kind: str) -> None:
        self.versions[kind] = self.versions.get(kind, 0) + 1

    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        record.check()
        await self._wait()
        key = (record.kind, record.workspace_id, record.id)
        version = self.records[key].version if key in self.records else 0
        if expected_version not in (None, version):
            return None
        self.records[key] = dataclasses.replace(record, version=version + 1)
        self._mark_changed(record.kind)
        return version + 1

    async def get_record(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        await self._wait()
        return self.records.get((kind, workspace_id, record_id))

    async def list_records(
        self,
        kind: str | None,
        workspace_id: str | None = None,
        *,
        after: str | None = None,
        limit: int,
        reverse: bool = False,
    ) -> Page[Record]:
        await self._wait()
        wanted = [
            self.records[key]
            for key in sorted(self.records, reverse=reverse)
            if kind in (None, key[0]) and workspace_id in (None, key[1])
        ]
        return _page(wanted, after, limit)

    async def records_version(self, kind: str) -> int:
        await self._wait()
        return self.versions.get(kind, 0)

    async def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        await self._wait()
        deleted = self.records.pop((kind, workspace_id, record_id), None) is not None
        if deleted:
            self._mark_changed(kind)
        return deleted

    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        await self._wait()
        old = [key for key, one in self.records.items() if key[0] == kind and one.at < before]
        for key in old[:limit]:
            del self.records[key]
            self._mark_changed(kind)
        return len(old[:limit])


class MemoryCounts(CountStore):
    """Counters."""

    def __init__(self) -> None:
        super().__init__()
        #: Each register with the value 0 → its value.
        self.registers: dict[Count, int] = {}
        #: Called before counters are written; may raise.
        self.before_counts: Callable[[], Any] | None = None

    async def put_counts(self, counts: Sequence[Count]) -> None:
        if self.before_counts is not None:
            self.before_counts()
        for one in counts:
            key = dataclasses.replace(one, value=0)
            self.registers[key] = max(one.value, self.registers.get(key, 0))

    async def counts(
        self,
        step: int,
        *,
        since: int,
        until: int,
        names: Sequence[str] | None = None,
        workspace_id: str | None = None,
        after: str | None = None,
        limit: int,
    ) -> Page[CountSum]:
        groups: dict[tuple[int, str, str, tuple[str, ...]], list[int]] = {}
        for one, value in self.registers.items():
            if (
                one.step == step
                and since <= one.at < until
                and (names is None or one.name in names)
                and workspace_id in (None, one.workspace_id)
            ):
                key = (one.at, one.name, one.workspace_id, one.labels)
                groups.setdefault(key, []).append(value)
        sums = [
            CountSum(
                at=at,
                name=name,
                workspace_id=workspace,
                labels=labels,
                total=sum(values),
                greatest=max(values),
                processes=len(values),
            )
            for (at, name, workspace, labels), values in sorted(groups.items())
        ]
        return _page(sums, after, limit)

    async def scan_counts(self, *, after: str | None, limit: int) -> Page[Count]:
        found = [dataclasses.replace(one, value=n) for one, n in self.registers.items()]
        return _page(found, after, limit)

    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        old = [one for one in self.registers if one.step == step and one.at < before]
        for one in old[:limit]:
            del self.registers[one]
        return len(old[:limit])


class MemoryStore(
    MemoryEvents,
    MemoryProfiles,
    MemorySubscriptions,
    MemoryDeadLetters,
    MemoryRecords,
    MemoryCounts,
):
    """All that a storage can keep."""


def _page(items: Sequence[Item], after: str | None, limit: int) -> Page[Item]:
    start = int(after or 0)
    end = start + limit
    return Page(items[start:end], str(end) if end < len(items) else None)


def _page_back(items: Sequence[Item], before: str | None, limit: int) -> Page[Item]:
    end = len(items) if before is None else int(before)
    start = max(end - limit, 0)
    return Page(list(reversed(items[start:end])), str(start) if start else None)
