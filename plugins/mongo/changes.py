# SPDX-License-Identifier: Apache-2.0
"""The profile changes of one write, folded in memory, and the statements that apply them.

A register is the document ``{t: timestamp, m: message id, o: origin, v: value}``, changed only by
``$max``. MongoDB compares documents field by field, so the greatest (timestamp, message id, origin)
wins, in any order and from any number of processes. Besides ``v`` a register may have ``j`` (the
value as JSON, where BSON may not keep it), ``i`` (the form in which users are looked up by it) and
``x`` (true if the trait is removed); all follow from the event, as ``v`` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
from bson.datetime_ms import DatetimeMS

from engage.api import (
    MAX_CLAIMS,
    Change,
    Event,
    GroupTraits,
    Link,
    Membership,
    ProfileLimits,
    RemovedTraits,
    Seen,
    UserTraits,
    identifier_value,
)

from .documents import decode_value, encode_value, escape_key, pair_id, scoped_id, unescape_key
from .identifiers import Claim, StoredClaims, claim_id
from .schema import CLAIMS, GROUPS, LINKS, MEMBERSHIPS, USERS

#: (timestamp, message id, origin): the greatest wins.
Version = tuple[int, str, str]

_NAMES: Final = {USERS: "userId", GROUPS: "groupId"}

#: In the place of a value: the trait is removed.
_REMOVED: Final = object()


def trait_size(trait: str, value: Any) -> int:
    """Return the size of a trait as :class:`ProfileLimits` counts it: bytes of compact JSON."""
    return len(orjson.dumps(trait)) + len(orjson.dumps(value))


@dataclasses.dataclass(slots=True)
class Subject:
    """The changes of one write to one user or group."""

    workspace: str
    name: str
    first: int
    last: int
    traits: dict[str, tuple[Version, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A link or a membership of a user."""

    workspace: str
    user: str
    other: str
    version: Version = (0, "", "")
    assigned: bool = True

    @property
    def owner(self) -> str:
        """The ``_id`` of the user."""
        return scoped_id(self.workspace, self.user)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredState:
    """The stored state of a write's users and groups that the limits need."""

    #: Collection → ``_id`` → trait → version and size.
    traits: Mapping[str, Mapping[str, Mapping[str, tuple[Version, int]]]]
    #: Collection → ``_id`` of the user → the ``_id`` of each link or membership that is stored.
    pairs: Mapping[str, Mapping[str, set[str]]]
    claims: StoredClaims = dataclasses.field(default_factory=StoredClaims)


