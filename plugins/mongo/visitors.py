# SPDX-License-Identifier: Apache-2.0
"""Visitors that belong to nobody and are deleted: old ones, and those that give way to new ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from bson.datetime_ms import DatetimeMS

from engage.api import (
    TRUSTED,
    Kind,
    StorageContext,
    Subject,
)
from engage.store.people import users
from engage.store.profiles import Person, owners
from engage.store.tables import Steps, execute_waiting

from .connection import BATCH, Connection
from .documents import (
    any_of,
    escape_key,
    scoped_id,
    subject_id,
)
from .paging import STEP, beyond
from .people import PeopleSteps
from .schema import PLACES, SUBSCRIPTIONS, USERS, VISITORS

Result = TypeVar("Result")


class Visitors:
    """Deletes visitors that belong to nobody, and knows to whom the others belong."""

    def __init__(self, connection: Connection, context: StorageContext) -> None:
        self._connection = connection
        self._context = context
        self._identifiers = context.identifiers
        #: Where :meth:`expire` continues, as a condition.
        self._expired: list[dict[str, Any]] = []

    async def _execute(self, steps: Steps[Result]) -> Result:
        profiles = PeopleSteps(self._connection, self._context)
        return await execute_waiting(steps, profiles.execute, self._context)

    async def owners(self, workspace: str, names: Collection[str]) -> dict[str, str]:
        """Return the user, of those that exist, that each anonymous id belongs to."""
        found = await self._execute(owners([(workspace, name) for name in names]))
        return {name: user.name for (_, name), user in found.items()}

    async def visitors_of(self, workspace: str, names: Collection[str]) -> dict[str, list[str]]:
        """Return the ids of those of some users that exist, with those of their visitors."""
        people = await self._execute(users(workspace, [*names]))
        return {user.name: [one.name for one in visitors] for user, _, visitors in people}

    async def forget_vouched(self) -> None:
        """Remove the traits that only engage sets: clients could set them in earlier versions."""
        declared = {name for names in self._identifiers.values() for name in names}
        names = [TRUSTED, *(f"{TRUSTED}:{name}" for name in sorted(declared))]
        fields = [f"traits.{escape_key(name)}" for name in names]
        for collection in (USERS, VISITORS):
            with self._connection.calling(scan=True) as db:
                wanted = {"$or": [{field: {"$exists": True}} for field in fields]}
                await db[collection].update_many(wanted, {"$unset": dict.fromkeys(fields, "")})

    async def expire(self, before: int, *, limit: int) -> int:
        """Delete visitors that belong to nobody, have no choice and were not changed since, and
        return how many, the least recently changed first.
        A call that reaches the limit is continued by the next one."""
        bounds = {"changedAt": {"$lt": DatetimeMS(before)}}
        deleted, more = 0, True
        while more and deleted < limit:
            with self._connection.calling() as db:
                query = {"$and": [bounds, *self._expired]}
                fields = dict.fromkeys(("workspaceId", "anonymousId", "changedAt"), 1)
                cursor = db[VISITORS].find(query, fields).sort([("changedAt", 1), ("_id", 1)])
                documents = await cursor.limit(BATCH).to_list(None)
                old = await self._belonging_to_nobody(documents)
                last = None if len(documents) < BATCH else documents[-1]
                if len(old) >= limit - deleted:
                    old = old[: limit - deleted]
                    last = old[-1]
                more = last is not None
                place = beyond("changedAt", last["changedAt"], last["_id"]) if last else None
                self._expired = [place] if place else []
                deleted += await _delete(self._connection, [one["_id"] for one in old], bounds)
        return deleted

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


async def delete_visitors(connection: Connection, changed: Mapping[Person, int]) -> int:
    """Delete visitors; see :func:`_delete`.

    :param changed: when each was changed last.
    """
    ids = [scoped_id(workspace, name) for workspace, _, name in changed]
    return await _delete(
        connection, ids, {"changedAt": {"$lte": DatetimeMS(max(changed.values()))}}
    )


async def _delete(connection: Connection, ids: Sequence[str], bounds: Mapping[str, Any]) -> int:
    """Delete visitors, unless an event changed them in the meantime.

    A visitor is deleted after what belongs to it: what a crash leaves expires with it later. Its
    traits are the first to go, so that an event in the meantime makes a new visitor.
    """
    if not ids:
        return 0
    db, old = connection.db, {"_id": any_of(ids), **bounds}
    async with connection.updating:
        await db[VISITORS].update_many(old, {"$unset": {"traits": "", "claims": ""}})
        if gone := [one["_id"] async for one in db[VISITORS].find(old, {"_id": 1})]:
            place = PLACES[Kind.VISITOR]
            for collection in (place.memberships, place.claims):
                await db[collection].delete_many({"visitor": any_of(gone), **bounds})
        done = await db[VISITORS].delete_many(old)
    return int(done.deleted_count)


def parts(
    documents: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Cut documents into parts of one workspace, of at most :data:`STEP`."""
    for workspace, found in itertools.groupby(documents, key=lambda one: one["workspaceId"]):
        part = list(found)
        for start in range(0, len(part), STEP):
            yield workspace, part[start : start + STEP]
