# SPDX-License-Identifier: Apache-2.0
"""A person in a store: the ids and addresses, and all that the store has under them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Literal

import orjson

from engage.api import (
    ADDRESS_TRAITS,
    MAX_TIME,
    RECIPIENT_PREFIXES,
    DeadLetter,
    DeadLetterStore,
    EngageError,
    ErasureStore,
    Event,
    EventFilter,
    EventStore,
    ProfileStore,
    Record,
    RecordStore,
    SubscriptionStore,
    SuppressionStore,
    UserProfile,
    VisitorProfile,
    identifier_value,
    suppressed_address,
)
from engage.config import Workspace
from engage.erasure.requests import noted_requests
from engage.upkeep.audit import AUDIT, read_entry
from engage.upkeep.export import MAX_PAGE, Kind, all_pages, as_line, render

__all__ = [
    "Erasable",
    "Person",
    "addresses_of",
    "audit_of",
    "erasable",
    "events_of",
    "export_person",
    "letters_of",
    "own_ids",
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
    #: Anonymous ids, and the ids of the users: some clients send these as anonymous ids.
    visitors: Mapping[str, int]

    def owns(self, user_id: str | None, anonymous_id: str | None, received_at: int) -> bool:
        """Return whether something that was received for these ids belongs to the person."""
        if user_id is not None:
            return received_at < self.users.get(user_id, 0)
        return anonymous_id is not None and received_at < self.visitors.get(anonymous_id, 0)


async def visitors_of(store: Erasable, workspace_id: str, user_id: str) -> set[str]:
    """Return the anonymous ids that are a user's alone: its own id, those that were linked to it
    first, and the addresses under which webhooks wrote when no user had them."""
    found = {user_id}
    for name in await store.linked_to(workspace_id, user_id):
        links = await store.links_to(workspace_id, name)
        if links and links[0][0] == user_id and await store.profile(workspace_id, name) is None:
            found.add(name)
    profile = await store.profile(workspace_id, user_id)
    if profile is None:
        return found
    for prefix in RECIPIENT_PREFIXES:
        trait = prefix.removesuffix(":")
        value = identifier_value(trait, profile.traits.get(trait))
        if value is not None:
            others = (await store.find_users(workspace_id, trait, [value])).get(value, ())
            if set(others) <= {user_id}:
                found.add(prefix + value)
    return found


async def own_ids(store: Erasable, person: Person) -> list[str]:
    """Return the ids under which choices of the person are kept: an anonymous id that is also that
    of a user is not one of them."""
    visitors = [
        name
        for name in person.visitors
        if name in person.users or await store.profile(person.workspace_id, name) is None
    ]
    return [*dict.fromkeys((*person.users, *visitors))]


async def addresses_of(
    store: Erasable, workspace: Workspace | None, person: Person
) -> set[tuple[str, str]]:
    """Return what the profiles have as addresses: pairs of channel and address, in the form in
    which they are suppressed."""
    groups = () if workspace is None else workspace.subscription_groups
    channels = {**{one.channel: one.channel for one in groups}, **ADDRESS_TRAITS}
    found: set[tuple[str, str]] = set()
    profiles: list[UserProfile | VisitorProfile | None] = [
        await store.profile(person.workspace_id, name) for name in person.users
    ]
    profiles += [await store.visitor(person.workspace_id, name) for name in person.visitors]
    for profile in profiles:
        for channel, trait in channels.items():
            value = None if profile is None else profile.traits.get(trait)
            if isinstance(value, str) and (address := suppressed_address(channel, value)):
                found.add((channel, address))
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


async def letters_of(
    store: EventStore, person: Person, addresses: set[tuple[str, str]]
) -> AsyncIterator[DeadLetter]:
    """Yield the dead letters of the person: those with an id, and the deliveries that name no user
    and contain an e-mail address."""
    if not isinstance(store, DeadLetterStore):
        return
    needles = [address.encode() for _, address in addresses if "@" in address]
    received = max((*person.users.values(), *person.visitors.values()), default=0)
    read = functools.partial(store.scan_dead_letters, person.workspace_id)
    async for letter in all_pages(read):
        if person.owns(letter.user_id, letter.anonymous_id, letter.received_at) or (
            letter.user_id is None
            and letter.received_at < received
            and any(needle in letter.item.lower() for needle in needles)
        ):
            yield letter


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


async def export_person(
    store: EventStore, workspace: Workspace, user_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield everything that a store has about a user as JSON, with its kind in ``record``: the
    profile, the visitors, choices with their history, suppressions, dead letters, entries of the
    audit and events.

    :raises EngageError: if the storage cannot tell what belongs to a person.
    :raises StorageUnavailable: if the store cannot be read.
    """
    known = erasable(store)
    visitors = await visitors_of(known, workspace.id, user_id)
    person = Person(
        workspace_id=workspace.id,
        users={user_id: MAX_TIME},
        visitors=dict.fromkeys(sorted(visitors), MAX_TIME),
    )
    user = await known.profile(workspace.id, user_id)
    if user is not None:
        yield _line("users", user)
    for name in person.visitors:
        visitor = await known.visitor(workspace.id, name)
        if visitor is not None:
            yield _line("visitors", visitor)
    ids = await own_ids(known, person)
    if isinstance(store, SubscriptionStore):
        async for choice in all_pages(functools.partial(store.scan_subscriptions, workspace.id)):
            if choice.user_id in ids:
                yield _line("subscriptions", choice)
        for name in ids:
            read = functools.partial(store.history, workspace.id, name)
            async for change in all_pages(read):
                yield _line("subscription-history", change)
    addresses = await addresses_of(known, workspace, person)
    if isinstance(store, SuppressionStore):
        async for one in all_pages(functools.partial(store.scan_suppressions, workspace.id)):
            if (one.channel, one.address) in addresses:  # Also one that was lifted.
                yield _line("suppressions", one)
    async for letter in letters_of(store, person, addresses):
        yield _line("dead-letters", letter)
    async for record, _ in audit_of(known, person, addresses):
        yield _with("audit", record.body)
    for record in await noted_requests(known, workspace.id, person.users):
        yield _with("erasure-requests", record.body)
    async for event in events_of(store, person):
        yield _line("events", event)


def _line(kind: Kind, item: object) -> bytes:
    return _with(kind, render(kind, item).json)


def _with(kind: Kind | Literal["audit", "erasure-requests"], document: bytes) -> bytes:
    return as_line(orjson.dumps({"record": kind, **orjson.loads(document)}))
