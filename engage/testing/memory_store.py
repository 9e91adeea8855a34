# SPDX-License-Identifier: Apache-2.0
"""A storage in memory, for tests of plugins and of one's own code.

:class:`MemoryStore` keeps all promises of the conformance suite that do not need a disk: another
process does not see what it stores, and the end of the process loses it. It never forgets the id of
a change of subscriptions, and reads a page by looking at everything: it is for some thousands of
events. A test that needs one method to behave differently makes a subclass. Each interface is a
class of its own, so that a test can also have a storage without profiles or without dead letters.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from engage import api
from engage.api import Kind

__all__ = ["MemoryStore", "stored"]

Key = TypeVar("Key")
Item = TypeVar("Item")


class Arrivals(dict[Key, Item]):
    """Items in the order in which their keys arrived. A page's cursor is the number of an arrival,
    so neither new items nor deleted ones move the next page."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Key, int] = {}
        self._last = 0

    def __setitem__(self, key: Key, item: Item) -> None:
        if key not in self:
            self._last += 1
            self._numbers[key] = self._last
        super().__setitem__(key, item)

    def page(
        self, wanted: Callable[[Item], bool], cursor: str | None, limit: int, *, back: bool = False
    ) -> api.Page[Item]:
        """Return the wanted items after a cursor; with ``back`` those before it, newest first."""
        keys: Iterable[Key] = reversed(self) if back else self
        end = None if cursor is None else int(cursor)
        found = [
            key
            for key in keys
            if (end is None or (self._numbers[key] < end if back else self._numbers[key] > end))
            and wanted(self[key])
        ]
        more = str(self._numbers[found[limit - 1]]) if len(found) > limit else None
        return api.Page([self[key] for key in found[:limit]], more)


