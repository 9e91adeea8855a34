# SPDX-License-Identifier: Apache-2.0
"""What a process remembers of profiles, and deleting them: erased ones, and visitors that belong to
nobody, which are old or give way to new ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from bson.datetime_ms import DatetimeMS

from engage.api import TRUSTED, Event, Kind, StorageContext, Subject
from engage.store.changes import EncodedChange
from engage.store.events import changing
from engage.store.people import users
from engage.store.profiles import KNOWN_LINKS, USER, Person, owners
from engage.store.remembered import Remembered
from engage.store.tables import Steps, execute_waiting

from .connection import BATCH, Connection
from .documents import (
    any_of,
    below,
    escape_key,
    in_workspace,
    pair_id,
    scoped_id,
    subject_id,
)
from .paging import STEP, beyond
from .people_steps import PeopleSteps
from .schema import LINKS, META, PLACES, SUBSCRIPTIONS, USERS, VISITORS

Result = TypeVar("Result")

#: Seconds between two looks at the number of erased profiles.
ERASURES_SECONDS: Final = 1.0

#: Seconds after which the visitors of a workspace are counted again. With those that housekeeping
#: waits, the number is five seconds old at most.
_COUNT_SECONDS: Final = 4.0


class Cache(Remembered):
    """What this process remembers: which links and claims are durable, and which workspaces have no
    room for more visitors.

    :param most: how many visitors a workspace has at most.
    """

    def __init__(self, connection: Connection, most: int) -> None:
        super().__init__()
        self._connection = connection
        self._most = most
        #: The workspaces with new visitors since these were counted, and those without room.
        self.growing: set[str] = set()
        self.full: set[str] = set()
        self._count_at = 0.0
        #: How many profiles were erased from the store when that was last looked up, and when it is
        #: looked up again.
        self._erased = 0
        self._look_at = 0.0

    def forget(self, topic: str | None = None) -> None:
        """Forget everything: another store may be at the address when it is opened."""
        super().forget(topic)
        self.full.clear()

    async def look_for_erasures(self) -> None:
        """Forget everything if a profile was erased, by any process: it had some of the links and
        claims. That is looked up once a second. To be called within :meth:`Connection.calling`."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + ERASURES_SECONDS
        if self.is_empty:
            return
        document = await self._connection.db[META].find_one({"_id": "erasures"})
        erased = 0 if document is None else document["count"]
        if erased != self._erased:
            self._erased = erased
            self.forget()

    async def erase(self, workspace_id: str, kind: Kind, name: str) -> bool:
        """Erase a user or a visitor, and return whether there was one. To be called within
        :meth:`Connection.calling`."""
        key, place, db = scoped_id(workspace_id, name), PLACES[kind], self._connection.db
        # What has the id of the profile in it is deleted first: a crash leaves the rest.
        whose = {"_id": below(pair_id(workspace_id, name, "").removesuffix(":"))}
        async with self._connection.updating:
            for collection in (place.memberships, place.claims):
                of_kind = whose if kind is Kind.USER else {"visitor": key}
                await db[collection].delete_many(of_kind)
            if kind is Kind.USER:
                await db[LINKS].delete_many({"user": key})
            done = await db[place.subjects].delete_many({"_id": key})
            # The next write of each process forgets what it remembers of the profile.
            await db[META].update_one({"_id": "erasures"}, {"$inc": {"count": 1}}, upsert=True)
        self._look_at = 0.0
        return bool(done.deleted_count)

    def changes(self, event: Event) -> Sequence[EncodedChange]:
        """Return the changes of an event; nothing if it only makes a link that is known.

        :raises UnstorableError: if the body does not fit the type.
        """
        if not event.may_change_profiles:
            return ()
        user, anonymous, at = event.user_id, event.anonymous_id, event.received_at
        if event.type in ("track", "page", "screen") and user is not None and anonymous is not None:
            link = ((event.workspace_id, USER, user), anonymous)
            if self.of(KNOWN_LINKS).get(link, at) < at:
                return ()
        _, changes = changing(event)
        return changes

    async def count_visitors(self) -> None:
        """Find out which workspaces have no room for more visitors, every five seconds at most. To
        be called within :meth:`Connection.calling`."""
        if not self.growing or time.monotonic() < self._count_at:
            return
        self._count_at = time.monotonic() + _COUNT_SECONDS
        growing, self.growing = self.growing, set()
        most, db = self._most, self._connection.db
        in_all = await db[VISITORS].estimated_document_count()
        for workspace in growing:
            count = 0
            if in_all >= most:
                query = {"_id": in_workspace(workspace)}
                count = (await db.command({"count": VISITORS, "query": query, "limit": most}))["n"]
            (self.full.add if count >= most else self.full.discard)(workspace)


