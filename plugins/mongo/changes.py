# SPDX-License-Identifier: Apache-2.0
"""The changes of one write, folded in memory, and the statements that apply them.

A register is the document ``{t: when, m: message id, o: origin, v: value}``, changed by ``$max``
only. MongoDB compares documents field by field, so the greatest (timestamp, message id, origin)
wins in whatever order, and from however many processes at once, changes arrive. Beside ``v`` may
stand ``j`` (the value as JSON, where BSON may not keep it) and ``i`` (the form in which users are
looked up by it); both follow from the event, as ``v`` does.
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
    Seen,
    UserTraits,
    identifier_value,
)

from .documents import decode_value, encode_value, escape_key, own_id, pair_id, unescape_key
from .schema import GROUPS, LINKS, MEMBERSHIPS, USERS

#: (timestamp, message id, origin): the greatest wins.
Version = tuple[int, str, str]

_NAMES: Final = {USERS: "userId", GROUPS: "groupId"}


def trait_size(trait: str, value: Any) -> int:
    """:return: bytes of compact JSON, as :class:`ProfileLimits` counts them."""
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
        return own_id(self.workspace, self.user)


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What is stored of the subjects of a write, as far as the limits need it."""

    #: Collection → ``_id`` → trait → version and size.
    traits: Mapping[str, Mapping[str, Mapping[str, tuple[Version, int]]]]
    #: Collection → ``_id`` of links and memberships that are stored, by the ``_id`` of their user.
    pairs: Mapping[str, Mapping[str, set[str]]]


