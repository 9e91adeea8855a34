# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: the base class of a storage, with everything that the rest of engage calls, as plans."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final

from engage.api import (
    BudgetUse,
    Count,
    CountStore,
    CountSum,
    DeadLetter,
    DeadLetterStore,
    ErasureStore,
    Event,
    EventFilter,
    EventStore,
    GroupProfile,
    Kind,
    Outcome,
    Page,
    Preferences,
    ProfileStore,
    Record,
    RecordStore,
    Status,
    StoredLink,
    StoreProblem,
    Subject,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
    SubscriptionStore,
    Suppression,
    SuppressionStore,
    UserProfile,
    VerifiableStore,
    VisitorProfile,
)
from engage.store import choices as choosing
from engage.store import counts as counting
from engage.store import events as storing
from engage.store import letters as keeping
from engage.store import people, records
from engage.store import suppressions as suppressing
from engage.store.keys import is_text
from engage.store.profiles import (
    CHOICES,
    CLAIMS,
    IDENTIFIERS,
    KINDS,
    LINKS,
    MEMBERSHIPS,
    PROFILES,
    TRAITS,
    VISITOR_TOTALS,
    Person,
)
from engage.store.tables import PLANS, Executor, Row, Table

#: The names that a storage imports.
__all__ = [
    "PLANS",
    "TABLES",
    "PlannedChoices",
    "PlannedCounts",
    "PlannedEvents",
    "PlannedLetters",
    "PlannedProfiles",
    "PlannedRecords",
    "PlannedSuppressions",
    "Storage",
]

#: Name → table, of all that a storage keeps.
TABLES: Final[Mapping[str, Table]] = {
    table.name: table
    for table in (
        *(storing.STORE, storing.EVENTS, keeping.LETTERS, keeping.TOTALS),
        *(PROFILES, TRAITS, MEMBERSHIPS, LINKS, IDENTIFIERS, CLAIMS, VISITOR_TOTALS),
        *(CHOICES, choosing.CHANGES, choosing.HISTORY, suppressing.SUPPRESSIONS),
        *(records.RECORDS, records.VERSIONS, counting.SERIES, counting.COUNTS),
    )
}


class PlannedEvents(Executor, EventStore):
    """Events, by plans."""

    #: See :attr:`~engage.api.ProfileStore.dropped_changes`.
    dropped_changes: int = 0

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes = [storing.STORED] * len(events)
        rows: list[Row] = []
        indexes: list[int] = []
        for index, event in enumerate(events):
            try:
                rows.append(storing.row_of(event))
                indexes.append(index)
            except storing.UnstorableError as reason:
                outcomes[index] = Outcome(Status.REFUSED, str(reason))
        others, dropped = await self.run(storing.write, rows) if rows else ({}, 0)
        self.dropped_changes += dropped
        for at, outcome in others.items():
            outcomes[indexes[at]] = outcome
        return outcomes

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        if not is_text(workspace_id, origin, message_id):
            return None
        return await self.read(storing.find, workspace_id, origin, message_id)

    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        return await self.read(storing.scan, wanted, after, limit, False)

    async def recent(
        self, wanted: EventFilter, *, before: str | None = None, limit: int
    ) -> Page[Event]:
        return await self.read(storing.scan, wanted, before, limit, True)

    async def follow(
        self, *, after: str | None, since: int | None = None, limit: int
    ) -> Page[Event]:
        return await self.read(storing.follow, after, since, limit)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        return await self.run(storing.expire, before, limit, force)

    async def erase_events(self, events: Sequence[Event], marks: Sequence[bytes]) -> int:
        """See :meth:`~engage.api.ErasureStore.erase_events`."""
        return await self.run(storing.erase, [one.identity for one in events], marks)

    async def reapply(self, events: Sequence[Event]) -> None:
        """See :meth:`~engage.api.ErasureStore.reapply`."""
        await self.run(storing.reapply, [*map(storing.row_of, events)])


