# SPDX-License-Identifier: Apache-2.0
"""The profile changes of one write, folded in memory, and the statements that apply them.

A register is the document ``{t: timestamp, m: message id, o: origin, v: value}``, changed only by
``$max``. MongoDB compares documents field by field, so the greatest (timestamp, message id, origin)
wins, in any order and from any number of processes. Besides ``v`` a register may have ``j`` (the
value as JSON, where BSON may not keep it), ``i`` (the form in which users are looked up by it) and
``x`` (true if the trait is removed); all follow from the event, as ``v`` does.

A link has the version of its first event, ``first``: ``{t: time of receipt, m, o}``, changed only
by ``$min``. One that was stored before there were versions has none, and is older than all others.
The decision of an operator is a register beside it; without a link, ``first`` is :data:`NEVER`.

What an event changes of a visitor has ``changedAt``, the greatest time of receipt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bson.datetime_ms import DatetimeMS

from engage.api import (
    MAX_CLAIMS,
    REMOVED,
    Change,
    Event,
    Kind,
    Link,
    LinkDecision,
    Membership,
    ProfileLimits,
    RemovedTraits,
    Seen,
    Traits,
    Version,
    identifier_value,
)

from .documents import (
    NEVER,
    OLDEST,
    encode_value,
    escape_key,
    pair_id,
    scoped_id,
    version_of,
)
from .identifiers import Claim, StoredClaims, claim_id
from .schema import LINKS, MEMBERSHIPS, PLACES, VISITOR_MEMBERSHIPS


@dataclasses.dataclass(slots=True)
class Subject:
    """The changes of one write to one user, visitor or group."""

    workspace: str
    name: str
    first: int
    last: int
    received: int
    traits: dict[str, tuple[Version, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A link of a user, the decision about one, or a membership of a user or visitor."""

    workspace: str
    #: The ``_id`` of the user or visitor.
    owner: str
    other: str
    version: Version
    value: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class StoredState:
    """The stored state of a write's users, visitors and groups that the limits need."""

    #: ``_id`` → trait → version and size.
    traits: Mapping[Kind, Mapping[str, Mapping[str, tuple[Version, int]]]]
    #: Collection → ``_id`` of the owner → the ``_id`` of each link or membership that is stored,
    #: with the version of a link.
    pairs: Mapping[str, Mapping[str, Mapping[str, Version]]]
    claims: Mapping[Kind, StoredClaims]


