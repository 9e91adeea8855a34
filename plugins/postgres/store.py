# SPDX-License-Identifier: Apache-2.0
"""The interface that the core calls: opening, plans, following events, and what is damaged."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import asyncpg

from engage import api
from engage.api import StorageUnavailable
from engage.store import events
from engage.store.facade import TABLES, Storage
from engage.store.pages import place_of
from engage.store.tables import Parameters, Plan, Result, Steps, execute_waiting

from .connections import CONFLICTS, Connections
from .schema import prepare
from .steps import NotAloneError, Run
from .tables import decode, hash_of, sql_of

_log = logging.getLogger("engage.storage.postgres")

#: How often a plan is run that surely had no effect.
_ATTEMPTS: Final = 10
#: Seconds that a follower waits for the plans that are running.
_FOLLOW_SECONDS: Final = 1.0
_LAST: Final = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM numbers"


class PostgresStorage(Storage):
    """The storage that keeps everything in one schema of a PostgreSQL database."""

    isolated = True
    concurrent_writes = 2

    def __init__(self, options: Mapping[str, Any], context: api.StorageContext) -> None:
        self._pool = Connections(options, context.write_timeout)
        self._context = context
        self._creates, self._had_store = False, context.had_store
        #: Whether it is the store that it was when it was written last. None: it is not examined.
        self._is_known: bool | None = None
        #: The greatest number before which no event appears any more.
        self._final = 0

    async def open(self, *, create: bool) -> None:
        if self._is_known is not None:
            return
        self._pool.open()
        self._creates = create
        try:
            await self._prepare()
        except BaseException as error:
            if not create or not isinstance(error, StorageUnavailable):
                await self.close()
                raise
            _log.warning("%s; engage retries until it is available", error)

    async def _prepare(self) -> None:
        async with self._pool.borrowed() as db:
            had_store, create = self._had_store, self._creates
            self._is_known = await prepare(self._pool, db, create=create, had_store=had_store)
        self._had_store = True

    async def _ready(self) -> None:
        if self._is_known is None:
            try:
                await self._prepare()
            except api.StorageError as error:
                raise StorageUnavailable(str(error)) from error

    async def close(self) -> None:
        self._is_known = None
        await self._pool.close()

    async def check(self) -> None:
        await self._ready()
        async with self._pool.borrowed() as db:
            await self._pool.begin(db, ())
            await db.execute("UPDATE store SET value = value WHERE name = 'version'")
            await self._pool.commit(db, wrote=True)

    def versions(self) -> Mapping[str, str]:
        return {**self._pool.version, "asyncpg": asyncpg.__version__}

    def backup_commands(self) -> tuple[str, str]:
        where = f"--dbname={shlex.quote(self._pool.name)}"
        schema = f"--schema={self._pool.schema}"
        return (
            f"pg_dump --format=custom {schema} --file=engage.dump {where}",
            f"pg_restore --exit-on-error {where} engage.dump",
        )

    async def run(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        await self._ready()
        names = None if plan.locks is None else plan.locks(*args, **kwargs)
        for _ in range(_ATTEMPTS):
            try:
                async with self._pool.borrowed() as db:
                    await self._pool.begin(db, names)
                    run, steps = Run(db, alone=names is None), plan(*args, **kwargs)
                    result = await execute_waiting(steps, run.execute, self._context)
                    await self._pool.commit(db, wrote=run.wrote)
                return result
            except NotAloneError:
                names = None
            except CONFLICTS:
                continue
        raise StorageUnavailable("this is being changed by too many callers")

    async def read(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        await self._ready()
        return await self._read(plan(*args, **kwargs))

    async def _read(self, steps: Steps[Result], end: int | None = None) -> Result:
        async with self._pool.borrowed() as db:
            await db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            result = await execute_waiting(steps, Run(db, end=end).execute, self._context)
            await db.execute("COMMIT")
        return result

    async def follow(
        self, *, after: str | None, since: int | None = None, limit: int
    ) -> api.Page[api.Event]:
        await self._ready()
        if not self._is_known:
            raise StorageUnavailable("the store was restored: start a server first")
        last = await self._move_on()
        page = await self._read(events.follow(after, since, limit), min(self._final, last))
        if (place := place_of(after, int, int)) is not None and place[1] > last:
            raise api.ForeignCursor("the place is one from before a restore")
        return page

    async def _move_on(self) -> int:
        # Numbers are given before commits. But when the plans have ended that were running when the
        # greatest was read, each event with a smaller one is visible, or never will be. Only plans
        # of this store count: a long transaction of another program holds nobody up.
        async with self._pool.borrowed() as db:
            last: int = await db.fetchval(_LAST)
            waiting = await self._pool.writers(db)
            end = time.monotonic() + _FOLLOW_SECONDS
            while waiting and time.monotonic() < end:
                await asyncio.sleep(0.005)
                waiting &= await self._pool.writers(db)
        if not waiting:
            self._final = last
        return last

    async def problems(self) -> AsyncIterator[api.StoreProblem | int]:
        await self._ready()
        for sql in map(sql_of, TABLES.values()):
            hash_, records, width = b"", [()] * sql.is_hashed, sql.table.key
            while records:
                async with self._pool.borrowed() as db:
                    records = await db.fetch(sql.hashes, hash_)
                for *row, hash_ in records:
                    if hash_of(map(decode, row[:width])) != hash_:
                        message = f"{sql.name}: hash {hash_.hex()} is not that of its row"
                        yield api.StoreProblem(what="hashes", message=message)
                yield len(records)
