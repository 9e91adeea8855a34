# SPDX-License-Identifier: Apache-2.0
"""The connections of a process to the database: time limits, errors, durability.

When the time of a call is over, its connection ends. A statement is never cancelled: of a commit
that waits for a standby, the server would say that it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg
from asyncpg.exceptions import DeadlockDetectedError, SerializationError

from engage.api import StorageUnavailable
from engage.store.tables import Key

from .tables import hash_of

_log = logging.getLogger("engage.storage.postgres")

#: The errors after which a transaction surely had no effect.
CONFLICTS: Final = (SerializationError, DeadlockDetectedError)
_OF_DRIVER: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_ERRORS: Final = (OSError, *_OF_DRIVER)
#: What begins the SQLSTATE of outages, and of what can be mended on the server.
_OUTAGES: Final = (
    "08",
    "25",
    "28",
    "3D",
    "3F",
    "40",
    "42501",
    "42P01",
    "53",
    "55",
    "57",
    "58",
    "XX",
)
#: Advice for those that an operator can mend.
_ADVICE: Final = {
    "25006": "the server is read-only",
    "3D000": "there is no such database: create it",
    "42501": "the role lacks a permission",
    "42P01": "a table is missing",
    "53200": "the server needs more max_locks_per_transaction",
    "53300": "the server has no connection left: raise max_connections, or lower pool_size",
}
#: What is looked at of each server: how it must be, and why. "on" may be weak if that is allowed.
_EXPECTED: Final = {
    "server_encoding": ("UTF8", "the encoding of the database is not UTF8"),
    "transaction_read_only": ("off", _ADVICE["25006"]),
    "fsync": ("on", "fsync = off: a power cut may damage the database and lose what is in it"),
    "full_page_writes": ("on", "full_page_writes = off: a power cut may damage the database"),
}
_EXAMINE: Final = "SELECT " + ", ".join(f"current_setting('{name}')" for name in _EXPECTED)
#: Every statement has its index, also while a table is small.
_SETTINGS: Final = {
    "application_name": "engage",
    "client_connection_check_interval": "1000",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    **dict.fromkeys(("enable_seqscan", "enable_hashjoin", "enable_mergejoin"), "off"),
    **dict.fromkeys(("enable_sort", "enable_bitmapscan"), "off"),
}
#: The server ends what a process left that was stopped or cut off.
_LIMITS: Final = ("statement_timeout", "idle_in_transaction_session_timeout")
_WRITERS: Final = (
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'advisory' AND granted "
    "AND classid::bigint = $1 AND objid = 0 AND objsubid = 2 AND database = "
    "(SELECT oid FROM pg_database WHERE datname = current_database())"
)
_MIN_VERSION: Final = 14  # It has client_connection_check_interval.
#: Locks of what plans name: one for each name would need too much memory.
_BUCKETS: Final = 1024


class Connections:
    """The connections of one process. A call may take ``timeout`` seconds."""

    def __init__(self, options: Mapping[str, Any], timeout: float) -> None:
        self._url = options.get("url", "postgresql://localhost/engage")
        self._size = options.get("pool_size", 8)
        self._allow_weak = options.get("allow_weak_durability", False)
        self._timeout, self.schema = timeout, options.get("schema", "engage")
        parts = urlsplit(self._url)
        #: Hosts and database, for messages; never the credentials.
        self.name = f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"
        #: The first key of all advisory locks; the second is 0 for all plans, or a bucket.
        self.lock = zlib.crc32(self.schema.encode()) >> 1
        limits = dict.fromkeys(_LIMITS, str(int(timeout * 1000)))
        self._settings = {**_SETTINGS, **limits, "search_path": self.schema}
        #: How many more may be borrowed. None: it is not open.
        self._room: asyncio.Semaphore | None = None
        self._free: list[Any] = []
        #: The version of the server, once it is known.
        self.version: dict[str, str] = {}

    def open(self) -> None:
        """Let calls make connections."""
        self._room = asyncio.Semaphore(self._size)

    async def close(self) -> None:
        """Close all connections; those that are borrowed follow. Idempotent."""
        self._room = None
        while self._free:
            self._free.pop().terminate()
        await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Any]:
        """Borrow a connection, and roll back after an error. An outage is an error of engage."""
        room, loop = self._room, asyncio.get_running_loop()
        if room is None:
            raise StorageUnavailable("the storage is not open")
        end = loop.time() + self._timeout
        try:
            async with asyncio.timeout_at(end):
                await room.acquire()
        except TimeoutError:
            raise StorageUnavailable(f"{self.name}: all connections are busy") from None
        db, timer = None, None
        try:
            while self._free and (db is None or db.is_closed()):
                db = self._free.pop()
            if db is None or db.is_closed():
                db = await self._connect(end - loop.time())
            timer = loop.call_at(end, db.terminate)
            yield db
        except BaseException as error:
            if db is not None and not isinstance(error, Exception):
                db.terminate()  # A statement may be under way.
            elif db is not None and not db.is_closed():
                with contextlib.suppress(*_ERRORS):
                    await db.execute("ROLLBACK")
            if isinstance(error, _ERRORS):
                self._raise_outage(error, is_late=loop.time() >= end)
            raise
        finally:
            room.release()
            if timer is not None:
                timer.cancel()
            if db is not None and self._room is not room:
                db.terminate()
            elif db is not None:
                self._free.append(db)

    async def _connect(self, seconds: float) -> Any:
        cache = {"statement_cache_size": 1000, "max_cached_statement_lifetime": 0}
        limit = max(seconds, 0.001)
        db = await asyncpg.connect(
            self._url, timeout=limit, server_settings=self._settings, **cache
        )
        try:
            self._examine(db, await db.fetchrow(_EXAMINE, timeout=limit))
        except BaseException:
            db.terminate()
            raise
        return db

    def _examine(self, db: Any, settings: Iterable[str]) -> None:
        for (right, why), value in zip(_EXPECTED.values(), settings, strict=True):
            if value != right and not (right == "on" and self._allow_weak):
                hint = " (allow_weak_durability = true accepts it)" * (right == "on")
                raise StorageUnavailable(f"{self.name}: {why}{hint}")
            if value != right and not self.version:
                _log.warning("weak durability: %s", why)
        version = db.get_server_version()
        if version.major < _MIN_VERSION:
            raise StorageUnavailable(f"{self.name}: PostgreSQL {_MIN_VERSION} or newer is needed")
        self.version = {"PostgreSQL": f"{version.major}.{version.minor}"}

    def _raise_outage(self, error: BaseException, *, is_late: bool) -> None:
        code = getattr(error, "sqlstate", None) or ""
        if isinstance(error, CONFLICTS) or (code and not code.startswith(_OUTAGES)):
            return
        text = _ADVICE.get(code, "no server answers" if isinstance(error, OSError) else "failed")
        if is_late or isinstance(error, TimeoutError) or code == "57014":
            text = f"no answer within {self._timeout:g} s"
        elif isinstance(error, asyncpg.ClientConfigurationError):
            text = "the connection string cannot be used"
        raise StorageUnavailable(f"{self.name}: {text} ({type(error).__name__})") from error

    async def begin(self, db: Any, names: Collection[Key] | None) -> None:
        """Begin the transaction of a plan with what it names. ``None``: no other one runs."""
        shared = "" if names is None else "_shared"  # Who runs alone does not share it.
        locks = f"SELECT pg_advisory_xact_lock{shared}({self.lock}, 0)"
        if buckets := {int.from_bytes(hash_of(name)[:4]) % _BUCKETS + 1 for name in names or ()}:
            one_by_one = ",".join(map(str, sorted(buckets)))
            locks += f"; SELECT count(pg_advisory_xact_lock({self.lock}, one)) "
            locks += f"FROM unnest('{{{one_by_one}}}'::int[]) one"
        await db.execute(
            f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = on; {locks}"
        )

    async def commit(self, db: Any, *, wrote: bool) -> None:
        """Commit, and return when the changes are durable, and everything that was visible."""
        warnings: list[str] = []

        def listen(_: Any, message: Any) -> None:
            warnings.append(message.sqlstate)

        # A transaction that writes nothing does not wait for what it has read.
        mark = "" if wrote else "SELECT pg_logical_emit_message(true, 'engage', ''); "
        db.add_log_listener(listen)
        status = await db.execute(f"{mark}COMMIT")
        db.remove_log_listener(listen)
        if status != "COMMIT" or any(code.startswith("01") for code in warnings):
            raise StorageUnavailable(f"{self.name}: a standby may not have what was written")

    async def writers(self, db: Any) -> set[str]:
        """Return the transactions of this store that are running now and may write."""
        return {*await db.fetch(_WRITERS, self.lock)}