class FoldedChanges:
    """The changes of one write: one entry per user, visitor, group, link and membership."""

    def __init__(
        self,
        changes: Iterable[tuple[Event, Sequence[Change]]],
        known_links: Mapping[str, Version],
        known_claims: Mapping[str, int],
        identifiers: Mapping[str, frozenset[str]],
    ) -> None:
        """
        :param changes: events with their changes, in order of arrival.
        :param known_links: the ``_id`` of links that are known to be durable, with their versions;
            they are left out, unless they become earlier.
        :param known_claims: the same of the claims of users: ``_id`` → time.
        :param identifiers: workspace id → the traits by which its users are looked up.
        """
        self._identifiers = identifiers
        self._known_links = known_links
        # Another process may delete a visitor with its claims.
        self._known_claims = {kind: known_claims if kind is Kind.USER else {} for kind in Kind}
        #: ``_id`` → claim, and its least time of receipt, in order of arrival.
        self._claims: dict[Kind, dict[str, tuple[Claim, int]]] = {kind: {} for kind in Kind}
        #: What :meth:`statements` stores: ``_id`` of a user's claim → time, except late ones, and
        #: ``_id`` of a link → version.
        self.kept_claims: dict[str, int] = {}
        self.kept_links: dict[str, Version] = {}
        self.subjects: dict[Kind, dict[str, Subject]] = {kind: {} for kind in Kind}
        self.pairs: dict[str, dict[str, Pair]] = {
            collection: {} for collection in (LINKS, MEMBERSHIPS, VISITOR_MEMBERSHIPS)
        }
        self._decisions: dict[str, Pair] = {}
        #: How many changes :meth:`statements` dropped because of a limit.
        self.dropped = 0
        for event, event_changes in changes:
            for change in event_changes:
                self._add(event, change)

    def __bool__(self) -> bool:
        return any((*self.subjects.values(), *self.pairs.values(), self._decisions))

    def _add(self, event: Event, change: Change) -> None:
        workspace = event.workspace_id
        version = (event.timestamp, event.message_id, event.origin)
        match change:
            case Seen(kind, name):
                self._subject(event, kind, name)
            case Traits(kind, name, traits):
                _keep_greatest(self._subject(event, kind, name), traits, version)
                if PLACES[kind].claims:
                    self._claim(event, change)
            case RemovedTraits(kind, name, names):
                removed = dict.fromkeys(names, REMOVED)
                _keep_greatest(self._subject(event, kind, name), removed, version)
            case Membership(kind, name, group, assigned):
                pair = Pair(workspace, scoped_id(workspace, name), group, version, assigned)
                known_pairs = self.pairs[PLACES[kind].memberships]
                key = pair_id(workspace, name, group)
                if key not in known_pairs or known_pairs[key].version < version:
                    known_pairs[key] = pair
            case Link(user, anonymous):
                key = pair_id(workspace, user, anonymous)
                first = (event.received_at, event.message_id, event.origin)
                known = self._known_links.get(key)
                if known is None or first < known:
                    pair = Pair(workspace, scoped_id(workspace, user), anonymous, first)
                    if key not in self.pairs[LINKS] or first < self.pairs[LINKS][key].version:
                        self.pairs[LINKS][key] = pair
            case LinkDecision(user, anonymous, counts):
                key = pair_id(workspace, user, anonymous)
                pair = Pair(workspace, scoped_id(workspace, user), anonymous, version, counts)
                if key not in self._decisions or self._decisions[key].version < version:
                    self._decisions[key] = pair

    def _claim(self, event: Event, change: Traits) -> None:
        kind, workspace, name, at = change.kind, event.workspace_id, change.id, event.received_at
        for trait in self._identifiers.get(workspace, ()):
            value = identifier_value(trait, change.traits.get(trait))
            if value is None:
                continue
            key = claim_id(workspace, name, trait, value)
            if self._known_claims[kind].get(key, at + 1) > at:
                claims = self._claims[kind]
                claim, least = claims.get(key) or (Claim(kind, workspace, name, trait, value), at)
                claims[key] = (claim, min(at, least))

    def _subject(self, event: Event, kind: Kind, name: str) -> Subject:
        at, received = event.timestamp, event.received_at
        key = scoped_id(event.workspace_id, name)
        subject = self.subjects[kind].get(key)
        if subject is None:
            subject = Subject(event.workspace_id, name, at, at, received)
            self.subjects[kind][key] = subject
        else:
            subject.first, subject.last = min(subject.first, at), max(subject.last, at)
            subject.received = max(subject.received, received)
        return subject

    # ----------------------------------------------------------------------- what must be read
    def wanted_traits(self, kind: Kind) -> list[str]:
        """Return the ids of the profiles that must be read first: for the limits, also that of the
        number of visitors."""
        subjects = self.subjects[kind].items()
        return sorted(key for key, one in subjects if one.traits or kind is Kind.VISITOR)

    def wanted_pairs(self, collection: str) -> list[str]:
        """Return the ids of the owners whose links or memberships must be read first."""
        return sorted({pair.owner for pair in self.pairs[collection].values()})

    def wanted_claims(self, kind: Kind, stored: StoredClaims) -> list[str]:
        """Return the ids of the claims that must be read when the profiles are read: those of
        values that may be new to them."""
        claims = self._claims[kind].items()
        return [key for key, (claim, _) in claims if stored.is_doubtful(claim)]

    # ----------------------------------------------------------------------------- statements
    def statements(
        self, state: StoredState, limits: ProfileLimits
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the update statements of each collection. Changes beyond a limit are left out, and
        counted in :attr:`dropped`.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for kind, place in PLACES.items():
            for key, subject in self.subjects[kind].items():
                registers = self._registers(kind, subject, state.traits[kind].get(key, {}), limits)
                greatest = {"updatedAt": DatetimeMS(subject.last), **self._changed(kind, key)}
                found.setdefault(place.subjects, []).append(
                    {
                        "q": {"_id": key},
                        "u": {
                            "$max": greatest | registers,
                            "$min": {"createdAt": DatetimeMS(subject.first)},
                            "$setOnInsert": {
                                "workspaceId": subject.workspace,
                                place.name: subject.name,
                            },
                        },
                        "upsert": True,
                    }
                )
            if self._claims[kind]:
                found[place.claims] = self._claim_statements(kind, state, found[place.subjects])
            if not place.memberships:
                continue
            *_, limit = limits.of(kind)
            for key, pair in self._allowed(place.memberships, state, limit).items():
                register = _register(pair.version, {"v": pair.value})
                greatest = {"assigned": register, **self._changed(kind, pair.owner)}
                found.setdefault(place.memberships, []).append(
                    _pair_statement(kind, key, pair, "groupId", {"$max": greatest})
                )
        found |= self._link_statements(state, limits.links)
        return found

    def leave_out_visitors(self, keys: Iterable[str]) -> None:
        """Leave out the visitors for which there is no room, by their ``_id``."""
        subjects = self.subjects[Kind.VISITOR]
        for key in keys:
            del subjects[key]
            self.dropped += 1
        pairs, claims = self.pairs[VISITOR_MEMBERSHIPS].items(), self._claims[Kind.VISITOR].items()
        self.pairs[VISITOR_MEMBERSHIPS] = {key: one for key, one in pairs if one.owner in subjects}
        self._claims[Kind.VISITOR] = {key: one for key, one in claims if one[0].owner in subjects}

    def _changed(self, kind: Kind, owner: str) -> dict[str, Any]:
        """Return when a visitor was changed, as a field."""
        if kind is not Kind.VISITOR:
            return {}
        return {"changedAt": DatetimeMS(self.subjects[kind][owner].received)}

    def _link_statements(self, state: StoredState, limit: int) -> dict[str, list[dict[str, Any]]]:
        found: list[dict[str, Any]] = []
        for key, pair in self._allowed(LINKS, state, limit).items():
            # A link that was read is written again: it may not be durable yet.
            stored = state.pairs[LINKS].get(pair.owner, {}).get(key, pair.version)
            first = {} if stored == OLDEST else {"$min": {"first": _register(pair.version, {})}}
            found.append(_pair_statement(Kind.USER, key, pair, "anonymousId", first))
            self.kept_links[key] = min(stored, pair.version)
        for key, pair in self._decisions.items():
            decision = {"$max": {"decision": _register(pair.version, {"v": pair.value})}}
            statement = _pair_statement(Kind.USER, key, pair, "anonymousId", decision)
            statement["u"]["$setOnInsert"]["first"] = _register(NEVER, {})
            found.append(statement)
        return {LINKS: found} if found else {}

    def _claim_statements(
        self, kind: Kind, state: StoredState, subjects: Iterable[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the statements of the claims, and add their numbers to those of their owners."""
        found: list[dict[str, Any]] = []
        greatest = {statement["q"]["_id"]: statement["u"]["$max"] for statement in subjects}
        counts: dict[tuple[str, str], int] = {}
        stored = state.claims[kind]
        for key, (claim, at) in self._claims[kind].items():
            changed = self._changed(kind, claim.owner)
            if not stored.has(claim):
                owner = greatest[claim.owner]
                count = counts.get((claim.owner, claim.trait), stored.count(claim))
                if count >= MAX_CLAIMS:
                    before = state.traits[kind].get(claim.owner, {}).get(claim.trait)
                    register = owner.get(f"traits.{claim.name}")
                    if register is None or (before and before[0] > version_of(register)):
                        current = stored.form(claim)
                    else:
                        current = register.get("i")
                    if current == claim.form:
                        found += claim.late_statements(at, changed)
                    continue
                counts[claim.owner, claim.trait] = count + 1
                owner[f"claims.{claim.name}"] = count + 1
            if kind is Kind.USER:
                self.kept_claims[key] = at
            found.append(claim.statement({"$min": {"at": DatetimeMS(at)}}, changed))
        return found

    def _registers(
        self,
        kind: Kind,
        subject: Subject,
        stored: Mapping[str, tuple[Version, int]],
        limits: ProfileLimits,
    ) -> dict[str, Any]:
        declared = self._identifiers.get(subject.workspace, ()) if PLACES[kind].claims else ()
        max_traits, max_bytes, _ = limits.of(kind)
        sizes = {trait: size for trait, (_, size) in stored.items()}
        count, total = sum(map(bool, sizes.values())), sum(sizes.values())
        registers: dict[str, Any] = {}
        for trait, (version, value) in subject.traits.items():
            before = stored.get(trait)
            # A statement is sent even if a later value was read, which may not be durable: if that
            # value stays, $max leaves it.
            if before is None or before[0] <= version:
                size = 0 if value is REMOVED else limits.size(trait, value, declared)
                was = sizes.get(trait, 0)
                added = bool(size) - bool(was)
                if (added > 0 and count >= max_traits) or (
                    size > was and total - was + size > max_bytes
                ):
                    self.dropped += 1
                    continue
                count += added
                total += size - was
            if value is REMOVED:
                register = _register(version, {"v": None, "x": True})
            else:
                register = _register(version, encode_value(value))
                looked_up = identifier_value(trait, value) if trait in declared else None
                if looked_up is not None:
                    register["i"] = scoped_id(subject.workspace, looked_up)
            registers[f"traits.{escape_key(trait)}"] = register
        return registers

    def _allowed(self, collection: str, state: StoredState, limit: int) -> dict[str, Pair]:
        """Return the links or memberships that the limit allows."""
        stored = state.pairs[collection]
        counts = {owner: len(ids) for owner, ids in stored.items()}
        allowed = {}
        for key, pair in self.pairs[collection].items():
            if key not in stored.get(pair.owner, ()):
                if counts.get(pair.owner, 0) >= limit:
                    self.dropped += 1
                    continue
                counts[pair.owner] = counts.get(pair.owner, 0) + 1
            allowed[key] = pair
        return allowed


def _keep_greatest(subject: Subject, traits: Mapping[str, Any], version: Version) -> None:
    for trait, value in traits.items():
        known = subject.traits.get(trait)
        # An event that sets and removes a trait removes it.
        if known is None or known[0] <= version:
            subject.traits[trait] = (version, value)


def _pair_statement(
    kind: Kind, key: str, pair: Pair, name: str, update: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the statement for a link or a membership. Its query names the owner, although the
    ``_id`` contains it: that is the shard key in docs/scaling.md, and MongoDB before 7.1 cannot
    insert without it.
    """
    fields = {"workspaceId": pair.workspace, name: pair.other}
    query = {"_id": key, kind.value: pair.owner}
    return {"q": query, "u": {**update, "$setOnInsert": fields}, "upsert": True}


def _register(version: Version, value: Mapping[str, Any]) -> dict[str, Any]:
    return {"t": DatetimeMS(version[0]), "m": version[1], "o": version[2], **value}
