# SPDX-License-Identifier: Apache-2.0
"""The merge of the events of one user, visitor or group, and of one link."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from engage.api import REMOVED, TRUSTED, Kind, ProfileLimits, Registers, Version, Versioned

__all__ = ["EMPTY", "Fold", "LinkFold", "View", "view_of"]

_NEVER: Final = sys.maxsize


def _decoded(value: tuple[Any, ...]) -> Any:
    return value[0] if value else REMOVED


@dataclasses.dataclass(kw_only=True)
class Fold(Registers):
    """The merge of some events. The value of a trait is in a tuple, which is empty if the trait is
    removed."""

    id: str = ""
    #: The least timestamp of the events that made it exist.
    created_at: int = _NEVER
    updated_at: int = 0
    traits: dict[str, Versioned] = dataclasses.field(default_factory=dict)
    groups: dict[str, Versioned] = dataclasses.field(default_factory=dict)
    decode: Any = _decoded
    #: When the first of the events was received.
    received_at: int = _NEVER
    #: Trait → the size of its largest value so far.
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def exists(self) -> bool:
        """Whether an event made it."""
        return self.created_at != _NEVER

    def copy(self) -> Fold:
        """Return another one, with the same events so far."""
        traits, groups, sizes = {**self.traits}, {**self.groups}, {**self.sizes}
        return dataclasses.replace(self, traits=traits, groups=groups, sizes=sizes)

    def add(
        self,
        version: Version,
        received_at: int,
        what: tuple[bool, Mapping[str, Any], Mapping[str, bool]],
        limits: ProfileLimits,
        declared: Collection[str],
    ) -> None:
        """Add an event.

        :param what: whether it makes the subject exist; trait → value, as above; group → whether
            it is assigned.
        """
        seen, traits, groups = what
        self.received_at = min(received_at, self.received_at)
        if seen:
            self.created_at = min(version[0], self.created_at)
            self.updated_at = max(version[0], self.updated_at)
        for name, value in traits.items():
            known = self.traits.get(name)
            if value and (known is None or known[3] != value):
                size = limits.size(name, orjson.dumps(value[0]), identifies=name in declared)
                self.sizes[name] = max(size, self.sizes.get(name, 0))
            if known is None or known[:3] <= version:
                self.traits[name] = (*version, value)
        for group, assigned in groups.items():
            if group not in self.groups or self.groups[group][:3] <= version:
                self.groups[group] = (*version, assigned)

    def may_exceed(self, kind: Kind, limits: ProfileLimits, actual: View) -> bool:
        """Return whether a limit may have been reached at any time: which changes were dropped then
        depends on the order in which the events arrived.

        :param actual: the profile.
        """
        most, most_bytes, memberships = limits.of(kind)
        sizes = {
            name: limits.size(name, orjson.dumps(value), identifies=False)
            for name, value in actual.traits.items()
        }
        for name, size in self.sizes.items():
            sizes[name] = max(size, sizes.get(name, 0))
        return (
            len(sizes) > most
            or sum(sizes.values()) > most_bytes
            or len(self.groups.keys() | set(actual.groups)) > memberships
        )


@dataclasses.dataclass(slots=True)
class LinkFold:
    """The merge of the events that link an anonymous id to a user."""

    first: Version | None = None
    decided: tuple[Version, bool] = ((0, "", ""), True)

    def add(self, version: Version, decision: bool | None) -> None:
        """Add an event.

        :param version: for a link, with the time of receipt; for a decision, with the timestamp.
        :param decision: what an operator decided; ``None``: it is a link.
        """
        if decision is not None:
            self.decided = max(self.decided, (version, decision))
        elif self.first is None or version < self.first:
            self.first = version


class View(NamedTuple):
    """A profile with the times of its values, in the same form for every kind."""

    traits: Mapping[str, Any]
    created_at: int | None = None
    updated_at: int = 0
    #: Trait → time, also of those that are removed; empty if it is not known.
    trait_times: Mapping[str, int] = {}
    groups: Sequence[str] = ()
    group_times: Mapping[str, int] = {}
    anonymous_ids: Sequence[str] = ()
    left_out: int = 0


#: A profile of which there is nothing.
EMPTY: Final = View({})


def view_of(profile: Any, merged: Sequence[Registers] = ()) -> View:
    """Return the view of a profile.

    :param merged: the registers that it was merged from, if they are known.
    """
    times: dict[str, int] = {}
    group_times: dict[str, int] = {}
    for one in merged:
        for found, registers in ((times, one.traits), (group_times, one.groups)):
            for name, (at, *_) in registers.items():
                found[name] = max(at, found.get(name, at))
    certain = getattr(profile, "certain", {})
    return View(
        {**profile.traits, **{f"{TRUSTED}:{name}": value for name, value in certain.items()}},
        getattr(profile, "created_at", None),
        getattr(profile, "updated_at", 0),
        times if merged else dict(getattr(profile, "trait_times", ())),
        list(getattr(profile, "groups", ())),
        group_times,
        list(getattr(profile, "anonymous_ids", ())),
        getattr(profile, "left_out", 0),
    )
