# SPDX-License-Identifier: Apache-2.0
"""A person in a store: the ids and addresses, and all that the store has under them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Literal

import orjson

from engage.api import (
    ADDRESS_TRAITS,
    API_ORIGIN,
    CONFLICT,
    MAX_TIME,
    OPERATOR_ORIGIN,
    RECIPIENT_PREFIXES,
    DeadLetter,
    EngageError,
    Event,
    EventFilter,
    Kind,
    Membership,
    Record,
    Subject,
    Traits,
    UserProfile,
    VisitorProfile,
    changes_of,
    identifier_value,
    render_time,
)
from engage.audit import AUDIT, read_entry
from engage.config import Workspace
from engage.people.addresses import addresses_in
from engage.people.own_events import ADDRESSES, Own, found_address, own_events
from engage.people.requests import noted_requests
from engage.reading.export import RecordKind, as_line, render
from engage.reading.scans import MAX_PAGE, all_pages
from engage.store.facade import Storage
from engage.store.people import people

__all__ = [
    "OtherVisitor",
    "Person",
    "addresses_in_letter",
    "addresses_of",
    "audit_of",
    "events_of",
    "export_person",
    "letters_of",
    "other_addresses",
    "other_visitors",
    "person_of",
    "subjects_of",
    "visitors_of",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """The ids of one person, or of several, in a workspace.

    Each has the time before which something must have been received to belong to it: milliseconds
    since 1970 UTC.
    """

    workspace_id: str
    users: Mapping[str, int]
    #: Anonymous ids, and addresses.
    visitors: Mapping[str, int]

    @property
    def addresses(self) -> list[str]:
        """The addresses, which begin with :data:`RECIPIENT_PREFIXES`."""
        return [name for name in self.visitors if name.startswith(RECIPIENT_PREFIXES)]

    def owns(self, user_id: str | None, anonymous_id: str | None, received_at: int) -> bool:
        """Return whether something that was received for these ids belongs to the person."""
        if user_id is not None:
            return received_at < self.users.get(user_id, 0)
        return anonymous_id is not None and received_at < self.visitors.get(anonymous_id, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OtherVisitor:
    """A visitor that may be a user's, which only an operator can know."""

    anonymous_id: str
    #: When something of it was first and last received or changed: milliseconds since 1970 UTC.
    #: ``None``: no event and no profile of it is known.
    first: int | None
    last: int | None
    #: ``None``: they were not counted.
    events: int | None
    #: The names of its traits.
    traits: Sequence[str]
    #: Whether it is linked to the user, or only has the text of the user id.
    linked: bool
    #: Whether another user is linked to it, or was until an operator undid that.
    shared: bool

    @property
    def is_copy(self) -> bool:
        """Whether all that is known is a choice: that of a link of the user, which unsubscribes the
        visitor with the same id too."""
        return not self.linked and self.first is None and self.events == 0

    def described(self) -> str:
        """Return it in one line, with texts that clients sent."""
        seen = [render_time(at) for at in (self.first, self.last) if at is not None]
        facts = [
            " to ".join(seen),
            f"events: {'not counted' if self.events is None else self.events}",
            f"traits: {', '.join(self.traits) or '-'}",
            *(() if self.linked else ("not linked, but has the same id as the user",)),
            *(("also linked to another user",) if self.shared else ()),
        ]
        return f"{self.anonymous_id} ({'; '.join(filter(None, facts))})"

    def document(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "anonymousId": self.anonymous_id,
            "firstSeen": None if self.first is None else render_time(self.first),
            "lastSeen": None if self.last is None else render_time(self.last),
            "events": self.events,
            "traits": self.traits,
            "linked": self.linked,
            "otherUsers": self.shared,
        }


async def visitors_of(
    store: Storage, workspace: Workspace, user_id: str, own: Own | None = None
) -> set[str]:
    """Return the anonymous ids that surely are a user's: those that a server key or an operator
    linked to it, and to no other user before. What else links them may be anyone's claim.

    :param own: what :func:`own_events` returned, if it is known.
    """
    visitors, others = set[str](), dict[str, Mapping[str, tuple[int, str, str]]]()
    own = await own_events(store, workspace, user_id) if own is None else own
    for name, link in own.links.items():
        for other, _ in await store.links_to(workspace.id, name):
            if other not in others:
                others[other] = (await own_events(store, workspace, other)).links
            if others[other].get(name, link) < link:
                break
        else:
            visitors.add(name)
    return visitors