@dataclasses.dataclass
class Profile:
    """A user, a visitor or a group: registers, each with the version of its value."""

    workspace_id: str
    kind: Kind
    id: str
    #: Least and greatest timestamp of the events that made it exist; ``None`` without one.
    times: tuple[int, int] | None = None
    #: The same of the subscription changes.
    chosen: tuple[int, int] | None = None
    #: When the last event that changed it was received.
    changed_at: int = 0
    traits: dict[str, tuple[api.Version, Any]] = dataclasses.field(default_factory=dict)
    #: Trait → its size, unless it is removed or does not count.
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Of a user: anonymous id → the first link.
    links: dict[str, api.Version] = dataclasses.field(default_factory=dict)
    #: Anonymous id → whether an operator lets the link count.
    decisions: dict[str, tuple[api.Version, bool]] = dataclasses.field(default_factory=dict)
    groups: dict[str, tuple[api.Version, bool]] = dataclasses.field(default_factory=dict)
    #: Trait → value → when it was claimed: the first 100, and that of a later current value.
    claims: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    late: dict[str, str] = dataclasses.field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Return the traits that are not removed."""
        return {name: value for name, (_, value) in self.traits.items() if value is not api.REMOVED}

    def links_that_count(self) -> dict[str, api.Version]:
        """Return the links of a user without those that an operator undid."""
        undone = {name for name, (_, counts) in self.decisions.items() if not counts}
        return {name: first for name, first in self.links.items() if name not in undone}

    def registers(self) -> api.Registers:
        """Return what is stored; the times are those of an existing profile."""
        times = [at for span in (self.times, self.chosen) if span is not None for at in span]
        return api.Registers(
            id=self.id,
            created_at=min(times),
            updated_at=max(times),
            traits=dict(sorted(self.traits.items())),
            groups=self.groups,
        )

    def claim(self, trait: str, form: str, at: int) -> None:
        """Remember when a value was claimed."""
        claims = self.claims.setdefault(trait, {})
        current = api.identifier_value(trait, self.values().get(trait)) == form
        if current and self.late.get(trait, form) != form:
            del claims[self.late.pop(trait)]
        if form not in claims and len(claims) >= api.MAX_CLAIMS:
            if not current:
                return
            self.late[trait] = form
        claims[form] = min(at, claims.get(form, at))


class Stored:
    """Everything that the stores of one name share."""

    def __init__(self, *, exists: bool = False) -> None:
        #: Whether a store was created.
        self.exists = exists
        #: While it is false, every method raises :class:`~engage.api.StorageUnavailable`.
        self.available = True
        #: By identity.
        self.events = Arrivals[tuple[str, str, str], api.Event]()
        #: By workspace, kind and id.
        self.profiles = Arrivals[tuple[str, Kind, str], Profile]()
        #: Workspace and id of the changes of subscriptions that were applied.
        self.applied: set[tuple[str, str]] = set()
        #: By workspace, user and group.
        self.choices = Arrivals[tuple[str, str, str], api.SubscriptionState]()
        #: By workspace, change and group.
        self.history = Arrivals[tuple[str, str, str], api.SubscriptionRecord]()
        #: By workspace and id.
        self.letters = Arrivals[tuple[str, str], api.DeadLetter]()
        #: By kind, workspace and id.
        self.records: dict[tuple[str, str, str], api.Record] = {}
        #: Kind → how often its records were changed.
        self.versions = collections.Counter[str]()
        #: By the counter with the value 0.
        self.counts = Arrivals[api.Count, api.Count]()

    def profile(self, workspace_id: str, kind: Kind, name: str) -> Profile:
        """Return a user, visitor or group, which is made if there is none."""
        key = (workspace_id, kind, name)
        if key not in self.profiles:
            self.profiles[key] = Profile(*key)
        return self.profiles[key]


_STORED: dict[str, Stored] = {}


def stored(name: str) -> Stored:
    """Return what the stores of a name share; the first call makes it."""
    return _STORED.setdefault(name, Stored())


class Memory:
    """Opens and closes.

    :param options: ``name``: which stores share what they keep. Without it, the store is the only
        one of its kind, and it is open from the beginning.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, context: api.StorageContext | None = None
    ) -> None:
        name = (options or {}).get("name")
        self.context = context or api.StorageContext(base_dir=Path(), identifiers={})
        self.stored = Stored(exists=True) if name is None else stored(name)
        self.is_open = name is None

    async def open(self, *, create: bool) -> None:
        if not self.stored.available:
            raise api.StorageUnavailable("the store in memory is not available")
        if not self.stored.exists and not create:
            raise api.StorageMissing("there is no store in memory of this name")
        self.stored.exists = self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def check(self) -> None:
        self.contents()

    def contents(self) -> Stored:
        """Return what is stored.

        :raises StorageUnavailable: if the store is closed or not available.
        """
        if not self.is_open:
            raise api.StorageUnavailable("the store in memory is closed")
        if not self.stored.available:
            raise api.StorageUnavailable("the store in memory is not available")
        return self.stored

    def apply_changes(self, event: api.Event) -> None:
        """Apply the changes of a newly stored event; a store without profiles ignores them."""

    def ids_of_person(self, workspace_id: str, name: str) -> list[str]:
        """Return the ids of the user that an id belongs to and of its visitors, or just the id."""
        return [name]


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
        return _delete(events, [key for at, key in times if at < before][:limit])


