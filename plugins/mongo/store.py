# SPDX-License-Identifier: Apache-2.0
"""The interface that the core calls: opening, readiness, and the work that is left for later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from engage.api import (
    BudgetUse,
    Count,
    CountStore,
    CountSum,
    DeadLetter,
    DeadLetterStore,
    Event,
    EventFilter,
    EventStore,
    GroupProfile,
    Outcome,
    Page,
    ProfileStore,
    Record,
    RecordStore,
    StorageContext,
    StorageError,
    StorageUnavailable,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
    SubscriptionStore,
    UserProfile,
)

from .connection import CLOSE_SECONDS, Connection
from .counts import Counts, Wanted
from .dead_letters import DeadLetters
from .documents import Sequencer
from .events import Events
from .identifiers import Identifiers, declared_traits
from .profiles import Profiles
from .records import Records
from .schema import META, Preparation, Schema
from .subscriptions import Subscriptions
from .url import DEFAULT_URL
from .writer import Writer

_log = logging.getLogger("engage.storage.mongo")

#: Seconds between an acknowledgement and the removal of its marks.
_PAUSE: Final = 1.0


class MongoStorage(
    EventStore, ProfileStore, SubscriptionStore, DeadLetterStore, RecordStore, CountStore
):
    """The storage that keeps everything in one MongoDB database."""

    concurrent_writes = 2  # with more, they are smaller, which costs as much as the overlap gains

    def __init__(self, connection: Connection, context: StorageContext) -> None:
        self._connection = connection
        self._schema = Schema(connection, traits=declared_traits(context.identifiers))
        #: Set when the housekeeping has something to do.
        self._work = asyncio.Event()
        sequence = Sequencer()
        self._identifiers = Identifiers(connection, context.identifiers)
        self._events = Events(connection)
        self._profiles = Profiles(connection, context.profile_limits, self._identifiers)
        self._writer = Writer(connection, self._events, self._profiles, sequence, self._work)
        self._subscriptions = Subscriptions(connection, self._profiles, sequence)
        self._dead_letters = DeadLetters(connection, context.dead_letter_budget, sequence)
        self._records = Records(connection)
        self._counts = Counts(connection)
        self.dropped_changes = 0
        self._preparation = Preparation(
            connection,
            self._schema,
            complete=self._complete,
            later=self._writer.complete_later,
            index=self._identifiers.index,
        )
        self._housekeeping: asyncio.Task[None] | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: StorageContext) -> MongoStorage:
        """Make the storage.

        :param options: valid according to ``schemas/plugins/mongo.json``.
        :raises ConfigError: if the connection string or the number of identifiers is not accepted.
        """
        connection = Connection(
            options.get("url", DEFAULT_URL),
            driver=options.get("driver", "motor"),
            allow_weak=options.get("allow_weak_acknowledgement", False),
            timeout=context.write_timeout,
        )
        return cls(connection, context)

    # ------------------------------------------------------------------------------------ life
    async def open(self, *, create: bool) -> None:
        if self._housekeeping is not None:
            return
        for weakness in self._connection.weaknesses:
            _log.warning("weak acknowledgement: %s", weakness)
        try:
            if create:
                await self._preparation.wait()
            else:
                await self._preparation.prepare(create=False)
        except StorageUnavailable as error:
            if not create:
                await self._connection.close()
                raise
            _log.warning("%s; engage retries until it is available", error)
        except BaseException:
            await self._preparation.stop()
            await self._connection.close()
            raise
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def _ready(self) -> None:
        if self._housekeeping is None:
            raise StorageUnavailable("the storage is not open")
        if not self._preparation.done:
            try:
                await self._preparation.wait()
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
        await self._preparation.stop()
        if self._preparation.done:
            with (
                contextlib.suppress(StorageError),
                self._connection.calling(seconds=CLOSE_SECONDS),
            ):
                # Marks that are left do no harm.
                await self._tidy()
        await self._connection.close()
        self._preparation.forget()
        self._profiles.forget()

    async def check(self) -> None:
        await self._ready()
        now = DatetimeMS(time.time_ns() // 1_000_000)
        with self._connection.calling() as db:
            await db[META].update_one({"_id": "alive"}, {"$set": {"at": now}}, upsert=True)

    # ------------------------------------------------------------------------------- later work
    async def _keep_house(self) -> None:
        """Remove marks, many at once, and complete the changes of failed writes. Runs until it is
        cancelled."""
        while True:
            await self._work.wait()
            await asyncio.sleep(_PAUSE)
            self._work.clear()
            try:
                await self._ready()
                with self._connection.calling():
                    await self._tidy()
                if self._writer.completions_due:
                    await self._writer.complete_due(self._complete)
                    if self._writer.completions_due:
                        self._work.set()
            except Exception as error:
                if not isinstance(error, StorageUnavailable):
                    _log.exception("housekeeping failed")
                self._work.set()
                await asyncio.sleep(self._connection.timeout)

    async def _tidy(self) -> None:
        await self._writer.remove_marks()
        if self._subscriptions.has_copied:
            await self._subscriptions.remove_copied()

    async def _complete(self) -> None:
        """Complete writes that a crash or a failure cut off."""
        await self._writer.complete()
        with self._connection.calling():
            await self._subscriptions.recover()

    # ----------------------------------------------------------------------------------- events
    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        await self._ready()
        try:
            return await self._writer.write(events)
        finally:
            self.dropped_changes = self._writer.dropped_changes

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        await self._ready()
        return await self._events.find(workspace_id, origin, message_id)

    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        await self._ready()
        return await self._events.scan(wanted, after=after, limit=limit)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        await self._ready()
        return await self._events.expire(before, limit=limit, force=force)

    async def recent(
        self, wanted: EventFilter, *, before: str | None = None, limit: int
    ) -> Page[Event]:
        await self._ready()
        return await self._events.recent(wanted, before=before, limit=limit)

    # --------------------------------------------------------------------------------- profiles
    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        await self._ready()
        return await self._profiles.find(workspace_id, user_id)

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        await self._ready()
        return await self._identifiers.find_users(workspace_id, trait, values)

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[str]:
        await self._ready()
        return await self._identifiers.holders(workspace_id, trait, value, after=after, limit=limit)

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
        if self._subscriptions.has_copied:
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
        return sum(not kept for kept in await self.keep(letters))

    async def keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        await self._ready()
        return await self._dead_letters.keep(letters)

    async def budget_use(self) -> Sequence[BudgetUse]:
        await self._ready()
        return await self._dead_letters.use()

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        await self._ready()
        return await self._dead_letters.scan(workspace_id, after=after, limit=limit)

    async def recent_dead_letters(
        self, workspace_id: str | None, *, before: str | None = None, limit: int
    ) -> Page[DeadLetter]:
        await self._ready()
        return await self._dead_letters.recent(workspace_id, before=before, limit=limit)

    async def dead_letter(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        await self._ready()
        return await self._dead_letters.find(workspace_id, letter_id)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        await self._ready()
        return await self._dead_letters.remove(workspace_id, ids)

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        await self._ready()
        return await self._dead_letters.expire(before, limit=limit)

    # ------------------------------------------------------------------------ records, counters
    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        await self._ready()
        return await self._records.put(record, expected_version=expected_version)

    async def get_record(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        await self._ready()
        return await self._records.get(kind, workspace_id, record_id)

    async def list_records(
        self,
        kind: str | None,
        workspace_id: str | None = None,
        *,
        after: str | None = None,
        limit: int,
        reverse: bool = False,
    ) -> Page[Record]:
        await self._ready()
        return await self._records.scan(kind, workspace_id, after, limit, reverse)

    async def records_version(self, kind: str) -> int:
        await self._ready()
        return await self._records.version(kind)

    async def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        await self._ready()
        return await self._records.delete(kind, workspace_id, record_id)

    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        await self._ready()
        return await self._records.expire(kind, before, limit=limit)

    async def put_counts(self, counts: Sequence[Count]) -> None:
        await self._ready()
        await self._counts.put(counts)

    async def counts(
        self,
        step: int,
        *,
        since: int,
        until: int,
        names: Sequence[str] | None = None,
        workspace_id: str | None = None,
        after: str | None = None,
        limit: int,
    ) -> Page[CountSum]:
        await self._ready()
        wanted = Wanted(step, since, until, names, workspace_id)
        return await self._counts.sums(wanted, after=after, limit=limit)

    async def scan_counts(self, *, after: str | None, limit: int) -> Page[Count]:
        await self._ready()
        return await self._counts.scan(after=after, limit=limit)

    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        await self._ready()
        return await self._counts.expire(step, before, limit=limit)