async def other_visitors(
    store: Storage,
    workspace: Workspace,
    person: Person,
    *,
    seconds: float | None = None,
    copies: bool = False,
) -> list[OtherVisitor]:
    """Return the visitors that are linked to the user of a person, or have the text of its id, and
    do not belong to the person.

    :param copies: whether to return one that :attr:`OtherVisitor.is_copy`, too.

    :param seconds: how long it may count events, which looks at all of them; ``None``: until it is
        done.
    """
    (user_id,) = person.users
    linked = set(await store.linked_to(workspace.id, user_id))
    names = {name for name in linked | {user_id} if not name.startswith(RECIPIENT_PREFIXES)}
    names -= person.visitors.keys()
    users = {name: {user for user, _ in await store.links_to(workspace.id, name)} for name in names}
    times: dict[str, list[int]] = {name: [] for name in names}
    counted, visitors = False, dict.fromkeys(names, MAX_TIME)
    try:
        async with asyncio.timeout(seconds):
            aliases = EventFilter(workspace_id=workspace.id, type="alias", origin=OPERATOR_ORIGIN)
            async for event in all_pages(functools.partial(store.scan, aliases)):
                name = event.document().get("previousId") if aliases.matches(event) else None
                if name in names and event.user_id is not None:
                    users[name].add(event.user_id)
            theirs = dataclasses.replace(person, users={}, visitors=visitors)
            async for event in events_of(store, theirs):
                if event.user_id is None and event.anonymous_id is not None:
                    times[event.anonymous_id].append(event.received_at)
        counted = True
    except TimeoutError:
        pass
    others = []
    for name in sorted(names):
        profile, received = await store.visitor(workspace.id, name), times[name]
        seen = [*received, *([] if profile is None else [profile.created_at, profile.updated_at])]
        chose = await store.state(workspace.id, Subject(Kind.VISITOR, name))
        if seen or chose or (name in linked and not counted):
            others.append(
                OtherVisitor(
                    anonymous_id=name,
                    first=min(seen, default=None),
                    last=max(seen, default=None),
                    events=len(received) if counted else None,
                    traits=() if profile is None else sorted(profile.traits),
                    linked=name in linked,
                    shared=bool(users[name] - {user_id}),
                )
            )
    return [visitor for visitor in others if copies or not visitor.is_copy]


def subjects_of(person: Person) -> list[Subject]:
    """Return the users and visitors of a person."""
    addresses = set(person.addresses)
    visitors = [name for name in person.visitors if name not in addresses]
    return [
        *(Subject(Kind.USER, name) for name in person.users),
        *(Subject(Kind.VISITOR, name) for name in visitors),
    ]


def addresses_of(workspace: Workspace, person: Person) -> set[tuple[str, str]]:
    """Return the addresses of a person: pairs of channel and address, in the form in which they are
    suppressed. Channels that only the workspace has are those of phone numbers."""
    groups = workspace.subscription_groups
    channels = {**{group.channel: "phone" for group in groups}, **ADDRESS_TRAITS}
    named = [name.partition(":") for name in person.addresses]
    return {
        (channel, address)
        for trait, _, address in named
        for channel, its_trait in channels.items()
        if trait == its_trait
    }


async def other_addresses(store: Storage, workspace: Workspace, person: Person) -> dict[str, bool]:
    """Return the addresses that the profiles of a person have beside those of the person, with
    whether other users have each."""
    addresses: dict[str, bool] = {}
    user, visitors = await _profiles(store, workspace, person)
    profiles = [user, *(visitors.get(name) for name in person.visitors)]
    for prefix in RECIPIENT_PREFIXES:
        trait = prefix.removesuffix(":")
        for profile in profiles:
            value = None if profile is None else identifier_value(trait, profile.traits.get(trait))
            if value is not None and prefix + value not in person.visitors:
                users = await store.find_users(person.workspace_id, trait, [value])
                addresses[value] = not person.users.keys() >= set(users.get(value, ()))
    return addresses


async def events_of(
    store: Storage, person: Person, *, since: int | None = None
) -> AsyncIterator[Event]:
    """Yield the events that have an id of the person, whenever they were received.

    :param since: only those received at this time or later.
    """
    ids = frozenset((*person.users, *person.visitors))
    criteria = EventFilter(workspace_id=person.workspace_id, ids=ids, since=since)
    # A database compares some thousands of ids well.
    asked = criteria if len(ids) <= MAX_PAGE else dataclasses.replace(criteria, ids=None)
    if len(person.users) == 1 and not person.visitors:  # It has an index.
        asked = dataclasses.replace(criteria, ids=None, user_id=next(iter(person.users)))
    async for event in all_pages(functools.partial(store.scan, asked)):
        if criteria.matches(event):
            yield event


