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
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import (
    ConfigError,
    Kind,
    identifier_value,
)

from .connection import Connection
from .documents import (
    decode_value,
    escape_key,
    pair_id,
    scoped_id,
)
from .paging import STEP, id_after
from .schema import META, PLACES

#: MongoDB allows 64 indexes on a collection; each identifier trait needs one.
_MAX_TRAITS: Final = 40
#: The kinds that are looked up.
_KINDS: Final = (Kind.USER, Kind.VISITOR)


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


def held_by(document: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the id of the user or visitor of a stored claim, the trait, and the value."""
    prefix = scoped_id(document["workspaceId"], "")
    size, _, held = document["held"].removeprefix(prefix).partition(":")
    name = document.get("userId") or document["visitor"].removeprefix(prefix)
    return name, held[: int(size)], held[int(size) + 1 :]


@dataclasses.dataclass(eq=False)
class Claim:
    """A user's trait was set to a value; see :meth:`~engage.store.facade.Storage.find_users`.

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


class Identifiers:
    """Has users and visitors found by the declared traits.

    :param declared: workspace id → the traits by which its users are looked up.
    """

    def __init__(self, connection: Connection, declared: Mapping[str, Sequence[str]]) -> None:
        self._connection = connection
        self.declared = {workspace: frozenset(traits) for workspace, traits in declared.items()}

    async def index(self) -> None:
        """Make users found by each declared trait, also those that were stored before the trait was
        declared."""
        declared = {
            scoped_id(workspace, trait): (workspace, trait)
            for workspace, traits in self.declared.items()
            for trait in traits
        }
        with self._connection.calling() as db:
            document = await db[META].find_one({"_id": "identifiers"})
        done = set() if document is None else set(document["done"])
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
