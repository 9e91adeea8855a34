# SPDX-License-Identifier: Apache-2.0
"""The profile changes of one write, merged in memory: each register keeps its greatest version.

Pure functions; ``profiles.py`` compares the result with the stored profiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import orjson

from engage.api import (
    Change,
    Event,
    GroupTraits,
    Link,
    Membership,
    RemovedTraits,
    Seen,
    UserTraits,
    identifier_value,
)

from ..schema import GROUP, USER

#: A user or a group: (workspace, kind, name).
Subject = tuple[str, int, str]
#: (timestamp, message id, origin): the greatest wins.
Version = tuple[int, str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """:class:`UserTraits`, :class:`RemovedTraits` or :class:`GroupTraits`.

    Each value is compact JSON, or ``None`` if the trait is removed.
    """

    kind: int
    name: str
    traits: Mapping[str, bytes | None]


EncodedChange = Seen | Traits | Membership | Link


def encode(change: Change) -> EncodedChange:
    """Return a change with the values of its traits in the form in which they are stored."""
    if isinstance(change, UserTraits):
        return Traits(USER, change.user_id, _encoded(change.traits))
    if isinstance(change, RemovedTraits):
        return Traits(USER, change.user_id, dict.fromkeys(change.traits))
    if isinstance(change, GroupTraits):
        return Traits(GROUP, change.group_id, _encoded(change.traits))
    return change


def _encoded(traits: Mapping[str, Any]) -> dict[str, bytes]:
    return {trait: orjson.dumps(value) for trait, value in traits.items()}


@dataclasses.dataclass(slots=True)
class FoldedChanges:
    """The changes of one write: one entry per user, group, trait, membership and link."""

    #: First and last timestamp.
    seen: dict[Subject, tuple[int, int]] = dataclasses.field(default_factory=dict)
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
    links: dict[tuple[Subject, str], None] = dataclasses.field(default_factory=dict)


def fold(
    changes: Iterable[tuple[Event, Sequence[EncodedChange]]],
    known_links: Container[tuple[Subject, str]],
    identifiers: Mapping[str, Collection[str]],
) -> FoldedChanges:
    """Return the changes of a write, folded.

    :param changes: events with their changes, in order of arrival.
    :param known_links: links that are known to be stored; they are left out.
    :param identifiers: workspace id → the traits by which its users are looked up.
    """
    folded = FoldedChanges()
    for event, event_changes in changes:
        workspace, at = event.workspace_id, event.timestamp
        version = (at, event.message_id, event.origin)
        for change in event_changes:
            match change:
                case Seen(user):
                    _extend(folded.seen, (workspace, USER, user), at)
                case Traits(kind, name, traits):
                    subject = (workspace, kind, name)
                    if kind == GROUP:
                        _extend(folded.seen, subject, at)
                    for trait, value in traits.items():
                        _keep_greatest(folded.traits, (subject, trait), version, value)
                    if kind == USER:
                        for trait in identifiers.get(workspace, ()):
                            if trait in traits:
                                _claim(folded, subject, trait, traits[trait], version, event)
                case Membership(user, group, assigned):
                    register = ((workspace, USER, user), group)
                    _keep_greatest(folded.memberships, register, version, assigned)
                case Link(user, anonymous):
                    link = ((workspace, USER, user), anonymous)
                    # An anonymous id that is the id of a user is not linked. That user may also
                    # appear earlier in this write.
                    if link not in known_links and (workspace, USER, anonymous) not in folded.seen:
                        folded.links[link] = None
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
    if known is None or known[0] < version:
        registers[key] = (version, value)