class MemoryProfiles(Memory, api.ProfileStore):
    """Users, visitors and groups, merged from the stored events."""

    def apply_changes(self, event: api.Event) -> None:
        for change in api.changes_of(event):
            match change:
                case api.Link(user_id=user) | api.LinkDecision(user_id=user):
                    self._link(
                        self.stored.profile(event.workspace_id, Kind.USER, user), change, event
                    )
                case _:
                    key = (event.workspace_id, change.kind, change.id)
                    if change.kind is Kind.VISITOR and key not in self.stored.profiles:
                        known = sum(one[:2] == key[:2] for one in self.stored.profiles)
                        if known >= self.context.profile_limits.visitors:
                            # Once for each event; its group exists nevertheless.
                            self.dropped_changes += isinstance(change, api.Seen)
                            continue
                    self._apply(self.stored.profile(*key), change, event)

    def _link(self, user: Profile, change: api.Link | api.LinkDecision, event: api.Event) -> None:
        name = change.anonymous_id
        if isinstance(change, api.LinkDecision):
            version = _version(event)
            if name not in user.decisions or user.decisions[name][0] < version:
                user.decisions[name] = (version, change.counts)
        elif name not in user.links and len(user.links) >= self.context.profile_limits.links:
            self.dropped_changes += 1
        else:
            first = (event.received_at, event.message_id, event.origin)
            user.links[name] = min(first, user.links.get(name, first))

    def _apply(self, profile: Profile, change: api.Change, event: api.Event) -> None:
        *_, memberships = self.context.profile_limits.of(profile.kind)
        profile.changed_at = max(profile.changed_at, event.received_at)
        match change:
            case api.Seen():
                profile.times = _extended(profile.times, event.timestamp)
            case api.Traits(_, _, traits):
                for name, value in traits.items():
                    self._set_trait(profile, name, value, _version(event))
                    form = api.identifier_value(name, value)
                    if form is not None and self._is_declared(profile, name):
                        profile.claim(name, form, event.received_at)
            case api.RemovedTraits(_, _, names):
                for name in names:
                    self._set_trait(profile, name, api.REMOVED, _version(event))
            case api.Membership(_, _, group, assigned):
                if group not in profile.groups and len(profile.groups) >= memberships:
                    self.dropped_changes += 1
                elif group not in profile.groups or profile.groups[group][0] <= _version(event):
                    profile.groups[group] = (_version(event), assigned)

    def _identifiers(self, workspace_id: str) -> Collection[str]:
        return self.context.identifiers.get(workspace_id, ())

    def _is_declared(self, profile: Profile, trait: str) -> bool:
        return profile.kind is not Kind.GROUP and trait in self._identifiers(profile.workspace_id)

    def _set_trait(self, profile: Profile, name: str, value: Any, version: api.Version) -> None:
        if name in profile.traits and profile.traits[name][0] > version:
            return
        limits, before = self.context.profile_limits, profile.sizes.get(name, 0)
        traits, trait_bytes, _ = limits.of(profile.kind)
        declared = self._identifiers(profile.workspace_id) if profile.kind is not Kind.GROUP else ()
        size = 0 if value is api.REMOVED else limits.size(name, value, declared)
        total = sum(profile.sizes.values()) - before + size
        if (size and not before and len(profile.sizes) >= traits) or (
            size > before and total > trait_bytes
        ):
            self.dropped_changes += 1
            return
        profile.traits[name] = (version, value)
        profile.sizes.pop(name, None)
        if size:
            profile.sizes[name] = size

    # ------------------------------------------------------------------------------- people
    def _user(self, workspace_id: str, name: str) -> Profile | None:
        """Return a user that exists: a choice makes it exist only if the id has no visitor."""
        found = self.contents().profiles.get((workspace_id, Kind.USER, name))
        if found is None or (found.times is None and found.chosen is None):
            return None
        if found.times is None and self._visitor(workspace_id, name) is not None:
            return None
        return found

    def _visitor(self, workspace_id: str, name: str) -> Profile | None:
        return self.contents().profiles.get((workspace_id, Kind.VISITOR, name))

    def _owner(self, workspace_id: str, anonymous_id: str) -> Profile | None:
        """Return the user that a visitor belongs to, if that user exists."""
        if self._user(workspace_id, anonymous_id) is not None:
            return None
        firsts = [
            (links[anonymous_id], user.id)
            for user in self._of_kind(workspace_id, Kind.USER)
            if anonymous_id in (links := user.links_that_count())
        ]
        return self._user(workspace_id, min(firsts)[1]) if firsts else None

    def _visitors(self, user: Profile) -> list[Profile]:
        """Return the visitors that belong to a user, in the order of their links."""
        links = user.links_that_count()
        found = []
        for name in sorted(links, key=links.__getitem__):
            visitor = self._visitor(user.workspace_id, name)
            if visitor is not None and self._owner(user.workspace_id, name) is user:
                found.append(visitor)
        return found

    def _of_kind(self, workspace_id: str | None, kind: Kind) -> list[Profile]:
        wanted = _of(workspace_id)
        known = self.contents().profiles.values()
        return [one for one in known if one.kind is kind and wanted(one)]

    def _merged(self, user: Profile) -> api.UserProfile:
        return api.merge(
            user.workspace_id,
            user.registers(),
            [
                name
                for name in user.links_that_count()
                if self._user(user.workspace_id, name) is None
            ],
            [one.registers() for one in self._visitors(user)],
            self.context.profile_limits,
            self._identifiers(user.workspace_id),
        )

    def _visitor_profile(self, visitor: Profile) -> api.VisitorProfile:
        owner = self._owner(visitor.workspace_id, visitor.id)
        return api.visitor_of(
            visitor.workspace_id, visitor.registers(), None if owner is None else owner.id
        )

    async def profile(self, workspace_id: str, user_id: str) -> api.UserProfile | None:
        found = self._user(workspace_id, user_id)
        return None if found is None else self._merged(found)

    async def visitor(self, workspace_id: str, anonymous_id: str) -> api.VisitorProfile | None:
        found = self._visitor(workspace_id, anonymous_id)
        return None if found is None else self._visitor_profile(found)

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        claims: dict[str, list[tuple[int, str]]] = {}
        for user in self._of_kind(workspace_id, Kind.USER):
            if self._user(workspace_id, user.id) is not None and self._is_declared(user, trait):
                visitors = self._visitors(user)
                value = api.winner(
                    trait,
                    user.registers(),
                    [one.registers() for one in visitors],
                    self.context.profile_limits,
                )
                form = api.identifier_value(trait, value)
                everyone = [_claim(one, trait, form) for one in (user, *visitors)]
                if form is not None and form in values:
                    at = min(at for at in everyone if at is not None)
                    claims.setdefault(form, []).append((at, user.id))
        return _oldest(claims)

    async def find_visitors(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        claims: dict[str, list[tuple[int, str]]] = {}
        for visitor in self._of_kind(workspace_id, Kind.VISITOR):
            if self._owner(workspace_id, visitor.id) is None:
                for value in values:
                    at = _claim(visitor, trait, value)
                    if at is not None and self._is_declared(visitor, trait):
                        claims.setdefault(value, []).append((at, visitor.id))
        return _oldest(claims)

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> api.Page[str]:
        found = {
            one.id: one.id
            for kind in (Kind.USER, Kind.VISITOR)
            for one in self._of_kind(workspace_id, kind)
            if self._is_declared(one, trait) and _claim(one, trait, value) is not None
        }
        return _page_by_key(found, after, limit)

    async def users_beginning(
        self, workspace_id: str, text: str, *, trait: str | None = None, limit: int
    ) -> Sequence[str]:
        found = []
        for user in self._of_kind(workspace_id, Kind.USER):
            value = user.id if trait is None else user.values().get(trait)
            form = value if trait is None else api.identifier_value(trait, value)
            if form is not None and form.startswith(text):
                found.append(user.id)
        return found[:limit]

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.UserProfile]:
        wanted = _of(workspace_id)
        page = self.contents().profiles.page(
            lambda one: (
                one.kind is Kind.USER
                and wanted(one)
                and self._user(one.workspace_id, one.id) is not None
            ),
            after,
            limit,
        )
        return api.Page([self._merged(one) for one in page.items], page.cursor)

    async def scan_visitors(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.VisitorProfile]:
        page = self._page(Kind.VISITOR, workspace_id, after, limit)
        return api.Page([self._visitor_profile(one) for one in page.items], page.cursor)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.GroupProfile]:
        page = self._page(Kind.GROUP, workspace_id, after, limit)
        found = [
            api.GroupProfile(workspace_id=one.workspace_id, group_id=one.id, traits=one.values())
            for one in page.items
        ]
        return api.Page(found, page.cursor)

    def _page(
        self, kind: Kind, workspace_id: str | None, after: str | None, limit: int
    ) -> api.Page[Profile]:
        wanted = _of(workspace_id)
        return self.contents().profiles.page(
            lambda one: one.kind is kind and wanted(one), after, limit
        )

    async def expire_visitors(self, before: int, *, limit: int) -> int:
        old = [
            (one.workspace_id, one.kind, one.id)
            for one in self._of_kind(None, Kind.VISITOR)
            if one.changed_at < before and self._owner(one.workspace_id, one.id) is None
        ]
        return _delete(self.contents().profiles, old[:limit])

    def ids_of_person(self, workspace_id: str, name: str) -> list[str]:
        user = self._user(workspace_id, name) or self._owner(workspace_id, name)
        return [name] if user is None else [user.id, *(one.id for one in self._visitors(user))]


