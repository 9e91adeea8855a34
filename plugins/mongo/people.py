# SPDX-License-Identifier: Apache-2.0
"""Reading users, visitors and groups: whom a visitor belongs to is decided here.

Each page needs a constant number of queries: the links of its users, the first link of each
anonymous id, the users and visitors with these ids, and the documents of the visitors that count.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import operator
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from bson.datetime_ms import DatetimeMS

from engage.api import (
    REMOVED,
    GroupProfile,
    Kind,
    Page,
    ProfileLimits,
    Registers,
    UserProfile,
    Version,
    VisitorProfile,
    merge,
    visitor_of,
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
    version_of,
)
from .paging import beyond, id_after, read_page
from .schema import GROUPS, LINKS, PLACES, USERS, VISITOR_CLAIMS, VISITOR_MEMBERSHIPS, VISITORS

Item = TypeVar("Item")

#: Users that are read at once, with their registers, links and memberships.
STEP: Final = 200

_TIMES: Final = ("createdAt", "updatedAt", "firstChoiceAt", "lastChoiceAt")
_NOTHING: Final = Registers(id="", created_at=0, updated_at=0, traits={}, groups={})


@dataclasses.dataclass(slots=True)
class Person:
    """A user that exists, with the visitors that belong to it."""

    document: Mapping[str, Any]
    #: All that are linked, and of these the ids of its visitors, in the order of their links.
    anonymous_ids: list[str]
    visitor_ids: list[str]
    #: What is stored of the user itself and of the visitors that are merged, when that is read.
    user: Registers = _NOTHING
    visitors: Sequence[Registers] = ()


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
        self.limits = limits
        self._identifiers = identifiers
        #: Where :meth:`expire` continues.
        self._expired: list[dict[str, Any]] = []

    # ------------------------------------------------------------------- who belongs to whom
    async def _known(self, workspace: str, names: Collection[str]) -> tuple[set[str], set[str]]:
        """Return which ids are those of users that exist, and which those of visitors."""
        ids = [scoped_id(workspace, name) for name in names]
        fields = {"userId": 1, "createdAt": 1}
        users, visitors = await asyncio.gather(
            self._documents(USERS, ids, fields), self._documents(VISITORS, ids, {"anonymousId": 1})
        )
        there = {one["anonymousId"] for one in visitors}
        existing = {one["userId"] for one in users if _exists(one, there)}
        return existing, there

    async def _documents(
        self, collection: str, ids: Sequence[str], fields: Mapping[str, Any] | None = None
    ) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for chunk in self._connection.chunks(ids):
            cursor = self._connection.db[collection].find({"_id": any_of(chunk)}, fields)
            found += await cursor.to_list(None)
        return found

    async def _first_links(self, workspace: str, names: Collection[str]) -> dict[str, str]:
        """Return the user of the first link that counts: anonymous id → user id."""
        found: dict[str, str] = {}
        start = len(scoped_id(workspace, ""))
        order = [("anonymousId", 1), ("first", 1), ("user", 1)]
        fields = {"anonymousId": 1, "user": 1, "first": 1}
        query: dict[str, Any] = {"workspaceId": workspace, "decision.v": {"$ne": False}}
        for chunk in self._connection.chunks(list(names)):
            left = set(chunk)
            # Anyone can link an anonymous id to very many users: such an id needs another turn.
            while left:
                query["anonymousId"], limit = any_of(list(left)), BATCH + len(left)
                cursor = self._connection.db[LINKS].find(query, fields).sort(order).limit(limit)
                links = await cursor.to_list(None)
                for link in links:
                    if link["anonymousId"] in left and link_version(link) is not None:
                        found[link["anonymousId"]] = link["user"][start:]
                    left.discard(link["anonymousId"])
                if len(links) < limit:
                    break
        return found

    async def owners(self, workspace: str, names: Collection[str]) -> dict[str, str]:
        """Return the user, of those that exist, that each anonymous id belongs to.

        To be called within :meth:`Connection.calling`, as the other methods that say nothing else.
        """
        firsts = await self._first_links(workspace, names)
        existing, _ = await self._known(workspace, {*firsts, *firsts.values()})
        return {
            name: user for name, user in firsts.items() if user in existing and name not in existing
        }

    async def _links(self, users: Sequence[str]) -> dict[str, list[str]]:
        """Return the anonymous ids that are linked to users, in the order of their links."""
        found: dict[str, list[tuple[Version, str]]] = {}
        fields = {"user": 1, "anonymousId": 1, "first": 1}
        query = {"user": any_of(users), "decision.v": {"$ne": False}}
        cursor = self._connection.db[LINKS].find(query, fields)
        for link in await cursor.to_list(None):
            if (version := link_version(link)) is not None:
                found.setdefault(link["user"], []).append((version, link["anonymousId"]))
        return {key: [name for _, name in sorted(links)] for key, links in found.items()}

    async def _belonging(
        self, workspace: str, documents: Sequence[Mapping[str, Any]]
    ) -> list[Person]:
        """Return those of some users that exist, without what is stored of their visitors."""
        links = await self._links([one["_id"] for one in documents]) if documents else {}
        names = set(itertools.chain.from_iterable(links.values()))
        firsts, (existing, visitors) = await asyncio.gather(
            self._first_links(workspace, names),
            # A choice makes a user exist only if the id has no visitor.
            self._known(
                workspace, names | {one["userId"] for one in documents if "createdAt" not in one}
            ),
        )
        found = []
        for document in documents:
            user = document["userId"]
            if not _exists(document, visitors):
                continue
            linked = [name for name in links.get(document["_id"], ()) if name not in existing]
            own = [name for name in linked if name in visitors and firsts.get(name) == user]
            found.append(Person(document, linked, own))
        return found

    async def persons_of(
        self, workspace: str, names: Sequence[str]
    ) -> dict[str, tuple[str | None, list[str]]]:
        """Return for each id the user that it belongs to, if any, and the ids of the user and its
        visitors, or just the id."""
        owners = await self.owners(workspace, names)
        users = list({scoped_id(workspace, owners.get(name, name)) for name in names})
        fields = {"userId": 1, "createdAt": 1}
        people = await self._belonging(workspace, await self._documents(USERS, users, fields))
        ids = {one.document["userId"]: one.visitor_ids for one in people}
        found: dict[str, tuple[str | None, list[str]]] = {}
        for name in names:
            user = owners.get(name, name)
            found[name] = (user, [user, *ids[user]]) if user in ids else (None, [name])
        return found

    async def persons(
        self, workspace: str, users: Sequence[str], trait: str | None = None
    ) -> list[Person]:
        """Return those of some users that exist, with what is stored.

        :param users: each ``_id``.
        :param trait: only this trait is read, which is a declared identifier, and no memberships.
        """
        documents = await self._documents(USERS, users, _fields(Kind.USER, trait))
        people = await self._belonging(workspace, documents)
        await self._fill(workspace, people, trait)
        return people

    async def _fill(
        self, workspace: str, people: Sequence[Person], trait: str | None = None
    ) -> None:
        most = self.limits.user_visitors
        ids = [scoped_id(workspace, one) for person in people for one in person.visitor_ids[:most]]
        visitors = await self._documents(VISITORS, ids, _fields(Kind.VISITOR, trait))
        users, registers = await asyncio.gather(
            self._registers(Kind.USER, [person.document for person in people], trait),
            self._registers(Kind.VISITOR, visitors, trait),
        )
        by_id = {one.id: one for one in registers}
        for person, user in zip(people, users, strict=True):
            own = person.visitor_ids[:most]
            person.user = user
            person.visitors = [by_id[name] for name in own if name in by_id]

    async def _registers(
        self, kind: Kind, documents: Sequence[Mapping[str, Any]], trait: str | None = None
    ) -> list[Registers]:
        """Return what is stored, with the memberships."""
        groups: dict[str, dict[str, tuple[Version, bool]]] = {}
        place, owner = PLACES[kind], kind.value
        fields = {owner: 1, "groupId": 1, "assigned": 1}
        ids = [one["_id"] for one in documents] if trait is None else []
        for chunk in self._connection.chunks(ids):
            cursor = self._connection.db[place.memberships].find({owner: any_of(chunk)}, fields)
            for one in await cursor.to_list(None):
                register = (version_of(one["assigned"]), one["assigned"]["v"])
                groups.setdefault(one[owner], {})[one["groupId"]] = register
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
                )
            )
        return found

    # -------------------------------------------------------------------------------- reading
    async def find(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """Return a user, or ``None`` if the user does not exist."""
        with self._connection.calling():
            documents = await self._documents(USERS, [scoped_id(workspace_id, user_id)])
            found = await self._users(workspace_id, documents)
        return found[0] if found else None

    async def visitor(self, workspace_id: str, anonymous_id: str) -> VisitorProfile | None:
        """Return a visitor, or ``None`` if no event made it exist."""
        with self._connection.calling():
            documents = await self._documents(VISITORS, [scoped_id(workspace_id, anonymous_id)])
            found = await self._visitors(workspace_id, documents)
        return found[0] if found else None

    async def _users(
        self, workspace: str, documents: Sequence[Mapping[str, Any]]
    ) -> list[UserProfile]:
        names, limits = self._identifiers.get(workspace, ()), self.limits
        found: list[UserProfile] = []
        left = (await self._belonging(workspace, documents))[::-1]
        while left:
            # Thousands of visitors would not fit into memory at once.
            part = [left.pop()]
            count = len(part[0].visitor_ids)
            while left and (count := count + len(left[-1].visitor_ids)) <= BATCH:
                part.append(left.pop())
            await self._fill(workspace, part)
            found += [
                merge(workspace, one.user, one.anonymous_ids, one.visitors, limits, names)
                for one in part
            ]
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
        found = []
        for one in documents:
            registers = registers_of(one).items()
            traits = {name: value for name, (_, value) in registers if value is not REMOVED}
            found.append(
                GroupProfile(workspace_id=workspace, group_id=one["groupId"], traits=traits)
            )
        return found

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

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        """Return a page of users."""
        return await self._scan(USERS, self._users, workspace_id, after, limit)

    async def scan_visitors(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[VisitorProfile]:
        """Return a page of visitors."""
        return await self._scan(VISITORS, self._visitors, workspace_id, after, limit)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        """Return a page of groups."""
        return await self._scan(GROUPS, self._groups, workspace_id, after, limit)

    async def _scan(
        self,
        collection: str,
        read: Callable[[str, Sequence[Mapping[str, Any]]], Awaitable[list[Item]]],
        workspace_id: str | None,
        after: str | None,
        limit: int,
    ) -> Page[Item]:
        items: list[Item] = []
        with self._connection.calling(scan=True) as db:
            cursor = db[collection].find(id_after(workspace_id, after)).sort([("_id", 1)])
            documents, last = await read_page(cursor, limit, _sized)
            for workspace, part in _parts(documents):
                items += await read(workspace, part)
        return Page(items, None if last is None else last["_id"])

    # ------------------------------------------------------------------------------- expiring
    async def expire(self, before: int, *, limit: int) -> int:
        """Delete visitors that belong to nobody and were not changed since, and return how many.
        A call that reaches the limit is continued by the next one."""
        bounds = {"changedAt": {"$lt": DatetimeMS(before)}}
        fields = {"workspaceId": 1, "anonymousId": 1, "changedAt": 1}
        deleted = 0
        while deleted < limit:
            with self._connection.calling() as db:
                cursor = db[VISITORS].find({"$and": [bounds, *self._expired]}, fields)
                cursor = cursor.sort([("changedAt", 1), ("_id", 1)]).limit(BATCH)
                documents = await cursor.to_list(None)
                owned: set[str] = set()
                for workspace, part in _parts(sorted(documents, key=lambda one: one["_id"])):
                    owners = await self.owners(workspace, [one["anonymousId"] for one in part])
                    owned.update(scoped_id(workspace, name) for name in owners)
                old = [one for one in documents if one["_id"] not in owned][: limit - deleted]
                deleted += await self._delete([one["_id"] for one in old], bounds)
            if deleted < limit and len(documents) < BATCH:
                self._expired = []
                break
            last = documents[-1] if deleted < limit else old[-1]
            self._expired = [beyond("changedAt", last["changedAt"], last["_id"])]
        return deleted

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
                for collection in (VISITOR_MEMBERSHIPS, VISITOR_CLAIMS):
                    await db[collection].delete_many({"visitor": any_of(gone), **bounds})
            done = await db[VISITORS].delete_many(old)
        return int(done.deleted_count)


def _exists(user: Mapping[str, Any], visitors: Collection[str]) -> bool:
    """Return whether a stored user exists: a choice makes it exist only if its id has no visitor.

    :param visitors: anonymous ids of visitors.
    """
    return "createdAt" in user or user["userId"] not in visitors


def _fields(kind: Kind, trait: str | None) -> dict[str, int] | None:
    if trait is None:
        return None
    return {PLACES[kind].name: 1, f"traits.{escape_key(trait)}": 1, **dict.fromkeys(_TIMES, 1)}


def _parts(
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
