# SPDX-License-Identifier: Apache-2.0
"""Users, groups, links and memberships."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engage.api import (
    Change,
    Event,
    GroupProfile,
    Page,
    ProfileLimits,
    UserProfile,
    changes_of,
    identifier_value,
)

from .changes import Folded, Known, seen_statement, stored_traits
from .client import Connection
from .documents import (
    decode_value,
    escape_key,
    in_workspace,
    own_id,
    pair_id,
    unescape_key,
)
from .events import among, gather_page
from .schema import GROUPS, LINKS, MEMBERSHIPS, META, USERS

log = logging.getLogger("engage.storage.mongo")

#: Links that are known to be durable; remembered so that each event of a visitor need not ask.
_KNOWN_LINKS: Final = 100_000
#: Users of one value of an identifier, as the interface says.
_MOST_USERS: Final = 100
#: Users whose links and memberships are read at once.
_AT_ONCE: Final = 200


class Profiles:
    """Reads profiles and applies changes to them.

    :param limits: per user and group.
    :param identifiers: workspace → traits by which users are looked up.
    """

    def __init__(
        self,
        connection: Connection,
        limits: ProfileLimits,
        identifiers: Mapping[str, Sequence[str]],
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._identifiers = {name: frozenset(traits) for name, traits in identifiers.items()}
        self._links: OrderedDict[str, None] = OrderedDict()

    # -------------------------------------------------------------------------------- changes
    def forget(self) -> None:
        """Another store may stand there now."""
        self._links.clear()

    def changes(self, event: Event) -> tuple[Change, ...]:
        """:return: the changes of an event, but links that are known to be durable."""
        if not event.may_change_profiles:
            return ()
        user, anonymous = event.user_id, event.anonymous_id
        if (
            event.type in ("track", "page", "screen")
            and user is not None
            and anonymous is not None
            and pair_id(event.workspace_id, user, anonymous) in self._links
        ):
            return ()
        return changes_of(event)

    def fold(self, changes: Sequence[tuple[Event, Sequence[Change]]]) -> Folded:
        """:param changes: of the events of a write, in their order."""
        return Folded(changes, self._links)

    async def known(self, folded: Folded) -> Known:
        """Read what applying needs. To be called within :meth:`Connection.calling`."""
        users, groups, links, memberships = await asyncio.gather(
            self._traits(USERS, folded.wanted_traits(USERS)),
            self._traits(GROUPS, folded.wanted_traits(GROUPS)),
            self._pairs(LINKS, folded.wanted_pairs(LINKS)),
            self._pairs(MEMBERSHIPS, folded.wanted_pairs(MEMBERSHIPS)),
        )
        return Known({USERS: users, GROUPS: groups}, {LINKS: links, MEMBERSHIPS: memberships})

    async def _traits(self, collection: str, ids: Sequence[str]) -> dict[str, Any]:
        found = {}
        for part in self._connection.portions(ids):
            # One by one: they may be large, and only their sizes are kept.
            cursor = self._connection.db[collection].find({"_id": among(part)}, {"traits": 1})
            async for document in cursor:
                found[document["_id"]] = stored_traits(document)
        return found

    async def _pairs(self, collection: str, users: Sequence[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for part in self._connection.portions(users):
            cursor = self._connection.db[collection].find({"user": among(part)}, {"user": 1})
            for document in await cursor.to_list(None):
                found.setdefault(document["user"], set()).add(document["_id"])
        return found

    async def apply(self, folded: Folded, known: Known | None = None) -> int:
        """Make changes durable: one update command per collection, all at once. To be called within
        :meth:`Connection.calling`.

        :param known: what :meth:`known` read, if it was read already.
        :return: how many changes were dropped.
        """
        if not folded:
            return 0
        if known is None:
            known = await self.known(folded)
        statements = folded.statements(known, self._limits, self._identifiers)
        results = await asyncio.gather(
            *(self._connection.update(name, part) for name, part in statements.items()),
            return_exceptions=True,
        )
        dropped = folded.dropped
        for result in results:
            if isinstance(result, BaseException):
                raise result
            refused = [code for code in result if code]
            if refused:
                log.error("%d changes can never be applied (code %d)", len(refused), refused[0])
                dropped += len(refused)
        durable = [statement["q"]["_id"] for statement in statements.get(LINKS, ())]
        for key in durable:
            self._links[key] = None
        while len(self._links) > _KNOWN_LINKS:
            self._links.popitem(last=False)
        return dropped

    async def see(self, workspace_id: str, user_id: str, at: int) -> None:
        """Make a user exist. To be called within :meth:`Connection.calling`."""
        await self._connection.update(USERS, [seen_statement(workspace_id, user_id, at)])

    # -------------------------------------------------------------------------------- reading
    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """See :meth:`ProfileStore.profile`."""
        key = own_id(workspace_id, user_id)
        with self._connection.calling() as db:
            document, links, memberships = await asyncio.gather(
                db[USERS].find_one({"_id": key}), self._links_of([key]), self._groups_of([key])
            )
        return None if document is None else _user(document, links, memberships)

    async def _links_of(self, users: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        fields = {"user": 1, "anonymousId": 1}
        cursor = self._connection.db[LINKS].find({"user": among(users)}, fields)
        for document in await cursor.to_list(None):
            found.setdefault(document["user"], []).append(document["anonymousId"])
        return found

    async def _groups_of(self, users: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        fields = {"user": 1, "groupId": 1, "assigned.v": 1}
        cursor = self._connection.db[MEMBERSHIPS].find({"user": among(users)}, fields)
        for document in await cursor.to_list(None):
            if document["assigned"]["v"]:
                found.setdefault(document["user"], []).append(document["groupId"])
        return found

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """See :meth:`ProfileStore.find_users`."""
        field = f"traits.{escape_key(trait)}.i"
        wanted = {own_id(workspace_id, value): value for value in values}
        fields = {"userId": 1, field: 1}
        found: dict[str, list[str]] = {}
        with self._connection.calling() as db:
            for key, value in wanted.items():
                cursor = db[USERS].find({field: key}, fields)
                cursor = cursor.sort([("createdAt", 1), ("_id", 1)]).limit(_MOST_USERS)
                users = [document["userId"] for document in await cursor.to_list(None)]
                if users:
                    found[value] = users
        return found

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        """See :meth:`ProfileStore.scan_users`."""
        with self._connection.calling() as db:
            cursor = db[USERS].find(_after(workspace_id, after)).sort([("_id", 1)])
            documents, last = await gather_page(cursor, limit, _sized)
            users = []
            for start in range(0, len(documents), _AT_ONCE):
                part = documents[start : start + _AT_ONCE]
                ids = [document["_id"] for document in part]
                links, groups = await asyncio.gather(self._links_of(ids), self._groups_of(ids))
                users += [_user(document, links, groups) for document in part]
        return Page(users, None if last is None else last["_id"])

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        """See :meth:`ProfileStore.scan_groups`."""
        with self._connection.calling() as db:
            cursor = db[GROUPS].find(_after(workspace_id, after)).sort([("_id", 1)])
            documents, last = await gather_page(cursor, limit, _sized)
        groups = [
            GroupProfile(
                workspace_id=document["workspaceId"],
                group_id=document["groupId"],
                traits=_values(document),
            )
            for document in documents
        ]
        return Page(groups, None if last is None else last["_id"])

    # ---------------------------------------------------------------------------- identifiers
    async def index_identifiers(self) -> None:
        """See that users can be looked up by each trait that the config declares, also by one that
        was declared after they were stored."""
        declared = {
            own_id(workspace, trait): (workspace, trait)
            for workspace, traits in self._identifiers.items()
            for trait in traits
        }
        with self._connection.calling() as db:
            found = await db[META].find_one({"_id": "identifiers"})
        done = set() if found is None else set(found["done"])
        if done == declared.keys():
            return
        for key in sorted(declared.keys() - done):
            await self._index_identifier(*declared[key])
        with self._connection.calling() as db:
            await db[META].update_one(
                {"_id": "identifiers"}, {"$set": {"done": sorted(declared)}}, upsert=True
            )

    async def _index_identifier(self, workspace: str, trait: str) -> None:
        field = f"traits.{escape_key(trait)}"
        after: str | None = None
        while True:
            query = {**_after(workspace, after), field: {"$exists": True}}
            with self._connection.calling() as db:
                cursor = db[USERS].find(query, {field: 1}).sort([("_id", 1)]).limit(_AT_ONCE)
                documents = await cursor.to_list(None)
                statements = []
                for document in documents:
                    register = document["traits"][escape_key(trait)]
                    value = identifier_value(trait, decode_value(register))
                    if value is not None and "i" not in register:
                        # Only if nobody changed it meanwhile: then it has the form already.
                        same = {f"{field}.{part}": register[part] for part in ("t", "m", "o")}
                        form = {f"{field}.i": own_id(workspace, value)}
                        statements.append(
                            {"q": {"_id": document["_id"], **same}, "u": {"$set": form}}
                        )
                await self._connection.update(USERS, statements)
            if len(documents) < _AT_ONCE:
                return
            after = documents[-1]["_id"]


def _after(workspace_id: str | None, after: str | None) -> dict[str, Any]:
    condition = in_workspace(workspace_id)
    if after is not None:
        condition = {**condition, "$gt": after}
        condition.pop("$gte", None)
    return {"_id": condition} if condition else {}


def _sized(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    # Cheap and near enough: only pages of large profiles must end early.
    return document, 512 * len(document.get("traits", ()))


def _values(document: Mapping[str, Any]) -> dict[str, Any]:
    traits = document.get("traits", {})
    return {unescape_key(key): decode_value(register) for key, register in traits.items()}


def _user(
    document: Mapping[str, Any],
    links: Mapping[str, Sequence[str]],
    groups: Mapping[str, Sequence[str]],
) -> UserProfile:
    key = document["_id"]
    return UserProfile(
        workspace_id=document["workspaceId"],
        user_id=document["userId"],
        traits=_values(document),
        created_at=int(document["createdAt"]),
        updated_at=int(document["updatedAt"]),
        anonymous_ids=sorted(links.get(key, ())),
        groups=sorted(groups.get(key, ())),
    )
