# SPDX-License-Identifier: Apache-2.0
"""What events change in users, visitors and groups.

The changes of a write are folded in memory (:func:`fold`), compared with what is stored in one
look-up for each table, and written with one step for each (:func:`apply`). Everything is a
register: the greatest version of a trait or a membership stays, the least one of a link. So the
result does not depend on the order in which events arrive, except for limits.
"""

from __future__ import annotations

import collections
import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, Final

import orjson

from engage import api
from engage.api import (
    MAX_CLAIMS,
    TRUSTED,
    Change,
    Event,
    Kind,
    Link,
    LinkDecision,
    Membership,
    ProfileLimits,
    RemovedTraits,
    Seen,
    StorageContext,
    Version,
    identifier_value,
)
from engage.store.profiles import (
    CLAIMS,
    GROUP,
    IDENTIFIERS,
    KIND_OF,
    KINDS,
    KNOWN_LINKS,
    LINKS,
    MEMBERSHIPS,
    PROFILES,
    REMOVED,
    SEARCHED,
    TRAITS,
    USER,
    VISITOR,
    VISITOR_TOTALS,
    LinkRow,
    Person,
    Profile,
    delete_profiles,
    may_expire,
)
from engage.store.tables import (
    Context,
    Delete,
    Get,
    Key,
    Pages,
    Put,
    Recall,
    Remember,
    Row,
    Steps,
    Table,
    Under,
)

#: A trait of a profile: (workspace, kind, name, trait).
_Trait = tuple[str, int, str, str]
#: A user, and an anonymous id.
Pair = tuple[Person, str]
#: Visitors that are examined at once so that some give way to new ones, and how often that is done
#: at most for a write: for those without an identifier, and then for those with one.
_EXAMINED: Final = 1000
_SEARCHES: Final = 3


# Not frozen: the ``__init__`` of a frozen class takes longer, and each identify event has one.
@dataclasses.dataclass(slots=True)
class Traits:
    """:class:`engage.api.Traits` or :class:`RemovedTraits`.

    Each value is compact JSON, or ``None`` if the trait is removed.
    """

    kind: Kind
    id: str
    traits: Mapping[str, bytes | None]


EncodedChange = Seen | Traits | Membership | Link | LinkDecision


def encode(change: Change) -> EncodedChange:
    """Return a change with the values of its traits in the form in which they are stored."""
    if isinstance(change, api.Traits):
        values = {trait: orjson.dumps(value) for trait, value in change.traits.items()}
        return Traits(change.kind, change.id, values)
    if isinstance(change, RemovedTraits):
        return Traits(change.kind, change.id, dict.fromkeys(change.names))
    return change


