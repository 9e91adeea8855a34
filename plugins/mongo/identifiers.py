# SPDX-License-Identifier: Apache-2.0
"""Users and visitors by the value of an identifier trait, such as an e-mail address.

The register of such a trait has the form that is looked up as ``i``, with an index for each trait.
The collections of claims have when each user or visitor first had each value.

A claim is a document that is changed only by ``$min``, so that the least time stays in any order of
arrival. A user keeps the first :data:`MAX_CLAIMS` claims of a trait, and the user's document counts
them (``claims.<trait>``): that is read with the traits, so that only a value that may be new to the
user needs another look-up. The same holds for a visitor.

All later values share one document, the *late* claim of the user and the trait. It belongs to the
value that became the current one last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import (
    MAX_CANDIDATES,
    MAX_CLAIMS,
    MAX_USERS,
    ConfigError,
    Kind,
    Page,
    Subject,
    identifier_value,
)

from .connection import BATCH, Connection
from .documents import (
    below,
    decode_value,
    escape_key,
    identifier_field,
    is_text,
    pair_id,
    scoped_id,
)
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

    kind: Kind
    workspace: str
    #: The id of the user or visitor.
    user: str
    trait: str
    #: In the form in which users are looked up.
    value: str

    @functools.cached_property
    def owner(self) -> str:
        """The ``_id`` of the user or visitor."""
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

    def statement(
        self, times: Mapping[str, Any], changed: Mapping[str, Any], key: str | None = None
    ) -> dict[str, Any]:
        """Return the statement that stores the claim.

        :param times: the operator that sets ``at``.
        :param changed: fields of which the greatest value stays.
        :param key: another ``_id``.
        """
        whose = {"userId": self.user} if self.kind is Kind.USER else {"visitor": self.owner}
        fields = {"workspaceId": self.workspace, **whose, "held": self.held}
        update = {**times, "$setOnInsert": {**fields, **times.get("$setOnInsert", {})}}
        if changed:
            update["$max"] = changed
        return {"q": {"_id": key or self.key}, "u": update, "upsert": True}

    def late_statements(self, at: int, changed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the statements that give the late claim to this value: with the time ``at``, or
        the time that it has if it belongs to this value already."""
        time = DatetimeMS(at)
        return [
            {
                "q": {"_id": self.late_key, "held": {"$ne": self.held}},
                "u": {"$set": {"held": self.held, "at": time}},
            },
            self.statement({"$min": {"at": time}}, changed, self.late_key),
        ]


#: For each trait, escaped, the value in the form in which users are looked up, and how many claims
#: are stored.
_Stored = tuple[Mapping[str, str | None], Mapping[str, int]]
_NOTHING: Final[_Stored] = ({}, {})


