# SPDX-License-Identifier: Apache-2.0
"""One person: a user and the visitors that belong to it, merged when they are read.

A visitor belongs to the user of its first link that counts: the one with the least
``(received_at, message id, origin)``. Nothing is copied from a visitor to a user. So nothing has to
be taken back when an earlier link arrives late, or when an operator undoes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson

from engage.api.profiles import UserProfile, VisitorProfile
from engage.api.storage import ProfileLimits

__all__ = ["REMOVED", "Registers", "Version", "merge", "visitor_of", "winner"]

Value = TypeVar("Value")

#: Orders the values of a register: timestamp, message id, origin. The greatest wins.
Version = tuple[int, str, str]

#: The value of a trait that an operator removed.
REMOVED: Final = object()


# Not frozen: the ``__init__`` of a frozen class takes longer, and a page has thousands.
@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Registers:
    """What is stored of one user or visitor."""

    id: str
    created_at: int
    updated_at: int
    #: Trait → version and value, which may be :data:`REMOVED`.
    traits: Mapping[str, tuple[Version, Any]]
    #: Group id → version, and whether the subject is a member.
    groups: Mapping[str, tuple[Version, bool]]


def merge(
    workspace_id: str,
    user: Registers,
    anonymous_ids: Iterable[str],
    visitors: Sequence[Registers],
    limits: ProfileLimits,
    identifiers: Collection[str],
) -> UserProfile:
    """Return a user with the visitors that belong to it: for each name, the greatest version.

    :param anonymous_ids: all that are linked.
    :param visitors: in the order of their links; those after the first ``limits.user_visitors``
        are left out. Within ``limits.traits``, ``trait_bytes`` and ``memberships``, the names of
        the user come first, then those of each visitor, in alphabetical order.
    :param identifiers: the traits by which users are looked up; they have room in any case.
    """
    visitors = visitors[: limits.user_visitors]
    everyone = (user, *visitors)
    traits = _greatest([one.traits for one in everyone])
    values = _values(traits)
    members = _greatest([one.groups for one in everyone])
    groups = sorted(name for name, (_, member) in members.items() if member)
    left_out = 0
    # The whole is larger than the sum of the sizes, so nearly always all have room.
    if visitors and (len(values) > limits.traits or len(orjson.dumps(values)) > limits.trait_bytes):
        names = _in_order(one.traits for one in everyone)
        traits, left_out = _within({name: traits[name] for name in names}, limits, identifiers)
        values = _values(traits)
    if visitors and len(groups) > limits.memberships:
        left_out += len(groups) - limits.memberships
        names = _in_order(one.groups for one in everyone)
        groups = sorted([name for name in names if members[name][1]][: limits.memberships])
    return UserProfile(
        workspace_id=workspace_id,
        user_id=user.id,
        created_at=user.created_at,
        updated_at=max(one.updated_at for one in everyone),
        anonymous_ids=sorted(anonymous_ids),
        groups=groups,
        left_out=left_out,
        traits=values,
        trait_times=_times(traits),
    )


def visitor_of(workspace_id: str, visitor: Registers, user_id: str | None) -> VisitorProfile:
    """Return a visitor.

    :param user_id: the user that the visitor belongs to, if that user exists.
    """
    return VisitorProfile(
        workspace_id=workspace_id,
        anonymous_id=visitor.id,
        user_id=user_id,
        created_at=visitor.created_at,
        updated_at=visitor.updated_at,
        groups=sorted(name for name, (_, member) in visitor.groups.items() if member),
        traits=_values(visitor.traits),
        trait_times=_times(visitor.traits),
    )


def winner(
    trait: str, user: Registers, visitors: Sequence[Registers], limits: ProfileLimits
) -> Any:
    """Return the value of one trait after :func:`merge`; :data:`REMOVED` if there is none.

    Only for a declared identifier: any other trait may be left out.
    """
    everyone = (user, *visitors[: limits.user_visitors])
    found = [one.traits[trait] for one in everyone if trait in one.traits]
    return max(found, key=_version)[1] if found else REMOVED


def _version(register: tuple[Version, Any]) -> Version:
    return register[0]


def _greatest(
    registers: Sequence[Mapping[str, tuple[Version, Value]]],
) -> Mapping[str, tuple[Version, Value]]:
    """Return the greatest version of each name."""
    found = dict(registers[0])
    for one in registers[1:]:
        for name, register in one.items():
            if name not in found or found[name][0] < register[0]:
                found[name] = register
    return found


def _in_order(registers: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Return the names in the order in which they get room: those of the first one in alphabetical
    order, then the others of the second one, and so on."""
    return dict.fromkeys(name for one in registers for name in sorted(one))


def _within(
    traits: Mapping[str, tuple[Version, Any]], limits: ProfileLimits, identifiers: Collection[str]
) -> tuple[dict[str, tuple[Version, Any]], int]:
    """Return the traits that have room, in their order, and how many have none."""
    kept, count, total = {}, 0, 0
    for name, register in traits.items():
        size = 0 if register[1] is REMOVED else limits.size(name, register[1], identifiers)
        if not size or (count < limits.traits and total + size <= limits.trait_bytes):
            count += bool(size)
            total += size
            kept[name] = register
    return kept, len(traits) - len(kept)


def _values(traits: Mapping[str, tuple[Version, Any]]) -> dict[str, Any]:
    return {name: value for name, (_, value) in traits.items() if value is not REMOVED}


def _times(traits: Mapping[str, tuple[Version, Any]]) -> dict[str, int]:
    return {name: version[0] for name, (version, value) in traits.items() if value is not REMOVED}
