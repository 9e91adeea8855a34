# SPDX-License-Identifier: Apache-2.0
"""The profile changes of one write, folded in memory, and the statements that apply them.

A register is the document ``{t: timestamp, m: message id, o: origin, v: value}``, changed only by
``$max``. MongoDB compares documents field by field, so the greatest (timestamp, message id, origin)
wins, in whatever order and from however many processes the changes arrive. Besides ``v`` a register
may have ``j`` (the value as JSON, where BSON may not keep it), ``i`` (the form in which users are
looked up by it) and ``x`` (true if the trait is removed); all follow from the event, as ``v`` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
from bson.datetime_ms import DatetimeMS

from engage.api import (
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
    """What one write does to one user or group."""

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
class Claim:
    """A user's trait was set to a value; see :meth:`~engage.api.ProfileStore.find_users`."""

    workspace: str
    user: str
    trait: str
    #: In the form in which users are looked up.
    value: str

    @property
    def key(self) -> str:
        """The ``_id`` of the claim."""
        return pair_id(self.workspace, self.user, self.field)

    @property
    def field(self) -> str:
        """The trait with the value."""
        return f"{len(self.trait)}:{self.trait}:{self.value}"

    def statement(self, times: Mapping[str, Any]) -> dict[str, Any]:
        """Return the statement that stores the claim.

        :param times: the operator that sets ``at``.
        """
        fields = {
            "workspaceId": self.workspace,
            "userId": self.user,
            "held": scoped_id(self.workspace, self.field),
        }
        inserted = {**fields, **times.get("$setOnInsert", {})}
        return {"q": {"_id": self.key}, "u": {**times, "$setOnInsert": inserted}, "upsert": True}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredState:
    """What is stored of the users and groups of a write, as far as the limits need it."""

    #: Collection → ``_id`` → trait → version and size.
    traits: Mapping[str, Mapping[str, Mapping[str, tuple[Version, int]]]]
    #: Collection → ``_id`` of the user → the ``_id`` of each link or membership that is stored.
    pairs: Mapping[str, Mapping[str, set[str]]]


class FoldedChanges:
    """The changes of one write: one entry per user, group, link and membership."""

    def __init__(
        self,
        changes: Iterable[tuple[Event, Sequence[Change]]],
        known_links: Mapping[str, None],
        identifiers: Mapping[str, frozenset[str]],
    ) -> None:
        """
        :param changes: events with their changes, in order of arrival.
        :param known_links: the ``_id`` of links that are known to be durable; they are left out.
        :param identifiers: workspace id → the traits by which its users are looked up.
        """
        self._identifiers = identifiers
        #: Claim → least time of receipt.
        self.claims: dict[Claim, int] = {}
        self.subjects: dict[str, dict[str, Subject]] = {USERS: {}, GROUPS: {}}
        self.pairs: dict[str, dict[str, Pair]] = {LINKS: {}, MEMBERSHIPS: {}}
        #: How many changes :meth:`statements` dropped because of a limit.
        self.dropped = 0
        # What must be read first. This includes the users whose ids are the anonymous ids of links,
        # also if an event of this write makes such a user exist: that event may turn out to be a
        # duplicate of one with other contents.
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
            if value is not None:
                claim = Claim(event.workspace_id, change.user_id, trait, value)
                at = event.received_at
                self.claims[claim] = min(at, self.claims.get(claim, at))

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

    # ----------------------------------------------------------------------------- statements
    def statements(
        self, state: StoredState, limits: ProfileLimits, known_claims: Mapping[str, int]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the update statements of each collection. What a limit forbids is left out, and
        counted in :attr:`dropped`.

        :param known_claims: claims that are known to be durable: ``_id`` → time; they are left out.
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
        for claim, at in self.claims.items():
            if known_claims.get(claim.key, at + 1) > at:
                statement = claim.statement({"$min": {"at": DatetimeMS(at)}})
                found.setdefault(CLAIMS, []).append(statement)
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
                # A process of an earlier version reads null.
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
