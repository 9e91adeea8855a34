# SPDX-License-Identifier: Apache-2.0
"""The storage in memory of :mod:`engage.testing`, which a test can make refuse, fail or wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from engage.api import (
    MAX_USERS,
    BudgetName,
    DeadLetter,
    Event,
    Kind,
    Outcome,
    Page,
    Record,
    Status,
    Subject,
    SubscriptionChange,
    Suppression,
)
from engage.store import choices, events, letters, records, suppressions
from engage.store.keys import KEY_BYTES, key_of
from engage.store.profiles import PROFILES
from engage.store.tables import Get, Put, Step, Steps, Table
from engage.testing import memory_store
from engage.testing.memory_store import Memory


def records_of(store: Memory) -> Mapping[tuple[str, str, str], Record]:
    """Return the records of a store: (kind, workspace, id) → record."""
    rows = store.stored.tables.rows(records.RECORDS)
    return {(row[0], row[1], row[2]): records.record_of(row) for row in rows}


def run_steps(store: Memory, *steps: Step) -> Any:
    """Execute steps on a store, and return the result of the last one."""

    def all_of_them() -> Steps[Any]:
        answer = None
        for step in steps:
            answer = yield step
        return answer

    return store.stored.tables.execute(all_of_them(), store.context)


def edit(store: Memory, table: Table, *key: Any, **values: Any) -> None:
    """Give a row of a store other values."""
    [row] = run_steps(store, Get(table, [key])).values()
    named = dict(zip(table.columns, row, strict=True)) | values
    run_steps(store, Put(table, [tuple(named.values())]))


def events_of(store: Memory) -> Mapping[tuple[str, str, str], Event]:
    """Return the events of a store, in order of arrival: identity → event."""
    rows = [row for row in store.stored.tables.rows(events.EVENTS) if row[3] != events.ERASED_TYPE]
    return {one.identity: one for one in map(events.event_of, rows)}


def profiles_of(store: Memory) -> set[tuple[str, int, str]]:
    """Return the users, visitors and groups of a store."""
    return {(row[0], row[1], row[2]) for row in store.stored.tables.rows(PROFILES)}


def letters_of(store: Memory) -> Mapping[tuple[str, str], DeadLetter]:
    """Return the dead letters of a store in order of arrival: (workspace, id) → letter."""
    found = map(letters.letter_of, store.stored.tables.rows(letters.LETTERS))
    return {(one.workspace_id, one.id): one for one in found}


def suppressions_of(store: Memory) -> list[Suppression]:
    """Return all suppressions of a store, also those that are lifted."""
    return [*map(suppressions.suppression_of, store.stored.tables.rows(suppressions.SUPPRESSIONS))]


class MemoryEvents(memory_store.MemoryStore):
    """Events only."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
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

    @property
    def events(self) -> Mapping[tuple[str, str, str], Event]:
        """Identity → event, in order of arrival."""
        return events_of(self)

    async def open(self, *, create: bool) -> None:
        self.opened += 1
        await super().open(create=create)

    async def close(self) -> None:
        self.closed += 1
        await super().close()

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        self.writes.append([event.message_id for event in events])
        waited = None if self.before is None else self.before(events)
        if waited is not None:
            await waited
        refused = {one: Outcome(Status.REFUSED, reason=why) for one, why in self.refuse.items()}
        written = iter(
            await super().write([event for event in events if event.message_id not in refused])
        )
        outcomes = [refused.get(event.message_id) or next(written) for event in events]
        if not self.with_stored:
            outcomes = [dataclasses.replace(outcome, stored=None) for outcome in outcomes]
        return outcomes

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        self.expired.append(await super().expire(before, limit=limit, force=force))
        return self.expired[-1]


class MemoryProfiles(memory_store.MemoryStore):
    """Finds the users that a test put there, and no other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: (workspace, trait, value) → user ids.
        self.users: dict[tuple[str, str, str], list[str]] = {}
        #: The arguments of each call of ``find_users``.
        self.searches: list[tuple[str, str, Sequence[str]]] = []

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        self.searches.append((workspace_id, trait, values))
        found = {value: self.users.get((workspace_id, trait, value)) for value in values}
        return {value: users[:MAX_USERS] for value, users in found.items() if users}

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[Subject]:
        self.searches.append((workspace_id, trait, [value]))
        users, start = self.users.get((workspace_id, trait, value), []), int(after or 0)
        end = start + limit
        items = [Subject(Kind.USER, name) for name in users[start:end]]
        return Page(items, str(end) if end < len(users) else None)


class MemorySubscriptions(memory_store.MemoryStore):
    """The choices of users."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Those that were applied.
        self.changes: list[SubscriptionChange] = []

    async def apply_all(
        self, changes: Sequence[SubscriptionChange]
    ) -> Sequence[Mapping[str, bool]]:
        known = {key[-KEY_BYTES:] for (key,) in self.stored.tables.rows(choices.CHANGES)}
        self.changes += [one for one in changes if key_of(one.workspace_id, one.id) not in known]
        return await super().apply_all(changes)


class MemoryDeadLetters(memory_store.MemoryStore):
    """Dead letters; a budget is full if the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: The budgets that have no room for another letter.
        self.full: set[BudgetName] = set()
        #: Called before dead letters are put; may raise.
        self.before_put: Callable[[], Any] | None = None

    @property
    def letters(self) -> Mapping[tuple[str, str], DeadLetter]:
        """(workspace, id) → letter, in order of arrival."""
        return letters_of(self)

    async def keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        if self.before_put is not None:
            self.before_put()
        await super().keep([letter for letter in letters if letter.budget not in self.full])
        kept = self.letters
        return [(letter.workspace_id, letter.id) in kept for letter in letters]


class MemoryStore(
    MemoryEvents,
    MemoryProfiles,
    MemorySubscriptions,
    MemoryDeadLetters,
):
    """Everything that a storage can keep."""

    @property
    def records(self) -> Mapping[tuple[str, str, str], Any]:
        """(kind, workspace, id) → record."""
        return records_of(self)
