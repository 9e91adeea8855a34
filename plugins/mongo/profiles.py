# SPDX-License-Identifier: Apache-2.0
"""Applying the changes of events to users, visitors, groups, links and memberships, and deleting
visitors that belong to nobody: old ones, and those that give way to new ones."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from bson.datetime_ms import DatetimeMS

from engage.api import (
    REMOVED,
    TRUSTED,
    Change,
    Event,
    Kind,
    ProfileLimits,
    StorageContext,
    Subject,
    Version,
    changes_of,
)
from engage.store.people import users
from engage.store.profiles import owners
from engage.store.tables import Steps, execute_waiting

from .changes import FoldedChanges, StoredState
from .connection import BATCH, Connection
from .documents import (
    any_of,
    below,
    escape_key,
    identifier_field,
    in_workspace,
    link_version,
    pair_id,
    registers_of,
    scoped_id,
    subject_id,
    trait_value,
)
from .identifiers import StoredClaims
from .paging import STEP, beyond
from .people import PeopleSteps
from .schema import LINKS, META, PLACES, SUBSCRIPTIONS, USERS, VISITOR_MEMBERSHIPS, VISITORS

_log = logging.getLogger("engage.storage.mongo")

Result = TypeVar("Result")

#: How many durable links, and how many durable claims, are remembered: most events of a visitor
#: then need no look-up of the link, and not each identify call writes its claim again.
_MAX_KNOWN: Final = 100_000

#: How many times that many visitors are examined at most for a write, so that some of those without
#: an identifier give way to new ones, and as many again for those with one.
_SEARCHES: Final = 5

#: Seconds between two looks at the number of erased profiles.
ERASURES_SECONDS: Final = 1.0

#: Seconds after which the visitors of a workspace are counted again. With those that housekeeping
#: waits, the number is five seconds old at most.
_COUNT_SECONDS: Final = 4.0


class Profiles:
    """Applies the changes of events, and remembers which links are durable.

    :param limits: per user, visitor and group.
    :param identifiers: workspace id → the traits by which its users are looked up.
    """

    def __init__(
        self,
        connection: Connection,
        limits: ProfileLimits,
        identifiers: Mapping[str, frozenset[str]],
        visitors: Visitors,
    ) -> None:
        self._connection = connection
        self._visitors = visitors
        self._limits = limits
        self._identifiers = identifiers
        self._links: OrderedDict[str, Version] = OrderedDict()
        self._claims: OrderedDict[str, int] = OrderedDict()
        #: The workspaces with new visitors since these were counted, and those without room.
        self._growing: set[str] = set()
        self._full: set[str] = set()
        self._count_at = 0.0
        #: How many profiles were erased from the store when that was last looked up, and when it is
        #: looked up again.
        self._erased = 0
        self._look_at = 0.0

    # -------------------------------------------------------------------------------- changes
    def forget(self) -> None:
        """Forget the remembered links and claims: another store may be at the address when it is
        opened."""
        self._links.clear()
        self._claims.clear()
        self._full.clear()

    async def look_for_erasures(self) -> None:
        """Forget the remembered links and claims if a profile was erased, by any process: it had
        some of them. That is looked up once a second. To be called within
        :meth:`Connection.calling`."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + ERASURES_SECONDS
        if not (self._links or self._claims):
            return
        found = await self._connection.db[META].find_one({"_id": "erasures"})
        erased = 0 if found is None else found["count"]
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

    def changes(self, event: Event) -> tuple[Change, ...]:
        """Return the changes of an event; nothing if it only makes links that are known."""
        if not event.may_change_profiles:
            return ()
        user, anonymous = event.user_id, event.anonymous_id
        if (
            event.type in ("track", "page", "screen")
            and user is not None
            and anonymous is not None
            and (known := self._links.get(pair_id(event.workspace_id, user, anonymous))) is not None
            and known <= (event.received_at, event.message_id, event.origin)
        ):
            return ()
        return changes_of(event)

    def fold(self, changes: Sequence[tuple[Event, Sequence[Change]]]) -> FoldedChanges:
        """Return the changes of a write, folded.

        :param changes: events with their changes, in order of arrival.
        """
        return FoldedChanges(changes, self._links, self._claims, self._identifiers)

    async def read_state(self, folded: FoldedChanges) -> StoredState:
        """Read what :meth:`apply` needs. To be called within :meth:`Connection.calling`."""
        claims = {kind: StoredClaims() for kind in Kind}
        traits, pairs = await asyncio.gather(
            asyncio.gather(*(self._stored_traits(kind, folded, claims[kind]) for kind in Kind)),
            asyncio.gather(*(self._stored_pairs(name, folded) for name in folded.pairs)),
        )
        return StoredState(
            dict(zip(Kind, traits, strict=True)),
            dict(zip(folded.pairs, pairs, strict=True)),
            claims,
        )

    async def _stored_traits(
        self, kind: Kind, folded: FoldedChanges, claims: StoredClaims
    ) -> dict[str, dict[str, tuple[Version, int]]]:
        found = {}
        place, db = PLACES[kind], self._connection.db
        declared = self._identifiers if place.claims else {}
        fields = {"workspaceId": 1, "traits": 1, "claims": 1}
        for chunk in self._connection.chunks(folded.wanted_traits(kind)):
            # One by one: documents may be large, and only the sizes of their traits are kept.
            async for document in db[place.subjects].find({"_id": any_of(chunk)}, fields):
                names = declared.get(document["workspaceId"], ())
                found[document["_id"]] = {
                    trait: (
                        (at, message_id, origin),
                        0 if value is REMOVED else self._limits.size(trait, value, names),
                    )
                    for trait, (at, message_id, origin, one) in registers_of(document).items()
                    for value in (trait_value(one),)
                }
                claims.add(document)
        wanted = folded.wanted_claims(kind, claims)
        there = await self._connection.read(place.claims, wanted, {"_id": 1})
        claims.keys.update(document["_id"] for document in there)
        return found

    async def _stored_pairs(
        self, collection: str, folded: FoldedChanges
    ) -> dict[str, dict[str, Version]]:
        found: dict[str, dict[str, Version]] = {}
        owner = (Kind.VISITOR if collection == VISITOR_MEMBERSHIPS else Kind.USER).value
        fields = {owner: 1, "first": 1}
        wanted = folded.wanted_pairs(collection)
        for document in await self._connection.read(collection, wanted, fields, by=owner):
            if (version := link_version(document)) is not None:
                found.setdefault(document[owner], {})[document["_id"]] = version
        return found

    async def apply(self, folded: FoldedChanges, state: StoredState | None = None) -> int:
        """Make changes durable, with one update command per collection, all at once. To be called
        within :meth:`Connection.calling`.

        :param state: what :meth:`read_state` returned, if it was called already.
        :return: how many changes were dropped.
        """
        if not folded:
            return 0
        if state is None:
            state = await self.read_state(folded)
        await self._limit_visitors(folded, state)
        statements = folded.statements(state, self._limits)
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
                _log.error(
                    "%d profile changes can never be applied (code %d)", len(refused), refused[0]
                )
                dropped += len(refused)
        self._links.update(folded.kept_links)
        self._claims.update(folded.kept_claims)
        for known in (self._links, self._claims):
            while len(known) > _MAX_KNOWN:
                known.popitem(last=False)
        return dropped

    async def _limit_visitors(self, folded: FoldedChanges, state: StoredState) -> None:
        """Leave out new visitors that have no room."""
        visitors, new = folded.subjects[Kind.VISITOR], dict[str, list[str]]()
        for key, one in visitors.items():
            if key not in state.traits[Kind.VISITOR]:
                new.setdefault(one.workspace, []).append(key)
        self._growing.update(new)
        for workspace in new.keys() & self._full:
            # Nobody gives way whom this write changes or links.
            kept = {one.name for one in visitors.values()}
            kept.update(pair.other for pair in folded.pairs[LINKS].values())
            room = await self._visitors.make_room(workspace, len(new[workspace]), kept)
            folded.leave_out_visitors(new[workspace][room:])

    async def ensure_user(self, workspace_id: str, user_id: str, at: int) -> None:
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
        await self._connection.update(USERS, [statement])

    async def count_visitors(self) -> None:
        """Find out which workspaces have no room for more visitors, every five seconds at most. To
        be called within :meth:`Connection.calling`."""
        if not self._growing or time.monotonic() < self._count_at:
            return
        self._count_at = time.monotonic() + _COUNT_SECONDS
        growing, self._growing = self._growing, set()
        most, db = self._limits.visitors, self._connection.db
        in_all = await db[VISITORS].estimated_document_count()
        for workspace in growing:
            count = 0
            if in_all >= most:
                query = {"_id": in_workspace(workspace)}
                count = (await db.command({"count": VISITORS, "query": query, "limit": most}))["n"]
            (self._full.add if count >= most else self._full.discard)(workspace)


