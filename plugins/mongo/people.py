# SPDX-License-Identifier: Apache-2.0
"""Reading users, visitors and groups: whom a visitor belongs to is decided here.

Each page needs a constant number of queries: the links of its users, the visitors with these ids,
the first link of each, and the documents of the visitors that count.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import (
    REMOVED,
    TRUSTED,
    GroupProfile,
    Kind,
    Page,
    ProfileLimits,
    Registers,
    Subject,
    UserProfile,
    Version,
    Versioned,
    VisitorProfile,
    certain_of,
    merge,
    visitor_of,
    winner,
)

from .connection import BATCH, Connection
from .documents import (
    any_of,
    escape_key,
    identifier_field,
    is_text,
    link_version,
    registers_of,
    scoped_id,
    subject_id,
    trait_value,
    version_of,
)
from .paging import beyond, id_after, read_page
from .schema import LINKS, PLACES, SUBSCRIPTIONS, USERS, VISITORS

#: Users that are read at once, with their registers, links and memberships.
STEP: Final = 200
#: How many times that many visitors are examined at most for a write, so that some of those without
#: an identifier give way to new ones, and as many again for those with one.
_SEARCHES: Final = 5

_TIMES: Final = ("createdAt", "updatedAt", "firstChoiceAt", "lastChoiceAt")
_LINK: Final = {"anonymousId": 1, "user": 1, "first": 1}
#: The links that no operator undid.
_COUNTS: Final = {"decision.v": {"$ne": False}}


@dataclasses.dataclass(slots=True)
class Person:
    """A user with the visitors that belong to it."""

    document: Mapping[str, Any]
    #: All that are linked, and of these the ids of its visitors, in the order of their links.
    anonymous_ids: list[str]
    visitor_ids: list[str]


class People:
    """Reads profiles, and deletes visitors.

    :param limits: of users.
    :param identifiers: workspace id → the traits by which its users are looked up.
    """

    def __init__(
        self,
        connection: Connection,
        limits: ProfileLimits,
        identifiers: Mapping[str, Collection[str]],
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._identifiers = identifiers
        self._readers: Mapping[Kind, Callable[[str, Sequence[Mapping[str, Any]]], Any]] = {
            Kind.USER: self._users,
            Kind.VISITOR: self._visitors,
            Kind.GROUP: self._groups,
        }
        #: Where :meth:`expire` continues, and :meth:`make_room` by workspace, and whether for
        #: visitors with identifiers.
        self._expired: dict[tuple[str, bool] | None, list[dict[str, Any]]] = {}

    # ------------------------------------------------------------------- who belongs to whom
    async def _known(self, kind: Kind, workspace: str, names: Collection[str]) -> set[str]:
        """Return which ids are those of users, or of visitors."""
        place, ids = PLACES[kind], [scoped_id(workspace, name) for name in names]
        return {
            one[place.name]
            for one in await self._connection.read(place.subjects, ids, {place.name: 1})
        }

    async def _first_links(self, workspace: str, names: Collection[str]) -> dict[str, str]:
        """Return the user of the first link that counts: anonymous id → user id."""
        found: dict[str, str] = {}
        start = len(scoped_id(workspace, ""))
        order = [("anonymousId", 1), ("first", 1), ("user", 1)]
        query: dict[str, Any] = {"workspaceId": workspace, **_COUNTS}
        for chunk in self._connection.chunks(names):
            left = set(chunk)
            # Anyone can link an anonymous id to very many users: such an id needs another turn.
            while left:
                query["anonymousId"], limit = any_of(list(left)), BATCH + len(left)
                cursor = self._connection.db[LINKS].find(query, _LINK).sort(order).limit(limit)
                links = await cursor.to_list(None)
                for link in links:
                    if link["anonymousId"] in left and link_version(link) is not None:
                        found[link["anonymousId"]] = link["user"][start:]
                    left.discard(link["anonymousId"])
                if len(links) < limit:
                    break
        return found

    async def links_to(self, workspace_id: str, anonymous_id: str) -> list[tuple[str, int]]:
        """Return the links to an anonymous id that count; see :meth:`ErasureStore.links_to`."""
        if not is_text(anonymous_id):
            return []
        of_id: dict[str, Any] = {"workspaceId": workspace_id, "anonymousId": anonymous_id}
        with self._connection.calling() as db:
            cursor = db[LINKS].find({**of_id, **_COUNTS}, _LINK).sort([("first", 1), ("user", 1)])
            links = await cursor.limit(BATCH).to_list(None)
        start = len(scoped_id(workspace_id, ""))
        versions = [(link["user"][start:], link_version(link)) for link in links]
        return [(user, max(0, first[0])) for user, first in versions if first is not None]

    async def linked_to(self, workspace_id: str, user_id: str) -> list[str]:
        """Return the anonymous ids of a user; see :meth:`ErasureStore.linked_to`."""
        if not is_text(user_id):
            return []
        ids = [scoped_id(workspace_id, user_id)]
        with self._connection.calling():
            links = await self._connection.read(LINKS, ids, _LINK, by="user", **_COUNTS)
        return [one["anonymousId"] for one in links if link_version(one) is not None]

    async def owners(self, workspace: str, names: Collection[str]) -> dict[str, str]:
        """Return the user, of those that exist, that each anonymous id belongs to.

        To be called within :meth:`Connection.calling`, as the other methods that say nothing else.
        """
        firsts = await self._first_links(workspace, names)
        existing = await self._known(Kind.USER, workspace, {*firsts.values()})
        return {name: user for name, user in firsts.items() if user in existing}

    async def _belonging(
        self, workspace: str, documents: Sequence[Mapping[str, Any]]
    ) -> list[Person]:
        """Return users without what is stored of their visitors."""
        links: dict[str, list[tuple[Version, str]]] = {}
        ids = [one["_id"] for one in documents]
        for link in await self._connection.read(LINKS, ids, _LINK, by="user", **_COUNTS):
            if (version := link_version(link)) is not None:
                links.setdefault(link["user"], []).append((version, link["anonymousId"]))
        names = {name for found in links.values() for _, name in found}
        visitors = await self._known(Kind.VISITOR, workspace, names)
        firsts = await self._first_links(workspace, visitors)
        people = []
        for document in documents:
            linked = [name for _, name in sorted(links.get(document["_id"], ()))]
            own = [name for name in linked if firsts.get(name) == document["userId"]]
            people.append(Person(document, linked, own))
        return people

    async def visitors_of(self, workspace: str, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the ids of those of some users that exist, with those of their visitors."""
        ids = [scoped_id(workspace, name) for name in names]
        users = await self._connection.read(USERS, ids, {"userId": 1})
        people = await self._belonging(workspace, users)
        return {one.document["userId"]: one.visitor_ids for one in people}

    async def values(self, workspace: str, names: Iterable[str], trait: str) -> dict[str, Any]:
        """Return the ids of those of some users that exist, with the value of an identifier."""
        ids = [scoped_id(workspace, name) for name in names]
        documents = await self._connection.read(USERS, ids, _fields(Kind.USER, trait))
        people = await self._belonging(workspace, documents)
        stored = await self._stored(workspace, people, trait)
        return {user.id: winner(trait, user, own, self._limits) for user, own in stored}

    async def _stored(
        self, workspace: str, people: Sequence[Person], trait: str | None = None
    ) -> list[tuple[Registers, list[Registers]]]:
        """Return what is stored of each user itself, and of the visitors that are merged.

        :param trait: only this trait is read, and no memberships.
        """
        own = [person.visitor_ids[: self._limits.user_visitors] for person in people]
        ids = [scoped_id(workspace, name) for names in own for name in names]
        visitors = await self._connection.read(VISITORS, ids, _fields(Kind.VISITOR, trait))
        users, registers = await asyncio.gather(
            self._registers(Kind.USER, [person.document for person in people], trait),
            self._registers(Kind.VISITOR, visitors, trait),
        )
        by_id = {one.id: one for one in registers}
        return [
            (user, [by_id[name] for name in names if name in by_id])
            for user, names in zip(users, own, strict=True)
        ]

    async def _registers(
        self, kind: Kind, documents: Sequence[Mapping[str, Any]], trait: str | None = None
    ) -> list[Registers]:
        """Return what is stored, with the memberships."""
        groups: dict[str, dict[str, Versioned]] = {}
        place, owner = PLACES[kind], kind.value
        fields = {owner: 1, "groupId": 1, "assigned": 1}
        ids = [one["_id"] for one in documents] if trait is None else []
        for one in await self._connection.read(place.memberships, ids, fields, by=owner):
            register = one["assigned"]
            groups.setdefault(one[owner], {})[one["groupId"]] = (
                *version_of(register),
                register["v"],
            )
        found = []
        for one in documents:
            times = [int(one[name]) for name in _TIMES if name in one]
            found.append(
                Registers(
                    id=one[place.name],
                    created_at=min(times),
                    updated_at=max(times),
                    traits=registers_of(one),
                    groups=groups.get(one["_id"], {}),
                    decode=trait_value,
                )
            )
        return found

    # -------------------------------------------------------------------------------- reading
    async def _find(self, kind: Kind, workspace_id: str, name: str) -> Any:
        """Return a profile, or ``None`` if it does not exist."""
        with self._connection.calling():
            key = scoped_id(workspace_id, name)
            documents = await self._connection.read(PLACES[kind].subjects, [key])
            found = await self._readers[kind](workspace_id, documents)
        return found[0] if found else None

    find = functools.partialmethod(_find, Kind.USER)
    visitor = functools.partialmethod(_find, Kind.VISITOR)

    async def certain(self, workspace_id: str, user_id: str) -> Mapping[str, str | None]:
        """Return the identifiers of a user that no visitor set, with those that are certain."""
        declared = self._identifiers.get(workspace_id, ())
        names = [name for trait in declared for name in (trait, f"{TRUSTED}:{trait}")]
        fields = {f"traits.{escape_key(name)}": 1 for name in names}
        with self._connection.calling():
            key = scoped_id(workspace_id, user_id)
            for user in await self._connection.read(USERS, [key], fields):
                own = {n: trait_value(found) for n, (*_, found) in registers_of(user).items()}
                there = [name for name, value in own.items() if value is not REMOVED]
                return {**dict.fromkeys(there), **certain_of(own, declared)}
        return {}

    async def forget_vouched(self) -> None:
        """Remove the traits that only engage sets: clients could set them in earlier versions."""
        declared = {name for names in self._identifiers.values() for name in names}
        names = [TRUSTED, *(f"{TRUSTED}:{name}" for name in sorted(declared))]
        fields = [f"traits.{escape_key(name)}" for name in names]
        for collection in (USERS, VISITORS):
            with self._connection.calling(scan=True) as db:
                wanted = {"$or": [{field: {"$exists": True}} for field in fields]}
                await db[collection].update_many(wanted, {"$unset": dict.fromkeys(fields, "")})

    async def _users(
        self, workspace: str, documents: Sequence[Mapping[str, Any]]
    ) -> list[UserProfile]:
        names, limits = self._identifiers.get(workspace, ()), self._limits
        found: list[UserProfile] = []
        people = await self._belonging(workspace, documents)
        counts = itertools.accumulate(len(one.visitor_ids) for one in people)
        # Thousands of visitors would not fit into memory at once.
        for _, part in itertools.groupby(
            zip(counts, people, strict=True), lambda one: one[0] // BATCH
        ):
            some = [person for _, person in part]
            for one, stored in zip(some, await self._stored(workspace, some), strict=True):
                user, visitors = stored
                found.append(merge(workspace, user, one.anonymous_ids, visitors, limits, names))
        return found

    async def _visitors(
        self, workspace: str, documents: Sequence[Mapping[str, Any]]
    ) -> list[VisitorProfile]:
        owners, visitors = await asyncio.gather(
            self.owners(workspace, [one["anonymousId"] for one in documents]),
            self._registers(Kind.VISITOR, documents),
        )
        return [visitor_of(workspace, one, owners.get(one.id)) for one in visitors]

    async def _groups(
        self, workspace: str, documents: Sequence[Mapping[str, Any]]
    ) -> list[GroupProfile]:
        return [
            GroupProfile(
                workspace_id=workspace,
                group_id=one["groupId"],
                traits={n: trait_value(found) for n, (*_, found) in registers_of(one).items()},
            )
            for one in documents
        ]

    async def users_beginning(
        self, workspace_id: str, text: str, *, trait: str | None = None, limit: int
    ) -> Sequence[str]:
        """Return the ids of users of which the id, or an identifier, has a beginning."""
        if not is_text(text):
            return ()
        first = scoped_id(workspace_id, text)
        field = "_id" if trait is None else identifier_field(trait)
        with self._connection.calling() as db:
            cursor = db[USERS].find({field: {"$gte": first}}, {"userId": 1, field: 1})
            documents = await cursor.sort([(field, 1)]).limit(limit).to_list(None)
        # Servers order letters in different ways, and all of them put these next to each other.
        found = itertools.takewhile(
            lambda one: functools.reduce(operator.getitem, field.split("."), one).startswith(first),
            documents,
        )
        return [document["userId"] for document in found]

    async def _scan(
        self, kind: Kind, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[Any]:
        """Return a page of profiles."""
        items: list[Any] = []
        with self._connection.calling(scan=True) as db:
            query = id_after(workspace_id, after)
            cursor = db[PLACES[kind].subjects].find(query).sort([("_id", 1)])
            documents, last = await read_page(cursor, limit, _sized)
            for workspace, part in parts(documents):
                items += await self._readers[kind](workspace, part)
        return Page(items, None if last is None else last["_id"])

    scan_users = functools.partialmethod(_scan, Kind.USER)
    scan_visitors = functools.partialmethod(_scan, Kind.VISITOR)
    scan_groups = functools.partialmethod(_scan, Kind.GROUP)

    # ------------------------------------------------------------------------------- expiring
    async def expire(self, before: int, *, limit: int) -> int:
        """Delete visitors that belong to nobody, have no choice and were not changed since, and
        return how many.
        A call that reaches the limit is continued by the next one."""
        bounds = {"changedAt": {"$lt": DatetimeMS(before)}}
        deleted, more = 0, True
        while more and deleted < limit:
            with self._connection.calling():
                gone, more = await self._expire(None, bounds, limit - deleted, BATCH)
            deleted += gone
        return deleted

    async def make_room(self, workspace: str, wanted: int, kept: Collection[str]) -> int:
        """Delete visitors that only public keys made, and that may expire: those without an
        identifier first, and of these the least recently changed. To be called within
        :meth:`Connection.calling`.

        :param wanted: how many are to be deleted.
        :param kept: anonymous ids of visitors that stay.
        :return: how many were deleted.
        """
        trusted = escape_key(TRUSTED)
        fields = [identifier_field(name) for name in self._identifiers.get(workspace, ())]
        fields.append(f"traits.{trusted}.t")
        deleted = 0
        for identified in [False] * _SEARCHES + [True] * _SEARCHES:

            def gives_way(one: Mapping[str, Any], identified: bool = identified) -> bool:
                traits = one.get("traits", {})
                ours = one["workspaceId"] == workspace and one["anonymousId"] not in kept
                return ours and trusted not in traits and any(traits.values()) is identified

            place, left = (workspace, identified), wanted - deleted
            if left > 0:
                gone, _ = await self._expire(place, {}, left, STEP, gives_way, fields)
                deleted += gone
        return deleted

    async def _expire(
        self,
        place: tuple[str, bool] | None,
        bounds: Mapping[str, Any],
        limit: int,
        most: int,
        may: Callable[[Mapping[str, Any]], bool] = lambda _: True,
        fields: Sequence[str] = (),
    ) -> tuple[int, bool]:
        """Delete visitors that belong to nobody and have no choice, the least recently changed
        first.

        :param place: continue where the last call with this place ended.
        :param most: how many are examined.
        :param may: whether one may be deleted, by the fields.
        :return: how many were deleted, and whether there are others to examine.
        """
        query = {"$and": [bounds, *self._expired.get(place, ())]}
        wanted = dict.fromkeys(("workspaceId", "anonymousId", "changedAt", *fields), 1)
        cursor = self._connection.db[VISITORS].find(query, wanted)
        cursor = cursor.sort([("changedAt", 1), ("_id", 1)]).limit(most)
        documents = await cursor.to_list(None)
        old = await self._belonging_to_nobody([one for one in documents if may(one)])
        last = None if len(documents) < most else documents[-1]
        if len(old) >= limit:
            old, last = old[:limit], old[limit - 1]
        if old and not bounds:
            bounds = {"changedAt": {"$lte": old[-1]["changedAt"]}}
        self._expired[place] = [beyond("changedAt", last["changedAt"], last["_id"])] if last else []
        return await self._delete([one["_id"] for one in old], bounds), last is not None

    async def _belonging_to_nobody(
        self, documents: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return those visitors that belong to nobody and have no choice."""
        kept: set[str] = set()
        for workspace, part in parts(sorted(documents, key=lambda one: one["_id"])):
            names = [one["anonymousId"] for one in part]
            chosen = [subject_id(workspace, Subject(Kind.VISITOR, one)) for one in names]
            choosers = await self._connection.read(SUBSCRIPTIONS, chosen, {"anonymousId": 1})
            kept.update(scoped_id(workspace, one["anonymousId"]) for one in choosers)
            owners = await self.owners(workspace, names)
            kept.update(scoped_id(workspace, name) for name in owners)
        return [one for one in documents if one["_id"] not in kept]

    async def _delete(self, ids: Sequence[str], bounds: Mapping[str, Any]) -> int:
        """Delete visitors, unless an event changed them in the meantime.

        A visitor is deleted after what belongs to it: what a crash leaves expires with it later.
        Its traits are the first to go, so that an event in the meantime makes a new visitor.
        """
        if not ids:
            return 0
        db, old = self._connection.db, {"_id": any_of(ids), **bounds}
        async with self._connection.updating:
            await db[VISITORS].update_many(old, {"$unset": {"traits": "", "claims": ""}})
            if gone := [one["_id"] async for one in db[VISITORS].find(old, {"_id": 1})]:
                place = PLACES[Kind.VISITOR]
                for collection in (place.memberships, place.claims):
                    await db[collection].delete_many({"visitor": any_of(gone), **bounds})
            done = await db[VISITORS].delete_many(old)
        return int(done.deleted_count)


def _fields(kind: Kind, trait: str | None) -> dict[str, int] | None:
    if trait is None:
        return None
    return {PLACES[kind].name: 1, f"traits.{escape_key(trait)}": 1, **dict.fromkeys(_TIMES, 1)}


def parts(
    documents: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Cut documents into parts of one workspace, of at most :data:`STEP`."""
    for workspace, found in itertools.groupby(documents, key=lambda one: one["workspaceId"]):
        part = list(found)
        for start in range(0, len(part), STEP):
            yield workspace, part[start : start + STEP]


def _sized(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    # An estimate is enough: only pages of large profiles must end early.
    return document, 512 * len(document.get("traits", ()))