class Folded:
    """The changes of one write: one entry per user, group, link and membership."""

    def __init__(
        self, changes: Iterable[tuple[Event, Sequence[Change]]], known_links: Mapping[str, None]
    ) -> None:
        """:param changes: in the order of their arrival."""
        self.subjects: dict[str, dict[str, Subject]] = {USERS: {}, GROUPS: {}}
        self.pairs: dict[str, dict[str, Pair]] = {LINKS: {}, MEMBERSHIPS: {}}
        self.dropped = 0
        # What must be read first; also for a link that an event of this write seems to forbid:
        # that event may turn out to be a repeat of one with other contents.
        self._strangers: set[str] = set()
        self._owners: dict[str, set[str]] = {LINKS: set(), MEMBERSHIPS: set()}
        for event, ones in changes:
            version = (event.timestamp, event.message_id, event.origin)
            for change in ones:
                self._add(event.workspace_id, version, change, known_links)

    def __bool__(self) -> bool:
        return any(self.subjects.values()) or any(self.pairs.values())

    def _add(
        self, workspace: str, version: Version, change: Change, known_links: Mapping[str, None]
    ) -> None:
        match change:
            case Seen(user):
                self._subject(USERS, workspace, user, version)
            case UserTraits(user, traits):
                _win(self._subject(USERS, workspace, user, version), traits, version)
            case GroupTraits(group, traits):
                _win(self._subject(GROUPS, workspace, group, version), traits, version)
            case Membership(user, group, assigned):
                key = pair_id(workspace, user, group)
                self._owners[MEMBERSHIPS].add(own_id(workspace, user))
                known = self.pairs[MEMBERSHIPS].get(key)
                if known is None or known.version < version:
                    self.pairs[MEMBERSHIPS][key] = Pair(workspace, user, group, version, assigned)
            case Link(user, anonymous):
                key = pair_id(workspace, user, anonymous)
                if key in known_links:
                    return
                stranger = own_id(workspace, anonymous)
                self._strangers.add(stranger)
                self._owners[LINKS].add(own_id(workspace, user))
                # Only what nobody is known by; users that came earlier in this write too.
                if stranger not in self.subjects[USERS]:
                    self.pairs[LINKS].setdefault(key, Pair(workspace, user, anonymous))

    def _subject(self, collection: str, workspace: str, name: str, version: Version) -> Subject:
        at = version[0]
        key = own_id(workspace, name)
        subject = self.subjects[collection].get(key)
        if subject is None:
            subject = self.subjects[collection][key] = Subject(workspace, name, at, at)
        else:
            subject.first, subject.last = min(subject.first, at), max(subject.last, at)
        return subject

    # ------------------------------------------------------------------------- what to look at
    def wanted_traits(self, collection: str) -> list[str]:
        """:return: ids of the users or groups that must be read first: for the limits, and (users)
        because an anonymous id that is a known user's is not linked."""
        wanted = {key for key, one in self.subjects[collection].items() if one.traits}
        if collection == USERS:
            wanted |= self._strangers
        return sorted(wanted)

    def wanted_pairs(self, collection: str) -> list[str]:
        """:return: ids of the users whose links or memberships must be counted."""
        return sorted(self._owners[collection])

    # ----------------------------------------------------------------------------- statements
    def statements(
        self,
        known: Known,
        limits: ProfileLimits,
        identifiers: Mapping[str, frozenset[str]],
    ) -> dict[str, list[dict[str, Any]]]:
        """:return: collection → update statements; ``dropped`` counts what a limit forbids."""
        found: dict[str, list[dict[str, Any]]] = {}
        for collection, subjects in self.subjects.items():
            for key, subject in subjects.items():
                registers = self._registers(
                    subject,
                    known.traits[collection].get(key, {}),
                    limits,
                    identifiers.get(subject.workspace, frozenset())
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
        for key, pair in self._within(LINKS, known, limits.links).items():
            # Also one that was read: whoever wrote it may not have waited until it was durable.
            fields = {"workspaceId": pair.workspace, "anonymousId": pair.other}
            found.setdefault(LINKS, []).append(
                {"q": _place(key, pair), "u": {"$setOnInsert": fields}, "upsert": True}
            )
        for key, pair in self._within(MEMBERSHIPS, known, limits.memberships).items():
            fields = {"workspaceId": pair.workspace, "groupId": pair.other}
            register = _register(pair.version, {"v": pair.assigned})
            found.setdefault(MEMBERSHIPS, []).append(
                {
                    "q": _place(key, pair),
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
        count, total = len(stored), sum(size for _, size in stored.values())
        registers: dict[str, Any] = {}
        for trait, (version, value) in subject.traits.items():
            before, size = stored.get(trait), trait_size(trait, value)
            # A later value that was read may not be durable: $max leaves it, should it stay.
            if before is None or before[0] <= version:
                was = 0 if before is None else before[1]
                if (before is None and count >= limits.traits) or (
                    size > was and total - was + size > limits.trait_bytes
                ):
                    self.dropped += 1
                    continue
                count += before is None
                total += size - was
            register = _register(version, encode_value(value))
            if trait in identifiers:
                looked_up = identifier_value(trait, value)
                if looked_up is not None:
                    register["i"] = own_id(subject.workspace, looked_up)
            registers[f"traits.{escape_key(trait)}"] = register
        return registers

    def _within(self, collection: str, known: Known, most: int) -> dict[str, Pair]:
        """:return: the links or memberships that the limit allows."""
        counts = {owner: len(ids) for owner, ids in known.pairs[collection].items()}
        allowed = {}
        for key, pair in self.pairs[collection].items():
            if key not in known.pairs[collection].get(pair.owner, ()):
                if (
                    collection == LINKS
                    and own_id(pair.workspace, pair.other) in known.traits[USERS]
                ):
                    continue
                if counts.get(pair.owner, 0) >= most:
                    self.dropped += 1
                    continue
                counts[pair.owner] = counts.get(pair.owner, 0) + 1
            allowed[key] = pair
        return allowed


def _win(subject: Subject, traits: Mapping[str, Any], version: Version) -> None:
    for trait, value in traits.items():
        known = subject.traits.get(trait)
        if known is None or known[0] < version:
            subject.traits[trait] = (version, value)


def _place(key: str, pair: Pair) -> dict[str, Any]:
    """:return: the query for a link or a membership. The user follows from the ``_id``, and is the
    shard key that docs/scaling.md names: MongoDB below 7.1 inserts nothing without it."""
    return {"_id": key, "user": pair.owner}


def _register(version: Version, value: Mapping[str, Any]) -> dict[str, Any]:
    return {"t": DatetimeMS(version[0]), "m": version[1], "o": version[2], **value}


def version_of(register: Mapping[str, Any]) -> Version:
    """:return: the version of a stored register."""
    return (int(register["t"]), register["m"], register["o"])


def stored_traits(document: Mapping[str, Any]) -> dict[str, tuple[Version, int]]:
    """:return: trait → version and size, of a user or group as stored."""
    found = {}
    for key, register in document.get("traits", {}).items():
        trait = unescape_key(key)
        found[trait] = (version_of(register), trait_size(trait, decode_value(register)))
    return found


def seen_statement(workspace: str, user: str, at: int) -> dict[str, Any]:
    """:return: the statement that makes a user exist."""
    return {
        "q": {"_id": own_id(workspace, user)},
        "u": {
            "$max": {"updatedAt": DatetimeMS(at)},
            "$min": {"createdAt": DatetimeMS(at)},
            "$setOnInsert": {"workspaceId": workspace, "userId": user},
        },
        "upsert": True,
    }
