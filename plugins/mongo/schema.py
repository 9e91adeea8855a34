# SPDX-License-Identifier: Apache-2.0
"""Collections, their indexes, the version of the store, and whether its shard keys are safe.

Everything here is idempotent and safe when several processes do it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from bson.datetime_ms import DatetimeMS
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from engage.api import StorageIncompatible, StorageMissing, StorageUnavailable

from .client import Connection
from .documents import escape_key

log = logging.getLogger("engage.storage.mongo")

#: The version of what this plugin writes, and the oldest plugin that can read it.
VERSION: Final = 1
MIN_READER: Final = 1

EVENTS: Final = "events"
USERS: Final = "users"
GROUPS: Final = "groups"
LINKS: Final = "links"
MEMBERSHIPS: Final = "memberships"
SUBSCRIPTIONS: Final = "subscriptions"
HISTORY: Final = "subscription_history"
DEAD_LETTERS: Final = "dead_letters"
META: Final = "meta"

_ARRIVAL: Final = {"receivedAt": 1, "_seq": 1}
_RECEIVED: Final = {"receivedAt": 1}

#: Collection → (keys, options) of its indexes; each is justified in docs/storage-mongo.md.
INDEXES: Final[Mapping[str, tuple[tuple[Mapping[str, int], Mapping[str, Any]], ...]]] = {
    EVENTS: (
        (_ARRIVAL, {}),
        ({"workspaceId": 1, "userId": 1, "timestamp": 1}, {}),
        ({"workspaceId": 1, "type": 1, "_name": 1, "timestamp": 1}, {}),
        ({"_mark": 1}, {"sparse": True}),
    ),
    LINKS: (({"user": 1}, {}),),
    MEMBERSHIPS: (({"user": 1}, {}),),
    SUBSCRIPTIONS: (({"pending": 1}, {"sparse": True}),),
    HISTORY: (({"_seq": 1}, {}), ({"workspaceId": 1, "userId": 1, "_seq": 1}, {})),
    DEAD_LETTERS: (
        ({"_seq": 1}, {}),
        (_ARRIVAL, {}),
        ({"workspaceId": 1, "budget": 1, "size": 1}, {}),
    ),
}

#: Fields that the ``_id`` determines: sharded on these only, an ``_id`` cannot be stored twice.
SAFE_SHARD_KEYS: Final[Mapping[str, frozenset[str]]] = {
    EVENTS: frozenset({"_id", "workspaceId", "messageId"}),
    USERS: frozenset({"_id", "workspaceId", "userId"}),
    GROUPS: frozenset({"_id", "workspaceId", "groupId"}),
    LINKS: frozenset({"_id", "workspaceId", "user", "anonymousId"}),
    MEMBERSHIPS: frozenset({"_id", "workspaceId", "user", "groupId"}),
    SUBSCRIPTIONS: frozenset({"_id", "workspaceId", "userId"}),
    HISTORY: frozenset({"_id", "workspaceId"}),
    DEAD_LETTERS: frozenset({"_id", "workspaceId"}),
}

_NAMESPACE_NOT_FOUND: Final = 26
#: Codes of ``createIndexes``: the same name or keys with other options.
_CONFLICTS: Final = frozenset({85, 86})
#: Attempts at the indexes of a collection.
_ATTEMPTS: Final = 5
#: Seconds that the building of an index on a collection that is already large may take.
_LONG: Final = 6 * 3600.0
_LARGE: Final = 50_000
_DAY: Final = 86_400


def identifier_index(trait: str) -> dict[str, int]:
    """:return: keys of the index by which users are found by ``trait``, oldest first."""
    return {f"traits.{escape_key(trait)}.i": 1, "createdAt": 1, "_id": 1}


def index_name(keys: Mapping[str, int]) -> str:
    """:return: the name that the drivers would give the index."""
    return "_".join(f"{field}_{way}" for field, way in keys.items())


class Schema:
    """Prepares the store.

    :param traits: all declared identifier traits.
    :param events_days: retention of events, for a TTL index; ``None``: no such index.
    :param dead_letters_days: the same for dead letters.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        traits: Iterable[str],
        events_days: int | None,
        dead_letters_days: int | None,
    ) -> None:
        self._connection = connection
        self._traits = sorted(set(traits))
        self._days = {EVENTS: events_days, DEAD_LETTERS: dead_letters_days}
        self._building: set[asyncio.Task[None]] = set()

    async def prepare(self, *, create: bool) -> None:
        """Look at the store; make what is missing when ``create`` is true.

        :raises StorageMissing: nothing is there and ``create`` is false.
        :raises StorageIncompatible: it was made by a newer version, or by somebody else.
        """
        with self._connection.calling() as db:
            found = await db[META].find_one({"_id": "schema"})
        if found is not None:
            _compatible(found, self._connection.name)
        elif not create:
            raise StorageMissing(f"{self._connection.name}: there is no engage store here yet")
        if create:
            await self._build()
            if found is None:
                document = {
                    "_id": "schema",
                    "version": VERSION,
                    "minReader": MIN_READER,
                    "createdAt": DatetimeMS(time.time_ns() // 1_000_000),
                }
                # A duplicate: another process was a moment earlier.
                with self._connection.calling() as db, contextlib.suppress(DuplicateKeyError):
                    await db[META].insert_one(document)
            await self._warn_of_shard_keys()

    async def close(self) -> None:
        """Stop waiting for indexes; the server finishes them."""
        for task in list(self._building):
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)

    # -------------------------------------------------------------------------------- indexes
    async def _build(self) -> None:
        task = asyncio.create_task(self._indexes())
        self._building.add(task)
        task.add_done_callback(self._building.discard)
        done, _ = await asyncio.wait({task}, timeout=self._connection.timeout)
        if done:
            task.result()
        else:
            # Its own time limit ends it where the server does not answer at all.
            log.warning("an index is being built on a large collection; going on meanwhile")
            task.add_done_callback(_report)

    async def _indexes(self) -> None:
        for collection in SAFE_SHARD_KEYS:
            wanted = list(INDEXES.get(collection, ()))
            if collection == USERS:
                wanted += [(identifier_index(trait), {}) for trait in self._traits]
            for attempt in range(_ATTEMPTS):
                try:
                    await self._make_indexes(collection, wanted)
                except StorageUnavailable:
                    # Several processes at once may meet each other's half-made collection.
                    if attempt == _ATTEMPTS - 1:
                        raise
                    await asyncio.sleep(0.1 * (attempt + 1))
                else:
                    break

    async def _make_indexes(
        self, collection: str, wanted: Iterable[tuple[Mapping[str, int], Mapping[str, Any]]]
    ) -> None:
        seconds = await self._patience(collection)
        with self._connection.calling(seconds=seconds) as db:
            there = await _existing(db, collection)
            missing = [
                {"key": dict(keys), "name": index_name(keys), **options}
                for keys, options in wanted
                if tuple(keys.items()) not in there
            ]
            if missing:
                await _create(db, collection, missing)
            if collection in self._days:
                ttl = there.get(tuple(_RECEIVED.items()))
                await _expire_after(db, collection, self._days[collection], ttl)

    async def _patience(self, collection: str) -> float | None:
        with self._connection.calling() as db:
            count = await db[collection].estimated_document_count()
        return _LONG if count > _LARGE else None

    # ------------------------------------------------------------------------------- sharding
    async def _warn_of_shard_keys(self) -> None:
        for collection, key in await self.unsafe_shard_keys():
            log.error(
                "%s: the collection %s is sharded on %s, which lets one message id be stored twice "
                "(an _id is unique within a shard only): shard it on {_id: 'hashed'}",
                self._connection.name,
                collection,
                key,
            )

    async def unsafe_shard_keys(self) -> list[tuple[str, dict[str, Any]]]:
        """:return: collection and shard key of those that are sharded on a key that breaks the
        uniqueness of ``_id``; empty also where nobody may look.
        """
        with self._connection.calling() as db:
            hello = await db.command("isMaster")
            if hello.get("msg") != "isdbgrid":
                return []
            query = {"_id": {"$in": [f"{db.name}.{name}" for name in SAFE_SHARD_KEYS]}}
            try:
                found = await db.client["config"]["collections"].find(query).to_list(None)
            except OperationFailure as error:
                log.info("the shard keys could not be looked at (code %s)", error.code)
                return []
        unsafe = []
        for document in found:
            collection = document["_id"].split(".", 1)[1]
            key = document.get("key") or {}
            if not key.keys() <= SAFE_SHARD_KEYS[collection]:
                unsafe.append((collection, dict(key)))
        return unsafe


