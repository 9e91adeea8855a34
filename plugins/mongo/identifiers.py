# SPDX-License-Identifier: Apache-2.0
"""Users by the value of an identifier trait, such as an e-mail address.

The register of such a trait has the form that is looked up as ``i``, with an index for each trait.
The collection of claims has when each user first had each value. It is read only for a value that
several users have.

A claim is a document that is changed only by ``$min``, so that the least time stays in any order of
arrival. A user keeps the first :data:`MAX_CLAIMS` claims of a trait, and the user's document counts
them (``claims.<trait>``): that is read with the traits, so that only a value that may be new to the
user needs another look-up.

All later values share one document, the *late* claim of the user and the trait. It belongs to the
value that became the current one last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import MAX_CLAIMS, MAX_USERS, ConfigError, Page, identifier_value

from .connection import BATCH, Connection
from .documents import any_of, decode_value, escape_key, is_text, pair_id, scoped_id
from .paging import id_after
from .schema import CLAIMS, META, USERS

#: MongoDB allows 64 indexes on a collection; each identifier trait needs one.
_MAX_TRAITS: Final = 40
#: The order in which the index of an identifier has the users.
_ORDER: Final = [("createdAt", 1), ("_id", 1)]
#: Pages of claims that are read to find the oldest of very many users: so many users may have had
#: the value earlier and not have it now. Then the order is that of ``createdAt``.
_CLAIM_PAGES: Final = 20
#: Users that are read at once, with their registers, links and memberships.
STEP: Final = 200


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


def claim_id(workspace: str, user: str, trait: str, value: str) -> str:
    """Return the ``_id`` of a claim."""
    return pair_id(workspace, user, _held(trait, value))


def _held(trait: str, value: str) -> str:
    return f"{len(trait)}:{trait}:{value}"


@dataclasses.dataclass(eq=False)
class Claim:
    """A user's trait was set to a value; see :meth:`~engage.api.ProfileStore.find_users`.

    It is never changed. It is not frozen, because making it would then take twice as long.
    """

    workspace: str
    user: str
    trait: str
    #: In the form in which users are looked up.
    value: str

    @functools.cached_property
    def owner(self) -> str:
        """The ``_id`` of the user."""
        return scoped_id(self.workspace, self.user)

    @functools.cached_property
    def name(self) -> str:
        """The trait as a key in the document of the user."""
        return escape_key(self.trait)

    @functools.cached_property
    def key(self) -> str:
        """The ``_id`` of the claim."""
        return claim_id(self.workspace, self.user, self.trait, self.value)

    @property
    def late_key(self) -> str:
        """The ``_id`` of the late claim of the same trait; no claim has an empty value."""
        return claim_id(self.workspace, self.user, self.trait, "")

    @property
    def held(self) -> str:
        """The trait with the value, within the workspace."""
        return scoped_id(self.workspace, _held(self.trait, self.value))

    @functools.cached_property
    def form(self) -> str:
        """The value as a register has it in ``i``."""
        return scoped_id(self.workspace, self.value)

    def statement(self, times: Mapping[str, Any]) -> dict[str, Any]:
        """Return the statement that stores the claim.

        :param times: the operator that sets ``at``.
        """
        return self._upsert(self.key, times)

    def late_statements(self, at: int) -> list[dict[str, Any]]:
        """Return the statements that give the late claim to this value: with the time ``at``, or
        the time that it has if it belongs to this value already."""
        time = DatetimeMS(at)
        return [
            {
                "q": {"_id": self.late_key, "held": {"$ne": self.held}},
                "u": {"$set": {"held": self.held, "at": time}},
            },
            self._upsert(self.late_key, {"$min": {"at": time}}),
        ]

    def _upsert(self, key: str, times: Mapping[str, Any]) -> dict[str, Any]:
        fields = {"workspaceId": self.workspace, "userId": self.user, "held": self.held}
        inserted = {**fields, **times.get("$setOnInsert", {})}
        return {"q": {"_id": key}, "u": {**times, "$setOnInsert": inserted}, "upsert": True}


class StoredClaims:
    """The stored claims of a write's users that the bound needs.

    :param owners: the ``_id`` of the users that are needed.
    """

    def __init__(self, owners: Collection[str] = ()) -> None:
        self._owners = owners
        #: ``_id`` of a user → for each trait, escaped, the value in the form in which users are
        #: looked up, and how many claims are stored.
        self._users: dict[str, tuple[Mapping[str, str | None], Mapping[str, int]]] = {}
        #: The ``_id`` of claims that were looked up, and are stored.
        self.keys: set[str] = set()

    def add(self, user: Mapping[str, Any]) -> None:
        """Take in the stored document of a user."""
        if user["_id"] in self._owners:
            traits = user.get("traits", {}).items()
            forms = {name: register.get("i") for name, register in traits}
            self._users[user["_id"]] = (forms, user.get("claims", {}))

    def count(self, claim: Claim) -> int:
        """Return how many claims the user has of the trait."""
        found = self._users.get(claim.owner)
        return 0 if found is None else int(found[1].get(claim.name, 0))

    def form(self, claim: Claim) -> str | None:
        """Return the current value of the trait, in the form in which users are looked up."""
        found = self._users.get(claim.owner)
        return None if found is None else found[0].get(claim.name)

    def is_doubtful(self, claim: Claim) -> bool:
        """Return whether a look-up must show if the claim is stored."""
        if claim.owner not in self._users:
            return False
        forms, counts = self._users[claim.owner]
        return (claim.name in forms or claim.name in counts) and not self._is_current(claim)

    def has(self, claim: Claim) -> bool:
        """Return whether the claim is stored, or at least counted."""
        return self._is_current(claim) or claim.key in self.keys

    def _is_current(self, claim: Claim) -> bool:
        # While there is room, each value that became the current one has a claim.
        return self.form(claim) == claim.form and self.count(claim) < MAX_CLAIMS


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
                query = {identifier_field(trait): scoped_id(workspace_id, value)}
                cursor = db[USERS].find(query, {"userId": 1, "createdAt": 1})
                users = await cursor.sort(_ORDER).limit(MAX_USERS + 1).to_list(None)
                if len(users) > 1:
                    claim = Claim(workspace_id, "", trait, value)
                    if len(users) > MAX_USERS:
                        users = await self._with_oldest_claims(db, query, claim) + users
                    users = await self._by_claim(db, users, claim)
                if users:
                    ids = dict.fromkeys(document["userId"] for document in users)
                    found[value] = list(ids)[:MAX_USERS]
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
        for _ in range(_CLAIM_PAGES):
            cursor = db[CLAIMS].find(held, {"userId": 1, "at": 1})
            claims = await cursor.sort([("at", 1), ("_id", 1)]).limit(BATCH).to_list(None)
            ids = [scoped_id(claim.workspace, document["userId"]) for document in claims]
            if ids:
                fields = {"userId": 1, "createdAt": 1}
                users = db[USERS].find({"_id": any_of(ids), **query}, fields)
                by_id = {document["_id"]: document for document in await users.to_list(None)}
                found += [by_id[one] for one in ids if one in by_id]
            if len(claims) < BATCH or len(found) >= MAX_USERS:
                break
            last = claims[-1]
            held["at"] = {"$gte": last["at"]}
            held["$or"] = [
                {"at": {"$gt": last["at"]}},
                {"at": last["at"], "_id": {"$gt": last["_id"]}},
            ]
        return found[:MAX_USERS]

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[str]:
        """Return a page of the users who have a value."""
        if not is_text(value):
            return Page((), None)
        query: dict[str, Any] = {identifier_field(trait): scoped_id(workspace_id, value)}
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
                cursor = db[USERS].find(query, names).sort([("_id", 1)]).limit(STEP)
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
            if len(documents) < STEP:
                return
            after = documents[-1]["_id"]


def identifier_field(trait: str) -> str:
    """Return the field of a user that has an identifier in the form that is looked up."""
    return f"traits.{escape_key(trait)}.i"