class Visitors:
    """Deletes visitors that belong to nobody, and knows to whom the others belong."""

    def __init__(self, connection: Connection, context: StorageContext) -> None:
        self._connection = connection
        self._context = context
        self._identifiers = context.identifiers
        #: Where :meth:`expire` continues, and :meth:`make_room` by workspace, and whether for
        #: visitors with identifiers.
        self._expired: dict[tuple[str, bool] | None, list[dict[str, Any]]] = {}

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
        return how many.
        A call that reaches the limit is continued by the next one."""
        bounds = {"changedAt": {"$lt": DatetimeMS(before)}}
        deleted, more = 0, True
        while more and deleted < limit:
            with self._connection.calling():
                gone, more = await self._expire(None, bounds, limit - deleted, BATCH)
            deleted += gone
        return deleted

    async def make_room(self, workspace: str, wanted: int, kept: Collection[str]) -> int:
        """Delete visitors that only public keys made, and that may expire: those without an
        identifier first, and of these the least recently changed. To be called within
        :meth:`Connection.calling`.

        :param wanted: how many are to be deleted.
        :param kept: anonymous ids of visitors that stay.
        :return: how many were deleted.
        """
        trusted = escape_key(TRUSTED)
        fields = [identifier_field(name) for name in self._identifiers.get(workspace, ())]
        fields.append(f"traits.{trusted}.t")
        deleted = 0
        for identified in [False] * _SEARCHES + [True] * _SEARCHES:

            def gives_way(one: Mapping[str, Any], identified: bool = identified) -> bool:
                traits = one.get("traits", {})
                ours = one["workspaceId"] == workspace and one["anonymousId"] not in kept
                return ours and trusted not in traits and any(traits.values()) is identified

            place, left = (workspace, identified), wanted - deleted
            if left > 0:
                gone, _ = await self._expire(place, {}, left, STEP, gives_way, fields)
                deleted += gone
        return deleted

    async def _expire(
        self,
        place: tuple[str, bool] | None,
        bounds: Mapping[str, Any],
        limit: int,
        most: int,
        may: Callable[[Mapping[str, Any]], bool] = lambda _: True,
        fields: Sequence[str] = (),
    ) -> tuple[int, bool]:
        """Delete visitors that belong to nobody and have no choice, the least recently changed
        first.

        :param place: continue where the last call with this place ended.
        :param most: how many are examined.
        :param may: whether one may be deleted, by the fields.
        :return: how many were deleted, and whether there are others to examine.
        """
        query = {"$and": [bounds, *self._expired.get(place, ())]}
        wanted = dict.fromkeys(("workspaceId", "anonymousId", "changedAt", *fields), 1)
        cursor = self._connection.db[VISITORS].find(query, wanted)
        cursor = cursor.sort([("changedAt", 1), ("_id", 1)]).limit(most)
        documents = await cursor.to_list(None)
        old = await self._belonging_to_nobody([one for one in documents if may(one)])
        last = None if len(documents) < most else documents[-1]
        if len(old) >= limit:
            old, last = old[:limit], old[limit - 1]
        if old and not bounds:
            bounds = {"changedAt": {"$lte": old[-1]["changedAt"]}}
        self._expired[place] = [beyond("changedAt", last["changedAt"], last["_id"])] if last else []
        return await self._delete([one["_id"] for one in old], bounds), last is not None

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

    async def _delete(self, ids: Sequence[str], bounds: Mapping[str, Any]) -> int:
        """Delete visitors, unless an event changed them in the meantime.

        A visitor is deleted after what belongs to it: what a crash leaves expires with it later.
        Its traits are the first to go, so that an event in the meantime makes a new visitor.
        """
        if not ids:
            return 0
        db, old = self._connection.db, {"_id": any_of(ids), **bounds}
        async with self._connection.updating:
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