class MemorySubscriptions(Memory, api.SubscriptionStore):
    """Subscription choices and their history."""

    async def apply(self, change: api.SubscriptionChange) -> Mapping[str, bool]:
        data, subject = self.contents(), (change.workspace_id, change.user_id)
        if (change.workspace_id, change.id) not in data.applied:
            data.applied.add((change.workspace_id, change.id))
            user = data.profile(change.workspace_id, Kind.USER, change.user_id)
            user.chosen = _extended(user.chosen, change.at)
            before = await self.state(*subject)
            common = {"workspace_id": change.workspace_id, "user_id": change.user_id}
            for group, after in change.choices.items():
                if before.get(group) is not after:
                    data.history[change.workspace_id, change.id, group] = api.SubscriptionRecord(
                        **common,
                        group_id=group,
                        change_id=change.id,
                        before=before.get(group),
                        after=after,
                        at=change.at,
                        how=change.how,
                    )
                known = data.choices.get((*subject, group))
                data.choices[*subject, group] = api.SubscriptionState(
                    **common,
                    group_id=group,
                    subscribed=after,
                    updated_at=change.at if known is None else max(change.at, known.updated_at + 1),
                    change_id=change.id,
                )
        return await self.state(*subject)

    async def state(self, workspace_id: str, user_id: str) -> Mapping[str, bool]:
        ids = self.ids_of_person(workspace_id, user_id)
        choices = [
            one
            for (workspace, name, _), one in self.contents().choices.items()
            if workspace == workspace_id and name in ids
        ]
        # The latest choice of the person for each group.
        choices.sort(key=lambda one: (one.updated_at, one.change_id))
        return {one.group_id: one.subscribed for one in choices}

    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.SubscriptionState]:
        return self.contents().choices.page(_of(workspace_id), after, limit)

    async def history(
        self, workspace_id: str | None, user_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.SubscriptionRecord]:
        wanted = _of(workspace_id)
        return self.contents().history.page(
            lambda one: wanted(one) and user_id in (None, one.user_id), after, limit
        )


