# SPDX-License-Identifier: Apache-2.0
"""Users and visitors by the value of an identifier trait, such as an e-mail address.

The register of such a trait has the form that is looked up as ``i``, with an index for each trait.
The collections of claims have when each user or visitor first had each value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import (
    MAX_CANDIDATES,
    MAX_USERS,
    ConfigError,
    Kind,
    Page,
    identifier_value,
    winner,
)

from .claims import Claim
from .connection import BATCH, Connection
from .documents import any_of, decode_value, escape_key, identifier_field, is_text, scoped_id
from .paging import beyond, id_after
from .people import STEP, People
from .schema import META, PLACES

#: MongoDB allows 64 indexes on a collection; each identifier trait needs one.
_MAX_TRAITS: Final = 40
#: The kinds that are looked up.
_KINDS: Final = (Kind.USER, Kind.VISITOR)
#: The order in which the index of an identifier has the users.
_ORDER: Final = [("createdAt", 1), ("_id", 1)]
#: Pages of claims that are read to find the oldest of very many users: so many users may have had
#: the value earlier and not have it now. Then the order is that of ``createdAt``.
_CLAIM_PAGES: Final = 20

#: Orders those who have a value: whether there is no claim, its time, id. One without a claim is
#: last, by ``createdAt``: anyone can choose a timestamp.
Age = tuple[bool, int, str]


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
    """Looks users and visitors up.

    :param declared: workspace id → the traits by which its users are looked up.
    """

    def __init__(
        self, connection: Connection, people: People, declared: Mapping[str, Sequence[str]]
    ) -> None:
        self._connection = connection
        self._people = people
        self.declared = {workspace: frozenset(traits) for workspace, traits in declared.items()}

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the users who have one of these values: value → user ids, oldest claim first."""
        found: dict[str, list[str]] = {}
        with self._connection.calling():
            for value in filter(is_text, values):
                users = await self._users(Claim(Kind.USER, workspace_id, "", trait, value))
                if users:
                    found[value] = users
        return found

    async def find_visitors(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the same of the visitors who belong to nobody."""
        found: dict[str, list[str]] = {}
        with self._connection.calling():
            for value in filter(is_text, values):
                visitors: list[str] = []
                async for step in self._steps(Claim(Kind.VISITOR, workspace_id, "", trait, value)):
                    owners = await self._people.owners(workspace_id, [name for *_, name in step])
                    visitors += [name for *_, name in step if name not in owners]
                    if len(visitors) >= MAX_USERS:
                        break
                if visitors:
                    found[value] = visitors[:MAX_USERS]
        return found

    async def _users(self, claim: Claim) -> list[str]:
        """Return the users who have a value, oldest claim first. A step of users, or of visitors,
        is read only while it can have one of them."""
        found: dict[str, Age] = {}
        seen: set[str] = set()
        steps = {kind: self._steps(dataclasses.replace(claim, kind=kind)) for kind in _KINDS}
        reached: dict[Kind, Age] = dict.fromkeys(_KINDS, (False, -(2**63), ""))
        while reached:
            if len(found) >= MAX_USERS and sorted(found.values())[MAX_USERS - 1] <= min(
                reached.values()
            ):
                break
            kind = min(reached, key=reached.__getitem__)
            step = await anext(steps[kind], None)
            if step is None:
                del reached[kind]
                continue
            reached[kind] = step[-1]
            names = {name for *_, name in step}
            if kind is Kind.VISITOR:
                names = set((await self._people.owners(claim.workspace, names)).values())
            found |= await self._examined(claim, names - seen)
            seen |= names
        return sorted(found, key=found.__getitem__)[:MAX_USERS]

    async def _examined(self, claim: Claim, names: Collection[str]) -> dict[str, Age]:
        """Return those of some users who have a value with their visitors, and since when."""
        having: dict[Kind, dict[str, int]] = {kind: {} for kind in _KINDS}
        found: dict[str, list[tuple[Kind, str]]] = {}
        limits = self._people.limits
        for person in await self._people.persons(claim.workspace, names, claim.trait):
            value = winner(claim.trait, person.user, person.visitors, limits)
            if identifier_value(claim.trait, value) != claim.value:
                continue
            found[person.user.id] = members = []
            everyone = [(Kind.USER, person.user), *((Kind.VISITOR, one) for one in person.visitors)]
            for kind, one in everyone:
                _, value = one.traits.get(claim.trait, (None, None))
                if identifier_value(claim.trait, value) == claim.value:
                    having[kind][one.id] = one.created_at
                    members.append((kind, one.id))
        ages = {
            kind: await self._ages(dataclasses.replace(claim, kind=kind), those)
            for kind, those in having.items()
            if those
        }
        return {
            user: min(ages[kind][name] for kind, name in members) for user, members in found.items()
        }

    async def _ages(self, claim: Claim, created: Mapping[str, int]) -> dict[str, Age]:
        """Return how old the claims of some users, or visitors, are.

        :param claim: a claim of the value by any of them.
        :param created: id → ``createdAt``.
        """
        keys: dict[str, str] = {}
        for name in created:
            one = dataclasses.replace(claim, user=name)
            keys[one.key] = keys[one.late_key] = name
        ages = {name: (True, at, name) for name, at in created.items()}
        for chunk in self._connection.chunks(list(keys)):
            cursor = self._connection.db[PLACES[claim.kind].claims].find(
                {"_id": any_of(chunk)}, {"held": 1, "at": 1}
            )
            for stored in await cursor.to_list(None):
                # A late claim may belong to another value.
                if stored["held"] == claim.held:
                    name = keys[stored["_id"]]
                    ages[name] = min(ages[name], (False, int(stored["at"]), name))
        return ages

    async def _steps(self, claim: Claim) -> AsyncIterator[list[Age]]:
        """Read those who have a value, oldest claim first: about :data:`MAX_CANDIDATES` at most.

        :param claim: a claim of the value by any of them.
        """
        place, db = PLACES[claim.kind], self._connection.db
        query = {identifier_field(claim.trait): claim.form}
        fields = {place.name: 1, "createdAt": 1}
        cursor = db[place.subjects].find(query, fields).sort(_ORDER).limit(MAX_USERS + 1)
        first = {one[place.name]: int(one["createdAt"]) for one in await cursor.to_list(None)}
        if len(first) <= MAX_USERS:
            if first:
                yield sorted((await self._ages(claim, first)).values())
            return
        found: set[str] = set()
        held: dict[str, Any] = {"held": claim.held}
        for _ in range(_CLAIM_PAGES):
            cursor = db[place.claims].find(held, {"userId": 1, "visitor": 1, "at": 1})
            claims = await cursor.sort([("at", 1), ("_id", 1)]).limit(BATCH).to_list(None)
            times = {
                one.get("visitor") or scoped_id(claim.workspace, one["userId"]): int(one["at"])
                for one in reversed(claims)
            }
            ages = []
            for chunk in self._connection.chunks(list(times)):
                cursor = db[place.subjects].find({"_id": any_of(chunk), **query}, fields)
                ages += [
                    (False, times[one["_id"]], one[place.name])
                    for one in await cursor.to_list(None)
                    if one[place.name] not in found
                ]
            ages.sort()
            for start in range(0, len(ages), STEP):
                yield ages[start : start + STEP]
            found.update(name for *_, name in ages)
            if len(claims) < BATCH or len(found) >= MAX_CANDIDATES:
                break
            held = {"held": claim.held, **beyond("at", claims[-1]["at"], claims[-1]["_id"])}
        if left := [(True, at, name) for name, at in first.items() if name not in found]:
            yield left

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[str]:
        """Return a page of the users who have a value, and then of the visitors."""
        if not is_text(value):
            return Page((), None)
        kind, start = Kind.USER, after or ""
        if start.startswith("v"):
            kind, start = Kind.VISITOR, start[1:]
        place = PLACES[kind]
        query: dict[str, Any] = {identifier_field(trait): scoped_id(workspace_id, value)}
        with self._connection.calling() as db:
            created, _, key = start.partition(".")
            place_after = beyond("createdAt", DatetimeMS(int(created)), key) if created else {}
            cursor = db[place.subjects].find(
                {**query, **place_after}, {place.name: 1, "createdAt": 1}
            )
            found = await cursor.sort(_ORDER).limit(limit).to_list(None)
            # An id is returned once.
            users: set[str] = set()
            if kind is Kind.VISITOR and found:
                ids = any_of([one["_id"] for one in found])
                both = db[PLACES[Kind.USER].subjects].find({"_id": ids, **query}, {"_id": 1})
                users = {one["_id"] for one in await both.to_list(None)}
        prefix = "v" if kind is Kind.VISITOR else ""
        more = None if prefix else "v"
        if len(found) == limit:
            more = f"{prefix}{int(found[-1]['createdAt'])}.{found[-1]['_id']}"
        return Page([one[place.name] for one in found if one["_id"] not in users], more)

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
            for kind in _KINDS:
                await self._index(kind, *declared[key])
        with self._connection.calling() as db:
            await db[META].update_one(
                {"_id": "identifiers"}, {"$set": {"done": sorted(declared)}}, upsert=True
            )

    async def _index(self, kind: Kind, workspace: str, trait: str) -> None:
        field, place = f"traits.{escape_key(trait)}", PLACES[kind]
        names = {field: 1, place.name: 1, "createdAt": 1, "changedAt": 1}
        after: str | None = None
        while True:
            query = {**id_after(workspace, after), field: {"$exists": True}}
            with self._connection.calling() as db:
                cursor = db[place.subjects].find(query, names).sort([("_id", 1)]).limit(STEP)
                documents = await cursor.to_list(None)
                statements, claims = [], []
                for document in documents:
                    register = document["traits"][escape_key(trait)]
                    value = identifier_value(trait, decode_value(register))
                    if value is None:
                        continue
                    # Claims were not recorded so far. The user exists at least since then.
                    claim = Claim(kind, workspace, document[place.name], trait, value)
                    created = {"$setOnInsert": {"at": document["createdAt"]}}
                    changed = {key: document[key] for key in ("changedAt",) if key in document}
                    claims.append(claim.statement(created, changed))
                    if "i" not in register:
                        # Only if the register is unchanged; a later value has the form already.
                        same = {f"{field}.{part}": register[part] for part in ("t", "m", "o")}
                        form = {f"{field}.i": scoped_id(workspace, value)}
                        statements.append(
                            {"q": {"_id": document["_id"], **same}, "u": {"$set": form}}
                        )
                await self._connection.update(place.claims, claims)
                await self._connection.update(place.subjects, statements)
            if len(documents) < STEP:
                return
            after = documents[-1]["_id"]
