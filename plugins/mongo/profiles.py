# SPDX-License-Identifier: Apache-2.0
"""Applying the changes of events to users, visitors, groups, links and memberships."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from bson.datetime_ms import DatetimeMS

from engage.api import REMOVED, Change, Event, Kind, ProfileLimits, Version, changes_of

from .changes import FoldedChanges, StoredState
from .connection import Connection
from .documents import (
    any_of,
    below,
    in_workspace,
    link_version,
    pair_id,
    registers_of,
    scoped_id,
    trait_value,
)
from .identifiers import StoredClaims
from .people import People
from .schema import LINKS, META, PLACES, USERS, VISITOR_MEMBERSHIPS, VISITORS

_log = logging.getLogger("engage.storage.mongo")

#: How many durable links, and how many durable claims, are remembered: most events of a visitor
#: then need no look-up of the link, and not each identify call writes its claim again.
_MAX_KNOWN: Final = 100_000

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
        people: People,
    ) -> None:
        self._connection = connection
        self._people = people
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
            room = await self._people.make_room(workspace, len(new[workspace]), kept)
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
