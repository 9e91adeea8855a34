# SPDX-License-Identifier: Apache-2.0
"""Users by the value of an identifier trait, such as an e-mail address.

The register of such a trait has the form that is looked up as ``i``, with an index for each trait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from engage.api import identifier_value

from .connection import Connection
from .documents import decode_value, escape_key, scoped_id
from .paging import id_after
from .schema import META, USERS

#: Maximum number of users that are returned for one value; the interface defines it.
_MAX_USERS: Final = 100
#: Users whose registers are completed at once.
_STEP: Final = 200


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
        """Return the users who have one of these values: value → user ids, oldest first."""
        field = f"traits.{escape_key(trait)}.i"
        wanted = {scoped_id(workspace_id, value): value for value in values}
        fields = {"userId": 1, field: 1}
        found: dict[str, list[str]] = {}
        with self._connection.calling() as db:
            for key, value in wanted.items():
                cursor = db[USERS].find({field: key}, fields)
                cursor = cursor.sort([("createdAt", 1), ("_id", 1)]).limit(_MAX_USERS)
                users = [document["userId"] for document in await cursor.to_list(None)]
                if users:
                    found[value] = users
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
            await self._index(*declared[key])
        with self._connection.calling() as db:
            await db[META].update_one(
                {"_id": "identifiers"}, {"$set": {"done": sorted(declared)}}, upsert=True
            )

    async def _index(self, workspace: str, trait: str) -> None:
        field = f"traits.{escape_key(trait)}"
        after: str | None = None
        while True:
            query = {**id_after(workspace, after), field: {"$exists": True}}
            with self._connection.calling() as db:
                cursor = db[USERS].find(query, {field: 1}).sort([("_id", 1)]).limit(_STEP)
                documents = await cursor.to_list(None)
                statements = []
                for document in documents:
                    register = document["traits"][escape_key(trait)]
                    value = identifier_value(trait, decode_value(register))
                    if value is not None and "i" not in register:
                        # Only if the register is unchanged; a later value has the form already.
                        same = {f"{field}.{part}": register[part] for part in ("t", "m", "o")}
                        form = {f"{field}.i": scoped_id(workspace, value)}
                        statements.append(
                            {"q": {"_id": document["_id"], **same}, "u": {"$set": form}}
                        )
                await self._connection.update(USERS, statements)
            if len(documents) < _STEP:
                return
            after = documents[-1]["_id"]