async def letters_of(store: Storage, person: Person) -> AsyncIterator[DeadLetter]:
    """Yield the dead letters of the person: those with an id, and those that name no user and have
    an address of the person."""
    named = {name: person.visitors[name] for name in person.addresses}
    read = functools.partial(store.scan_dead_letters, person.workspace_id)
    async for letter in all_pages(read):
        if person.owns(letter.user_id, letter.anonymous_id, letter.received_at) or (
            named
            and any(letter.received_at < named.get(name, 0) for name in addresses_in_letter(letter))
        ):
            yield letter


def addresses_in_letter(letter: DeadLetter) -> Iterator[str]:
    """Yield the addresses in a dead letter that names no user: in a delivery, or in what applied to
    all items of a batch."""
    if letter.user_id is None and letter.origin != API_ORIGIN:
        yield from addresses_in(letter.item)
    elif letter.user_id is None and letter.anonymous_id is None:
        yield from addresses_in(letter.envelope or b"")


async def audit_of(
    store: Storage, person: Person, addresses: set[tuple[str, str]]
) -> AsyncIterator[tuple[Record, list[str]]]:
    """Yield the records of the audit that have an id or an address of the person, with the names of
    the details that have one."""
    ids: dict[str, Collection[str]] = {"user": person.users, "anonymousId": person.visitors}
    named_addresses = {address for _, address in addresses}
    async for record in all_pages(functools.partial(store.list_records, AUDIT)):
        details = read_entry(record).details
        named = [
            name
            for name, value in details.items()
            if isinstance(value, str) and value in ids.get(name, named_addresses)
        ]
        if named and details.get("workspace") == person.workspace_id:
            yield record, named


async def person_of(
    store: Storage,
    workspace: Workspace,
    user_id: str,
    addresses: Collection[str] = (),
    visitors: Collection[str] = (),
    *,
    linked: bool = False,
) -> Person:
    """Return a user with the visitors and addresses that surely are the user's, and those that an
    operator names.

    :param addresses: those of the person: see :func:`~engage.people.addresses.named_addresses`.
    :param visitors: anonymous ids that the operator knows to be the person's.
    :param linked: whether to take all linked visitors to which no other user was ever linked.
    :raises EngageError: if an anonymous id is an address.
    """
    for name in visitors:
        if name.startswith(RECIPIENT_PREFIXES):
            raise EngageError(f"{name!r} is no visitor but an address: name the address")
    own = await own_events(store, workspace, user_id)
    user = await store.profile(workspace.id, user_id)
    certain = dict(own.certain)
    if user is not None:
        # The events that made one certain, or that set a later value, may have expired.
        present = {trait: identifier_value(trait, user.traits.get(trait)) for trait in certain}
        certain = {trait: value for trait, value in certain.items() if present[trait] == value}
        certain |= user.certain
    sure = [f"{trait}:{certain[trait]}" for trait in sorted(ADDRESSES & certain.keys())]
    taken = {*await visitors_of(store, workspace, user_id, own), *sure, *addresses, *visitors}
    person = Person(
        workspace_id=workspace.id,
        users={user_id: MAX_TIME},
        visitors=dict.fromkeys(sorted(taken), MAX_TIME),
    )
    if not linked:
        return person
    others = await other_visitors(store, workspace, person)
    alone = [other.anonymous_id for other in others if other.linked and not other.shared]
    return dataclasses.replace(person, visitors=dict.fromkeys(sorted({*taken, *alone}), MAX_TIME))


@dataclasses.dataclass(slots=True)
class _LeftOut:
    """What deliveries that are left out of an export set of a user and its visitors."""

    #: Trait → the timestamps of the events.
    traits: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    groups: set[str] = dataclasses.field(default_factory=set)

    def without(self, traits: Mapping[str, Any], times: Mapping[str, int]) -> dict[str, Any]:
        """Return the traits that other events set."""
        return {
            name: value
            for name, value in traits.items()
            if name not in self.traits or times.get(name) not in self.traits[name]
        }


async def _left_out(store: Storage, person: Person) -> _LeftOut:
    left = _LeftOut()
    async for event in events_of(store, person):
        address = found_address(event.origin, event.body)
        if address is not None and address not in person.visitors:
            for change in changes_of(event):
                if isinstance(change, Traits):
                    for name in change.traits:
                        left.traits.setdefault(name, set()).add(event.timestamp)
                elif isinstance(change, Membership):
                    left.groups.add(change.group_id)
    return left