@dataclasses.dataclass(slots=True)
class FoldedChanges:
    """The changes of one write: one entry per profile, trait, membership and link."""

    #: First and last timestamp.
    seen: dict[Person, tuple[int, int]] = dataclasses.field(default_factory=dict)
    #: Visitor → when the last event was received.
    visited: dict[Person, int] = dataclasses.field(default_factory=dict)
    #: By the names of traits. The value is ``None`` if the trait is removed.
    traits: dict[Person, dict[str, tuple[Version, bytes | None]]] = dataclasses.field(
        default_factory=dict
    )
    #: Of the declared identifier traits: value → least time of receipt, in order of arrival. Each
    #: value is in the form in which users are looked up.
    claims: dict[_Trait, dict[str, int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(dict)
    )
    #: The form of the greatest value in ``traits``, or ``None`` if no user can be looked up by it.
    forms: dict[_Trait, str | None] = dataclasses.field(default_factory=dict)
    #: By the ids of groups.
    memberships: dict[Person, dict[str, tuple[Version, bool]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(dict)
    )
    #: The first of the events that made the link: received at, message id, origin.
    links: dict[Pair, Version] = dataclasses.field(default_factory=dict)
    #: An operator's: whether the link does not count.
    decisions: dict[Pair, tuple[Version, bool]] = dataclasses.field(default_factory=dict)


def fold(
    changes: Iterable[tuple[Event, Sequence[EncodedChange]]],
    known_links: Mapping[Pair, int],
    identifiers: Mapping[str, Collection[str]],
    before: FoldedChanges | None = None,
) -> FoldedChanges:
    """Return the changes of a write, folded.

    :param changes: events with their changes, in order of arrival.
    :param known_links: links that are stored, and when the first event was received; later links
        are left out.
    :param identifiers: workspace id → the traits by which its users are looked up.
    :param before: what they are added to.
    """
    folded = FoldedChanges() if before is None else before
    for event, event_changes in changes:
        workspace, at = event.workspace_id, event.timestamp
        version = (at, event.message_id, event.origin)
        for change in event_changes:
            match change:
                case Seen(kind, name):
                    subject = (workspace, KINDS[kind], name)
                    _extend(folded.seen, subject, at)
                    if subject[1] == VISITOR:
                        last = folded.visited.get(subject, event.received_at)
                        folded.visited[subject] = max(last, event.received_at)
                case Traits(kind, name, traits):
                    subject = (workspace, KINDS[kind], name)
                    if registers := folded.traits.get(subject):
                        for trait, value in traits.items():
                            _keep_greatest(registers, trait, version, value)
                    else:
                        new = {trait: (version, value) for trait, value in traits.items()}
                        folded.traits[subject] = new
                    if subject[1] != GROUP:
                        for trait in identifiers.get(workspace, ()):
                            if trait in traits:
                                _claim(folded, subject, trait, traits[trait], version, event)
                case Membership(kind, name, group, assigned):
                    subject = (workspace, KINDS[kind], name)
                    _keep_greatest(folded.memberships[subject], group, version, assigned)
                case Link(user, anonymous):
                    link = ((workspace, USER, user), anonymous)
                    cached = known_links.get(link)
                    if cached is None or event.received_at <= cached:
                        first = (event.received_at, event.message_id, event.origin)
                        folded.links[link] = min(first, folded.links.get(link, first))
                case LinkDecision(user, anonymous, counts):
                    pair = ((workspace, USER, user), anonymous)
                    _keep_greatest(folded.decisions, pair, version, not counts)
    return folded


def _claim(
    folded: FoldedChanges,
    subject: Person,
    trait: str,
    encoded: bytes | None,
    version: Version,
    event: Event,
) -> None:
    value = None if encoded is None else identifier_value(trait, orjson.loads(encoded))
    if folded.traits[subject][trait][0] == version:
        folded.forms[*subject, trait] = value
    if value is not None:
        claims, at = folded.claims[*subject, trait], event.received_at
        claims[value] = min(at, claims.get(value, at))


def _extend(seen: dict[Person, tuple[int, int]], subject: Person, at: int) -> None:
    first, last = seen.get(subject, (at, at))
    seen[subject] = (min(first, at), max(last, at))


def _keep_greatest(
    registers: dict[Any, tuple[Version, Any]], key: Any, version: Version, value: Any
) -> None:
    register = registers.get(key)
    # Of two changes of one event, the second wins.
    if register is None or register[0] <= version:
        registers[key] = (version, value)


# -------------------------------------------------------------------------------------- applying


def apply(changes: Sequence[tuple[Event, Sequence[EncodedChange]]]) -> Steps[int]:
    """Apply the changes of newly stored events.

    :param changes: events with their changes, in order of arrival.
    :return: how many changes were dropped because of a limit.
    """
    context: StorageContext = yield Context()
    folded = fold(changes, (yield Recall(KNOWN_LINKS)), context.identifiers)
    people = {person for person, _ in (*folded.links, *folded.decisions)}
    people.update(folded.seen)
    if not people:
        return 0
    write = _Write(folded, context.profile_limits, people, (yield Get(PROFILES, people)))
    if new := [visitor for visitor in folded.visited if visitor in write.new]:
        yield from write.limit_visitors(new)
    write.set_times()
    yield from write.set_traits()
    yield from write.set_memberships()
    links = yield from write.set_links()
    changed = [write.profiles[person].row for person in write.changed]
    for table, rows in {PROFILES: changed, **write.rows}.items():
        if rows:
            yield Put(table, rows)
    if links:
        yield Remember(KNOWN_LINKS, links)
    return write.dropped


class _Write:
    """The changes of a write, while they are compared with what is stored.

    :param people: those whom it changes, or whose links.
    :param stored: their rows.
    """

    def __init__(
        self,
        folded: FoldedChanges,
        limits: ProfileLimits,
        people: Collection[Person],
        stored: Mapping[Person, Row],
    ) -> None:
        self.folded = folded
        self.limits = limits
        self.profiles = {
            person: Profile(*stored[person]) if person in stored else Profile(*person)
            for person in people
        }
        #: Those of whom nothing is stored yet, and those whose rows change.
        self.new = {person for person in people if person not in stored}
        self.changed = {*self.new}
        #: How many changes were dropped because of a limit.
        self.dropped = 0
        #: What is to be put, but profiles.
        self.rows: dict[Table, list[Row]] = {}

    def stored(
        self, table: Table, registers: Iterable[tuple[Person, Iterable[str]]]
    ) -> Steps[Mapping[Key, Row]]:
        """Read the rows of registers, given by their names."""
        old = [(person, names) for person, names in registers if person not in self.new]
        keys = [(*person, name) for person, names in old for name in names]
        return (yield Get(table, keys)) if keys else {}

    def limit_visitors(self, new: Sequence[Person]) -> Steps[None]:
        """Count new visitors, and leave out those that have no room."""
        rows = yield Get(VISITOR_TOTALS, {(workspace,) for workspace, *_ in new})
        totals = Counter(dict(rows.values()))
        late = []
        for visitor in new:
            if totals[visitor[0]] >= self.limits.visitors:
                late.append(visitor)
            else:
                totals[visitor[0]] += 1
        for workspace in {workspace for workspace, *_ in late}:
            mine = [visitor for visitor in late if visitor[0] == workspace]
            # The visitors that this write changes or links stay.
            kept = {name for *_, name in self.profiles}
            kept.update(name for _, name in self.folded.links)
            gone = yield from _make_room(workspace, len(mine), kept)
            self._leave_out({*mine[gone:]})
        yield Put(VISITOR_TOTALS, [*totals.items()])

    def _leave_out(self, people: Collection[Person]) -> None:
        self.dropped += len(people)
        self.changed.difference_update(people)
        folded = self.folded
        for person in people:
            del self.profiles[person], folded.seen[person]
            folded.traits.pop(person, None)
            folded.memberships.pop(person, None)
        identified: list[dict[_Trait, Any]] = [folded.claims, folded.forms]
        for by_trait in identified:
            for key in [key for key in by_trait if key[:3] in people]:
                del by_trait[key]

    def set_times(self) -> None:
        """Set when people were first and last seen."""
        for person, (first, last) in self.folded.seen.items():
            profile = self.profiles[person]
            if profile.created_at is not None and profile.updated_at is not None:
                first, last = min(first, profile.created_at), max(last, profile.updated_at)
            if (first, last) != (profile.created_at, profile.updated_at):
                profile.created_at, profile.updated_at = first, last
                self.changed.add(person)
        for person, at in self.folded.visited.items():
            if person in self.profiles and at > (self.profiles[person].changed_at or 0):
                self.profiles[person].changed_at = at
                self.changed.add(person)

    def set_traits(self) -> Steps[None]:
        """Set the registers that win."""
        folded, limits = self.folded, self.limits
        stored = yield from self.stored(TRAITS, folded.traits.items())
        room = {number: limits.of(kind) for number, kind in KIND_OF.items()}
        identifiers = {trait for *_, trait in folded.forms}
        forms: dict[_Trait, str | None] = {}
        rows = self.rows[TRAITS] = []
        for person, registers in folded.traits.items():
            profile, is_new, so_far = self.profiles[person], person in self.new, len(rows)
            most, most_bytes, _ = room[profile.kind]
            count, used = profile.traits, profile.trait_bytes
            for trait, (version, value) in registers.items():
                key, before = (*person, trait), 0
                if not is_new and key in stored:
                    _, _, _, _, at, _, message_id, origin, before = stored[key]
                    if (at, message_id, origin) > version:
                        continue
                identifies = trait in identifiers and key in folded.forms
                size = 0 if value is None else limits.size(trait, value, identifies=identifies)
                added = (size > 0) - (before > 0)
                if (added > 0 and count >= most) or (
                    size > before and used - before + size > most_bytes
                ):
                    self.dropped += 1
                    continue
                count += added
                used += size - before
                at, message_id, origin = version
                encoded = REMOVED if value is None else value
                rows.append((*key, at, encoded, message_id, origin, size))
                if identifies:
                    forms[key] = folded.forms[key]
            if len(rows) > so_far:
                profile.traits, profile.trait_bytes = count, used
                self.changed.add(person)
        if folded.forms:
            yield from self._set_identifiers(forms)

    def _set_identifiers(self, forms: Mapping[_Trait, str | None]) -> Steps[None]:
        """Set the current values of identifiers, and when each value was claimed.

        The claim of the current value is beside it, and becomes a row of claims when the user gets
        another value: most users never do. A user keeps the first :data:`MAX_CLAIMS` of a trait,
        the current value included. A later value counts as claimed when it was received, until the
        user has another one.

        :param forms: the values that traits have now, in the form in which users are looked up;
            ``None``: there is none.
        """
        claims: dict[_Trait, dict[str, int]] = {key: {} for key in forms} | self.folded.claims
        old = [key for key in claims if key[:3] not in self.new]
        stored = (yield Get(IDENTIFIERS, old)) if old else {}
        before = {key: (value, at) for key, (*_, value, at) in stored.items()}
        current: dict[_Trait, tuple[str, int]] = {}
        others: dict[_Trait, dict[str, int]] = {}
        for key, values in claims.items():
            so_far = before.get(key)
            if so_far is not None:
                value, claimed_at = so_far
                if (at := values.pop(value, claimed_at)) < claimed_at:
                    # That is rare, because events usually arrive in order.
                    before[key] = current[key] = so_far = value, at
            if values or (key in forms and forms[key] != (so_far and so_far[0])):
                # The value so far was claimed first.
                others[key] = values if so_far is None else dict([so_far]) | values
        earlier = [key for key in others if key[:3] not in self.new]
        kept = (yield Under(CLAIMS, earlier)) if earlier else {}
        rows = self.rows[CLAIMS] = []
        gone: list[_Trait] = []
        for key, values in others.items():
            claimed = {value: at for *_, value, at in kept.get(key, ())}
            count, was = len(claimed), before[key][0] if key in before else None
            now = forms.get(key, was)
            for other, at in values.items():
                has_room = other in claimed or count < MAX_CLAIMS
                count += has_room and other not in claimed
                if other != now and has_room and at < claimed.get(other, at + 1):
                    rows.append((*key, other, at))
            if now is None and was is not None:
                gone.append(key)
                current.pop(key, None)
            elif now is not None and now != was:
                current[key] = now, min(values[now], claimed.get(now, values[now]))
        if gone:
            yield Delete(IDENTIFIERS, gone)
        self.rows[IDENTIFIERS] = [(*key, *claim) for key, claim in current.items()]

    def set_memberships(self) -> Steps[None]:
        """Set the registers that win."""
        stored = yield from self.stored(MEMBERSHIPS, self.folded.memberships.items())
        room = {number: self.limits.of(kind) for number, kind in KIND_OF.items()}
        rows = self.rows[MEMBERSHIPS] = []
        for person, registers in self.folded.memberships.items():
            profile = self.profiles[person]
            for group, (version, assigned) in registers.items():
                key = (*person, group)
                if key in stored:
                    *_, at, message_id, origin, _ = stored[key]
                    if (at, message_id, origin) > version:
                        continue
                elif profile.memberships >= room[profile.kind][-1]:
                    self.dropped += 1
                    continue
                else:
                    profile.memberships += 1
                self.changed.add(person)
                rows.append((*key, *version, int(assigned)))

    def set_links(self) -> Steps[dict[Pair, int]]:
        """Set links and decisions.

        :return: the links that are stored, with when the first event was received.
        """
        pairs = {**self.folded.links, **self.folded.decisions}
        stored = yield from self.stored(LINKS, ((user, (name,)) for user, name in pairs))
        rows = self.rows[LINKS] = []
        kept = {}
        for pair in pairs:
            person, name = pair
            profile, made, key = self.profiles[person], self.folded.links.get(pair), (*person, name)
            row = LinkRow(*stored[key]) if key in stored else LinkRow(*key)
            first = row.first
            if made is not None and first is None and profile.links >= self.limits.links:
                made = None
                self.dropped += 1
            if made is not None:
                if first is None:
                    first = made
                    profile.links += 1
                    self.changed.add(person)
                first = min(first, made)
                kept[pair] = first[0]
            decision = max(row.decision, self.folded.decisions.get(pair, row.decision))
            if (first, decision) != (row.first, row.decision):
                version, undone = decision
                rows.append((*key, *(first or (None, "", "")), *version, int(undone)))
        return kept


def _make_room(workspace: str, count: int, kept: Collection[str]) -> Steps[int]:
    """Delete visitors that only public keys made, and that may expire: those without an identifier
    first, and of those that are examined at once the least recently changed.

    :param count: how many are to be deleted.
    :param kept: anonymous ids of visitors that stay.
    :return: how many were deleted.
    """
    gone = 0
    searched = yield Recall(SEARCHED)
    places = {place: at for place, at in searched.items() if place[0] == workspace}
    for place in [(workspace, False)] * _SEARCHES + [(workspace, True)] * _SEARCHES:
        page = yield Pages(
            PROFILES,
            _EXAMINED,
            equal={"kind": VISITOR, "workspace": workspace},
            after=places.get(place),
        )
        some = [row for row in starmap(Profile, page.rows) if row.name not in kept]
        named = yield Under(IDENTIFIERS, [row.person for row in some])
        trusted = yield Get(TRAITS, [(*row.person, TRUSTED) for row in some])
        free = yield from may_expire(
            [
                row
                for row in some
                if bool(named[row.person]) is place[1] and (*row.person, TRUSTED) not in trusted
            ]
        )
        old = sorted(free, key=attrgetter("changed_at"))[: count - gone]
        gone += yield from delete_profiles([row.person for row in old])
        if gone == count:
            break
        places[place] = page.place if page.more else None
    yield Remember(SEARCHED, places)
    return gone
