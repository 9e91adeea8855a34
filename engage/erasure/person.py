# SPDX-License-Identifier: Apache-2.0
"""A person in a store: the ids and addresses, and all that the store has under them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping
from typing import Literal

import orjson

from engage.api import (
    ADDRESS_TRAITS,
    API_ORIGIN,
    MAX_TIME,
    RECIPIENT_PREFIXES,
    DeadLetter,
    DeadLetterStore,
    EngageError,
    ErasureStore,
    Event,
    EventFilter,
    EventStore,
    Kind,
    ProfileStore,
    Record,
    RecordStore,
    Subject,
    SubscriptionStore,
    SuppressionStore,
    identifier_value,
)
from engage.config import Workspace
from engage.erasure.addresses import addresses_in
from engage.erasure.requests import noted_requests
from engage.upkeep.audit import AUDIT, read_entry
from engage.upkeep.export import MAX_PAGE, RecordKind, all_pages, as_line, render

__all__ = [
    "Erasable",
    "Person",
    "addresses_in_letter",
    "addresses_of",
    "audit_of",
    "erasable",
    "events_of",
    "export_person",
    "letters_of",
    "other_addresses",
    "person_of",
    "subjects_of",
    "visitors_of",
]


class Erasable(ErasureStore, ProfileStore, RecordStore, EventStore):
    """A storage from which a person can be erased."""


def erasable(store: EventStore) -> Erasable:
    """Return the store.

    :raises EngageError: if its storage does not have all interfaces.
    """
    if not all(isinstance(store, one) for one in (ErasureStore, ProfileStore, RecordStore)):
        raise EngageError("the configured storage cannot erase people")
    return store  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """The ids of one person, or of several, in a workspace.

    Each has the time before which something must have been received to belong to it: milliseconds
    since 1970 UTC.
    """

    workspace_id: str
    users: Mapping[str, int]
    #: Anonymous ids, and the ids of the users: some clients send these as anonymous ids. Those that
    #: begin with :data:`RECIPIENT_PREFIXES` are addresses that an operator named.
    visitors: Mapping[str, int]

    def owns(self, user_id: str | None, anonymous_id: str | None, received_at: int) -> bool:
        """Return whether something that was received for these ids belongs to the person."""
        if user_id is not None:
            return received_at < self.users.get(user_id, 0)
        return anonymous_id is not None and received_at < self.visitors.get(anonymous_id, 0)


async def visitors_of(store: Erasable, workspace_id: str, user_id: str) -> set[str]:
    """Return the anonymous ids that are a user's alone: its own id, and those that were linked to
    it first. Addresses are not among them: anyone can claim one."""
    found = {user_id}
    for name in await store.linked_to(workspace_id, user_id):
        links = await store.links_to(workspace_id, name)
        if links and links[0][0] == user_id:
            found.add(name)
    return {name for name in found if not name.startswith(RECIPIENT_PREFIXES)}


def subjects_of(person: Person) -> list[Subject]:
    """Return the users and visitors of a person."""
    visitors = [name for name in person.visitors if not name.startswith(RECIPIENT_PREFIXES)]
    return [
        *(Subject(Kind.USER, name) for name in person.users),
        *(Subject(Kind.VISITOR, name) for name in visitors),
    ]


def addresses_of(workspace: Workspace | None, person: Person) -> set[tuple[str, str]]:
    """Return the addresses of a person: pairs of channel and address, in the form in which they are
    suppressed. Channels that only the workspace has are those of phone numbers."""
    groups = () if workspace is None else workspace.subscription_groups
    channels = {**{one.channel: "phone" for one in groups}, **ADDRESS_TRAITS}
    named = [name.partition(":") for name in person.visitors if name.startswith(RECIPIENT_PREFIXES)]
    return {
        (channel, address)
        for trait, _, address in named
        for channel, its_trait in channels.items()
        if trait == its_trait
    }


async def other_addresses(store: Erasable, person: Person) -> dict[str, bool]:
    """Return the addresses that the profiles of a person have and an operator did not name, with
    whether other users have each."""
    found: dict[str, bool] = {}
    profiles = [
        *[await store.profile(person.workspace_id, name) for name in person.users],
        *[await store.visitor(person.workspace_id, name) for name in person.visitors],
    ]
    for prefix in RECIPIENT_PREFIXES:
        trait = prefix.removesuffix(":")
        for profile in profiles:
            value = None if profile is None else identifier_value(trait, profile.traits.get(trait))
            if value is not None and prefix + value not in person.visitors:
                users = await store.find_users(person.workspace_id, trait, [value])
                found[value] = not person.users.keys() >= set(users.get(value, ()))
    return found


async def events_of(
    store: EventStore, person: Person, *, since: int | None = None
) -> AsyncIterator[Event]:
    """Yield the events that have an id of the person, whenever they were received.

    :param since: only those received at this time or later.
    """
    ids = frozenset((*person.users, *person.visitors))
    wanted = EventFilter(workspace_id=person.workspace_id, ids=ids, since=since)
    # A database compares some thousands of ids well.
    asked = wanted if len(ids) <= MAX_PAGE else dataclasses.replace(wanted, ids=None)
    async for event in all_pages(functools.partial(store.scan, asked)):
        if wanted.matches(event):
            yield event


async def letters_of(store: EventStore, person: Person) -> AsyncIterator[DeadLetter]:
    """Yield the dead letters of the person: those with an id, and the deliveries that name no user
    and have an address of the person."""
    if not isinstance(store, DeadLetterStore):
        return
    named = {
        name: at for name, at in person.visitors.items() if name.startswith(RECIPIENT_PREFIXES)
    }
    read = functools.partial(store.scan_dead_letters, person.workspace_id)
    async for letter in all_pages(read):
        if person.owns(letter.user_id, letter.anonymous_id, letter.received_at) or (
            named
            and any(letter.received_at < named.get(one, 0) for one in addresses_in_letter(letter))
        ):
            yield letter


def addresses_in_letter(letter: DeadLetter) -> Iterator[str]:
    """Yield the addresses in a dead letter, if it is a delivery that names no user."""
    if letter.origin != API_ORIGIN and letter.user_id is None:
        yield from addresses_in(letter.item)


async def audit_of(
    store: Erasable, person: Person, addresses: set[tuple[str, str]]
) -> AsyncIterator[tuple[Record, list[str]]]:
    """Yield the records of the audit that have an id or an address of the person, with the names of
    the details that have one."""
    ids = {*person.users, *person.visitors, *(address for _, address in addresses)}
    async for record in all_pages(functools.partial(store.list_records, AUDIT)):
        details = read_entry(record).details
        named = [
            name
            for name, value in details.items()
            if isinstance(value, str) and value in ids and name != "workspace"
        ]
        if named and details.get("workspace") == person.workspace_id:
            yield record, named


async def person_of(
    store: EventStore, workspace_id: str, user_id: str, addresses: Collection[str] = ()
) -> Person:
    """Return a user with its visitors.

    :param addresses: those of the person: see :func:`~engage.erasure.addresses.named_addresses`.
    :raises EngageError: if the storage cannot tell what belongs to a person.
    """
    visitors = await visitors_of(erasable(store), workspace_id, user_id)
    return Person(
        workspace_id=workspace_id,
        users={user_id: MAX_TIME},
        visitors=dict.fromkeys(sorted(visitors.union(addresses)), MAX_TIME),
    )


async def export_person(
    store: EventStore, workspace: Workspace, user_id: str, addresses: Collection[str] = ()
) -> AsyncGenerator[bytes, None]:
    """Yield everything that a store has about a user as JSON, with its kind in ``record``: the
    profile, the visitors, choices with their history, suppressions, dead letters, entries of the
    audit and events.

    :param addresses: as :func:`person_of`.
    :raises EngageError: if the storage cannot tell what belongs to a person.
    :raises StorageUnavailable: if the store cannot be read.
    """
    known = erasable(store)
    person = await person_of(known, workspace.id, user_id, addresses)
    user = await known.profile(workspace.id, user_id)
    if user is not None:
        yield _line("users", user)
    for name in person.visitors:
        visitor = await known.visitor(workspace.id, name)
        if visitor is not None:
            yield _line("visitors", visitor)
    subjects = subjects_of(person)
    if isinstance(store, SubscriptionStore):
        async for choice in all_pages(functools.partial(store.scan_subscriptions, workspace.id)):
            if choice.subject in subjects:
                yield _line("subscriptions", choice)
        for subject in subjects:
            read = functools.partial(store.history, workspace.id, subject)
            async for change in all_pages(read):
                yield _line("subscription-history", change)
    suppressed = addresses_of(workspace, person)
    if isinstance(store, SuppressionStore):
        async for one in all_pages(functools.partial(store.scan_suppressions, workspace.id)):
            if (one.channel, one.address) in suppressed:  # Also one that was lifted.
                yield _line("suppressions", one)
    async for letter in letters_of(store, person):
        yield _line("dead-letters", letter)
    async for record, _ in audit_of(known, person, suppressed):
        yield _with("audit", record.body)
    for record in await noted_requests(known, workspace.id, person.users):
        yield _with("erasure-requests", record.body)
    async for event in events_of(store, person):
        if person.owns(event.user_id, event.anonymous_id, event.received_at):
            yield _line("events", event)


def _line(kind: RecordKind, item: object) -> bytes:
    return _with(kind, render(kind, item).json)


def _with(kind: RecordKind | Literal["audit", "erasure-requests"], document: bytes) -> bytes:
    return as_line(orjson.dumps({"record": kind, **orjson.loads(document)}))