class StoredClaims:
    """The stored claims of a write's users, or of its visitors, that the bound needs."""

    def __init__(self) -> None:
        #: ``_id`` of a user → what is stored of it.
        self._users: dict[str, _Stored] = {}
        #: The ``_id`` of claims that were looked up, and are stored.
        self.keys: set[str] = set()

    def add(self, user: Mapping[str, Any]) -> None:
        """Take in the stored document of a user."""
        traits = user.get("traits", {}).items()
        forms = {name: register.get("i") for name, register in traits}
        self._users[user["_id"]] = (forms, user.get("claims", {}))

    def count(self, claim: Claim) -> int:
        """Return how many claims the user has of the trait."""
        return int(self._users.get(claim.owner, _NOTHING)[1].get(claim.name, 0))

    def form(self, claim: Claim) -> str | None:
        """Return the current value of the trait, in the form in which users are looked up."""
        return self._users.get(claim.owner, _NOTHING)[0].get(claim.name)

    def is_doubtful(self, claim: Claim) -> bool:
        """Return whether a look-up must show if the claim is stored."""
        forms, counts = self._users.get(claim.owner, _NOTHING)
        return (claim.name in forms or claim.name in counts) and not self._is_current(claim)

    def has(self, claim: Claim) -> bool:
        """Return whether the claim is stored, or at least counted."""
        return self._is_current(claim) or claim.key in self.keys

    def _is_current(self, claim: Claim) -> bool:
        # While there is room, each value that became the current one has a claim.
        return self.form(claim) == claim.form and self.count(claim) < MAX_CLAIMS


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

    async def _find(
        self, kind: Kind, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the users who have one of these values, or the visitors who belong to nobody:
        value → ids, oldest claim first."""
        search = self._users if kind is Kind.USER else self._visitors
        with self._connection.calling():
            found = {
                value: await search(Claim(kind, workspace_id, "", trait, value))
                for value in filter(is_text, values)
            }
        return {value: names[:MAX_USERS] for value, names in found.items() if names}

    find_users = functools.partialmethod(_find, Kind.USER)
    find_visitors = functools.partialmethod(_find, Kind.VISITOR)

    async def _visitors(self, claim: Claim) -> list[str]:
        found: list[str] = []
        async for step in self._steps(claim):
            owners = await self._people.owners(claim.workspace, [name for *_, name in step])
            found += [name for *_, name in step if name not in owners]
            if len(found) >= MAX_USERS:
                break
        return found

    async def _users(self, claim: Claim) -> list[str]:
        """Return the users who have a value with their visitors, oldest claim first. A step of
        users, or of visitors, is read only while it can have one of them."""
        ages: dict[str, Age] = {}
        found: set[str] = set()
        steps = {kind: self._steps(dataclasses.replace(claim, kind=kind)) for kind in _KINDS}
        reached: dict[Kind, Age] = dict.fromkeys(_KINDS, (False, -(2**63), ""))
        while reached:
            oldest = sorted(found, key=ages.__getitem__)[:MAX_USERS]
            if len(oldest) == MAX_USERS and ages[oldest[-1]] <= min(reached.values()):
                break
            kind = min(reached, key=reached.__getitem__)
            step = await anext(steps[kind], None)
            if step is None:
                del reached[kind]
                continue
            reached[kind] = step[-1]
            whose = {name: name for *_, name in step}
            if kind is Kind.VISITOR:
                whose = await self._people.owners(claim.workspace, whose)
            names = set(whose.values()) - ages.keys()
            values = await self._people.values(claim.workspace, names, claim.trait)
            forms = {name: identifier_value(claim.trait, values[name]) for name in values}
            found |= {name for name, form in forms.items() if form == claim.value}
            for age in step:
                if (user := whose.get(age[-1])) is not None:
                    ages[user] = min(age, ages.get(user, age))
        return sorted(found, key=ages.__getitem__)

    async def _steps(self, claim: Claim) -> AsyncIterator[list[Age]]:
        """Read those who have a value, oldest claim first: about :data:`MAX_CANDIDATES` at most.

        :param claim: a claim of the value by any of them.
        """
        place, db = PLACES[claim.kind], self._connection.db
        query = {identifier_field(claim.trait): claim.form}
        fields = {place.name: 1, "createdAt": 1}
        cursor = db[place.subjects].find(query, fields).sort(_ORDER).limit(MAX_USERS + 1)
        first = {one[place.name]: int(one["createdAt"]) for one in await cursor.to_list(None)}
        if not first:
            return
        if len(first) <= MAX_USERS:
            keys: dict[str, str] = {}
            for name in first:
                one = dataclasses.replace(claim, user=name)
                keys[one.key] = keys[one.late_key] = name
            by_name = {name: (True, at, name) for name, at in first.items()}
            fields = {"held": 1, "at": 1}
            for stored in await self._connection.read(place.claims, keys, fields):
                # A late claim may belong to another value.
                if stored["held"] == claim.held:
                    name = keys[stored["_id"]]
                    by_name[name] = min(by_name[name], (False, int(stored["at"]), name))
            yield sorted(by_name.values())
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
            ages = sorted(
                (False, times[one["_id"]], one[place.name])
                for one in await self._connection.read(place.subjects, times, fields, **query)
                if one[place.name] not in found
            )
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
    ) -> Page[Subject]:
        """Return a page of the users who have a value, and then of the visitors."""
        if not is_text(value):
            return Page((), None)
        prefix, _, start = (after or "u").partition("/")
        kind = Kind.VISITOR if prefix == "v" else Kind.USER
        query: dict[str, Any] = {identifier_field(trait): scoped_id(workspace_id, value)}
        place = PLACES[kind]
        if start:
            created, _, key = start.partition(".")
            query |= beyond("createdAt", DatetimeMS(int(created)), key)
        with self._connection.calling() as db:
            cursor = db[place.subjects].find(query, {place.name: 1, "createdAt": 1})
            found = await cursor.sort(_ORDER).limit(limit).to_list(None)
        more = "v" if kind is Kind.USER else None
        if len(found) == limit:
            more = f"{prefix}/{int(found[-1]['createdAt'])}.{found[-1]['_id']}"
        return Page([Subject(kind, one[place.name]) for one in found], more)

    async def history(
        self, workspace_id: str, trait: str, ids: Sequence[str]
    ) -> dict[str, set[str]]:
        """Return the values of a trait that these users, with their visitors, have or had."""
        found: dict[str, set[str]] = {}
        held, whose = scoped_id(workspace_id, _held(trait, "")), scoped_id(workspace_id, "")
        with self._connection.calling() as db:
            people = await self._people.visitors_of(workspace_id, filter(is_text, ids))
            users = {
                Kind.USER: {name: name for name in people},
                Kind.VISITOR: {one: name for name, names in people.items() for one in names},
            }
            for kind, user_of in users.items():
                paths = [claim_id(workspace_id, one, trait, "")[:-1] for one in user_of]
                for start in range(0, len(paths), STEP):
                    ranges = [{"_id": below(path)} for path in paths[start : start + STEP]]
                    async for one in db[PLACES[kind].claims].find({"$or": ranges}):
                        name = user_of[one.get("userId") or one["visitor"].removeprefix(whose)]
                        found.setdefault(name, set()).add(one["held"].removeprefix(held))
        return found

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