class PlannedRecords(Executor, RecordStore):
    """Records, by plans."""

    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        record.check()
        return await self.run(records.put, record, expected_version)

    async def get_record(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        if not is_text(kind, workspace_id, record_id):
            return None
        return await self.read(records.get, kind, workspace_id, record_id)

    async def list_records(
        self,
        kind: str | None,
        workspace_id: str | None = None,
        *,
        after: str | None = None,
        limit: int,
        reverse: bool = False,
    ) -> Page[Record]:
        return await self.read(records.scan, kind, workspace_id, after, limit, reverse)

    async def records_version(self, kind: str) -> int:
        return await self.read(records.version, kind)

    async def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        if not is_text(kind, workspace_id, record_id):
            return False
        return await self.run(records.delete, kind, workspace_id, record_id)

    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        return await self.run(records.expire, kind, before, limit)


class PlannedProfiles(Executor, ProfileStore):
    """Users, visitors and groups, by plans. What writes events applies their changes."""

    #: Where the next call of :meth:`expire_visitors` continues.
    _expired: str | None = None

    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        if not is_text(user_id):
            return None
        return await self.read(people.profile, workspace_id, user_id)

    async def certain(self, workspace_id: str, user_id: str) -> Mapping[str, str | None]:
        return await self.read(people.certain, workspace_id, user_id)

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        return await self.read(people.find_users, workspace_id, trait, [*filter(is_text, values)])

    async def identifier_history(
        self, workspace_id: str, trait: str, ids: Sequence[str]
    ) -> Mapping[str, Collection[str]]:
        texts = [*filter(is_text, ids)]
        return await self.read(people.identifier_history, workspace_id, trait, texts)

    async def find_visitors(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        texts = [*filter(is_text, values)]
        return await self.read(people.find_visitors, workspace_id, trait, texts)

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[Subject]:
        if not is_text(value):
            return Page((), None)
        return await self.read(people.holders, workspace_id, trait, value, after, limit)

    async def visitor(self, workspace_id: str, anonymous_id: str) -> VisitorProfile | None:
        if not is_text(anonymous_id):
            return None
        return await self.read(people.visitor, workspace_id, anonymous_id)

    async def users_beginning(
        self, workspace_id: str, text: str, *, trait: str | None = None, limit: int
    ) -> Sequence[str]:
        if not is_text(text):
            return ()
        return await self.read(people.users_beginning, workspace_id, trait, text, limit)

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        return await self.read(people.scan_users, workspace_id, after, limit)

    async def scan_visitors(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[VisitorProfile]:
        return await self.read(people.scan_visitors, workspace_id, after, limit)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        return await self.read(people.scan_groups, workspace_id, after, limit)

    async def expire_visitors(self, before: int, *, limit: int) -> int:
        # Reading plans look for them, because most visitors may belong to users.
        old: list[Person] = []
        while len(old) < limit:
            found, self._expired = await self.read(
                people.old_visitors, before, self._expired, limit - len(old)
            )
            old += found
            if self._expired is None:
                break
        return await self.run(people.delete_visitors, old, before) if old else 0

    async def erase_profile(self, workspace_id: str, kind: Kind, name: str) -> bool:
        """See :meth:`~engage.api.ErasureStore.erase_profile`."""
        if not is_text(name):
            return False
        return await self.run(people.erase, workspace_id, KINDS[kind], name)

    async def links_to(self, workspace_id: str, anonymous_id: str) -> Sequence[tuple[str, int]]:
        """See :meth:`~engage.api.ErasureStore.links_to`."""
        if not is_text(anonymous_id):
            return []
        return await self.read(people.links_to, workspace_id, anonymous_id)

    async def linked_to(self, workspace_id: str, user_id: str) -> Sequence[str]:
        """See :meth:`~engage.api.ErasureStore.linked_to`."""
        if not is_text(user_id):
            return []
        return await self.read(people.linked_to, workspace_id, user_id)

    async def scan_links(self, *, after: str | None, limit: int) -> Page[StoredLink]:
        """See :meth:`~engage.api.VerifiableStore.scan_links`."""
        return await self.read(people.scan_links, after, limit)


class PlannedCounts(Executor, CountStore):
    """Counters, by plans."""

    async def put_counts(self, counts: Sequence[Count]) -> None:
        if counts:
            await self.run(counting.put, counts)

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
        return await self.read(counting.sums, step, since, until, names, workspace_id, after, limit)

    async def scan_counts(self, *, after: str | None, limit: int) -> Page[Count]:
        return await self.read(counting.scan, after, limit)

    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        return await self.run(counting.expire, step, before, limit)


class PlannedChoices(Executor, SubscriptionStore):
    """Subscription choices and their history, by plans."""

    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        return (await self.apply_all([change]))[0]

    async def apply_all(
        self, changes: Sequence[SubscriptionChange]
    ) -> Sequence[Mapping[str, bool]]:
        if not changes:
            return []
        return await self.run(choosing.apply_all, changes)

    async def state(self, workspace_id: str, subject: Subject) -> Mapping[str, bool]:
        if not is_text(subject.id):
            return {}
        return await self.read(choosing.state, workspace_id, subject)

    async def preferences(
        self,
        workspace_id: str,
        subject: Subject,
        identifier: tuple[str, str] | None,
        key: str | None,
    ) -> Preferences:
        if not is_text(subject.id, *(identifier or ())):
            return Preferences({}, (), ())
        return await self.read(choosing.preferences, workspace_id, subject, identifier, key)

    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionState]:
        return await self.read(choosing.scan, workspace_id, after, limit)

    async def history(
        self,
        workspace_id: str | None,
        subject: Subject | None,
        *,
        since: int = 0,
        after: str | None,
        limit: int,
    ) -> Page[SubscriptionRecord]:
        return await self.read(choosing.history, workspace_id, subject, since, after, limit)

    async def erase_choices(
        self, workspace_id: str, subject: Subject, pseudonym: str
    ) -> tuple[int, int]:
        """See :meth:`~engage.api.ErasureStore.erase_choices`."""
        if not is_text(subject.id):
            return 0, 0
        return await self.run(choosing.erase, workspace_id, subject, pseudonym)


class PlannedSuppressions(Executor, SuppressionStore):
    """Suppressed addresses, by plans."""

    async def suppress(self, suppressions: Sequence[Suppression]) -> None:
        if suppressions:
            await self.run(suppressing.suppress, suppressions)

    async def suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> Sequence[Suppression]:
        return await self.read(suppressing.find, workspace_id, [*addresses])

    async def scan_suppressions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[Suppression]:
        return await self.read(suppressing.scan, workspace_id, after, limit)

    async def erase_suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> int:
        """See :meth:`~engage.api.ErasureStore.erase_suppressions`."""
        return await self.run(suppressing.erase, workspace_id, [*addresses])


class PlannedLetters(Executor, DeadLetterStore):
    """Dead letters, by plans."""

    async def put(self, letters: Sequence[DeadLetter]) -> int:
        return sum(not kept for kept in await self.keep(letters))

    async def keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        return await self.run(keeping.keep, [*map(keeping.storable, letters)])

    async def budget_use(self) -> Sequence[BudgetUse]:
        return await self.read(keeping.use)

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        return await self.read(keeping.scan, workspace_id, after, limit, False)

    async def recent_dead_letters(
        self, workspace_id: str | None, *, before: str | None = None, limit: int
    ) -> Page[DeadLetter]:
        return await self.read(keeping.scan, workspace_id, before, limit, True)

    async def dead_letter(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        if not is_text(workspace_id, letter_id):
            return None
        return await self.read(keeping.get, workspace_id, letter_id)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        return await self.run(keeping.remove, workspace_id, [*ids])

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        return await self.run(keeping.expire, before, limit)


class Storage(
    PlannedEvents,
    PlannedProfiles,
    PlannedChoices,
    PlannedSuppressions,
    PlannedLetters,
    PlannedRecords,
    PlannedCounts,
    ErasureStore,
    VerifiableStore,
):
    """A storage that keeps everything.

    It has five methods of its own: :meth:`~engage.api.EventStore.open`,
    :meth:`~engage.api.EventStore.close`, :meth:`~engage.api.EventStore.check`,
    :meth:`~engage.store.tables.Executor.run` and :meth:`~engage.store.tables.Executor.read`. It may
    have its own way for any other.
    """

    async def settle(self) -> bool:
        await self.check()
        return False

    async def problems(self) -> AsyncIterator[StoreProblem | int]:
        yield 0
