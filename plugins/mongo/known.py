# SPDX-License-Identifier: Apache-2.0
"""What a process remembers between writes, and what makes it forget: an erasure by any process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from bson.datetime_ms import DatetimeMS

from engage.api import Event, Kind, changes_of
from engage.store.changes import EncodedChange, encode
from engage.store.profiles import KNOWN_LINKS, USER
from engage.store.remembered import Remembered

from .connection import Connection
from .documents import below, in_workspace, pair_id, scoped_id
from .schema import LINKS, META, PLACES, USERS, VISITORS

#: Seconds between two looks at the number of erased profiles.
ERASURES_SECONDS: Final = 1.0

#: Seconds after which the visitors of a workspace are counted again. With those that housekeeping
#: waits, the number is five seconds old at most.
_COUNT_SECONDS: Final = 4.0


class Known(Remembered):
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

    def changes(self, event: Event) -> Sequence[EncodedChange]:
        """Return the changes of an event; nothing if it only makes a link that is known."""
        if not event.may_change_profiles:
            return ()
        user, anonymous, at = event.user_id, event.anonymous_id, event.received_at
        if event.type in ("track", "page", "screen") and user is not None and anonymous is not None:
            link = ((event.workspace_id, USER, user), anonymous)
            if self.of(KNOWN_LINKS).get(link, at) < at:
                return ()
        return [*map(encode, changes_of(event))]

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
