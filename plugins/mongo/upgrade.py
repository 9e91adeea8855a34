# SPDX-License-Identifier: Apache-2.0
"""The upgrade of a store of version 1, in which a choice belonged to an id, whoever that was.

Now it belongs to the user or the visitor with the id. A kill may end the upgrade anywhere, and two
hosts may run it at the same time: each step can be repeated, what is written follows from what is
stored, and the document of version 1 is the last to go.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import bson
from bson.objectid import ObjectId

from engage import api
from engage.api import Kind, Subject

from .connection import BATCH, Connection
from .counts import Counts
from .documents import scoped_id, subject_id
from .people import STEP, People, parts
from .schema import EVENTS, HISTORY, LINKS, META, PLACES, SUBSCRIPTIONS, USERS, VERSION, VISITORS
from .subscriptions import Subscriptions, sorted_choices

#: Milliseconds after which a process that wrote no counter of a new minute has ended.
_ALIVE: Final = 75_000
#: Seconds that reading all events may take.
_SCAN_SECONDS: Final = 3600.0

#: The beginning of the ids of its changes.
_PREFIX: Final = "upgrade-"

_Document = Mapping[str, Any]
#: Workspace and id → what the id is known to be. That a choice made a user exist is no proof.
_Known = collections.defaultdict[tuple[str, str], set[Kind]]


@dataclasses.dataclass(frozen=True)
class Upgrade:
    """Brings the choices up to date."""

    connection: Connection
    people: People
    subscriptions: Subscriptions
    counts: Counts
    #: Completes writes that a crash cut off.
    complete: Callable[[], Awaitable[None]]

    async def run(self) -> None:
        """Give each choice to the user or the visitor.

        :raises StorageUnavailable: also while processes of another version use the store.
        """
        await self._refuse_others()
        with self.connection.calling() as db:
            # From now on, an older version would misread the store.
            fence = {"minReader": VERSION, "engage": api.ENGAGE_VERSION}
            await db[META].update_one({"_id": "schema", "version": 1}, {"$set": fence})
        await self.complete()
        known, unsure = _Known(set), set()
        async for workspace, part in self._parts("userId", known):
            for one in part:
                kinds = known[key := (workspace, one["userId"])]
                if Kind.USER not in kinds or (Kind.VISITOR not in kinds and _unsubscribed(one)):
                    unsure.add(key)
        if unsure:
            await self._look_in_events(unsure, known)
        async for workspace, part in self._parts("userId"):
            kinds_of = [(one, known[workspace, one["userId"]]) for one in part]
            await self._move([one for one, kinds in kinds_of if kinds == {Kind.VISITOR}])
            await self._unsubscribe(
                (Subject(Kind.VISITOR, one["userId"]), one)
                for one, kinds in kinds_of
                if len(kinds) != 1
            )
        async for workspace, part in self._parts("anonymousId"):
            left = {one["anonymousId"]: one for one in part if _unsubscribed(one)}
            with self.connection.calling(scan=True):
                owners = await self.people.owners(workspace, left)
            await self._unsubscribe(
                (Subject(Kind.USER, user), left[name]) for name, user in owners.items()
            )

    async def lost(self) -> int:
        """Return how many subscriptions of visitors no longer count for their users after it."""
        known, found = _Known(set), 0
        async for workspace, part in self._parts("userId", known):
            names = [one["userId"] for one in part]
            names = [name for name in names if Kind.USER not in known[workspace, name]]
            with self.connection.calling(scan=True):
                owners = await self.people.owners(workspace, names)
                people = await self.people.visitors_of(workspace, owners.values())
                for name, user in owners.items():
                    keys = [scoped_id(workspace, one) for one in (user, *people[user])]
                    latest: dict[str, tuple[Any, ...]] = {}
                    for whose in await self.connection.read(SUBSCRIPTIONS, keys):
                        for group, one in sorted_choices(whose):
                            version = (int(one["updatedAt"]), one.get("changeId", ""))
                            choice = (*version, whose["userId"], one["subscribed"])
                            latest[group] = max(choice, latest.get(group, choice))
                    found += sum(one[2:] == (name, True) for one in latest.values())
        return found

    async def _refuse_others(self) -> None:
        now = time.time_ns() // 1_000_000
        since, until = now - _ALIVE, now + _ALIVE
        up = await self.counts.sums(60, since=since, until=until, names=("up",), limit=BATCH)
        others = {one.labels[0]: one.processes for one in up.items}
        others.pop(api.ENGAGE_VERSION, None)
        if others:
            text = ", ".join(f"{count} of engage {name}" for name, count in sorted(others.items()))
            raise api.StorageUnavailable(
                f"{self.connection.name}: processes of another version use this store ({text}); "
                f"stop all of them: engage brings it up to date {_ALIVE // 1000} seconds later"
            )

    async def _parts(
        self, name: str, known: _Known | None = None
    ) -> AsyncIterator[tuple[str, list[_Document]]]:
        """Read the choices that have a field, in parts of one workspace, unless another process has
        completed the upgrade meanwhile.

        :param known: gets what profiles and links tell.
        """
        after: str | None = ""
        while after is not None:
            query = {"_id": {"$gt": after}, name: {"$exists": True}}
            with self.connection.calling(scan=True) as db:
                schema = await db[META].find_one({"_id": "schema"})
                cursor = db[SUBSCRIPTIONS].find(query).sort([("_id", 1)]).limit(STEP)
                page = await cursor.to_list(None)
            if schema["version"] >= VERSION:
                return
            for workspace, part in parts(page):
                if known is not None:
                    await self._look(workspace, {one["_id"]: one[name] for one in part}, known)
                yield workspace, part
            after = page[-1]["_id"] if len(page) == STEP else None

    async def _look(self, workspace: str, names: Mapping[str, str], known: _Known) -> None:
        ids = {name: name for name in names.values()}
        with self.connection.calling(scan=True) as db:
            for kind, collection, by, of, query in (
                (Kind.USER, USERS, "_id", names, {"createdAt": {"$exists": True}}),
                (Kind.USER, LINKS, "user", names, {}),
                (Kind.VISITOR, VISITORS, "_id", names, {}),
                (Kind.VISITOR, LINKS, "anonymousId", ids, {"workspaceId": workspace}),
            ):
                # One by one: an anonymous id may have very many users.
                async for one in db[collection].find({**query, by: {"$in": [*of]}}, {by: 1}):
                    known[workspace, of[one[by]]].add(kind)

    async def _look_in_events(self, unsure: set[tuple[str, str]], known: _Known) -> None:
        fields = {"_id": 0, "workspaceId": 1, "userId": 1, "anonymousId": 1}
        with self.connection.calling(seconds=_SCAN_SECONDS) as db:
            cursor = db[EVENTS].find({}, fields).batch_size(BATCH)
            while page := await cursor.to_list(BATCH):
                for one in page:
                    for kind in (Kind.USER, Kind.VISITOR):
                        if (key := (one["workspaceId"], one.get(PLACES[kind].name))) in unsure:
                            known[key].add(kind)

    async def _move(self, moved: Sequence[_Document]) -> None:
        """Give choices, with their history, to visitors."""
        if not moved:
            return
        histories, made = [], []
        for one in moved:
            workspace, name = one["workspaceId"], one["userId"]
            # A later change would be that of a process that has completed the upgrade.
            until = {"$lte": one.get("seq", ObjectId("f" * 24))}
            query = {"workspaceId": workspace, "userId": name, "_seq": until}
            update = {"$set": {"anonymousId": name}, "$unset": {"userId": ""}}
            histories.append({"q": query, "u": update, "multi": True})
            key = subject_id(workspace, Subject(Kind.VISITOR, name))
            rest = {field: value for field, value in one.items() if field != "userId"}
            made.append(bson.encode({**rest, "_id": key, "anonymousId": name}))
        ids = {"$in": [one["_id"] for one in moved]}
        same = [{"_id": one["_id"], "seq": one.get("seq")} for one in moved]
        with self.connection.calling(scan=True) as db:
            await self.connection.update(HISTORY, histories)
            # Some may be there, from a run that was cut off.
            await self.connection.insert(SUBSCRIPTIONS, made)
            await db[USERS].delete_many({"_id": ids, "createdAt": {"$exists": False}})
            await db[SUBSCRIPTIONS].delete_many({"$or": same})

    async def _unsubscribe(self, copied: Iterable[tuple[Subject, _Document]]) -> None:
        """Apply the unsubscriptions of documents to others, with their times."""
        changes = []
        for subject, one in copied:
            fields: Any = {"workspace_id": one["workspaceId"], "dated": True, "how": "upgrade"}
            for group, at in _unsubscribed(one).items():
                # The same whoever makes it, and how often.
                name = uuid.uuid5(uuid.NAMESPACE_OID, repr((subject, one["_id"], group, at)))
                fields |= {"id": f"{_PREFIX}{name}", "at": at, "choices": {group: False}}
                changes.append(api.SubscriptionChange(subject=subject, **fields))
        # It needs the method ``apply`` only.
        await api.SubscriptionStore.apply_all(cast(Any, self.subscriptions), changes)
        with self.connection.calling():
            await self.subscriptions.remove_copied()


def _unsubscribed(document: _Document) -> dict[str, int]:
    """Return the times of the choices that are unsubscriptions, by group; without those that the
    upgrade has applied to a user, because these were never choices of the id."""
    return {
        group: int(one["updatedAt"])
        for group, one in sorted_choices(document)
        if not one["subscribed"]
        and not ("userId" in document and one.get("changeId", "").startswith(_PREFIX))
    }
