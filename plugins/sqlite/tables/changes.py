# SPDX-License-Identifier: Apache-2.0
"""The profile changes of one write, merged in memory: each register keeps its greatest version.

Pure functions; ``profiles.py`` compares the result with the stored profiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from engage import api
from engage.api import (
    Change,
    Event,
    Kind,
    Link,
    LinkDecision,
    Membership,
    RemovedTraits,
    Seen,
    Version,
    identifier_value,
)

from ..schema import GROUP, USER, VISITOR

#: A user, a visitor or a group: (workspace, kind, name).
Subject = tuple[str, int, str]
#: A user, and an anonymous id.
Pair = tuple[Subject, str]

#: Their numbers in the tables.
KINDS: Final = {Kind.USER: USER, Kind.VISITOR: VISITOR, Kind.GROUP: GROUP}
KIND_OF: Final = {number: kind for kind, number in KINDS.items()}

#: The value of a trait that is removed. No other value begins with a space.
REMOVED: Final = b" null"


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
    seen: dict[Subject, tuple[int, int]] = dataclasses.field(default_factory=dict)
    #: Visitor → when the last event was received.
    visited: dict[Subject, int] = dataclasses.field(default_factory=dict)
    #: The value is ``None`` if the trait is removed.
    traits: dict[tuple[Subject, str], tuple[Version, bytes | None]] = dataclasses.field(
        default_factory=dict
    )
    #: Of the declared identifier traits: (user, trait, value) → least time of receipt, in order of
    #: arrival. Each value is in the form in which users are looked up.
    claims: dict[tuple[Subject, str, str], int] = dataclasses.field(default_factory=dict)
    #: The form of the greatest value in ``traits``, or ``None`` if no user can be looked up by it.
    forms: dict[tuple[Subject, str], str | None] = dataclasses.field(default_factory=dict)
    memberships: dict[tuple[Subject, str], tuple[Version, bool]] = dataclasses.field(
        default_factory=dict
    )
    #: The first of the events that made the link: received at, message id, origin.
    links: dict[Pair, Version] = dataclasses.field(default_factory=dict)
    #: An operator's: whether the link does not count.
    decisions: dict[Pair, tuple[Version, bool]] = dataclasses.field(default_factory=dict)


def fold(
    changes: Iterable[tuple[Event, Sequence[EncodedChange]]],
    known_links: Mapping[Pair, int],
    identifiers: Mapping[str, Collection[str]],
) -> FoldedChanges:
    """Return the changes of a write, folded.

    :param changes: events with their changes, in order of arrival.
    :param known_links: links that are stored, and when the first event was received; later links
        are left out.
    :param identifiers: workspace id → the traits by which its users are looked up.
    """
    folded = FoldedChanges()
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
                    for trait, value in traits.items():
                        _keep_greatest(folded.traits, (subject, trait), version, value)
                    if subject[1] != GROUP:
                        for trait in identifiers.get(workspace, ()):
                            if trait in traits:
                                _claim(folded, subject, trait, traits[trait], version, event)
                case Membership(kind, name, group, assigned):
                    register = ((workspace, KINDS[kind], name), group)
                    _keep_greatest(folded.memberships, register, version, assigned)
                case Link(user, anonymous):
                    link = ((workspace, USER, user), anonymous)
                    known = known_links.get(link)
                    if known is None or event.received_at <= known:
                        first = (event.received_at, event.message_id, event.origin)
                        folded.links[link] = min(first, folded.links.get(link, first))
                case LinkDecision(user, anonymous, counts):
                    pair = ((workspace, USER, user), anonymous)
                    _keep_greatest(folded.decisions, pair, version, not counts)
    return folded


def _claim(
    folded: FoldedChanges,
    subject: Subject,
    trait: str,
    encoded: bytes | None,
    version: Version,
    event: Event,
) -> None:
    value = None if encoded is None else identifier_value(trait, orjson.loads(encoded))
    if folded.traits[subject, trait][0] == version:
        folded.forms[subject, trait] = value
    if value is not None:
        claim, at = (subject, trait, value), event.received_at
        folded.claims[claim] = min(at, folded.claims.get(claim, at))


def _extend(seen: dict[Subject, tuple[int, int]], subject: Subject, at: int) -> None:
    first, last = seen.get(subject, (at, at))
    seen[subject] = (min(first, at), max(last, at))


def _keep_greatest(
    registers: dict[Any, tuple[Version, Any]], key: Any, version: Version, value: Any
) -> None:
    known = registers.get(key)
    # Of two changes of one event, the second wins.
    if known is None or known[0] <= version:
        registers[key] = (version, value)