class MemoryDeadLetters(Memory, api.DeadLetterStore):
    """Dead letters, within their budgets."""

    async def put(self, letters: Sequence[api.DeadLetter]) -> int:
        return sum(not kept for kept in await self.keep(letters))

    async def keep(self, letters: Sequence[api.DeadLetter]) -> Sequence[bool]:
        known = self.contents().letters
        used = {
            (use.workspace_id, use.budget): (use.count, use.size) for use in await self.budget_use()
        }
        kept = []
        for letter in letters:
            key, budget = (letter.workspace_id, letter.id), (letter.workspace_id, letter.budget)
            count, size = used.get(budget, (0, 0))
            most, most_bytes = self.context.dead_letter_budget.of(letter.budget)
            if key not in known and count < most and size + _size(letter) <= most_bytes:
                known[key] = letter
                used[budget] = (count + 1, size + _size(letter))
            kept.append(key in known)
        return kept

    async def budget_use(self) -> Sequence[api.BudgetUse]:
        sizes: dict[tuple[str, api.BudgetName], list[int]] = {}
        for one in self.contents().letters.values():
            sizes.setdefault((one.workspace_id, one.budget), []).append(_size(one))
        return [
            api.BudgetUse(workspace_id=workspace, budget=budget, count=len(found), size=sum(found))
            for (workspace, budget), found in sizes.items()
        ]

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.DeadLetter]:
        return self.contents().letters.page(_of(workspace_id), after, limit)

    async def recent_dead_letters(
        self, workspace_id: str | None, *, before: str | None = None, limit: int
    ) -> api.Page[api.DeadLetter]:
        return self.contents().letters.page(_of(workspace_id), before, limit, back=True)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        return _delete(self.contents().letters, [(workspace_id, one) for one in ids])

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        letters = self.contents().letters
        old = [key for key, letter in letters.items() if letter.received_at < before]
        return _delete(letters, old[:limit])


class MemoryRecords(Memory, api.RecordStore):
    """Records."""

    async def put_record(
        self, record: api.Record, *, expected_version: int | None = None
    ) -> int | None:
        record.check()
        data, key = self.contents(), (record.kind, record.workspace_id, record.id)
        version = data.records[key].version if key in data.records else 0
        if expected_version not in (None, version):
            return None
        data.records[key] = dataclasses.replace(record, version=version + 1)
        data.versions[record.kind] += 1
        return version + 1

    async def get_record(self, kind: str, workspace_id: str, record_id: str) -> api.Record | None:
        return self.contents().records.get((kind, workspace_id, record_id))

    async def list_records(
        self,
        kind: str | None,
        workspace_id: str | None = None,
        *,
        after: str | None = None,
        limit: int,
        reverse: bool = False,
    ) -> api.Page[api.Record]:
        wanted = {
            key: record
            for key, record in self.contents().records.items()
            if kind in (None, key[0]) and workspace_id in (None, key[1])
        }
        return _page_by_key(wanted, after, limit, reverse=reverse)

    async def records_version(self, kind: str) -> int:
        return self.contents().versions[kind]

    async def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        deleted = _delete(self.contents().records, [(kind, workspace_id, record_id)])
        self.stored.versions[kind] += deleted
        return bool(deleted)

    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        records = self.contents().records
        old = [key for key, one in records.items() if key[0] == kind and one.at < before]
        deleted = _delete(records, old[:limit])
        self.stored.versions[kind] += deleted
        return deleted


