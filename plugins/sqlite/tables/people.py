# SPDX-License-Identifier: Apache-2.0
"""People: users with the visitors that belong to them, merged when they are read.

A page takes one statement for the profiles, and for each step of them a few for their links, traits
and memberships.
"""

from __future__ import annotations

import heapq
import sqlite3
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final, TypeVar

import orjson

from engage import api
from engage.api import (
    MAX_CANDIDATES,
    MAX_USERS,
    TRUSTED,
    GroupProfile,
    ProfileLimits,
    Registers,
    Subject,
    UserProfile,
    VisitorProfile,
    identifier_value,
)

from ..connection import is_text, look_up
from ..schema import GROUP, USER, VISITOR
from .changes import KIND_OF, REMOVED
from .paging import Window

Item = TypeVar("Item")


def _exists(user: str) -> str:
    """Return a condition: an event or a choice made a user exist."""
    return f"({user}.created_at IS NOT NULL OR {user}.chosen_first IS NOT NULL)"


#: The number of the user to whom a visitor ``v`` was linked first.
_FIRST: Final = """(SELECT f.profile FROM links f
    WHERE f.workspace = v.workspace AND f.anonymous_id = v.name
    AND f.received_at IS NOT NULL AND f.undone = 0
    ORDER BY f.received_at, f.message_id, f.origin, f.profile LIMIT 1)"""
#: The number of the user that a visitor ``v`` belongs to.
_OWNER: Final = f"(SELECT o.id FROM profiles o WHERE o.id = {_FIRST} AND {_exists('o')})"


#: Whether a visitor ``v`` may expire: it belongs to nobody, and has no choice.
_MAY_EXPIRE: Final = f"""{_OWNER} IS NULL AND NOT EXISTS (SELECT 1 FROM choices c
    WHERE c.workspace = v.workspace AND c.kind = {VISITOR} AND c.name = v.name)"""


def _columns(profile: str) -> str:
    """Return what is read of a profile: number, workspace, id, first and last time, the bytes of
    its traits, and how many groups and links it has."""
    times = ", ".join(
        f"coalesce({least}({profile}.{made}, {profile}.{chosen}), {profile}.{made}, "
        f"{profile}.{chosen})"
        for least, made, chosen in (
            ("min", "created_at", "chosen_first"),
            ("max", "updated_at", "chosen_last"),
        )
    )
    return (
        f"{profile}.id, {profile}.workspace, {profile}.name, {times}, "
        f"{profile}.trait_bytes, {profile}.memberships, {profile}.links"
    )


#: Visitors that are examined at once so that some give way to new ones, and how often that is done
#: at most for a write: for those without an identifier, and then for those with one.
_EXAMINED: Final = 1000
_SEARCHES: Final = 3

#: Users that are read at once, so that what is read of them fits into the caches of a processor.
_STEP: Final = 128

#: A profile: the values of :func:`_columns`, perhaps with others after them.
Row = tuple[Any, ...]
#: User → the linked anonymous ids, and the visitors that belong to the user, in the order of their
#: links.
Linked = Mapping[int, tuple[list[str], list[Row]]]
#: A user: its number, its row, the linked anonymous ids, and the visitors that are merged.
Person = tuple[int, Row, Sequence[str], Sequence[Row]]


