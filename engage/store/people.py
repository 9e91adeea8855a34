# SPDX-License-Identifier: Apache-2.0
"""People: users with the visitors that belong to them, merged when they are read.

See :func:`engage.api.merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from engage import api
from engage.api import (
    TRUSTED,
    GroupProfile,
    Kind,
    Page,
    Registers,
    StoredLink,
    UserProfile,
    Version,
    VisitorProfile,
)
from engage.store.keys import is_text
from engage.store.pages import NUMBER, cursor_of, page, place_of
from engage.store.profiles import (
    GROUP,
    IDENTIFIERS,
    KINDS,
    KNOWN_LINKS,
    LINKS,
    MEMBERSHIPS,
    PROFILES,
    REMOVED,
    TRAITS,
    USER,
    VALUES,
    VISITOR,
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
    Executor,
    Get,
    Pages,
    Put,
    Remember,
    Row,
    Steps,
    Table,
    Under,
    plan,
)

Item = TypeVar("Item")
_by_first: Final = attrgetter("first")
#: Users that are read at once: as many as SQLite looks up with one statement.
_STEP: Final = 256
#: Users and visitors, by their ids.
Profiles = tuple[Mapping[str, UserProfile], Mapping[str, VisitorProfile]]
#: A user, the linked anonymous ids, and the visitors that are merged, by their links.
_User = tuple[Profile, Sequence[str], Sequence[Profile]]
#: The row of a user, visitor or group, and those of its traits and memberships.
PersonRows = tuple[Row, Sequence[Row], Sequence[Row]]


def _profile(row: Row) -> Profile:
    return Profile(*row)


def with_visitors(users: Sequence[Profile]) -> Steps[list[_User]]:
    """Return users with what is linked to them, and the visitors that belong to them."""
    linked = [user.person for user in users if user.links]
    if not linked:
        return [(user, (), ()) for user in users]
    links = {
        user: sorted([link for link in map(LinkRow._make, rows) if link.counts], key=_by_first)
        for user, rows in (yield Under(LINKS, linked)).items()
    }
    ids = {(link.workspace, VISITOR, link.anonymous_id) for some in links.values() for link in some}
    stored = {profile.visitor: profile for profile in (yield from profiles(ids))}
    first = yield from first_users(stored)
    most = (yield Context()).profile_limits.user_visitors
    theirs: dict[Person, tuple[Sequence[str], Sequence[Profile]]] = {}
    for user, mine in links.items():
        visitors = [stored[link.visitor] for link in mine if first.get(link.visitor) == user]
        theirs[user] = [link.anonymous_id for link in mine], visitors[:most]
    return [(user, *theirs.get(user.person, ((), ()))) for user in users]


# ------------------------------------------------------------------------------------------ reading
def _decoded(value: bytes) -> Any:
    return api.REMOVED if value == REMOVED else orjson.loads(value)


_Rows = Mapping[Person, Sequence[Row]]


def _groups(people: Iterable[Profile]) -> Steps[_Rows]:
    """Read memberships."""
    members = [profile.person for profile in people if profile.memberships]
    return (yield Under(MEMBERSHIPS, members)) if members else {}


def _joined(groups: _Rows, person: Person) -> list[str]:
    """Return the groups of which somebody is a member."""
    return sorted([group for *_, group, _, _, _, on in groups.get(person, ()) if on])


def registers(profile: Profile, traits: _Rows, groups: _Rows) -> Registers:
    """Return what is stored of a user or a visitor."""
    first, last = profile.times
    person = profile.person
    return Registers(
        id=profile.name,
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
    together = [who for user, _, visitors in people if visitors for who in (user, *visitors)]
    values = yield Under(VALUES, [profile.person for profile in alone])
    traits = yield Under(TRAITS, [profile.person for profile in together])
    groups = yield from _groups((*alone, *together))
    users = []
    for user, names, visitors in people:
        space, person = user.workspace, user.person
        declared = context.identifiers.get(space, ())
        if visitors:
            own, *others = (registers(profile, traits, groups) for profile in (user, *visitors))
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
    stored = yield from profiles([(workspace_id, USER, name) for name in ids])
    return (yield from with_visitors([profile for profile in stored if profile.exists]))


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
    existing = [profile for profile in starmap(Profile, rows) if profile.exists]
    for step in _steps(existing):
        people = yield from with_visitors(step)
        for count, (user, _, visitors) in enumerate(people, 1):
            size += user.trait_bytes
            for profile in visitors:
                size += profile.trait_bytes
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
    stored = yield from profiles([(workspace_id, VISITOR, anonymous_id)])
    return next(iter((yield from _visitors(stored))), None)


@plan()
def people(
    workspace_id: str,
    ids: Sequence[str],
    names: Collection[str],
    linked: int | None = None,
    after: str = "",
) -> Steps[Profiles]:
    """Return those users and visitors that exist.

    :param linked: how many visitors that are linked to each user to return too, of those with an
        anonymous id greater than ``after``; ``None``: all.
    """
    merged = yield from _merged((yield from users(workspace_id, [*filter(is_text, ids)])))
    links = [[name for name in user.anonymous_ids if name > after][:linked] for user in merged]
    named = {name for some in (filter(is_text, names), *links) for name in some}
    stored = yield from profiles([(workspace_id, VISITOR, name) for name in named])
    visitors = yield from _visitors(stored)
    return {user.user_id: user for user in merged}, {x.anonymous_id: x for x in visitors}


@plan()
def scan_visitors(
    workspace_id: str | None, after: str | None, limit: int
) -> Steps[Page[VisitorProfile]]:
    """Return a page of visitors, in the order in which they were made."""
    equal = _of_kind(VISITOR, workspace_id)
    part = yield from page(_profile, PROFILES, equal, after, limit)
    return Page((yield from _visitors(part.items)), part.cursor)


def _visitors(visitors: Sequence[Profile]) -> Steps[list[VisitorProfile]]:
    owner = yield from owners([profile.visitor for profile in visitors])
    values = yield Under(VALUES, [profile.person for profile in visitors])
    groups = yield from _groups(visitors)
    made = []
    for profile in visitors:
        user = owner.get(profile.visitor)
        current, times, _ = _values(values[profile.person])
        first, last = profile.times
        made.append(
            VisitorProfile(
                workspace_id=profile.workspace,
                anonymous_id=profile.name,
                user_id=None if user is None else user.name,
                created_at=first,
                updated_at=last,
                groups=_joined(groups, profile.person),
                traits=current,
                trait_times=times,
            )
        )
    return made


@plan()
def scan_groups(
    workspace_id: str | None, after: str | None, limit: int
) -> Steps[Page[GroupProfile]]:
    """Return a page of groups, in the order in which they were made."""
    equal = _of_kind(GROUP, workspace_id)
    part = yield from page(_profile, PROFILES, equal, after, limit)
    stored = yield Under(VALUES, [row.person for row in part.items])
    groups = []
    for row in part.items:
        traits, *_ = _values(stored[row.person])
        groups.append(GroupProfile(workspace_id=row.workspace, group_id=row.name, traits=traits))
    return Page(groups, part.cursor)


@plan()
def scan_rows(kind: int, after: str | None, limit: int) -> Steps[Page[PersonRows]]:
    """Return a page of people as they are stored; see
    :meth:`~engage.store.facade.Storage.scan_rows`."""
    rows, place, more = yield Pages(
        PROFILES, limit, equal={"kind": kind}, after=place_of(after, NUMBER)
    )
    people, size = [], 0
    for profile in starmap(Profile, rows):
        people.append(profile)
        size += profile.trait_bytes
        if size > MAX_PAGE_BYTES:
            place, more = (profile.number,), True
            break
    traits = yield Under(TRAITS, [profile.person for profile in people])
    groups = yield from _groups(people if kind != GROUP else ())
    items = [(who.row, traits[who.person], groups.get(who.person, ())) for who in people]
    return Page(items, cursor_of(place) if more else None)


# ----------------------------------------------------------------------------------------- links
@plan()
def links_to(workspace_id: str, anonymous_id: str) -> Steps[list[tuple[str, int]]]:
    """Return the links to an anonymous id that count, the first one first: user and time."""
    equal = {"workspace": workspace_id, "anonymous_id": anonymous_id}
    part = yield Pages(LINKS, 1000, by=LINKS.indexes[0], equal={**equal, "undone": 0}, low=0)
    return [(link.name, link.received_at or 0) for link in map(LinkRow._make, part.rows)]


@plan()
def linked_to(workspace_id: str, user_id: str) -> Steps[list[str]]:
    """Return the anonymous ids of a user."""
    user = (workspace_id, USER, user_id)
    rows = yield Under(LINKS, [user])
    return [link.anonymous_id for link in map(LinkRow._make, rows[user]) if link.counts]


@plan()
def scan_links(after: str | None, limit: int) -> Steps[Page[StoredLink]]:
    """Return a page of links; see :meth:`~engage.store.facade.Storage.scan_links`."""
    part = yield from page(LinkRow._make, LINKS, {}, after, limit)
    links = [
        StoredLink(
            workspace_id=link.workspace,
            user_id=link.name,
            anonymous_id=link.anonymous_id,
            first=link.first,
            counts=not link.undone,
        )
        for link in part.items
    ]
    return Page(links, part.cursor)


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
    return [profile.person for profile in old], cursor_of(page.place) if page.more else None


def _changed_before(before: int, rows: Iterable[Row]) -> Iterator[Profile]:
    return (profile for profile in starmap(Profile, rows) if (profile.changed_at or 0) < before)


@plan(frees=True)
def delete_visitors(visitors: Sequence[Person], before: int) -> Steps[int]:
    """Delete those visitors that may still be deleted, and return how many.

    :param visitors: the result of :func:`old_visitors`, which may have read an earlier state.
    """
    stored = yield Get(PROFILES, visitors)
    old = yield from may_expire([*_changed_before(before, stored.values())])
    return (yield from delete_profiles([profile.person for profile in old]))


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
    return any(profile.exists for profile in starmap(Profile, stored.values()))


# -------------------------------------------------------------------------------------- repairing
class Wrong(NamedTuple):
    """What is stored of somebody, and no event made it."""

    #: Trait → version.
    traits: dict[str, Version]
    #: Group id → version.
    memberships: dict[str, Version]
    #: Anonymous id → the first event of the link.
    links: dict[str, Version]
    #: The times of the first and the last event, as they are stored and as they should be.
    stored_times: tuple[int, int] | None = None
    times: tuple[int, int] | None = None


def _delete_wrong(
    table: Table, person: Person, versions: Mapping[str, Version], version: Callable[[Row], Any]
) -> Steps[tuple[list[Row], list[Row]]]:
    """Delete the rows of some names that still have these versions, and return them and the
    rest."""
    gone, left = list[Row](), list[Row]()
    for row in (yield Under(table, [person]))[person]:
        is_wrong = row[3] in versions and version(row) == versions[row[3]]
        (gone if is_wrong else left).append(row)
    yield Delete(table, [row[:4] for row in gone])
    return gone, left


def forget(person: Person, wrong: Wrong) -> Steps[None]:
    """Delete what is wrong, unless it was changed meanwhile, and count what is left."""
    yield Remember(KNOWN_LINKS, None)
    stored = yield Get(PROFILES, [person])
    if person not in stored:
        return
    new = Profile(*stored[person])
    gone, traits = yield from _delete_wrong(TRAITS, person, wrong.traits, itemgetter(4, 6, 7))
    yield Delete(IDENTIFIERS, [row[:4] for row in gone])
    _, groups = yield from _delete_wrong(
        MEMBERSHIPS, person, wrong.memberships, itemgetter(4, 5, 6)
    )
    gone, links = yield from _delete_wrong(
        LINKS, person, wrong.links, lambda row: LinkRow(*row).first
    )
    # The event of an operator's decision may be gone.
    decided = [link for link in starmap(LinkRow, gone) if any(link.decision[0])]
    yield Put(LINKS, [(*link[:4], None, "", "", *link[7:]) for link in decided])
    if wrong.stored_times == (new.created_at, new.updated_at):
        new.created_at, new.updated_at = wrong.times or (None, None)
    new.traits, new.trait_bytes = sum(row[-1] > 0 for row in traits), sum(row[-1] for row in traits)
    new.memberships = len(groups)
    new.links = sum(row[4] is not None for row in links)
    if new.exists or traits or groups or links or decided:
        yield Put(PROFILES, [new.row])
    else:
        yield from delete_profiles([person])


# --------------------------------------------------------------------------------------- storage
class People(Executor):
    """Users, visitors and groups. What writes events applies their changes.

    What the events of one person change is kept apart: the user's registers, and those of each
    visitor. A user that the storage returns is merged from them by :func:`engage.api.merge`; see
    ``profiles.py`` for which visitors belong to it.

    Profiles have limits (:class:`ProfileLimits`). An event that exceeds one is stored, but its
    change is dropped and counted in :attr:`dropped_changes`.
    A declared identifier trait (:attr:`StorageContext.identifiers`) does not count, unless its
    value is larger than :attr:`ProfileLimits.identifier_bytes`: it always has room.

    At :attr:`ProfileLimits.visitors`, a new visitor replaces one that :meth:`expire_visitors` could
    delete and that has no trait :data:`~engage.api.events.TRUSTED`: the least recently changed, and
    first of those without a declared identifier. A storage may examine a bounded number for a
    write, and the visitors of one write need not replace each other.
    """

    #: Where the next call of :meth:`expire_visitors` continues.
    _expired: str | None = None

    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """Return the user, or ``None`` if no event made the user exist."""
        if not is_text(user_id):
            return None
        return await self.read(profile, workspace_id, user_id)

    async def certain(self, workspace_id: str, user_id: str) -> Mapping[str, str | None]:
        """Return which identifiers of a user are certain.

        A signed link calls this, so a storage should read only the user's own identifiers.

        :return: each identifier that a user has → its value if it is in
            :attr:`UserProfile.certain`, else ``None``. Other traits may be among them.
        """
        return await self.read(certain, workspace_id, user_id)

    async def visitor(self, workspace_id: str, anonymous_id: str) -> VisitorProfile | None:
        """Return the visitor, or ``None`` if no event made it exist."""
        if not is_text(anonymous_id):
            return None
        return await self.read(visitor, workspace_id, anonymous_id)

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        """Return one page of all users, in any order; each user once."""
        return await self.read(scan_users, workspace_id, after, limit)

    async def scan_visitors(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[VisitorProfile]:
        """Return one page of all visitors, in any order; each visitor once."""
        return await self.read(scan_visitors, workspace_id, after, limit)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        """Return one page of all groups, in any order; each group once."""
        return await self.read(scan_groups, workspace_id, after, limit)

    async def expire_visitors(self, before: int, *, limit: int) -> int:
        # Reading plans look for them, because most visitors may belong to users.
        """Delete visitors that belong to no user, have no subscription choice, and were changed by
        no event received since ``before``.

        :param before: milliseconds since 1970 UTC.
        :param limit: the maximum number of visitors, so that one call never stalls writes.
        :return: how many were deleted.
        """
        old: list[Person] = []
        while len(old) < limit:
            part, self._expired = await self.read(
                old_visitors, before, self._expired, limit - len(old)
            )
            old += part
            if self._expired is None:
                break
        return await self.run(delete_visitors, old, before) if old else 0

    async def erase_profile(self, workspace_id: str, kind: Kind, name: str) -> bool:
        """Erase a user or a visitor with its traits and memberships, a user also with its links and
        what is known of its choices, and return whether there was one.

        What the storage remembers of it, in any process, must not change what later events do: see
        :meth:`settle`.
        """
        if not is_text(name):
            return False
        return await self.run(erase, workspace_id, KINDS[kind], name)

    async def links_to(self, workspace_id: str, anonymous_id: str) -> Sequence[tuple[str, int]]:
        """Return the links to an anonymous id that count, the first one first, at most 1000: the id
        of the user, whether it exists or not, and when the event that made the link was received.
        """
        if not is_text(anonymous_id):
            return []
        return await self.read(links_to, workspace_id, anonymous_id)

    async def linked_to(self, workspace_id: str, user_id: str) -> Sequence[str]:
        """Return the anonymous ids of the links of a user that count, whether it exists or not."""
        if not is_text(user_id):
            return []
        return await self.read(linked_to, workspace_id, user_id)

    async def scan_rows(self, kind: Kind, *, after: str | None, limit: int) -> Page[PersonRows]:
        """Return one page of all users, visitors or groups as they are stored, not merged, with
        those of whom there are only links; each once."""
        return await self.read(scan_rows, KINDS[kind], after, limit)

    async def scan_links(self, *, after: str | None, limit: int) -> Page[StoredLink]:
        """Return one page of all links and decisions, in any order; each once."""
        return await self.read(scan_links, after, limit)
