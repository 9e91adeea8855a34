# SPDX-License-Identifier: Apache-2.0
"""What the core talks to: writing, readiness, and the work that is left for later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import (
    ConfigError,
    DeadLetter,
    DeadLetterStore,
    Event,
    EventFilter,
    EventStore,
    GroupProfile,
    Outcome,
    Page,
    ProfileStore,
    StorageContext,
    StorageError,
    StorageUnavailable,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
    SubscriptionStore,
    UserProfile,
)

from .client import Connection
from .dead_letters import DeadLetters
from .documents import Sequencer
from .events import Events, among
from .profiles import Profiles
from .schema import EVENTS, META, Schema
from .subscriptions import Subscriptions
from .url import DEFAULT_URL
from .writer import Write

log = logging.getLogger("engage.storage.mongo")

#: MongoDB allows 64 indexes on a collection.
_MOST_IDENTIFIERS: Final = 40
#: Seconds between an acknowledgement and the removal of its marks.
_TIDY_AFTER: Final = 1.0
#: Marked events that are completed at once.
_SWEEP: Final = 500
#: Seconds that closing may spend on removing marks; they are only left-overs of no harm.
_LAST_TIDY: Final = 3.0


class MongoStorage(EventStore, ProfileStore, SubscriptionStore, DeadLetterStore):
    """Everything in one MongoDB database."""

    def __init__(self, connection: Connection, context: StorageContext) -> None:
        traits = {trait for names in context.identifiers.values() for trait in names}
        if len(traits) > _MOST_IDENTIFIERS:
            raise ConfigError(
                f"workspaces: {len(traits)} different subscription_identifiers, but MongoDB has "
                f"indexes for {_MOST_IDENTIFIERS}"
            )
        self._connection = connection
        self._schema = Schema(
            connection,
            traits=traits,
            events_days=context.events_days,
            dead_letters_days=context.dead_letters_days,
        )
        self._sequence = Sequencer()
        self._events = Events(connection)
        self._profiles = Profiles(connection, context.profile_limits, context.identifiers)
        self._subscriptions = Subscriptions(connection, self._profiles, self._sequence)
        self._dead_letters = DeadLetters(connection, context.dead_letter_budget, self._sequence)
        self.dropped_changes = 0
        self._prepared = False
        self._preparing = asyncio.Lock()
        #: Marks of this process: a prefix, how many were given, those whose changes are durable.
        self._process = os.urandom(6).hex()
        self._writes = 0
        self._durable: set[str] = set()
        #: How many sweeps a failed write still asks for.
        self._sweeps_due = 0
        self._work = asyncio.Event()
        self._housekeeping: asyncio.Task[None] | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: StorageContext) -> MongoStorage:
        """:param options: valid by ``schemas/plugins/mongo.json``."""
        connection = Connection(
            options.get("url", DEFAULT_URL),
            allow_weak=options.get("allow_weak_acknowledgement", False),
            timeout=context.write_timeout,
        )
        return cls(connection, context)

    # ------------------------------------------------------------------------------------ life
    async def open(self, *, create: bool) -> None:
        if self._housekeeping is not None:
            return
        for weakness in self._connection.weaknesses:
            log.warning("weak acknowledgement: %s", weakness)
        try:
            self._connection.connect()
            await self._prepare(create=create)
        except StorageUnavailable as error:
            if not create:
                await self._connection.close()
                raise
            log.warning("%s; trying again until it is there", error)
        except BaseException:
            await self._connection.close()
            raise
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def _prepare(self, *, create: bool) -> None:
        async with self._preparing:
            if self._prepared:
                return
            self._connection.connect()
            await self._schema.prepare(create=create)
            try:
                await self._catch_up()
            except StorageError:
                # A command that only reads may run with credentials that only read.
                if create:
                    raise
                log.info("could not complete what a crash may have left", exc_info=True)
            self._prepared = True

    async def _ready(self) -> None:
        if self._housekeeping is None:
            raise StorageUnavailable("the storage is not open")
        if not self._prepared:
            try:
                await self._prepare(create=True)
            except StorageUnavailable:
                raise
            except StorageError as error:
                raise StorageUnavailable(str(error)) from error

    async def close(self) -> None:
        task, self._housekeeping = self._housekeeping, None
        if task is None:
            await self._connection.close()
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._schema.close()
        if self._prepared:
            with contextlib.suppress(StorageError), self._connection.calling(seconds=_LAST_TIDY):
                await self._tidy()
        await self._connection.close()
        self._prepared = False
        self._profiles.forget()

    async def check(self) -> None:
        await self._ready()
        now = DatetimeMS(time.time_ns() // 1_000_000)
        with self._connection.calling() as db:
            await db[META].update_one({"_id": "alive"}, {"$set": {"at": now}}, upsert=True)

    # --------------------------------------------------------------------------------- writing
    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        await self._ready()
        write = Write(events, self._profiles.changes, self._sequence, self._new_mark())
        try:
            with self._connection.calling():
                await self._insert(write)
                await self._apply(write)
        except BaseException:
            # Events may be stored whose changes are not: completed as soon as the server is there.
            # And once more when the call must have ended: the driver's thread may still insert.
            self._sweeps_due = 2
            self._work.set()
            raise
        if write.stored:
            self._durable.add(write.mark)
            self._work.set()
        outcomes = write.outcomes()
        late = write.repeats_of_refused()
        if late:
            for index, outcome in zip(
                late, await self.write([events[i] for i in late]), strict=True
            ):
                outcomes[index] = outcome
        return outcomes

    async def _insert(self, write: Write) -> None:
        inserting = self._connection.insert(EVENTS, write.documents)
        changing = write.changing()
        if changing:
            reading = self._profiles.known(self._profiles.fold(changing))
            # Both at once; both are waited for, so that none goes on behind the caller's back.
            codes, known = await asyncio.gather(inserting, reading, return_exceptions=True)
            if isinstance(codes, BaseException):
                raise codes
            if isinstance(known, BaseException):
                raise known
            write.known = known
        else:
            codes = await inserting
        write.settle(codes)
        if write.duplicates:
            ids = [write.ids[position] for position in write.duplicates]
            write.present = await self._events.stored(ids)
            missing = [key for key in ids if key not in write.present]
            if missing:
                # Refused by a unique index that is not engage's, or deleted a moment ago.
                raise StorageUnavailable("an event is neither stored nor taken (unique index?)")

    async def _apply(self, write: Write) -> None:
        changes = write.stored
        if changes:
            self.dropped_changes += await self._profiles.apply(
                self._profiles.fold(changes), write.known
            )
        cut_off = [
            (event, self._profiles.changes(event))
            for event, mark in write.present.values()
            if mark is not None and mark not in self._durable
        ]
        if cut_off:
            # What is dropped here was counted when the event was stored.
            await self._profiles.apply(self._profiles.fold(cut_off))

    def _new_mark(self) -> str:
        self._writes += 1
        return f"{self._process}.{self._writes}"

    # ------------------------------------------------------------------------------- afterwards
    async def _keep_house(self) -> None:
        """Remove marks, many at once; complete what a failed write left. Never ends by itself."""
        pause = _TIDY_AFTER
        while True:
            await self._work.wait()
            await asyncio.sleep(pause)
            self._work.clear()
            try:
                if not self._prepared:
                    await self._ready()
                with self._connection.calling():
                    await self._tidy()
                pause = _TIDY_AFTER
                if self._sweeps_due:
                    # Before the sweep: a write that fails meanwhile asks for two of its own.
                    self._sweeps_due -= 1
                    try:
                        await self._sweep()
                    except BaseException:
                        self._sweeps_due = 2
                        raise
                    if self._sweeps_due:
                        pause = self._connection.timeout
                        self._work.set()
            except StorageUnavailable:
                self._work.set()
                pause = min(pause * 2, 10.0)
            except Exception:
                log.exception("cannot tidy up")
                self._work.set()
                pause = 10.0

    async def _tidy(self) -> None:
        if self._durable:
            marks = sorted(self._durable)
            statement = {
                "q": {"_mark": among(marks)},
                "u": {"$unset": {"_mark": ""}},
                "multi": True,
            }
            await self._connection.update(EVENTS, [statement])
            self._durable.difference_update(marks)
        if self._subscriptions.has_leftovers:
            await self._subscriptions.tidy()

    async def _catch_up(self) -> None:
        await self._sweep()
        await self._profiles.index_identifiers()

    async def _sweep(self) -> None:
        """Complete the changes of all marked events, and the records of subscription changes."""
        while True:
            with self._connection.calling() as db:
                query = {"_mark": {"$exists": True}}
                cursor = db[EVENTS].find(query, {"_id": 1, "_seq": 1}).limit(_SWEEP)
                found = await cursor.to_list(None)
                if not found:
                    break
                found.sort(key=lambda document: document["_seq"])
                ids = [document["_id"] for document in found]
                stored = await self._events.stored(ids)
                changes = [
                    (stored[key][0], self._profiles.changes(stored[key][0]))
                    for key in ids
                    if key in stored
                ]
                await self._profiles.apply(self._profiles.fold(changes))
                statement = {
                    "q": {"_id": among(ids)},
                    "u": {"$unset": {"_mark": ""}},
                    "multi": True,
                }
                await self._connection.update(EVENTS, [statement])
            if len(found) < _SWEEP:
                break
        with self._connection.calling():
            await self._subscriptions.recover()

    # ----------------------------------------------------------------------------------- events
    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        await self._ready()
        return await self._events.find(workspace_id, origin, message_id)

    async def scan(
        self,
        wanted: EventFilter,
        *,
        after: str | None,
        limit: int,
    ) -> Page[Event]:
        await self._ready()
        return await self._events.scan(wanted, after=after, limit=limit)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        await self._ready()
        return await self._events.expire(before, limit=limit, force=force)

    # --------------------------------------------------------------------------------- profiles
    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        await self._ready()
        return await self._profiles.profile(workspace_id, user_id)

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        await self._ready()
        return await self._profiles.find_users(workspace_id, trait, values)

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        await self._ready()
        return await self._profiles.scan_users(workspace_id, after=after, limit=limit)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        await self._ready()
        return await self._profiles.scan_groups(workspace_id, after=after, limit=limit)

    # ---------------------------------------------------------------------------- subscriptions
    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        await self._ready()
        choices = await self._subscriptions.apply(change)
        if self._subscriptions.has_leftovers:
            self._work.set()
        return choices

    async def state(self, workspace_id: str, user_id: str) -> Mapping[str, bool]:
        await self._ready()
        return await self._subscriptions.state(workspace_id, user_id)

    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionState]:
        await self._ready()
        return await self._subscriptions.scan(workspace_id, after=after, limit=limit)

    async def history(
        self, workspace_id: str | None, user_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionRecord]:
        await self._ready()
        return await self._subscriptions.history(workspace_id, user_id, after=after, limit=limit)

    # ----------------------------------------------------------------------------- dead letters
    async def put(self, letters: Sequence[DeadLetter]) -> int:
        await self._ready()
        return await self._dead_letters.put(letters)

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        await self._ready()
        return await self._dead_letters.scan(workspace_id, after=after, limit=limit)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        await self._ready()
        return await self._dead_letters.remove(workspace_id, ids)

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        await self._ready()
        return await self._dead_letters.expire(before, limit=limit)