class People:
    """Reads users, visitors and groups.

    :param limits: of a user, with the visitors.
    :param declared: the traits by which users are looked up, by workspace.
    """

    def __init__(self, limits: ProfileLimits, declared: Mapping[str, Collection[str]]) -> None:
        self._limits = limits
        self._declared = declared

    def find(self, db: sqlite3.Connection, workspace_id: str, user_id: str) -> UserProfile | None:
        """Return a user, or ``None`` if the user does not exist."""
        people = [*self._people(db, _by_id(db, USER, workspace_id, user_id))]
        return next(iter(self._users(db, people)), None)

    def certain(
        self, db: sqlite3.Connection, workspace_id: str, user_id: str
    ) -> dict[str, str | None]:
        """Return the identifiers of a user that no visitor set, with those that are certain."""
        declared = self._declared.get(workspace_id, ())
        names = [*declared, *(f"{TRUSTED}:{trait}" for trait in declared)]
        rows = db.execute(
            "SELECT t.trait, t.value FROM profiles p JOIN traits t ON t.profile = p.id WHERE "
            "p.workspace = ? AND p.kind = ? AND p.name = ? "
            f"AND t.trait IN ({', '.join('?' * len(names))})",
            (workspace_id, USER, user_id, *names),
        )
        own = {name: _decoded(value) for name, value in rows if value != REMOVED}
        return {**dict.fromkeys(own), **api.certain_of(own, declared)}

    def scan_users(
        self, db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[UserProfile], int | None]:
        """Return a page of users, and its cursor."""
        window, rows = _scan(db, USER, workspace_id, after, limit)

        def sized(one: Person) -> tuple[Person, int]:
            return one, sum([row[5] for row in (one[1], *one[3])])

        people, cursor = window.page(self._people(db, rows), sized, limit)
        return [user for step in _steps(people) for user in self._users(db, step)], cursor

    def _people(self, db: sqlite3.Connection, rows: Sequence[Row]) -> Iterator[Person]:
        for step in _steps(rows):
            links = _links(db, step)
            for row in step:
                names, visitors = links[row[0]]
                yield row[0], row, names, visitors[: self._limits.user_visitors]

    def _users(self, db: sqlite3.Connection, people: Sequence[Person]) -> list[UserProfile]:
        found = _registers(db, [one for one in people if one[3]])
        alone = _alone(db, [one for one in people if not one[3]], self._declared)
        return [
            alone.get(number)
            or api.merge(
                row[1],
                found[number],
                names,
                [found[one[0]] for one in visitors],
                self._limits,
                self._declared.get(row[1], ()),
            )
            for number, row, names, visitors in people
        ]

    def find_users(
        self, db: sqlite3.Connection, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the users who have one of these values: value → user ids, oldest claim first."""
        found = {}
        for value in filter(is_text, values):
            users = list(islice(self._having(db, workspace_id, trait, value), MAX_USERS))
            if users:
                found[value] = users
        return found

    def _having(
        self, db: sqlite3.Connection, workspace_id: str, trait: str, value: str
    ) -> Iterator[str]:
        """Yield the users whose value wins, oldest claim first."""
        candidates = heapq.merge(
            *(_candidates(db, kind, workspace_id, trait, value) for kind in (USER, VISITOR)),
            key=lambda row: row[0],
        )
        seen: set[int] = set()
        while step := list(islice(candidates, MAX_USERS)):
            users = {row[2]: row[2:] for row in step if row[2] is not None and row[2] not in seen}
            seen.update(users)
            people = [*self._people(db, [*users.values()])]
            found = _registers(db, people, trait)
            for number, row, _, visitors in people:
                some = [found[one[0]] for one in visitors]
                won = api.winner(trait, found[number], some, self._limits)
                if identifier_value(trait, won) == value:
                    yield row[2]


def find_visitor(
    db: sqlite3.Connection, workspace_id: str, anonymous_id: str
) -> VisitorProfile | None:
    """Return a visitor, or ``None`` if it does not exist."""
    return next(iter(_visitors(db, _by_id(db, VISITOR, workspace_id, anonymous_id))), None)


def scan_visitors(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[VisitorProfile], int | None]:
    """Return a page of visitors, and its cursor."""
    window, rows = _scan(db, VISITOR, workspace_id, after, limit)
    rows, cursor = window.page(rows, _sized, limit)
    return _visitors(db, rows), cursor


def scan_groups(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[GroupProfile], int | None]:
    """Return a page of groups, and its cursor."""
    window, rows = _scan(db, GROUP, workspace_id, after, limit)
    rows, cursor = window.page(rows, _sized, limit)
    traits, _, _ = _values(db, rows)
    groups = [
        GroupProfile(workspace_id=row[1], group_id=row[2], traits=traits[row[0]]) for row in rows
    ]
    return groups, cursor


def find_visitors(
    db: sqlite3.Connection, workspace_id: str, trait: str, values: Sequence[str]
) -> dict[str, list[str]]:
    """Return the visitors that belong to nobody: value → anonymous ids, oldest claim first."""
    found = {}
    for value in filter(is_text, values):
        rows = _candidates(db, VISITOR, workspace_id, trait, value)
        alone = list(islice((row[1] for row in rows if row[2] is None), MAX_USERS))
        if alone:
            found[value] = alone
    return found


def holders(
    db: sqlite3.Connection,
    workspace_id: str,
    trait: str,
    value: str,
    after: tuple[int, int, int] | None,
    limit: int,
) -> tuple[list[Subject], tuple[int, int, int] | None]:
    """Return a page of the users and visitors who have a value, and its cursor."""
    if not is_text(value):
        return [], None
    rows = db.execute(
        "SELECT p.name, i.kind, i.claimed_at, i.profile FROM identifiers i "
        "CROSS JOIN profiles p ON p.id = i.profile "
        "WHERE i.workspace = ? AND i.trait = ? AND i.value = ? "
        "AND (i.kind, i.claimed_at, i.profile) > (?, ?, ?) "
        "ORDER BY i.kind, i.claimed_at, i.profile LIMIT ?",
        (workspace_id, trait, value, *(after or (-1, 0, 0)), limit),
    ).fetchall()
    last = rows[-1][1:] if len(rows) == limit else None
    return [Subject(KIND_OF[kind], name) for name, kind, *_ in rows], last


def users_beginning(
    db: sqlite3.Connection, workspace_id: str, trait: str | None, text: str, limit: int
) -> list[str]:
    """Return the ids of users of which the id, or an identifier, has a beginning."""
    rows = db.execute(
        "SELECT name FROM profiles WHERE workspace = ?1 AND kind = ?5 AND name >= ?3 "
        "AND name < ?4 ORDER BY name LIMIT ?6"
        if trait is None
        else "SELECT p.name FROM identifiers i CROSS JOIN profiles p ON p.id = i.profile "
        "WHERE i.workspace = ?1 AND i.trait = ?2 AND i.kind = ?5 AND i.value >= ?3 "
        "AND i.value < ?4 ORDER BY i.value LIMIT ?6",
        (workspace_id, trait, text, text + chr(sys.maxunicode), USER, limit),
    )
    return [name for (name,) in rows]


def identifier_history(
    db: sqlite3.Connection, workspace_id: str, trait: str, ids: Sequence[str]
) -> dict[str, set[str]]:
    """Return the values of a trait that users have or had, by each of these ids."""
    found: dict[str, set[str]] = {}
    for name in ids:
        for user in _by_id(db, USER, workspace_id, name):
            _, visitors = _links(db, [user])[user[0]]
            for table in ("identifiers", "claims"):
                query = f"SELECT value FROM {{keys}} CROSS JOIN {table} ON profile = column1"
                keys = [(one[0], trait) for one in (user, *visitors)]
                for (value,) in look_up(db, f"{query} AND trait = column2", keys):
                    found.setdefault(name, set()).add(value)
    return found


# ------------------------------------------------------------------------------------ old visitors
def old_visitors(
    db: sqlite3.Connection, before: int, after: int | None, limit: int
) -> tuple[list[int], int | None]:
    """Return a page of the visitors that may be deleted: their numbers, and its cursor."""
    window = Window(db, "profiles", "id", after)
    rows = db.execute(
        f"SELECT v.id FROM profiles v WHERE v.id > ? AND v.id <= ? AND v.kind = {VISITOR} "
        f"AND v.changed_at < ? AND {_MAY_EXPIRE} ORDER BY v.id",
        (window.after, window.last, before),
    )
    return window.page(rows, lambda row: (row[0], 0), limit)


def delete_visitors(db: sqlite3.Connection, visitors: Collection[int], before: int) -> int:
    """Delete those visitors that may still be deleted, and return how many.

    :param visitors: the result of :func:`old_visitors`, which may have read an earlier state.
    """
    query = (
        "SELECT v.id, v.workspace FROM {keys} k CROSS JOIN profiles v ON v.id = k.column1 "
        f"AND v.kind = {VISITOR} AND v.changed_at < k.column2 WHERE {_MAY_EXPIRE}"
    )
    old = look_up(db, query, [(one, before) for one in visitors])
    _delete(db, old)
    return len(old)


def make_room(
    db: sqlite3.Connection,
    workspace: str,
    wanted: int,
    kept: Collection[str],
    places: dict[tuple[str, bool], int | None],
) -> int:
    """Delete visitors that only public keys made, and that may expire: those without an identifier
    first, and of those that are examined at once the least recently changed.

    :param wanted: how many are to be deleted.
    :param kept: anonymous ids of visitors that stay.
    :param places: where the next search begins: by workspace, and whether with identifiers.
    :return: how many were deleted.
    """
    query = (
        "SELECT v.id, v.workspace, v.changed_at, v.name, "
        "EXISTS (SELECT 1 FROM identifiers WHERE profile = v.id) = ? AND NOT EXISTS "
        f"(SELECT 1 FROM traits WHERE profile = v.id AND trait = ?) AND {_MAY_EXPIRE} "
        "FROM profiles v WHERE v.id > ? AND v.id <= ? "
        f"AND v.kind = {VISITOR} AND +v.workspace = ? ORDER BY v.id"
    )
    gone = 0
    for place in [(workspace, False)] * _SEARCHES + [(workspace, True)] * _SEARCHES:
        window = Window(db, "profiles", "id", places.get(place))
        rows = db.execute(query, (place[1], TRUSTED, window.after, window.last, workspace))
        page, following = window.page(rows, lambda row: (row, 0), _EXAMINED)
        may = [row for row in page if row[4] and row[3] not in kept]
        old = sorted(may, key=itemgetter(2))[: wanted - gone]
        _delete(db, [row[:2] for row in old])
        gone += len(old)
        if gone == wanted:
            break
        places[place] = following
    return gone


def erase(db: sqlite3.Connection, workspace_id: str, kind: int, name: str) -> bool:
    """Erase a user or a visitor, and return whether there was one."""
    rows = db.execute(
        "SELECT id, workspace FROM profiles WHERE workspace = ? AND kind = ? AND name = ?",
        (workspace_id, kind, name),
    ).fetchall()
    db.executemany("DELETE FROM links WHERE profile = ?", [row[:1] for row in rows])
    _delete(db, rows, counted=kind == VISITOR)
    return bool(rows)


def _delete(db: sqlite3.Connection, old: Sequence[Any], *, counted: bool = True) -> None:
    """Delete profiles.

    :param old: the number and the workspace of each.
    :param counted: whether they are visitors.
    """
    for table in ("traits", "memberships", "identifiers", "claims"):
        db.executemany(f"DELETE FROM {table} WHERE profile = ?", [row[:1] for row in old])
    db.executemany("DELETE FROM profiles WHERE id = ?", [row[:1] for row in old])
    if not counted:
        return
    totals = Counter(workspace for _, workspace in old)
    db.executemany(
        "UPDATE visitor_totals SET count = count - ?2 WHERE workspace = ?1", [*totals.items()]
    )


def links_to(db: sqlite3.Connection, workspace_id: str, anonymous_id: str) -> list[tuple[str, int]]:
    """Return the links to an anonymous id that count; see :meth:`ErasureStore.links_to`."""
    if not is_text(anonymous_id):
        return []
    return db.execute(
        "SELECT p.name, l.received_at FROM links l CROSS JOIN profiles p ON p.id = l.profile "
        "WHERE l.workspace = ? AND l.anonymous_id = ? AND l.received_at IS NOT NULL "
        "AND l.undone = 0 ORDER BY l.received_at, l.message_id, l.origin, l.profile LIMIT 1000",
        (workspace_id, anonymous_id),
    ).fetchall()


def linked_to(db: sqlite3.Connection, workspace_id: str, user_id: str) -> list[str]:
    """Return the anonymous ids of a user; see :meth:`ErasureStore.linked_to`."""
    if not is_text(user_id):
        return []
    query = (
        "SELECT l.anonymous_id FROM profiles p CROSS JOIN links l ON l.profile = p.id "
        f"WHERE p.workspace = ? AND p.kind = {USER} AND p.name = ? "
        "AND l.received_at IS NOT NULL AND l.undone = 0"
    )
    return [name for (name,) in db.execute(query, (workspace_id, user_id))]


# ------------------------------------------------------------------------------------------- rows
def _by_id(db: sqlite3.Connection, kind: int, workspace_id: str, name: str) -> list[Row]:
    if not is_text(name):
        return []
    condition = f"v.workspace = ? AND v.kind = ? AND v.name = ? AND {_exists('v')}"
    return _select(db, kind, condition, (workspace_id, kind, name)).fetchall()


def _scan(
    db: sqlite3.Connection, kind: int, workspace_id: str | None, after: int | None, limit: int
) -> tuple[Window, list[Row]]:
    window = Window(db, "profiles", "id", after)
    condition = f"v.id > ? AND v.id <= ? AND v.kind = ? AND {_exists('v')}"
    values = [window.after, window.last, kind]
    if workspace_id is not None:
        condition += " AND +v.workspace = ?"
        values.append(workspace_id)
    condition += " ORDER BY v.id LIMIT ?"
    return window, _select(db, kind, condition, [*values, limit]).fetchall()


def _select(
    db: sqlite3.Connection, kind: int, condition: str, values: Sequence[Any]
) -> sqlite3.Cursor:
    owner = f", (SELECT name FROM profiles WHERE id = {_OWNER})" if kind == VISITOR else ""
    return db.execute(f"SELECT {_columns('v')}{owner} FROM profiles v WHERE {condition}", values)


def _candidates(
    db: sqlite3.Connection, kind: int, workspace_id: str, trait: str, value: str
) -> Iterator[Any]:
    """Return those who have a value, oldest claim first: the claim, the id, and the user, if any,
    that it is or belongs to."""
    user = "v.id" if kind == USER else _OWNER
    return db.execute(
        f"SELECT i.claimed_at, v.name, {_columns('p')} FROM identifiers i "
        f"CROSS JOIN profiles v ON v.id = i.profile LEFT JOIN profiles p ON p.id = {user} "
        "WHERE i.workspace = ? AND i.trait = ? AND i.value = ? AND i.kind = ? "
        "ORDER BY i.claimed_at, i.profile LIMIT ?",
        (workspace_id, trait, value, kind, MAX_CANDIDATES),
    )


def _links(db: sqlite3.Connection, users: Collection[Row]) -> Linked:
    """Return what is linked to users that exist."""
    query = (
        f"SELECT l.profile, l.anonymous_id, v.id IS NOT NULL AND {_FIRST} = l.profile, "
        "v.id, v.workspace, v.name, v.created_at, v.updated_at, v.trait_bytes, v.memberships, "
        "l.received_at, l.message_id, l.origin "
        "FROM {keys} k CROSS JOIN links l ON l.profile = k.column1 "
        f"LEFT JOIN profiles v ON v.workspace = l.workspace AND v.kind = {VISITOR} "
        "AND v.name = l.anonymous_id "
        "WHERE l.received_at IS NOT NULL AND l.undone = 0"
    )
    found: Linked = {row[0]: ([], []) for row in users}
    for row in look_up(db, query, [row[:1] for row in users if row[7]]):
        names, visitors = found[row[0]]
        names.append(row[1])
        if row[2]:
            visitors.append(row[3:])
    for _, visitors in found.values():
        visitors.sort(key=itemgetter(-3, -2, -1))
    return found


def _registers(
    db: sqlite3.Connection, people: Sequence[Person], trait: str | None = None
) -> dict[int, Registers]:
    """Return what is stored of users and of the visitors that are merged.

    :param trait: the only trait that is wanted; no groups are then.
    """
    rows = [one for _, row, _, visitors in people for one in (row, *visitors)]
    traits: dict[int, dict[str, Any]] = {row[0]: {} for row in rows}
    groups: dict[int, dict[str, Any]] = {row[0]: {} for row in rows}
    query = (
        "SELECT t.timestamp, t.message_id, t.origin, t.%s, t.%s, t.profile "
        "FROM {keys} k CROSS JOIN %s t ON t.profile = k.column1"
    )
    of_traits = query % ("value", "trait", "traits")
    keys: list[tuple[Any, ...]] = [row[:1] for row in rows]
    if trait is not None:
        of_traits += " AND t.trait = k.column2"
        keys = [(row[0], trait) for row in rows]
    else:
        of_groups = query % ("assigned", "group_id", "memberships")
        for row in look_up(db, of_groups, [row[:1] for row in rows if row[6]]):
            *_, group, profile = row
            groups[profile][group] = row
    for row in look_up(db, of_traits, keys):
        _, _, _, _, name, profile = row
        traits[profile][name] = row
    return {
        row[0]: Registers(
            id=row[2],
            created_at=row[3],
            updated_at=row[4],
            traits=traits[row[0]],
            groups=groups[row[0]],
            decode=_decoded,
        )
        for row in rows
    }


def _decoded(value: bytes) -> Any:
    return api.REMOVED if value == REMOVED else orjson.loads(value)


def _alone(
    db: sqlite3.Connection, people: Sequence[Person], declared: Mapping[str, Collection[str]]
) -> dict[int, UserProfile]:
    """Return users without visitors, as :func:`engage.api.merge` does: most users have none, and
    need no versions."""
    rows = [row for _, row, _, _ in people]
    traits, times, trusted = _values(db, rows)
    groups: dict[int, list[str]] = {row[0]: [] for row in rows}
    query = (
        "SELECT m.profile, m.group_id FROM {keys} k CROSS JOIN memberships m "
        "ON m.profile = k.column1 AND m.assigned"
    )
    for profile, group in look_up(db, query, [row[:1] for row in rows if row[6]]):
        groups[profile].append(group)
    return {
        row[0]: UserProfile(
            workspace_id=row[1],
            user_id=row[2],
            created_at=row[3],
            updated_at=row[4],
            anonymous_ids=sorted(names),
            groups=sorted(groups[row[0]]),
            traits=traits[row[0]],
            trait_times=times[row[0]],
            certain=api.certain_of({**traits[row[0]], **trusted[row[0]]}, declared.get(row[1], ()))
            if row[0] in trusted
            else {},
        )
        for _, row, names, _ in people
    }


def _values(
    db: sqlite3.Connection, rows: Sequence[Row]
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, int]], dict[int, dict[str, Any]]]:
    """Return the traits of profiles, when each was set, and those that engage set."""
    trusted: dict[int, dict[str, Any]] = {}
    traits: dict[int, dict[str, Any]] = {row[0]: {} for row in rows}
    times: dict[int, dict[str, int]] = {row[0]: {} for row in rows}
    query = (
        "SELECT t.profile, t.trait, t.timestamp, t.value FROM {keys} k CROSS JOIN traits t "
        "ON t.profile = k.column1"
    )
    for profile, trait, at, value in look_up(db, query, [row[:1] for row in rows]):
        if trait.startswith(TRUSTED):
            trusted.setdefault(profile, {})[trait] = _decoded(value)
        elif value != REMOVED:
            traits[profile][trait] = orjson.loads(value)
            times[profile][trait] = at
    return traits, times, trusted


def _visitors(db: sqlite3.Connection, rows: Sequence[Row]) -> list[VisitorProfile]:
    found = _registers(db, [(row[0], row, (), ()) for row in rows])
    return [api.visitor_of(row[1], found[row[0]], row[8]) for row in rows]


def _steps(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[start : start + _STEP] for start in range(0, len(items), _STEP))


def _sized(row: Row) -> tuple[Row, int]:
    return row, row[5]