class MemoryCounts(Memory, api.CountStore):
    """Counters."""

    async def put_counts(self, counts: Sequence[api.Count]) -> None:
        known = self.contents().counts
        for one in counts:
            key = dataclasses.replace(one, value=0)
            if key not in known or known[key].value < one.value:
                known[key] = one

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
    ) -> api.Page[api.CountSum]:
        groups: dict[Any, list[int]] = collections.defaultdict(list)
        for one in self.contents().counts.values():
            wanted = workspace_id in (None, one.workspace_id) and one.step == step
            if wanted and since <= one.at < until and (names is None or one.name in names):
                groups[one.at, one.name, one.workspace_id, one.labels].append(one.value)
        sums = {
            key: api.CountSum(
                **dict(zip(("at", "name", "workspace_id", "labels"), key, strict=True)),
                total=sum(values),
                greatest=max(values),
                processes=len(values),
            )
            for key, values in groups.items()
        }
        return _page_by_key(sums, after, limit)

    async def scan_counts(self, *, after: str | None, limit: int) -> api.Page[api.Count]:
        return self.contents().counts.page(lambda _: True, after, limit)

    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        counts = self.contents().counts
        old = [key for key in counts if key.step == step and key.at < before]
        return _delete(counts, old[:limit])


class MemoryStore(
    MemoryEvents,
    MemoryProfiles,
    MemorySubscriptions,
    MemoryDeadLetters,
    MemoryRecords,
    MemoryCounts,
):
    """A storage in memory with all interfaces."""


@api.hookimpl
def engage_register_storage(register: api.Register[api.StorageFactory]) -> None:
    """Register the storage ``memory``, for a conformance suite; no entry point names this."""
    register("memory", MemoryStore, {"type": "object", "required": ["name"]})


def _version(event: api.Event) -> api.Version:
    return (event.timestamp, event.message_id, event.origin)


def _extended(times: tuple[int, int] | None, at: int) -> tuple[int, int]:
    return (at, at) if times is None else (min(at, times[0]), max(at, times[1]))


def _claim(profile: Profile, trait: str, form: str | None) -> int | None:
    """Return when a profile claimed a value, if it has it now."""
    if form is None or api.identifier_value(trait, profile.values().get(trait)) != form:
        return None
    return profile.claims.get(trait, {}).get(form, 0)


def _oldest(claims: Mapping[str, list[tuple[int, str]]]) -> Mapping[str, Sequence[str]]:
    """Return the ids of each value, oldest claim first."""
    return {
        form: [name for _, name in sorted(found)[: api.MAX_USERS]] for form, found in claims.items()
    }


def _size(letter: api.DeadLetter) -> int:
    described = orjson.dumps([*letter.errors, *letter.headers])
    return len(letter.item) + len(described) + len(letter.envelope or b"")


def _of(workspace_id: str | None) -> Callable[[Any], bool]:
    return lambda one: workspace_id in (None, one.workspace_id)


def _delete(items: dict[Key, Any], keys: Iterable[Key]) -> int:
    return sum(items.pop(key, None) is not None for key in keys)


def _page_by_key(
    items: Mapping[Any, Item], after: str | None, limit: int, *, reverse: bool = False
) -> api.Page[Item]:
    """Return a page in the order of the keys; the cursor is the last key."""
    last = None if after is None else ast.literal_eval(after)
    keys = [
        key
        for key in sorted(items, reverse=reverse)
        if last is None or (key < last if reverse else key > last)
    ]
    more = repr(keys[limit - 1]) if len(keys) > limit else None
    return api.Page([items[key] for key in keys[:limit]], more)
