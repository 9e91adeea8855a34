# SPDX-License-Identifier: Apache-2.0
"""Users by the value of an identifier trait, such as an e-mail address.

The register of such a trait has the form that is looked up as ``i``, with an index for each trait.
The collection of claims has when each user first had each value (``claims.py``). It is read only
for a value that several users have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import ConfigError, Page, identifier_value

from .claims import Claim
from .connection import Connection
from .documents import any_of, decode_value, escape_key, is_text, scoped_id
from .paging import id_after
from .schema import CLAIMS, META, USERS

#: MongoDB allows 64 indexes on a collection; each identifier trait needs one.
_MAX_TRAITS: Final = 40
#: Maximum number of users that are returned for one value; the interface defines it.
_MAX_USERS: Final = 100
#: The order in which the index of an identifier has the users.
_ORDER: Final = [("createdAt", 1), ("_id", 1)]
#: Claims that are read at once, and how often, to find the oldest of very many users: so many users
#: may have had the value earlier and not have it now. Then the order is that of ``createdAt``.
_CLAIMS: Final = (1000, 20)
#: Users whose registers are completed at once.
_STEP: Final = 200


def declared_traits(identifiers: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the traits that any workspace declares.

    :param identifiers: workspace id → the traits by which its users are looked up.
    :raises ConfigError: if there are too many.
    """
    traits = {trait for names in identifiers.values() for trait in names}
    if len(traits) > _MAX_TRAITS:
        raise ConfigError(
            f"workspaces: {len(traits)} different subscription_identifiers; MongoDB has "
            f"indexes for at most {_MAX_TRAITS}"
        )
    return traits


