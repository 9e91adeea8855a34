# SPDX-License-Identifier: Apache-2.0
"""The merge of the events of one user, visitor or group."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from engage.api import (
    REMOVED,
    Change,
    Kind,
    LinkDecision,
    Membership,
    ProfileLimits,
    Registers,
    RemovedTraits,
    Traits,
    Version,
    Versioned,
)

__all__ = ["Fold", "Link", "View", "plain", "view_of"]


def plain(change: Change) -> tuple[str, Any]:
    """Return what a change does to a user, visitor or group, as plain values."""
    if isinstance(change, Traits):
        return "traits", change.traits
    if isinstance(change, RemovedTraits):
        return "removed", list(change.names)
    if isinstance(change, Membership):
        return "membership", (change.group_id, change.assigned)
    return "seen", None


@dataclasses.dataclass(slots=True)
class Fold:
    """The merge of some events."""

    #: ``None``: no event made it exist.
    created_at: int | None = None
    updated_at: int = 0
    #: When the first of the events was received.
    received_at: int | None = None
    #: Trait → version and, unless it is removed, the value, in a tuple.
    traits: dict[str, Versioned] = dataclasses.field(default_factory=dict)
    groups: dict[str, Versioned] = dataclasses.field(default_factory=dict)
    #: Trait → the size of its largest value so far.
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def copy(self) -> Fold:
        """Return another one, with the same events so far."""
        traits, groups, sizes = {**self.traits}, {**self.groups}, {**self.sizes}
        return dataclasses.replace(self, traits=traits, groups=groups, sizes=sizes)

    def add(
        self,
        version: Version,
        received_at: int,
        change: tuple[str, Any],
        limits: ProfileLimits,
        declared: Collection[str],
    ) -> None:
        """Add a change of an event; see :func:`plain`."""
        what, value = change
        at = version[0]
        if self.received_at is None or received_at < self.received_at:
            self.received_at = received_at
        if what == "seen":
            self.created_at = at if self.created_at is None else min(at, self.created_at)
            self.updated_at = max(at, self.updated_at)
        elif what == "traits":
            for name, one in value.items():
                known = self.traits.get(name)
                if known is None or known[3] != (one,):
                    size = limits.size(name, one, declared)
                    self.sizes[name] = max(size, self.sizes.get(name, 0))
                if known is None or known[:3] <= version:
                    self.traits[name] = (*version, (one,))
        elif what == "removed":
            for name in value:
                known = self.traits.get(name)
                if known is None or known[:3] <= version:
                    self.traits[name] = (*version, ())
        else:
            group, assigned = value
            if group not in self.groups or self.groups[group][:3] <= version:
                self.groups[group] = (*version, assigned)

    def registers(self, name: str) -> Registers:
        """Return it in the form of :func:`engage.api.merge`.

        :param name: the id.
        """
        return Registers(
            id=name,
            created_at=self.created_at or 0,
            updated_at=self.updated_at,
            traits=self.traits,
            groups=self.groups,
            decode=_decoded,
        )

    def may_exceed(
        self, kind: Kind, limits: ProfileLimits, traits: Mapping[str, Any], groups: Collection[str]
    ) -> bool:
        """Return whether a limit may have been reached at any time: which changes were dropped then
        depends on the order in which the events arrived.

        :param traits: those that the profile has.
        :param groups: the same.
        """
        most, most_bytes, memberships = limits.of(kind)
        sizes = {name: limits.size(name, value, ()) for name, value in traits.items()}
        for name, size in self.sizes.items():
            sizes[name] = max(size, sizes.get(name, 0))
        return (
            len(sizes) > most
            or sum(sizes.values()) > most_bytes
            or len(self.groups.keys() | set(groups)) > memberships
        )


@dataclasses.dataclass(slots=True)
class Link:
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

    @staticmethod
    def decision(change: Change) -> bool | None:
        """Return the decision of a change, if it is one."""
        return change.counts if isinstance(change, LinkDecision) else None


@dataclasses.dataclass(slots=True, kw_only=True)
class View:
    """A profile with the times of its values, in the same form for every kind."""

    created_at: int | None = None
    updated_at: int = 0
    traits: Mapping[str, Any]
    #: Trait → time, also of those that are removed; empty if it is not known.
    trait_times: Mapping[str, int] = dataclasses.field(default_factory=dict)
    groups: Collection[str] = ()
    group_times: Mapping[str, int] = dataclasses.field(default_factory=dict)
    anonymous_ids: Collection[str] = ()
    left_out: int = 0


def view_of(profile: Any, merged: Sequence[Registers] = ()) -> View:
    """Return the view of a profile.

    :param merged: the registers that it was merged from, if they are known.
    """
    times = _latest(one.traits for one in merged)
    return View(
        created_at=getattr(profile, "created_at", None),
        updated_at=getattr(profile, "updated_at", 0),
        traits=profile.traits,
        trait_times=times if merged else getattr(profile, "trait_times", {}),
        groups=getattr(profile, "groups", ()),
        group_times=_latest(one.groups for one in merged),
        anonymous_ids=getattr(profile, "anonymous_ids", ()),
        left_out=getattr(profile, "left_out", 0),
    )


def _decoded(value: tuple[Any, ...]) -> Any:
    return value[0] if value else REMOVED


def _latest(registers: Iterable[Mapping[str, Versioned]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in registers:
        for name, (at, *_) in one.items():
            found[name] = max(at, found.get(name, at))
    return found