async def _profiles(
    store: Storage, workspace: Workspace, person: Person, left: _LeftOut | None = None
) -> tuple[UserProfile | None, Mapping[str, VisitorProfile]]:
    """Return the user of a person without what it has of visitors that are not the person's, and
    the visitors of both.

    :param left: what is left out, too.
    """
    left = _LeftOut() if left is None else left
    (user_id,) = person.users
    users, visitors = await store.read(people, workspace.id, [user_id], [*person.visitors])
    user = users.get(user_id)
    if user is None:
        return None, visitors
    belonging = [visitor for visitor in visitors.values() if visitor.user_id == user_id]
    others = [visitor for visitor in belonging if visitor.anonymous_id not in person.visitors]
    if not others and not left.traits and not left.groups:
        return user, visitors
    own = await own_events(store, workspace, user_id, person.addresses)
    traits = left.without(user.traits, user.trait_times)
    groups = set(user.groups) - left.groups
    for other in others:
        groups.difference_update(other.groups)
        for name in other.traits:
            if name in traits and user.trait_times.get(name) == other.trait_times.get(name):
                del traits[name]
    kept = [user.trait_times.get(name, 0) for name in traits]
    theirs = [visitor.updated_at for visitor in belonging if visitor not in others]
    changed = dataclasses.replace(
        user,
        traits={**own.traits, **traits},
        groups=sorted(groups.union(own.groups)),
        updated_at=max(user.created_at, own.updated_at, *kept, *theirs),
    )
    return changed, visitors


async def export_person(
    store: Storage,
    workspace: Workspace,
    user_id: str,
    addresses: Collection[str] = (),
    visitors: Collection[str] = (),
    *,
    left_out: Counter[str] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield everything that a store has about a user as JSON, with its kind in ``record``: the
    profile, the visitors, choices with their history, suppressions, dead letters, entries of the
    audit and events.

    :param addresses: as :func:`person_of`.
    :param visitors: as :func:`person_of`.
    :param left_out: gets the number of deliveries that are left out, by the address with which
        engage found whose they are: anyone can claim an address.
    :raises StorageUnavailable: if the store cannot be read.
    """
    left_out = Counter() if left_out is None else left_out
    person = await person_of(store, workspace, user_id, addresses, visitors)

    def is_left_out(origin: str, body: bytes) -> bool:
        address = found_address(origin, body)
        if address is None or address in person.visitors:
            return False
        left_out[address] += 1
        return True

    left = await _left_out(store, person)
    user, profiles = await _profiles(store, workspace, person, left)
    if user is not None:
        yield _line("users", user)
    for name in person.visitors:
        if (visitor := profiles.get(name)) is not None:
            traits = left.without(visitor.traits, visitor.trait_times)
            groups = sorted({*visitor.groups} - left.groups)
            yield _line("visitors", dataclasses.replace(visitor, traits=traits, groups=groups))
    subjects = subjects_of(person)
    async for choice in all_pages(functools.partial(store.scan_subscriptions, workspace.id)):
        if choice.subject in subjects:
            yield _line("subscriptions", choice)
    for subject in subjects:
        read = functools.partial(store.history, workspace.id, subject)
        async for change in all_pages(read):
            yield _line("subscription-history", change)
    suppressed = addresses_of(workspace, person)
    async for row in all_pages(functools.partial(store.scan_suppressions, workspace.id)):
        if (row.channel, row.address) in suppressed:  # Also one that was lifted.
            yield _line("suppressions", row)
    async for letter in letters_of(store, person):
        if letter.reason != CONFLICT or not is_left_out(letter.origin, letter.item):
            yield _line("dead-letters", letter)
    async for record, _ in audit_of(store, person, suppressed):
        yield _with("audit", record.body)
    for record in await noted_requests(store, workspace.id, person.users):
        yield _with("erasure-requests", record.body)
    async for event in events_of(store, person):
        owned = person.owns(event.user_id, event.anonymous_id, event.received_at)
        if owned and not is_left_out(event.origin, event.body):
            yield _line("events", event)


def _line(kind: RecordKind, item: object) -> bytes:
    return _with(kind, render(kind, item).json)


def _with(kind: RecordKind | Literal["audit", "erasure-requests"], document: bytes) -> bytes:
    return as_line(orjson.dumps({"record": kind, **orjson.loads(document)}))
