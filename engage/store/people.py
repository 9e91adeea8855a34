# SPDX-License-Identifier: Apache-2.0
"""People: users with the visitors that belong to them, merged when they are read.

See :func:`engage.api.merge`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, Final, TypeVar

import orjson

from engage import api
from engage.api import (
    MAX_CANDIDATES,
    MAX_USERS,
    TRUSTED,
    GroupProfile,
    Page,
    Registers,
    StoredLink,
    Subject,
    UserProfile,
    VisitorProfile,
    identifier_value,
)
from engage.store.pages import NUMBER, cursor_of, page, place_of
from engage.store.profiles import (
    CLAIMS,
    GROUP,
    IDENTIFIER_HEADS,
    IDENTIFIERS,
    KIND_OF,
    KNOWN_LINKS,
    LINKS,
    MEMBERSHIPS,
    PERSONS,
    PROFILES,
    REMOVED,
    TRAITS,
    USER,
    VALUES,
    VISITOR,
    Identifier,
    LinkRow,
    Person,
    Profile,
    delete_profiles,
    first_users,
    may_expire,
    owners,
    profiles,
)
from engage.store.tables import (
    MAX_PAGE_BYTES,
    Context,
    Delete,
    Get,
    Pages,
    Remember,
    Row,
    Steps,
    Under,
    plan,
)

Item = TypeVar("Item")
_by_first: Final = attrgetter("first")
#: Users that are read at once: as many as SQLite looks up with one statement.
_STEP: Final = 256
#: A user, the linked anonymous ids, and the visitors that are merged, by their links.
_User = tuple[Profile, Sequence[str], Sequence[Profile]]


def _profile(row: Row) -> Profile:
    return Profile(*row)


def _with_visitors(users: Sequence[Profile]) -> Steps[list[_User]]:
    """Return users with what is linked to them, and the visitors that belong to them."""
    linked = [one.person for one in users if one.links]
    if not linked:
        return [(user, (), ()) for user in users]
    links = {
        user: sorted([link for link in map(LinkRow._make, rows) if link.counts], key=_by_first)
        for user, rows in (yield Under(LINKS, linked)).items()
    }
    ids = {(link.workspace, VISITOR, link.anonymous_id) for some in links.values() for link in some}
    stored = {one.visitor: one for one in (yield from profiles(ids))}
    first = yield from first_users(stored)
    most = (yield Context()).profile_limits.user_visitors
    found: dict[Person, tuple[Sequence[str], Sequence[Profile]]] = {}
    for user, mine in links.items():
        visitors = [stored[link.visitor] for link in mine if first.get(link.visitor) == user]
        found[user] = [link.anonymous_id for link in mine], visitors[:most]
    return [(user, *found.get(user.person, ((), ()))) for user in users]


# ------------------------------------------------------------------------------------------ reading
def _decoded(value: bytes) -> Any:
    return api.REMOVED if value == REMOVED else orjson.loads(value)


_Rows = Mapping[Person, Sequence[Row]]


def _groups(people: Iterable[Profile]) -> Steps[_Rows]:
    """Read memberships."""
    members = [one.person for one in people if one.memberships]
    return (yield Under(MEMBERSHIPS, members)) if members else {}


def _joined(groups: _Rows, person: Person) -> list[str]:
    """Return the groups of which somebody is a member."""
    return sorted([group for *_, group, _, _, _, on in groups.get(person, ()) if on])


def _registers(one: Profile, traits: _Rows, groups: _Rows) -> Registers:
    """Return what is stored of a user or a visitor."""
    first, last = one.times
    person = one.person
    return Registers(
        id=one.name,
        created_at=first,
        updated_at=last,
        # By their names, each with its version first.
        traits={
            name: (at, message_id, origin, value)
            for _, _, _, name, at, value, message_id, origin, _ in traits.get(person, ())
        },
        groups={row[3]: row[4:] for row in groups.get(person, ())},
        decode=_decoded,
    )


def _merged(people: Sequence[_User]) -> Steps[list[UserProfile]]:
    """Merge users with their visitors. Most users have none, and need no versions."""
    context = yield Context()
    alone = [user for user, _, visitors in people if not visitors]
    together = [one for user, _, visitors in people if visitors for one in (user, *visitors)]
    values = yield Under(VALUES, [one.person for one in alone])
    traits = yield Under(TRAITS, [one.person for one in together])
    groups = yield from _groups((*alone, *together))
    users = []
    for user, names, visitors in people:
        space, person = user.workspace, user.person
        declared = context.identifiers.get(space, ())
        if visitors:
            own, *others = (_registers(one, traits, groups) for one in (user, *visitors))
            users.append(api.merge(space, own, names, others, context.profile_limits, declared))
            continue
        current, times, trusted = _values(values[person])
        first, last = user.times
        users.append(
            UserProfile(
                workspace_id=space,
                user_id=user.name,
                created_at=first,
                updated_at=last,
                anonymous_ids=sorted(names),
                groups=_joined(groups, person),
                traits=current,
                trait_times=times,
                certain=api.certain_of({**current, **trusted}, declared) if trusted else {},
            )
        )
    return users


def _values(rows: Sequence[Row]) -> tuple[dict[str, Any], dict[str, int], dict[str, Any]]:
    """Return traits, when each was set, and those that engage sets."""
    values, times, trusted = {}, {}, {}
    for _, _, _, trait, at, value in rows:
        if trait.startswith(TRUSTED):
            trusted[trait] = _decoded(value)
        elif value != REMOVED:
            values[trait] = orjson.loads(value)
            times[trait] = at
    return values, times, trusted


def _of_kind(kind: int, workspace_id: str | None) -> dict[str, Any]:
    return {"kind": kind} | ({} if workspace_id is None else {"workspace": workspace_id})


@plan()
def profile(workspace_id: str, user_id: str) -> Steps[UserProfile | None]:
    """Return a user, or ``None`` if the user does not exist."""
    people = yield from users(workspace_id, [user_id])
    return next(iter((yield from _merged(people))), None)


def users(workspace_id: str, ids: Sequence[str]) -> Steps[list[_User]]:
    """Return the users of these ids that exist."""
    found = yield from profiles([(workspace_id, USER, name) for name in ids])
    return (yield from _with_visitors([one for one in found if one.exists]))


@plan()
def certain(workspace_id: str, user_id: str) -> Steps[dict[str, str | None]]:
    """Return the identifiers of a user that no visitor set, with those that are certain."""
    declared = (yield Context()).identifiers.get(workspace_id, ())
    names = [*declared, *(f"{TRUSTED}:{trait}" for trait in declared)]
    rows = yield Get(VALUES, [(workspace_id, USER, user_id, name) for name in names])
    own = {row[3]: _decoded(row[-1]) for row in rows.values() if row[-1] != REMOVED}
    return {**dict.fromkeys(own), **api.certain_of(own, declared)}


@plan()
def scan_users(workspace_id: str | None, after: str | None, limit: int) -> Steps[Page[UserProfile]]:
    """Return a page of users, in the order in which they were made."""
    equal, place = _of_kind(USER, workspace_id), place_of(after, NUMBER)
    rows, place, more = yield Pages(PROFILES, limit, equal=equal, after=place)
    users: list[UserProfile] = []
    size = 0
    existing = [one for one in starmap(Profile, rows) if one.exists]
    for step in _steps(existing):
        people = yield from _with_visitors(step)
        for count, (user, _, visitors) in enumerate(people, 1):
            size += user.trait_bytes
            for one in visitors:
                size += one.trait_bytes
            if size > MAX_PAGE_BYTES:
                users += yield from _merged(people[:count])
                return Page(users, cursor_of((user.number,)))
        users += yield from _merged(people)
    return Page(users, cursor_of(place) if more else None)


def _steps(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[start : start + _STEP] for start in range(0, len(items), _STEP))


@plan()
def visitor(workspace_id: str, anonymous_id: str) -> Steps[VisitorProfile | None]:
    """Return a visitor, or ``None`` if it does not exist."""
    found = yield from profiles([(workspace_id, VISITOR, anonymous_id)])
    return next(iter((yield from _visitors(found))), None)


@plan()
def scan_visitors(
    workspace_id: str | None, after: str | None, limit: int
) -> Steps[Page[VisitorProfile]]:
    """Return a page of visitors, in the order in which they were made."""
    equal = _of_kind(VISITOR, workspace_id)
    found = yield from page(_profile, PROFILES, equal, after, limit)
    return Page((yield from _visitors(found.items)), found.cursor)


def _visitors(visitors: Sequence[Profile]) -> Steps[list[VisitorProfile]]:
    owner = yield from owners([one.visitor for one in visitors])
    values = yield Under(VALUES, [one.person for one in visitors])
    groups = yield from _groups(visitors)
    found = []
    for one in visitors:
        user = owner.get(one.visitor)
        current, times, _ = _values(values[one.person])
        first, last = one.times
        found.append(
            VisitorProfile(
                workspace_id=one.workspace,
                anonymous_id=one.name,
                user_id=None if user is None else user.name,
                created_at=first,
                updated_at=last,
                groups=_joined(groups, one.person),
                traits=current,
                trait_times=times,
            )
        )
    return found


@plan()
def scan_groups(
    workspace_id: str | None, after: str | None, limit: int
) -> Steps[Page[GroupProfile]]:
    """Return a page of groups, in the order in which they were made."""
    equal = _of_kind(GROUP, workspace_id)
    found = yield from page(_profile, PROFILES, equal, after, limit)
    stored = yield Under(VALUES, [one.person for one in found.items])
    groups = []
    for one in found.items:
        traits, *_ = _values(stored[one.person])
        groups.append(GroupProfile(workspace_id=one.workspace, group_id=one.name, traits=traits))
    return Page(groups, found.cursor)


# ----------------------------------------------------------------------------- by their identifiers
def _candidates(workspace_id: str, trait: str, value: str, *kinds: int) -> Steps[list[Identifier]]:
    """Return the identifiers of those who have a value, oldest claim first: of each kind, those
    that are examined."""
    by, equal = IDENTIFIERS.indexes[0], {"workspace": workspace_id, "trait": trait, "value": value}
    found = yield Pages(IDENTIFIERS, MAX_CANDIDATES, by, equal)
    rows = [row for row in starmap(Identifier, found.rows) if row.kind in kinds]
    if found.more:
        rows = []
        for kind in kinds:
            found = yield Pages(IDENTIFIERS, MAX_CANDIDATES, by, {**equal, "kind": kind})
            rows += starmap(Identifier, found.rows)
    return sorted(rows, key=attrgetter("claimed_at"))


@plan()
def find_users(workspace_id: str, trait: str, values: Sequence[str]) -> Steps[dict[str, list[str]]]:
    """Return the users who have one of these values: value → user ids, oldest claim first."""
    found = {}
    for value in values:
        if users := (yield from _having(workspace_id, trait, value)):
            found[value] = users
    return found


def _having(workspace_id: str, trait: str, value: str) -> Steps[list[str]]:
    """Return the users whose value wins, oldest claim first."""
    candidates = yield from _candidates(workspace_id, trait, value, USER, VISITOR)
    limits = (yield Context()).profile_limits
    users: list[str] = []
    seen: set[Person] = set()
    for start in range(0, len(candidates), MAX_USERS):
        step = candidates[start : start + MAX_USERS]
        own = yield from profiles([one.person for one in step if one.kind == USER])
        owner = yield from owners([(x.workspace, x.name) for x in step if x.kind == VISITOR])
        found_users = {one.person: one for one in own if one.exists}
        rows = {}
        for one in step:
            if one.kind == USER:
                user = found_users.get(one.person)
            else:
                user = owner.get((one.workspace, one.name))
            if user is not None and user.person not in seen:
                seen.add(user.person)
                rows[user.person] = user
        people = yield from _with_visitors([*rows.values()])
        everyone = [one for user, _, visitors in people for one in (user, *visitors)]
        stored = yield Get(TRAITS, [(*one.person, trait) for one in everyone])
        traits = {key[:3]: [row] for key, row in stored.items()}
        for user, _, visitors in people:
            some = [_registers(one, traits, {}) for one in (user, *visitors)]
            won = api.winner(trait, some[0], some[1:], limits)
            if identifier_value(trait, won) == value:
                users.append(user.name)
        if len(users) >= MAX_USERS:
            break
    return users[:MAX_USERS]


@plan()
def find_visitors(
    workspace_id: str, trait: str, values: Sequence[str]
) -> Steps[dict[str, list[str]]]:
    """Return the visitors without a user: value → anonymous ids, oldest claim first."""
    found = {}
    for value in values:
        some = yield from _candidates(workspace_id, trait, value, VISITOR)
        owner = yield from owners([(workspace_id, one.name) for one in some])
        alone = [one.name for one in some if (workspace_id, one.name) not in owner]
        if alone:
            found[value] = alone[:MAX_USERS]
    return found


@plan()
def holders(
    workspace_id: str, trait: str, value: str, after: str | None, limit: int
) -> Steps[Page[Subject]]:
    """Return a page of the users and visitors who have a value."""
    equal = {"workspace": workspace_id, "trait": trait, "value": value}
    found = yield from page(
        Identifier._make, IDENTIFIERS, equal, after, limit, by=IDENTIFIERS.indexes[0]
    )
    return Page([Subject(KIND_OF[one.kind], one.name) for one in found.items], found.cursor)


@plan()
def users_beginning(
    workspace_id: str, trait: str | None, text: str, limit: int
) -> Steps[list[str]]:
    """Return the ids of users of which the id, or an identifier, has a beginning."""
    equal: dict[str, Any] = {"workspace": workspace_id, "kind": USER}
    table, by = PERSONS, PERSONS.columns
    if trait is not None:
        equal["trait"] = trait
        table, by = IDENTIFIER_HEADS, IDENTIFIERS.indexes[0][:3]
    end = text + chr(sys.maxunicode)
    found = yield Pages(table, limit, by, equal, low=text, high=end)
    return [name for _, _, name, *_ in found.rows]


@plan()
def identifier_history(
    workspace_id: str, trait: str, ids: Sequence[str]
) -> Steps[dict[str, list[str]]]:
    """Return the values of a trait that users have or had, by each of these ids."""
    people = yield from users(workspace_id, ids)
    keys = [(*one.person, trait) for user, _, visitors in people for one in (user, *visitors)]
    current = yield Get(IDENTIFIER_HEADS, keys)
    earlier = yield Under(CLAIMS, keys)
    found: dict[str, list[str]] = {}
    for user, _, visitors in people:
        mine = [(*one.person, trait) for one in (user, *visitors)]
        values = {current[key][-1] for key in mine if key in current}
        values.update(value for key in mine for *_, value, _ in earlier[key])
        if values:
            found[user.name] = [*values]
    return found


# ----------------------------------------------------------------------------------------- links
@plan()
def links_to(workspace_id: str, anonymous_id: str) -> Steps[list[tuple[str, int]]]:
    """Return the links to an anonymous id that count, the first one first: user and time."""
    equal = {"workspace": workspace_id, "anonymous_id": anonymous_id}
    found = yield Pages(LINKS, 1000, by=LINKS.indexes[0], equal={**equal, "undone": 0}, low=0)
    return [(one.name, one.received_at or 0) for one in map(LinkRow._make, found.rows)]


@plan()
def linked_to(workspace_id: str, user_id: str) -> Steps[list[str]]:
    """Return the anonymous ids of a user."""
    user = (workspace_id, USER, user_id)
    found = yield Under(LINKS, [user])
    return [one.anonymous_id for one in map(LinkRow._make, found[user]) if one.counts]


@plan()
def scan_links(after: str | None, limit: int) -> Steps[Page[StoredLink]]:
    """Return a page of links; see :meth:`~engage.api.VerifiableStore.scan_links`."""
    found = yield from page(LinkRow._make, LINKS, {}, after, limit)
    links = [
        StoredLink(
            workspace_id=one.workspace,
            user_id=one.name,
            anonymous_id=one.anonymous_id,
            first=one.first,
            counts=not one.undone,
        )
        for one in found.items
    ]
    return Page(links, found.cursor)


# --------------------------------------------------------------------------------------- deleting
@plan()
def old_visitors(
    before: int, after: str | None, limit: int
) -> Steps[tuple[list[Person], str | None]]:
    """Return those of a page of visitors that may be deleted, and its cursor.

    :param limit: the maximum number of visitors of the page.
    """
    page = yield Pages(PROFILES, limit, equal={"kind": VISITOR}, after=place_of(after, NUMBER))
    old = yield from may_expire([*_changed_before(before, page.rows)])
    return [one.person for one in old], cursor_of(page.place) if page.more else None


def _changed_before(before: int, rows: Iterable[Row]) -> Iterator[Profile]:
    return (one for one in starmap(Profile, rows) if (one.changed_at or 0) < before)


@plan(frees=True)
def delete_visitors(visitors: Sequence[Person], before: int) -> Steps[int]:
    """Delete those visitors that may still be deleted, and return how many.

    :param visitors: the result of :func:`old_visitors`, which may have read an earlier state.
    """
    stored = yield Get(PROFILES, visitors)
    old = yield from may_expire([*_changed_before(before, stored.values())])
    yield from delete_profiles([one.person for one in old])
    return len(old)


@plan(repeatable=False, frees=True, overwrites=True)
def erase(workspace_id: str, kind: int, name: str) -> Steps[bool]:
    """Erase a user or a visitor, and return whether there was one."""
    stored = yield Get(PROFILES, [(workspace_id, kind, name)])
    for person in stored:
        links = yield Under(LINKS, [person])
        yield Delete(LINKS, [row[: LINKS.key] for row in links[person]])
    yield from delete_profiles([*stored])
    yield Remember(KNOWN_LINKS, None)
    # Somebody of whom there are only links is no user yet.
    return any(one.exists for one in starmap(Profile, stored.values()))
