# SPDX-License-Identifier: Apache-2.0
"""One person: a user and the visitors that belong to it, merged when they are read.

A visitor belongs to the user of its first link that counts: the one with the least
``(received_at, message id, origin)``. Nothing is copied from a visitor to a user. So nothing has to
be taken back when an earlier link arrives late, or when an operator undoes one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api.events import TRUSTED, identifier_value
from engage.api.profiles import UserProfile
from engage.api.storage import ProfileLimits

__all__ = [
    "REMOVED",
    "Registers",
    "Version",
    "Versioned",
    "certain_of",
    "merge",
    "winner",
]

#: Orders the values of a register: timestamp, message id, origin. The greatest wins.
Version = tuple[int, str, str]

#: A version and the value, in one tuple; a storage may have more after them. Two of one name never
#: have the same version, so comparing the tuples compares the versions.
Versioned = tuple[Any, ...]

#: Returns the value.
_value: Final = operator.itemgetter(3)

#: The value of a trait that an operator removed.
REMOVED: Final = object()


def _as_it_is(value: Any) -> Any:
    return value


# Not frozen: the ``__init__`` of a frozen class takes longer, and a page has thousands.
@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Registers:
    """What is stored of one user or visitor."""

    id: str
    created_at: int
    updated_at: int
    #: Trait → version and value.
    traits: Mapping[str, Versioned]
    #: Group id → version, and whether the subject is a member.
    groups: Mapping[str, Versioned]
    #: Returns what the stored value of a trait means, which may be :data:`REMOVED`. It is called
    #: for the values that win only.
    decode: Callable[[Any], Any] = _as_it_is


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
    own = {
        name: user.decode(_value(user.traits[name]))
        for trait in identifiers
        for name in (trait, f"{TRUSTED}:{trait}")
        if name in user.traits
    }
    values, times = _decoded(_greatest([person.traits for person in everyone]), user.decode)
    members = _greatest([person.groups for person in everyone])
    groups = sorted([name for name, register in members.items() if _value(register)])
    left_out = 0
    # The whole is larger than the sum of the sizes, so nearly always all have room.
    if visitors and (len(values) > limits.traits or len(orjson.dumps(values)) > limits.trait_bytes):
        names = _in_order(person.traits for person in everyone)
        kept = _within(
            {name: values[name] for name in names if name in values}, limits, identifiers
        )
        left_out = len(values) - len(kept)
        values, times = kept, {name: times[name] for name in kept}
    if visitors and len(groups) > limits.memberships:
        left_out += len(groups) - limits.memberships
        names = _in_order(person.groups for person in everyone)
        groups = sorted([name for name in names if _value(members[name])][: limits.memberships])
    return UserProfile(
        workspace_id=workspace_id,
        user_id=user.id,
        created_at=user.created_at,
        updated_at=max([person.updated_at for person in everyone]),
        anonymous_ids=sorted(anonymous_ids),
        groups=groups,
        left_out=left_out,
        traits=values,
        trait_times=times,
        certain=certain_of(own, identifiers),
    )


def certain_of(own: Mapping[str, Any], identifiers: Iterable[str]) -> dict[str, str]:
    """Return the identifiers that surely are a user's: those of which a server key or a trusted
    provider gave the present value last.

    :param own: the values of the user's own traits, without those of visitors, but with those that
        engage sets (:data:`~engage.api.events.TRUSTED`).
    :param identifiers: the traits by which the users of the workspace are looked up.
    :return: trait → value in the form of :func:`~engage.api.events.identifier_value`.
    """
    return {
        trait: form
        for trait in identifiers
        if isinstance(form := own.get(f"{TRUSTED}:{trait}"), str)
        and form == identifier_value(trait, own.get(trait))
    }


def winner(
    trait: str, user: Registers, visitors: Sequence[Registers], limits: ProfileLimits
) -> Any:
    """Return the value of one trait after :func:`merge`; :data:`REMOVED` if there is none.

    Only for a declared identifier: any other trait may be left out.
    """
    everyone = (user, *visitors[: limits.user_visitors])
    versions = [person.traits[trait] for person in everyone if trait in person.traits]
    return user.decode(_value(max(versions))) if versions else REMOVED


def _greatest(registers: Sequence[Mapping[str, Versioned]]) -> Mapping[str, Versioned]:
    """Return the greatest version of each name."""
    if len(registers) == 1:
        return registers[0]
    greatest = dict(registers[0])
    for other in registers[1:]:
        for name, register in other.items():
            if name not in greatest or greatest[name] < register:
                greatest[name] = register
    return greatest


def _decoded(
    traits: Mapping[str, Versioned], decode: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the traits that are not removed, and when each was set."""
    values, times = {}, {}
    for name, register in traits.items():
        value = decode(_value(register))
        if value is not REMOVED and not name.startswith(TRUSTED):
            values[name] = value
            times[name] = register[0]
    return values, times


def _in_order(registers: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Return the names in the order in which they get room: those of the first one in alphabetical
    order, then the others of the second one, and so on."""
    return dict.fromkeys(name for named in registers for name in sorted(named))


def _within(
    values: Mapping[str, Any], limits: ProfileLimits, identifiers: Collection[str]
) -> dict[str, Any]:
    """Return the traits that have room, in their order."""
    kept, count, total = {}, 0, 0
    for name, value in values.items():
        size = limits.size(name, orjson.dumps(value), identifies=name in identifiers)
        if not size or (count < limits.traits and total + size <= limits.trait_bytes):
            count += bool(size)
            total += size
            kept[name] = value
    return kept
