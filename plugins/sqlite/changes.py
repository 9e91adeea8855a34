# SPDX-License-Identifier: Apache-2.0
"""The changes of one write, folded in memory: of each register only the greatest version is left.

Pure; what it comes to is compared with what is stored in ``profiles.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import orjson

from engage.api import Change, Event, GroupTraits, Link, Membership, Seen, UserTraits

from .schema import GROUP, USER

#: (workspace, kind, name)
Subject = tuple[str, int, str]
#: (timestamp, message id, origin): the greatest wins.
Version = tuple[int, str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """:class:`UserTraits` or :class:`GroupTraits` with each value as compact JSON."""

    kind: int
    name: str
    traits: Mapping[str, bytes]


EncodedChange = Seen | Traits | Membership | Link


def encode(change: Change) -> EncodedChange:
    """:return: the change, with the values of traits as they are stored."""
    if isinstance(change, UserTraits):
        return Traits(USER, change.user_id, _encoded(change.traits))
    if isinstance(change, GroupTraits):
        return Traits(GROUP, change.group_id, _encoded(change.traits))
    return change


def _encoded(traits: Mapping[str, Any]) -> dict[str, bytes]:
    return {trait: orjson.dumps(value) for trait, value in traits.items()}


@dataclasses.dataclass(slots=True)
class Folded:
    """The changes of one write, folded per register."""

    seen: dict[Subject, tuple[int, int]] = dataclasses.field(default_factory=dict)
    traits: dict[tuple[Subject, str], tuple[Version, bytes]] = dataclasses.field(
        default_factory=dict
    )
    memberships: dict[tuple[Subject, str], tuple[Version, bool]] = dataclasses.field(
        default_factory=dict
    )
    links: dict[tuple[Subject, str], None] = dataclasses.field(default_factory=dict)


def fold(
    changes: Iterable[tuple[Event, Sequence[EncodedChange]]],
    known_links: Container[tuple[Subject, str]],
) -> Folded:
    """Fold the changes of a write.

    :param changes: in the order of their arrival.
    :param known_links: links that are stored for certain: they need not be looked for.
    """
    folded = Folded()
    for event, ones in changes:
        workspace, at = event.workspace_id, event.timestamp
        version = (at, event.message_id, event.origin)
        for change in ones:
            match change:
                case Seen(user):
                    _widen(folded.seen, (workspace, USER, user), at)
                case Traits(kind, name, traits):
                    subject = (workspace, kind, name)
                    if kind == GROUP:
                        _widen(folded.seen, subject, at)
                    for trait, value in traits.items():
                        _win(folded.traits, (subject, trait), version, value)
                case Membership(user, group, assigned):
                    _win(folded.memberships, ((workspace, USER, user), group), version, assigned)
                case Link(user, anonymous):
                    link = ((workspace, USER, user), anonymous)
                    # Only what nobody is known by; users of this write that came earlier too.
                    if link not in known_links and (workspace, USER, anonymous) not in folded.seen:
                        folded.links[link] = None
    return folded


def _widen(seen: dict[Subject, tuple[int, int]], subject: Subject, at: int) -> None:
    first, last = seen.get(subject, (at, at))
    seen[subject] = (min(first, at), max(last, at))


def _win(registers: dict[Any, tuple[Version, Any]], key: Any, version: Version, value: Any) -> None:
    known = registers.get(key)
    if known is None or known[0] < version:
        registers[key] = (version, value)
