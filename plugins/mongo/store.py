# SPDX-License-Identifier: Apache-2.0
"""The interface that the core calls: opening, readiness, and the work that is left for later."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import shlex
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from bson.datetime_ms import DatetimeMS

from engage.api import (
    Event,
    Kind,
    Outcome,
    Page,
    StorageContext,
    StorageError,
    StorageUnavailable,
    StoreProblem,
    SubscriptionChange,
)
from engage.store.facade import Storage
from engage.store.tables import Plan

from .arrivals import BEAT, Arrivals
from .choices import Subscriptions, Upgrade, apply_all
from .connection import CLOSE_SECONDS, Connection
from .counts import Counts
from .documents import Sequencer, is_text
from .identifiers import Identifiers, declared_traits
from .profiles import ERASURES_SECONDS, Cache, Visitors
from .schema import META, Preparation, Schema
from .steps import Steps
from .stored_events import Events
from .url import DEFAULT_URL
from .verification import Verification
from .writer import Writer

_log = logging.getLogger("engage.storage.mongo")

#: Seconds between an acknowledgement and the removal of its marks.
_PAUSE: Final = 1.0


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _once_ready(
    part: str, method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]]
) -> Callable[Concatenate[MongoStorage, Parameters], Coroutine[Any, Any, Result]]:
    """Return a method of the storage that calls one of its parts when the store is prepared.

    :param part: the name of the attribute that has the part.
    """

    @functools.wraps(method)
    async def call(
        self: MongoStorage, /, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        await self._ready()
        return await method(getattr(self, part), *arguments, **options)

    return call


class MongoStorage(Storage):
    """The storage that keeps everything in one MongoDB database."""

    concurrent_writes = 2  # with more, they are smaller, which costs as much as the overlap gains

    def __init__(self, connection: Connection, context: StorageContext) -> None:
        self._connection = connection
        traits = declared_traits(context.identifiers)
        #: Set when the housekeeping has something to do.
        self._work = asyncio.Event()
        sequence = Sequencer()
        self._visitors = Visitors(connection, context)
        self._identifiers = Identifiers(connection, context.identifiers)
        self._events = Events(connection)
        self._cache = Cache(connection, context.profile_limits.visitors)
        # Its plans are not isolated: they would look for erasures in vain.
        without = dataclasses.replace(context, erasures_key=None)
        self._steps = Steps(connection, without, sequence, self._cache)
        self._arrivals = Arrivals(connection, sequence)
        self._writer = Writer(
            connection,
            self._events,
            self._cache,
            self._steps,
            self._arrivals,
            sequence,
            self._work,
        )
        self._subscriptions = Subscriptions(connection, sequence)
        self._counts = Counts(connection)
        self._verification = Verification(connection, context.identifiers)
        upgrade = Upgrade(
            connection, self._visitors, self._subscriptions, self._counts, self._complete
        )
        self._schema = Schema(
            connection, traits=traits, upgrade=upgrade, begin=self._arrivals.create
        )
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
        self._arrivals.keeps = create
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
                await self._arrivals.close()
        await self._connection.close()
        self._preparation.forget()
        self._cache.forget()

    def backup_commands(self) -> tuple[str, str]:
        hosts, _, database = self._connection.name.rpartition("/")
        uri, everything = shlex.quote(hosts), shlex.quote(f"{database}.*")
        archive = "--gzip --archive=engage.archive.gz"
        return (
            f"mongodump --uri {uri} --db {shlex.quote(database)} {archive}",
            f"mongorestore --uri {uri} --nsInclude {everything} {archive}",
        )

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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT):
                    await self._work.wait()
            await asyncio.sleep(_PAUSE)
            self._work.clear()
            try:
                await self._ready()
                with self._connection.calling():
                    await self._tidy()
                    await self._arrivals.enter()
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
        await self._cache.count_visitors()
        if self._subscriptions.has_copied:
            await self._subscriptions.remove_copied()

    async def _complete(self) -> None:
        """Complete writes that a crash or a failure cut off."""
        await self._writer.complete()
        with self._connection.calling():
            await self._subscriptions.recover()

    # --------------------------------------------------------------------------------- the parts
    async def run(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        await self._ready()
        return await self._steps.run(plan, *args, **kwargs)

    async def read(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        await self._ready()
        return await self._steps.read(plan, *args, **kwargs)

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        await self._ready()
        try:
            return await self._writer.write(events)
        finally:
            self.dropped_changes = self._writer.dropped_changes

    find = _once_ready("_events", Events.find)
    scan = _once_ready("_events", Events.scan)
    recent = _once_ready("_events", Events.recent)

    async def follow(
        self, *, after: str | None, since: int | None = None, limit: int
    ) -> Page[Event]:
        await self._ready()
        return await self._arrivals.page(after, since, limit)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        await self._ready()
        deleted = await self._events.expire(before, limit=limit, force=force)
        if deleted:
            with self._connection.calling():
                await self._arrivals.expire(before)
        return deleted

    expire_visitors = _once_ready("_visitors", Visitors.expire)

    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        await self._ready()
        try:
            choices = await self._subscriptions.apply(change)
        except StorageUnavailable:
            # The choice may be stored, and its record not yet in the history.
            self._writer.complete_later()
            raise
        if self._subscriptions.has_copied:
            self._work.set()
        return choices

    async def apply_all(
        self, changes: Sequence[SubscriptionChange]
    ) -> Sequence[Mapping[str, bool]]:
        return await apply_all(self.apply, changes)

    erase_events = _once_ready("_events", Events.erase)
    reapply = _once_ready("_writer", Writer.reapply)
    erase_choices = _once_ready("_subscriptions", Subscriptions.erase)

    async def erase_profile(self, workspace_id: str, kind: Kind, name: str) -> bool:
        await self._ready()
        if not is_text(name):
            return False
        with self._connection.calling():
            return await self._cache.erase(workspace_id, kind, name)

    async def settle(self) -> bool:
        await self._ready()
        # The other processes look for erasures in time, and a write that had begun has ended.
        await asyncio.sleep(ERASURES_SECONDS + self._connection.timeout)
        return False

    put_counts = _once_ready("_counts", Counts.put)
    counts = _once_ready("_counts", Counts.sums)
    scan_counts = _once_ready("_counts", Counts.scan)
    expire_counts = _once_ready("_counts", Counts.expire)

    async def problems(self) -> AsyncIterator[StoreProblem | int]:
        await self._ready()
        async for problem in self._verification.problems():
            yield problem

    unfinished = _once_ready("_verification", Verification.unfinished)
