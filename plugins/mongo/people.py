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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

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

from .changes import link_version, registers_of, version_of
from .connection import BATCH, Connection
from .documents import any_of, escape_key, identifier_field, is_text, scoped_id
from .paging import beyond, id_after, read_page
from .schema import GROUPS, LINKS, PLACES, USERS, VISITOR_CLAIMS, VISITOR_MEMBERSHIPS, VISITORS

#: Users that are read at once, with their registers, links and memberships.
STEP: Final = 200

_TIMES: Final = ("createdAt", "updatedAt", "firstChoiceAt", "lastChoiceAt")


@dataclasses.dataclass(slots=True)
class Person:
    """A user that exists, with the visitors that belong to it."""

    document: Mapping[str, Any]
    #: All that are linked.
    anonymous_ids: list[str]
    #: Those of visitors that belong to the user, in the order of their links.
    visitor_ids: list[str]
    visitors: list[Registers] = dataclasses.field(default_factory=list)
    groups: Mapping[str, tuple[Version, bool]] = dataclasses.field(default_factory=dict)

    @property
    def user(self) -> Registers:
        """What is stored of the user itself."""
        return _registers(Kind.USER, self.document, self.groups)


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
        left = set(names)
        # Anyone can link an anonymous id to very many users: such an id needs another turn.
        while left:
            query = {"workspaceId": workspace, "decision.v": {"$ne": False}}
            query["anonymousId"] = any_of(sorted(left))
            limit = BATCH + len(left)
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

    async def ids(self, workspace: str, name: str) -> list[str]:
        """Return the ids of the user that an id belongs to and of its visitors, or just the id."""

        async def person(user: str) -> list[Person]:
            key = scoped_id(workspace, user)
            fields = {"userId": 1, "createdAt": 1}
            return await self._belonging(workspace, await self._documents(USERS, [key], fields))

        found = await person(name)
        if not found and (owner := (await self.owners(workspace, [name])).get(name)) is not None:
            found = await person(owner)
        return [found[0].document["userId"], *found[0].visitor_ids] if found else [name]

    async def persons(
        self, workspace: str, names: Collection[str], trait: str | None = None
    ) -> list[Person]:
        """Return those of some users that exist.

        :param trait: only this trait is read, which is a declared identifier, and no memberships.
        """
        ids = [scoped_id(workspace, name) for name in names]
        fields = _fields(Kind.USER, trait)
        return await self._persons(workspace, await self._documents(USERS, ids, fields), trait)

    async def _persons(
        self, workspace: str, documents: Sequence[Mapping[str, Any]], trait: str | None = None
    ) -> list[Person]:
        people = await self._belonging(workspace, documents)
        most = self.limits.user_visitors
        ids = [scoped_id(workspace, one) for person in people for one in person.visitor_ids[:most]]
        keys = [person.document["_id"] for person in people] if trait is None else []
        visitors, groups, groups_of_visitors = await asyncio.gather(
            self._documents(VISITORS, ids, _fields(Kind.VISITOR, trait)),
            self._groups(Kind.USER, keys),
            self._groups(Kind.VISITOR, ids if trait is None else []),
        )
        registers = {
            one["anonymousId"]: _registers(
                Kind.VISITOR, one, groups_of_visitors.get(one["_id"], {})
            )
            for one in visitors
        }
        for person in people:
            person.groups = groups.get(person.document["_id"], {})
            own = person.visitor_ids[:most]
            person.visitors = [registers[name] for name in own if name in registers]
        return people

    async def _groups(
        self, kind: Kind, owners: Sequence[str]
    ) -> dict[str, dict[str, tuple[Version, bool]]]:
        found: dict[str, dict[str, tuple[Version, bool]]] = {}
        owner, collection = kind.value, PLACES[kind].memberships
        fields = {owner: 1, "groupId": 1, "assigned": 1}
        for chunk in self._connection.chunks(owners):
            cursor = self._connection.db[collection].find({owner: any_of(chunk)}, fields)
            for one in await cursor.to_list(None):
                register = (version_of(one["assigned"]), one["assigned"]["v"])
                found.setdefault(one[owner], {})[one["groupId"]] = register
        return found

    # -------------------------------------------------------------------------------- reading
    async def find(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """Return a user, or ``None`` if the user does not exist."""
        with self._connection.calling():
            found = await self.persons(workspace_id, [user_id])
        return self._user(workspace_id, found[0]) if found else None

    def _user(self, workspace: str, person: Person) -> UserProfile:
        identifiers = self._identifiers.get(workspace, ())
        return merge(
            workspace, person.user, person.anonymous_ids, person.visitors, self.limits, identifiers
        )

    async def visitor(self, workspace_id: str, anonymous_id: str) -> VisitorProfile | None:
        """Return a visitor, or ``None`` if no event made it exist."""
        with self._connection.calling():
            found = await self._documents(VISITORS, [scoped_id(workspace_id, anonymous_id)])
            visitors = await self._visitors(workspace_id, found)
        return visitors[0] if visitors else None

    async def _visitors(
        self, workspace: str, documents: Sequence[Mapping[str, Any]]
    ) -> list[VisitorProfile]:
        owners, groups = await asyncio.gather(
            self.owners(workspace, [one["anonymousId"] for one in documents]),
            self._groups(Kind.VISITOR, [one["_id"] for one in documents]),
        )
        return [
            visitor_of(
                workspace,
                _registers(Kind.VISITOR, one, groups.get(one["_id"], {})),
                owners.get(one["anonymousId"]),
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

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        """Return a page of users."""
        users: list[UserProfile] = []
        with self._connection.calling(scan=True):
            documents, last = await self._page(USERS, workspace_id, after, limit)
            for workspace, part in _parts(documents):
                people = await self._persons(workspace, part)
                users += [self._user(workspace, person) for person in people]
        return Page(users, last)

    async def scan_visitors(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[VisitorProfile]:
        """Return a page of visitors."""
        visitors: list[VisitorProfile] = []
        with self._connection.calling(scan=True):
            documents, last = await self._page(VISITORS, workspace_id, after, limit)
            for workspace, part in _parts(documents):
                visitors += await self._visitors(workspace, part)
        return Page(visitors, last)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        """Return a page of groups."""
        with self._connection.calling(scan=True):
            documents, last = await self._page(GROUPS, workspace_id, after, limit)
        groups = [
            GroupProfile(
                workspace_id=document["workspaceId"],
                group_id=document["groupId"],
                traits={
                    name: value
                    for name, (_, value) in registers_of(document).items()
                    if value is not REMOVED
                },
            )
            for document in documents
        ]
        return Page(groups, last)

    async def _page(
        self, collection: str, workspace_id: str | None, after: str | None, limit: int
    ) -> tuple[list[Mapping[str, Any]], str | None]:
        cursor = self._connection.db[collection].find(id_after(workspace_id, after))
        documents, last = await read_page(cursor.sort([("_id", 1)]), limit, _sized)
        return documents, None if last is None else last["_id"]

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
        """Delete visitors, unless an event changed them in the meantime. An event that makes one
        exist again keeps what belongs to it: that is newer."""
        if not ids:
            return 0
        db = self._connection.db
        async with self._connection.updating:
            done = await db[VISITORS].delete_many({"_id": any_of(ids), **bounds})
            left = {one["_id"] for one in await self._documents(VISITORS, ids, {"_id": 1})}
            if gone := [key for key in ids if key not in left]:
                for collection in (VISITOR_MEMBERSHIPS, VISITOR_CLAIMS):
                    await db[collection].delete_many({"visitor": any_of(gone), **bounds})
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


def _registers(
    kind: Kind, document: Mapping[str, Any], groups: Mapping[str, tuple[Version, bool]]
) -> Registers:
    times = [int(document[name]) for name in _TIMES if name in document]
    return Registers(
        id=document[PLACES[kind].name],
        created_at=min(times),
        updated_at=max(times),
        traits=registers_of(document),
        groups=groups,
    )


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
