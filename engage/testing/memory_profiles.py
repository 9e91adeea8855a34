# SPDX-License-Identifier: Apache-2.0
"""Users, visitors and groups in memory: the shortest form of what a storage does with profiles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engage import api
from engage.api import Kind

from .memory_base import Memory, Profile, delete, of_workspace, page_by_key

__all__ = ["MemoryProfiles", "extended"]


class MemoryProfiles(Memory, api.ProfileStore):
    """Users, visitors and groups, merged from the stored events."""

    def apply_changes(self, event: api.Event) -> None:
        for change in api.changes_of(event):
            match change:
                case api.Link(user_id=user) | api.LinkDecision(user_id=user):
                    self._link(
                        self.stored.profile(event.workspace_id, Kind.USER, user), change, event
                    )
                case _:
                    key = (event.workspace_id, change.kind, change.id)
                    if change.kind is Kind.VISITOR and key not in self.stored.profiles:
                        known = sum(one[:2] == key[:2] for one in self.stored.profiles)
                        most = self.context.profile_limits.visitors
                        if known >= most and not self._make_room(event.workspace_id):
                            # Once for each event; its group exists nevertheless.
                            self.dropped_changes += isinstance(change, api.Seen)
                            continue
                    self._apply(self.stored.profile(*key), change, event)

    def _make_room(self, workspace_id: str) -> bool:
        """Delete the visitor that gives way to a new one, and return whether there was one."""
        declared = self._identifiers(workspace_id)
        free = [
            (
                any(api.identifier_value(name, one.values().get(name)) for name in declared),
                one.changed_at,
                one.id,
            )
            for one in self._of_kind(workspace_id, Kind.VISITOR)
            if self._belongs_to_nobody(one) and api.TRUSTED not in one.traits
        ]
        if free:
            del self.stored.profiles[workspace_id, Kind.VISITOR, min(free)[-1]]
        return bool(free)

    def _belongs_to_nobody(self, visitor: Profile) -> bool:
        """Return whether a visitor belongs to no user, and made no choice."""
        subject = (visitor.workspace_id, api.Subject(visitor.kind, visitor.id))
        owner = self._owner(visitor.workspace_id, visitor.id)
        return owner is None and all(key[:2] != subject for key in self.stored.choices)

    def _link(self, user: Profile, change: api.Link | api.LinkDecision, event: api.Event) -> None:
        name = change.anonymous_id
        if isinstance(change, api.LinkDecision):
            version = _version(event)
            if name not in user.decisions or user.decisions[name][0] < version:
                user.decisions[name] = (version, change.counts)
        elif name not in user.links and len(user.links) >= self.context.profile_limits.links:
            self.dropped_changes += 1
        else:
            first = (event.received_at, event.message_id, event.origin)
            user.links[name] = min(first, user.links.get(name, first))

    def _apply(self, profile: Profile, change: api.Change, event: api.Event) -> None:
        *_, memberships = self.context.profile_limits.of(profile.kind)
        profile.changed_at = max(profile.changed_at, event.received_at)
        match change:
            case api.Seen():
                profile.times = extended(profile.times, event.timestamp)
            case api.Traits(_, _, traits):
                for name, value in traits.items():
                    self._set_trait(profile, name, value, _version(event))
                    form = api.identifier_value(name, value)
                    if form is not None and self._is_declared(profile, name):
                        profile.claim(name, form, event.received_at)
            case api.RemovedTraits(_, _, names):
                for name in names:
                    self._set_trait(profile, name, api.REMOVED, _version(event))
            case api.Membership(_, _, group, assigned):
                if group not in profile.groups and len(profile.groups) >= memberships:
                    self.dropped_changes += 1
                elif group not in profile.groups or profile.groups[group][0] <= _version(event):
                    profile.groups[group] = (_version(event), assigned)

    def _identifiers(self, workspace_id: str) -> Collection[str]:
        return self.context.identifiers.get(workspace_id, ())

    def _is_declared(self, profile: Profile, trait: str) -> bool:
        return profile.kind is not Kind.GROUP and trait in self._identifiers(profile.workspace_id)

    def _set_trait(self, profile: Profile, name: str, value: Any, version: api.Version) -> None:
        if name in profile.traits and profile.traits[name][0] > version:
            return
        limits, before = self.context.profile_limits, profile.sizes.get(name, 0)
        traits, trait_bytes, _ = limits.of(profile.kind)
        declared = self._identifiers(profile.workspace_id) if profile.kind is not Kind.GROUP else ()
        size = 0 if value is api.REMOVED else limits.size(name, value, declared)
        total = sum(profile.sizes.values()) - before + size
        if (size and not before and len(profile.sizes) >= traits) or (
            size > before and total > trait_bytes
        ):
            self.dropped_changes += 1
            return
        profile.traits[name] = (version, value)
        profile.sizes.pop(name, None)
        if size:
            profile.sizes[name] = size

    # ------------------------------------------------------------------------------- people
    def _user(self, workspace_id: str, name: str) -> Profile | None:
        """Return a user that exists: one that has only links does not."""
        found = self.contents().profiles.get((workspace_id, Kind.USER, name))
        if found is None or (found.times is None and found.chosen is None):
            return None
        return found

    def _visitor(self, workspace_id: str, name: str) -> Profile | None:
        return self.contents().profiles.get((workspace_id, Kind.VISITOR, name))

    def _owner(self, workspace_id: str, anonymous_id: str) -> Profile | None:
        """Return the user that a visitor belongs to, if that user exists."""
        firsts = [
            (links[anonymous_id], user.id)
            for user in self._of_kind(workspace_id, Kind.USER)
            if anonymous_id in (links := user.links_that_count())
        ]
        return self._user(workspace_id, min(firsts)[1]) if firsts else None

    def _visitors(self, user: Profile) -> list[Profile]:
        """Return the visitors that belong to a user, in the order of their links."""
        links = user.links_that_count()
        found = []
        for name in sorted(links, key=links.__getitem__):
            visitor = self._visitor(user.workspace_id, name)
            if visitor is not None and self._owner(user.workspace_id, name) is user:
                found.append(visitor)
        return found

    def _of_kind(self, workspace_id: str | None, kind: Kind) -> list[Profile]:
        wanted = of_workspace(workspace_id)
        known = self.contents().profiles.values()
        return [one for one in known if one.kind is kind and wanted(one)]

    def _merged(self, user: Profile) -> api.UserProfile:
        return api.merge(
            user.workspace_id,
            user.registers(),
            user.links_that_count(),
            [one.registers() for one in self._visitors(user)],
            self.context.profile_limits,
            self._identifiers(user.workspace_id),
        )

    def _visitor_profile(self, visitor: Profile) -> api.VisitorProfile:
        owner = self._owner(visitor.workspace_id, visitor.id)
        return api.visitor_of(
            visitor.workspace_id, visitor.registers(), None if owner is None else owner.id
        )

    async def profile(self, workspace_id: str, user_id: str) -> api.UserProfile | None:
        found = self._user(workspace_id, user_id)
        return None if found is None else self._merged(found)

    async def visitor(self, workspace_id: str, anonymous_id: str) -> api.VisitorProfile | None:
        found = self._visitor(workspace_id, anonymous_id)
        return None if found is None else self._visitor_profile(found)

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        claims: dict[str, list[tuple[int, str]]] = {}
        for user in self._of_kind(workspace_id, Kind.USER):
            if self._user(workspace_id, user.id) is not None and self._is_declared(user, trait):
                visitors = self._visitors(user)
                value = api.winner(
                    trait,
                    user.registers(),
                    [one.registers() for one in visitors],
                    self.context.profile_limits,
                )
                form = api.identifier_value(trait, value)
                everyone = [_claim(one, trait, form) for one in (user, *visitors)]
                if form is not None and form in values:
                    at = min(at for at in everyone if at is not None)
                    claims.setdefault(form, []).append((at, user.id))
        return _oldest(claims)

    async def identifier_history(
        self, workspace_id: str, trait: str, ids: Sequence[str]
    ) -> Mapping[str, Collection[str]]:
        found: dict[str, set[str]] = {}
        for name in ids:
            user = self._user(workspace_id, name)
            for one in () if user is None else (user, *self._visitors(user)):
                if trait in one.claims:
                    found.setdefault(name, set()).update(one.claims[trait])
        return found

    async def find_visitors(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        claims: dict[str, list[tuple[int, str]]] = {}
        for visitor in self._of_kind(workspace_id, Kind.VISITOR):
            if self._owner(workspace_id, visitor.id) is None:
                for value in values:
                    at = _claim(visitor, trait, value)
                    if at is not None and self._is_declared(visitor, trait):
                        claims.setdefault(value, []).append((at, visitor.id))
        return _oldest(claims)

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> api.Page[api.Subject]:
        found = {
            (one.kind.value, one.id): api.Subject(one.kind, one.id)
            for kind in (Kind.USER, Kind.VISITOR)
            for one in self._of_kind(workspace_id, kind)
            if self._is_declared(one, trait) and _claim(one, trait, value) is not None
        }
        return page_by_key(found, after, limit)

    async def users_beginning(
        self, workspace_id: str, text: str, *, trait: str | None = None, limit: int
    ) -> Sequence[str]:
        found = []
        for user in self._of_kind(workspace_id, Kind.USER):
            value = user.id if trait is None else user.values().get(trait)
            form = value if trait is None else api.identifier_value(trait, value)
            if form is not None and form.startswith(text):
                found.append(user.id)
        return found[:limit]

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.UserProfile]:
        wanted = of_workspace(workspace_id)
        page = self.contents().profiles.page(
            lambda one: (
                one.kind is Kind.USER
                and wanted(one)
                and self._user(one.workspace_id, one.id) is not None
            ),
            after,
            limit,
        )
        return api.Page([self._merged(one) for one in page.items], page.cursor)

    async def scan_visitors(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.VisitorProfile]:
        page = self._page(Kind.VISITOR, workspace_id, after, limit)
        return api.Page([self._visitor_profile(one) for one in page.items], page.cursor)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.GroupProfile]:
        page = self._page(Kind.GROUP, workspace_id, after, limit)
        found = [
            api.GroupProfile(workspace_id=one.workspace_id, group_id=one.id, traits=one.values())
            for one in page.items
        ]
        return api.Page(found, page.cursor)

    def _page(
        self, kind: Kind, workspace_id: str | None, after: str | None, limit: int
    ) -> api.Page[Profile]:
        wanted = of_workspace(workspace_id)
        return self.contents().profiles.page(
            lambda one: one.kind is kind and wanted(one), after, limit
        )

    async def expire_visitors(self, before: int, *, limit: int) -> int:
        old = [
            (one.workspace_id, one.kind, one.id)
            for one in self._of_kind(None, Kind.VISITOR)
            if one.changed_at < before and self._belongs_to_nobody(one)
        ]
        return delete(self.contents().profiles, old[:limit])

    async def erase_profile(self, workspace_id: str, kind: Kind, name: str) -> bool:
        return bool(delete(self.contents().profiles, [(workspace_id, kind, name)]))

    async def links_to(self, workspace_id: str, anonymous_id: str) -> Sequence[tuple[str, int]]:
        found = [
            (links[anonymous_id], user.id)
            for user in self._of_kind(workspace_id, Kind.USER)
            if anonymous_id in (links := user.links_that_count())
        ]
        return [(user, first[0]) for first, user in sorted(found)]

    async def linked_to(self, workspace_id: str, user_id: str) -> Sequence[str]:
        found = self.contents().profiles.get((workspace_id, Kind.USER, user_id))
        return [] if found is None else [*found.links_that_count()]

    async def reapply(self, events: Sequence[api.Event]) -> None:
        self.contents()
        for event in events:
            self.apply_changes(event)


def _version(event: api.Event) -> api.Version:
    return (event.timestamp, event.message_id, event.origin)


def extended(times: tuple[int, int] | None, at: int) -> tuple[int, int]:
    """Return the least and the greatest of some times and one more."""
    return (at, at) if times is None else (min(at, times[0]), max(at, times[1]))


def _claim(profile: Profile, trait: str, form: str | None) -> int | None:
    """Return when a profile claimed a value, if it has it now."""
    if form is None or api.identifier_value(trait, profile.values().get(trait)) != form:
        return None
    return profile.claims.get(trait, {}).get(form, 0)


def _oldest(claims: Mapping[str, list[tuple[int, str]]]) -> Mapping[str, Sequence[str]]:
    """Return the ids of each value, oldest claim first."""
    return {
        form: [name for _, name in sorted(found)[: api.MAX_USERS]] for form, found in claims.items()
    }