class FoldedChanges:
    """The changes of one write: one entry per user, group, link and membership."""

    def __init__(
        self,
        changes: Iterable[tuple[Event, Sequence[Change]]],
        known_links: Mapping[str, None],
        known_claims: Mapping[str, int],
        identifiers: Mapping[str, frozenset[str]],
    ) -> None:
        """
        :param changes: events with their changes, in order of arrival.
        :param known_links: the ``_id`` of links that are known to be durable; they are left out.
        :param known_claims: the same of claims: ``_id`` → time.
        :param identifiers: workspace id → the traits by which its users are looked up.
        """
        self._identifiers = identifiers
        self._known_claims = known_claims
        #: ``_id`` → claim, and its least time of receipt, in order of arrival.
        self._claims: dict[str, tuple[Claim, int]] = {}
        #: The claims that :meth:`statements` stores, except late ones: ``_id`` → time.
        self.kept_claims: dict[str, int] = {}
        self.subjects: dict[str, dict[str, Subject]] = {USERS: {}, GROUPS: {}}
        self.pairs: dict[str, dict[str, Pair]] = {LINKS: {}, MEMBERSHIPS: {}}
        #: How many changes :meth:`statements` dropped because of a limit.
        self.dropped = 0
        # The state that must be read first. This includes the users whose ids are the anonymous ids
        # of links, also if an event of this write makes such a user exist: that event may turn out
        # to be a duplicate of one with other contents.
        self._namesakes: set[str] = set()
        self._owners: dict[str, set[str]] = {LINKS: set(), MEMBERSHIPS: set()}
        for event, event_changes in changes:
            version = (event.timestamp, event.message_id, event.origin)
            for change in event_changes:
                self._add(event.workspace_id, version, change, known_links)
                if isinstance(change, UserTraits):
                    self._claim(event, change)

    def __bool__(self) -> bool:
        return any(self.subjects.values()) or any(self.pairs.values())

    def _add(
        self, workspace: str, version: Version, change: Change, known_links: Mapping[str, None]
    ) -> None:
        match change:
            case Seen(user):
                self._subject(USERS, workspace, user, version)
            case UserTraits(user, traits):
                _keep_greatest(self._subject(USERS, workspace, user, version), traits, version)
            case RemovedTraits(user, names):
                removed = dict.fromkeys(names, _REMOVED)
                _keep_greatest(self._subject(USERS, workspace, user, version), removed, version)
            case GroupTraits(group, traits):
                _keep_greatest(self._subject(GROUPS, workspace, group, version), traits, version)
            case Membership(user, group, assigned):
                key = pair_id(workspace, user, group)
                self._owners[MEMBERSHIPS].add(scoped_id(workspace, user))
                known = self.pairs[MEMBERSHIPS].get(key)
                if known is None or known.version < version:
                    self.pairs[MEMBERSHIPS][key] = Pair(workspace, user, group, version, assigned)
            case Link(user, anonymous):
                key = pair_id(workspace, user, anonymous)
                if key in known_links:
                    return
                namesake = scoped_id(workspace, anonymous)
                self._namesakes.add(namesake)
                self._owners[LINKS].add(scoped_id(workspace, user))
                # An anonymous id that is the id of a user is not linked. That user may also appear
                # earlier in this write.
                if namesake not in self.subjects[USERS]:
                    self.pairs[LINKS].setdefault(key, Pair(workspace, user, anonymous))

    def _claim(self, event: Event, change: UserTraits) -> None:
        for trait in self._identifiers.get(event.workspace_id, ()):
            value = identifier_value(trait, change.traits.get(trait))
            if value is None:
                continue
            workspace, user, at = event.workspace_id, change.user_id, event.received_at
            key = claim_id(workspace, user, trait, value)
            if self._known_claims.get(key, at + 1) > at:
                claim, least = self._claims.get(key) or (Claim(workspace, user, trait, value), at)
                self._claims[key] = (claim, min(at, least))

    def _subject(self, collection: str, workspace: str, name: str, version: Version) -> Subject:
        at = version[0]
        key = scoped_id(workspace, name)
        subject = self.subjects[collection].get(key)
        if subject is None:
            subject = self.subjects[collection][key] = Subject(workspace, name, at, at)
        else:
            subject.first, subject.last = min(subject.first, at), max(subject.last, at)
        return subject

    # ----------------------------------------------------------------------- what must be read
    def wanted_traits(self, collection: str) -> list[str]:
        """Return the ids of the users or groups that must be read first: for the limits, and to
        find the anonymous ids that are ids of users, which are not linked."""
        wanted = {key for key, one in self.subjects[collection].items() if one.traits}
        if collection == USERS:
            wanted |= self._namesakes
        return sorted(wanted)

    def wanted_pairs(self, collection: str) -> list[str]:
        """Return the ids of the users whose links or memberships must be read first."""
        return sorted(self._owners[collection])

    def claimants(self) -> set[str]:
        """Return the ids of the users of whom claims must be stored."""
        return {claim.owner for claim, _ in self._claims.values()}

    def wanted_claims(self, stored: StoredClaims) -> list[str]:
        """Return the ids of the claims that must be read when the users are read: those of values
        that may be new to their users."""
        return [key for key, (claim, _) in self._claims.items() if stored.is_doubtful(claim)]

    # ----------------------------------------------------------------------------- statements
    def statements(
        self, state: StoredState, limits: ProfileLimits
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the update statements of each collection. Changes beyond a limit are left out, and
        counted in :attr:`dropped`.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for collection, subjects in self.subjects.items():
            for key, subject in subjects.items():
                registers = self._registers(
                    subject,
                    state.traits[collection].get(key, {}),
                    limits,
                    self._identifiers.get(subject.workspace, frozenset())
                    if collection == USERS
                    else frozenset(),
                )
                found.setdefault(collection, []).append(
                    {
                        "q": {"_id": key},
                        "u": {
                            "$max": {"updatedAt": DatetimeMS(subject.last), **registers},
                            "$min": {"createdAt": DatetimeMS(subject.first)},
                            "$setOnInsert": {
                                "workspaceId": subject.workspace,
                                _NAMES[collection]: subject.name,
                            },
                        },
                        "upsert": True,
                    }
                )
        if self._claims:
            found[CLAIMS] = self._claim_statements(state, found[USERS])
        for key, pair in self._allowed(LINKS, state, limits.links).items():
            # A link that was read is written again: it may not be durable yet.
            fields = {"workspaceId": pair.workspace, "anonymousId": pair.other}
            found.setdefault(LINKS, []).append(
                {"q": _pair_query(key, pair), "u": {"$setOnInsert": fields}, "upsert": True}
            )
        for key, pair in self._allowed(MEMBERSHIPS, state, limits.memberships).items():
            fields = {"workspaceId": pair.workspace, "groupId": pair.other}
            register = _register(pair.version, {"v": pair.assigned})
            found.setdefault(MEMBERSHIPS, []).append(
                {
                    "q": _pair_query(key, pair),
                    "u": {"$max": {"assigned": register}, "$setOnInsert": fields},
                    "upsert": True,
                }
            )
        return found

    def _claim_statements(
        self, state: StoredState, users: Iterable[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the statements of the claims, and add their numbers to the statements of users."""
        found: list[dict[str, Any]] = []
        greatest = {statement["q"]["_id"]: statement["u"]["$max"] for statement in users}
        counts: dict[tuple[str, str], int] = {}
        for key, (claim, at) in self._claims.items():
            if not state.claims.has(claim):
                user = greatest[claim.owner]
                count = counts.get((claim.owner, claim.trait), state.claims.count(claim))
                if count >= MAX_CLAIMS:
                    before = state.traits[USERS].get(claim.owner, {}).get(claim.trait)
                    register = user.get(f"traits.{claim.name}")
                    if register is None or (before and before[0] > version_of(register)):
                        current = state.claims.form(claim)
                    else:
                        current = register.get("i")
                    if current == claim.form:
                        found += claim.late_statements(at)
                    continue
                counts[claim.owner, claim.trait] = count + 1
                user[f"claims.{claim.name}"] = count + 1
            self.kept_claims[key] = at
            found.append(claim.statement({"$min": {"at": DatetimeMS(at)}}))
        return found

    def _registers(
        self,
        subject: Subject,
        stored: Mapping[str, tuple[Version, int]],
        limits: ProfileLimits,
        identifiers: frozenset[str],
    ) -> dict[str, Any]:
        def counted(trait: str, size: int) -> int:
            return 0 if trait in identifiers and size <= limits.identifier_bytes else size

        sizes = {trait: counted(trait, size) for trait, (_, size) in stored.items()}
        count, total = sum(map(bool, sizes.values())), sum(sizes.values())
        registers: dict[str, Any] = {}
        for trait, (version, value) in subject.traits.items():
            before = stored.get(trait)
            # A statement is sent even if a later value was read, which may not be durable: if that
            # value stays, $max leaves it.
            if before is None or before[0] <= version:
                size = 0 if value is _REMOVED else counted(trait, trait_size(trait, value))
                was = sizes.get(trait, 0)
                added = bool(size) - bool(was)
                if (added > 0 and count >= limits.traits) or (
                    size > was and total - was + size > limits.trait_bytes
                ):
                    self.dropped += 1
                    continue
                count += added
                total += size - was
            if value is _REMOVED:
                register = _register(version, {"v": None, "x": True})
            else:
                register = _register(version, encode_value(value))
                looked_up = identifier_value(trait, value) if trait in identifiers else None
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
                if (
                    collection == LINKS
                    and scoped_id(pair.workspace, pair.other) in state.traits[USERS]
                ):
                    continue
                if counts.get(pair.owner, 0) >= limit:
                    self.dropped += 1
                    continue
                counts[pair.owner] = counts.get(pair.owner, 0) + 1
            allowed[key] = pair
        return allowed


def _keep_greatest(subject: Subject, traits: Mapping[str, Any], version: Version) -> None:
    for trait, value in traits.items():
        known = subject.traits.get(trait)
        if known is None or known[0] < version:
            subject.traits[trait] = (version, value)


def _pair_query(key: str, pair: Pair) -> dict[str, Any]:
    """Return the query for a link or a membership. It names the user, although the ``_id`` contains
    it: that is the shard key in docs/scaling.md, and MongoDB before 7.1 cannot insert without it.
    """
    return {"_id": key, "user": pair.owner}


def _register(version: Version, value: Mapping[str, Any]) -> dict[str, Any]:
    return {"t": DatetimeMS(version[0]), "m": version[1], "o": version[2], **value}


def version_of(register: Mapping[str, Any]) -> Version:
    """Return the version of a stored register."""
    return (int(register["t"]), register["m"], register["o"])


def stored_traits(document: Mapping[str, Any]) -> dict[str, tuple[Version, int]]:
    """Return the traits of a stored user or group: trait → version and size."""
    found = {}
    for key, register in document.get("traits", {}).items():
        trait = unescape_key(key)
        size = 0 if "x" in register else trait_size(trait, decode_value(register))
        found[trait] = (version_of(register), size)
    return found


def user_statement(workspace: str, user: str, at: int) -> dict[str, Any]:
    """Return the statement that makes a user exist, as an event of the time ``at`` would."""
    return {
        "q": {"_id": scoped_id(workspace, user)},
        "u": {
            "$max": {"updatedAt": DatetimeMS(at)},
            "$min": {"createdAt": DatetimeMS(at)},
            "$setOnInsert": {"workspaceId": workspace, "userId": user},
        },
        "upsert": True,
    }