async def ensure_user(connection: Connection, workspace_id: str, user_id: str, at: int) -> None:
    """Make a user exist because of a subscription change. To be called within
    :meth:`Connection.calling`."""
    statement = {
        "q": {"_id": scoped_id(workspace_id, user_id)},
        "u": {
            "$max": {"lastChoiceAt": DatetimeMS(at)},
            "$min": {"firstChoiceAt": DatetimeMS(at)},
            "$setOnInsert": {"workspaceId": workspace_id, "userId": user_id},
        },
        "upsert": True,
    }
    await connection.update(USERS, [statement])


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
        owner_of = await self._execute(owners([(workspace, name) for name in names]))
        return {name: user.name for (_, name), user in owner_of.items()}

    async def visitors_of(self, workspace: str, names: Collection[str]) -> dict[str, list[str]]:
        """Return the ids of those of some users that exist, with those of their visitors."""
        people = await self._execute(users(workspace, [*names]))
        return {user.name: [visitor.name for visitor in visitors] for user, _, visitors in people}

    async def forget_vouched(self) -> None:
        """Remove the traits that only engage sets: clients could set them in earlier versions."""
        declared = {name for names in self._identifiers.values() for name in names}
        names = [TRUSTED, *(f"{TRUSTED}:{name}" for name in sorted(declared))]
        fields = [f"traits.{escape_key(name)}" for name in names]
        for collection in (USERS, VISITORS):
            with self._connection.calling(scan=True) as db:
                query = {"$or": [{field: {"$exists": True}} for field in fields]}
                await db[collection].update_many(query, {"$unset": dict.fromkeys(fields, "")})

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
                deleted += await _delete(self._connection, [item["_id"] for item in old], bounds)
        return deleted

    async def _belonging_to_nobody(
        self, documents: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return those visitors that belong to nobody and have no choice."""
        kept: set[str] = set()
        for workspace, part in parts(sorted(documents, key=lambda document: document["_id"])):
            names = [document["anonymousId"] for document in part]
            chosen = [subject_id(workspace, Subject(Kind.VISITOR, name)) for name in names]
            choosers = await self._connection.read(SUBSCRIPTIONS, chosen, {"anonymousId": 1})
            kept.update(scoped_id(workspace, chooser["anonymousId"]) for chooser in choosers)
            owners = await self.owners(workspace, names)
            kept.update(scoped_id(workspace, name) for name in owners)
        return [document for document in documents if document["_id"] not in kept]


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
        if gone := [document["_id"] async for document in db[VISITORS].find(old, {"_id": 1})]:
            place = PLACES[Kind.VISITOR]
            for collection in (place.memberships, place.claims):
                await db[collection].delete_many({"visitor": any_of(gone), **bounds})
        done = await db[VISITORS].delete_many(old)
    return int(done.deleted_count)


def parts(
    documents: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Cut documents into parts of one workspace, of at most :data:`STEP`."""
    for workspace, group in itertools.groupby(documents, key=lambda item: item["workspaceId"]):
        part = list(group)
        for start in range(0, len(part), STEP):
            yield workspace, part[start : start + STEP]