def _compatible(document: Mapping[str, Any], name: str) -> None:
    version, min_reader = document.get("version"), document.get("minReader")
    if not isinstance(version, int) or not isinstance(min_reader, int):
        raise StorageIncompatible(f"{name}: the collection meta is not engage's")
    if min_reader > VERSION:
        raise StorageIncompatible(
            f"{name}: made by a newer engage (store version {version}, readable from version "
            f"{min_reader}, this is {VERSION})"
        )


async def _existing(
    db: Any, collection: str
) -> dict[tuple[tuple[str, Any], ...], Mapping[str, Any]]:
    """:return: keys of an index → the index."""
    try:
        reply = await db.command({"listIndexes": collection})
    except OperationFailure as error:
        if error.code == _NAMESPACE_NOT_FOUND:
            return {}
        raise
    # 64 indexes are the most there can be; the first batch of a reply holds 101.
    return {tuple(index["key"].items()): index for index in reply["cursor"]["firstBatch"]}


async def _create(db: Any, collection: str, indexes: list[dict[str, Any]]) -> None:
    try:
        await db.command({"createIndexes": collection, "indexes": indexes})
    except OperationFailure as error:
        if error.code not in _CONFLICTS:
            raise
        if len(indexes) > 1:
            # None of them was made.
            for index in indexes:
                await _create(db, collection, [index])
            return
        # The operator has one of that name with options of his own: his to decide.
        log.warning("an index of %s exists with other options; it is left", collection)


async def _expire_after(
    db: Any, collection: str, days: int | None, there: Mapping[str, Any] | None
) -> None:
    """Let the server expire documents, if it can; without ``days``, see that it does not.

    :param there: the index that may do so already.
    """
    name = index_name(_RECEIVED)
    if days is None:
        if there is not None and "expireAfterSeconds" in there:
            with contextlib.suppress(OperationFailure):
                await db.command({"dropIndexes": collection, "index": there["name"]})
        return
    seconds = days * _DAY
    if there is not None:
        if there.get("expireAfterSeconds") == seconds:
            return
        change = {"keyPattern": dict(_RECEIVED), "expireAfterSeconds": seconds}
        try:
            await db.command({"collMod": collection, "index": change})
        except OperationFailure:
            # Not every server can: made anew, then.
            await db.command({"dropIndexes": collection, "index": there["name"]})
        else:
            return
    index = {"key": dict(_RECEIVED), "name": name, "expireAfterSeconds": seconds}
    try:
        await db.command({"createIndexes": collection, "indexes": [index]})
    except OperationFailure as error:
        log.info(
            "%s: no TTL index here (code %s); expired in the background", collection, error.code
        )


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        error = task.exception()
        if isinstance(error, StorageUnavailable | PyMongoError):
            log.warning("an index could not be built: %s", error)
        elif error is not None:
            log.error("an index could not be built", exc_info=error)
        else:
            log.info("all indexes are built")