class Identifiers:
    """Looks users up.

    :param declared: workspace id → the traits by which its users are looked up.
    """

    def __init__(self, connection: Connection, declared: Mapping[str, Sequence[str]]) -> None:
        self._connection = connection
        self.declared = {workspace: frozenset(traits) for workspace, traits in declared.items()}

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the users who have one of these values: value → user ids, oldest claim first."""
        found: dict[str, list[str]] = {}
        with self._connection.calling() as db:
            for value in filter(is_text, values):
                query = {_field(trait): scoped_id(workspace_id, value)}
                cursor = db[USERS].find(query, {"userId": 1, "createdAt": 1})
                users = await cursor.sort(_ORDER).limit(_MAX_USERS + 1).to_list(None)
                if len(users) > 1:
                    claim = Claim(workspace_id, "", trait, value)
                    if len(users) > _MAX_USERS:
                        users = await self._with_oldest_claims(db, query, claim) + users
                    users = await self._by_claim(db, users, claim)
                if users:
                    ids = dict.fromkeys(document["userId"] for document in users)
                    found[value] = list(ids)[:_MAX_USERS]
        return found

    async def _by_claim(
        self, db: Any, users: Sequence[Mapping[str, Any]], claim: Claim
    ) -> list[Mapping[str, Any]]:
        """Return users in the order of their claims.

        :param claim: a claim of the value by any user.
        """
        keys = {}
        for document in users:
            one = dataclasses.replace(claim, user=document["userId"])
            keys[one.key] = keys[one.late_key] = document["_id"]
        times: dict[str, int] = {}
        cursor = db[CLAIMS].find({"_id": any_of(list(keys))}, {"held": 1, "at": 1})
        for stored in await cursor.to_list(None):
            # A late claim may belong to another value.
            if stored["held"] == claim.held:
                key, at = keys[stored["_id"]], int(stored["at"])
                times[key] = min(at, times.get(key, at))

        def age(user: Mapping[str, Any]) -> tuple[bool, int, str]:
            # A user without a claim is last: anyone can choose a timestamp, and so ``createdAt``.
            at = times.get(user["_id"])
            return at is None, int(user["createdAt"]) if at is None else at, user["_id"]

        return sorted(users, key=age)

    async def _with_oldest_claims(
        self, db: Any, query: Mapping[str, Any], claim: Claim
    ) -> list[Mapping[str, Any]]:
        """Return the users with the oldest claims of a value that they have now."""
        found: list[Mapping[str, Any]] = []
        held: dict[str, Any] = {"held": claim.held}
        step, pages = _CLAIMS
        for _ in range(pages):
            cursor = db[CLAIMS].find(held, {"userId": 1, "at": 1})
            claims = await cursor.sort([("at", 1), ("_id", 1)]).limit(step).to_list(None)
            ids = [scoped_id(claim.workspace, document["userId"]) for document in claims]
            if ids:
                fields = {"userId": 1, "createdAt": 1}
                users = db[USERS].find({"_id": any_of(ids), **query}, fields)
                by_id = {document["_id"]: document for document in await users.to_list(None)}
                found += [by_id[one] for one in ids if one in by_id]
            if len(claims) < step or len(found) >= _MAX_USERS:
                break
            last = claims[-1]
            held["at"] = {"$gte": last["at"]}
            held["$or"] = [
                {"at": {"$gt": last["at"]}},
                {"at": last["at"], "_id": {"$gt": last["_id"]}},
            ]
        return found[:_MAX_USERS]

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[str]:
        """Return a page of the users who have a value."""
        if not is_text(value):
            return Page((), None)
        query: dict[str, Any] = {_field(trait): scoped_id(workspace_id, value)}
        if after is not None:
            created, _, key = after.partition(".")
            at = DatetimeMS(int(created))
            query["createdAt"] = {"$gte": at}
            query["$or"] = [{"createdAt": {"$gt": at}}, {"createdAt": at, "_id": {"$gt": key}}]
        with self._connection.calling() as db:
            cursor = db[USERS].find(query, {"userId": 1, "createdAt": 1})
            users = await cursor.sort(_ORDER).limit(limit).to_list(None)
        last = users[-1] if len(users) == limit else None
        return Page(
            [document["userId"] for document in users],
            None if last is None else f"{int(last['createdAt'])}.{last['_id']}",
        )

    async def index(self) -> None:
        """Make users found by each declared trait, also those that were stored before the trait was
        declared."""
        declared = {
            scoped_id(workspace, trait): (workspace, trait)
            for workspace, traits in self.declared.items()
            for trait in traits
        }
        with self._connection.calling() as db:
            found = await db[META].find_one({"_id": "identifiers"})
        done = set() if found is None else set(found["done"])
        if done == declared.keys():
            return
        for key in sorted(declared.keys() - done):
            await self._index(*declared[key])
        with self._connection.calling() as db:
            await db[META].update_one(
                {"_id": "identifiers"}, {"$set": {"done": sorted(declared)}}, upsert=True
            )

    async def _index(self, workspace: str, trait: str) -> None:
        field = f"traits.{escape_key(trait)}"
        names = {field: 1, "userId": 1, "createdAt": 1}
        after: str | None = None
        while True:
            query = {**id_after(workspace, after), field: {"$exists": True}}
            with self._connection.calling() as db:
                cursor = db[USERS].find(query, names).sort([("_id", 1)]).limit(_STEP)
                documents = await cursor.to_list(None)
                statements, claims = [], []
                for document in documents:
                    register = document["traits"][escape_key(trait)]
                    value = identifier_value(trait, decode_value(register))
                    if value is None:
                        continue
                    # Claims were not recorded so far. The user exists at least since then.
                    claim = Claim(workspace, document["userId"], trait, value)
                    claims.append(claim.statement({"$setOnInsert": {"at": document["createdAt"]}}))
                    if "i" not in register:
                        # Only if the register is unchanged; a later value has the form already.
                        same = {f"{field}.{part}": register[part] for part in ("t", "m", "o")}
                        form = {f"{field}.i": scoped_id(workspace, value)}
                        statements.append(
                            {"q": {"_id": document["_id"], **same}, "u": {"$set": form}}
                        )
                await self._connection.update(CLAIMS, claims)
                await self._connection.update(USERS, statements)
            if len(documents) < _STEP:
                return
            after = documents[-1]["_id"]


def _field(trait: str) -> str:
    return f"traits.{escape_key(trait)}.i"
