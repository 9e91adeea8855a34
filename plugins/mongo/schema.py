# SPDX-License-Identifier: Apache-2.0
"""Preparing the store before its first use: collections, indexes, version, shard keys.

Everything here is idempotent, and several processes can do it at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from bson.datetime_ms import DatetimeMS
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from engage.api import (
    ENGAGE_VERSION,
    Kind,
    StorageError,
    StorageIncompatible,
    StorageMissing,
    StorageOutdated,
    StorageUnavailable,
)

from .connection import Connection
from .documents import escape_key
from .paging import ARRIVAL

if TYPE_CHECKING:
    from .choices import Upgrade

_log = logging.getLogger("engage.storage.mongo")

#: The version of the stores that this plugin writes, and the oldest version that can read them.
VERSION: Final = 3
MIN_READER: Final = 3
#: The version since which a choice belongs to a user or a visitor.
OWN_CHOICES: Final = 2

EVENTS: Final = "events"
USERS: Final = "users"
VISITORS: Final = "visitors"
GROUPS: Final = "groups"
LINKS: Final = "links"
MEMBERSHIPS: Final = "memberships"
VISITOR_MEMBERSHIPS: Final = "visitor_memberships"
CLAIMS: Final = "claims"
VISITOR_CLAIMS: Final = "visitor_claims"
SUBSCRIPTIONS: Final = "subscriptions"
HISTORY: Final = "subscription_history"
SUPPRESSIONS: Final = "suppressions"
DEAD_LETTERS: Final = "dead_letters"
RECORDS: Final = "records"
COUNTS: Final = "counts"
ARRIVALS: Final = "arrivals"
META: Final = "meta"


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where the profiles of a kind are."""

    subjects: str
    #: The field that has the id.
    name: str
    #: Collections; groups have none.
    memberships: str = ""
    claims: str = ""


PLACES: Final[Mapping[Kind, Places]] = {
    Kind.USER: Places(USERS, "userId", MEMBERSHIPS, CLAIMS),
    Kind.VISITOR: Places(VISITORS, "anonymousId", VISITOR_MEMBERSHIPS, VISITOR_CLAIMS),
    Kind.GROUP: Places(GROUPS, "groupId"),
}

_ARRIVAL: Final = dict(ARRIVAL)
#: The index of the events of a user.
BY_USER: Final[Mapping[str, int]] = {"workspaceId": 1, "userId": 1, "timestamp": 1}

#: Collection → (keys, options) of its indexes; docs/storage-mongo.md has the reason of each.
INDEXES: Final[Mapping[str, tuple[tuple[Mapping[str, int], Mapping[str, Any]], ...]]] = {
    EVENTS: (
        (_ARRIVAL, {}),
        (BY_USER, {}),
        ({"workspaceId": 1, "type": 1, "_name": 1, "timestamp": 1}, {}),
        ({"_mark": 1}, {"sparse": True}),
    ),
    VISITORS: (({"changedAt": 1, "_id": 1}, {}),),
    LINKS: (
        ({"user": 1}, {}),
        ({"workspaceId": 1, "anonymousId": 1, "first": 1, "user": 1}, {}),
    ),
    MEMBERSHIPS: (({"user": 1}, {}),),
    VISITOR_MEMBERSHIPS: (({"visitor": 1}, {}),),
    CLAIMS: (({"held": 1, "at": 1, "_id": 1}, {}),),
    VISITOR_CLAIMS: (({"held": 1, "at": 1, "_id": 1}, {}), ({"visitor": 1}, {})),
    SUBSCRIPTIONS: (({"pending": 1}, {"sparse": True}),),
    HISTORY: (
        ({"_seq": 1}, {}),
        ({"workspaceId": 1, "userId": 1, "_seq": 1}, {}),
        ({"workspaceId": 1, "anonymousId": 1, "_seq": 1}, {}),
    ),
    DEAD_LETTERS: (
        ({"_seq": 1}, {}),
        (_ARRIVAL, {}),
        ({"workspaceId": 1, "budget": 1, "size": 1}, {}),
        ({"workspaceId": 1, "_seq": 1}, {}),
    ),
    RECORDS: (({"kind": 1, "workspaceId": 1, "id": 1}, {}), ({"kind": 1, "at": 1}, {})),
}

#: Fields that the ``_id`` determines: in a collection that is sharded on no other field, an ``_id``
#: cannot be stored twice.
SAFE_SHARD_KEYS: Final[Mapping[str, frozenset[str]]] = {
    EVENTS: frozenset({"_id", "workspaceId", "messageId"}),
    USERS: frozenset({"_id", "workspaceId", "userId"}),
    VISITORS: frozenset({"_id", "workspaceId", "anonymousId"}),
    GROUPS: frozenset({"_id", "workspaceId", "groupId"}),
    LINKS: frozenset({"_id", "workspaceId", "user", "anonymousId"}),
    MEMBERSHIPS: frozenset({"_id", "workspaceId", "user", "groupId"}),
    VISITOR_MEMBERSHIPS: frozenset({"_id", "workspaceId", "visitor", "groupId"}),
    CLAIMS: frozenset({"_id", "workspaceId", "userId"}),
    VISITOR_CLAIMS: frozenset({"_id", "workspaceId", "visitor"}),
    SUBSCRIPTIONS: frozenset({"_id", "workspaceId", "userId"}),
    HISTORY: frozenset({"_id", "workspaceId"}),
    SUPPRESSIONS: frozenset({"_id", "workspaceId", "channel", "address"}),
    DEAD_LETTERS: frozenset({"_id", "workspaceId"}),
    ARRIVALS: frozenset({"_id"}),
    # Their upserts name the _id only.
    RECORDS: frozenset({"_id"}),
    COUNTS: frozenset({"_id"}),
}

_NAMESPACE_NOT_FOUND: Final = 26
#: Codes of ``createIndexes``: an index of the same name or keys has other options.
_CONFLICTS: Final = frozenset({85, 86})
#: Attempts to create the indexes of a collection.
_MAX_ATTEMPTS: Final = 5
#: Seconds that building the indexes of a large collection may take, and the number of documents
#: from which a collection is large.
_BUILD_SECONDS: Final = 6 * 3600.0
_LARGE: Final = 50_000


#: The part of a call's time for which a call waits until the store is prepared. The core waits for
#: the opening of a store as long as for one call.
_WAIT: Final = 3 / 4


def identifier_index(trait: str) -> dict[str, int]:
    """Return the keys of the index by which users are found by ``trait``, oldest first."""
    return {f"traits.{escape_key(trait)}.i": 1, "createdAt": 1, "_id": 1}


def index_name(keys: Mapping[str, int]) -> str:
    """Return the name that the drivers give an index with these keys."""
    return "_".join(f"{field}_{way}" for field, way in keys.items())


class Schema:
    """Prepares the store.

    :param traits: all declared identifier traits.
    :param upgrade: from version 1.
    :param begin: begins the journal of arrivals, if there is none.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        traits: Iterable[str],
        upgrade: Upgrade,
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._upgrade = upgrade
        self._begin = begin
        self._traits = sorted(set(traits))
        self._building: set[asyncio.Task[None]] = set()

    async def prepare(self, *, create: bool) -> None:
        """Check the store, and create missing parts if ``create`` is true.

        :raises StorageMissing: if there is no store and ``create`` is false.
        :raises StorageIncompatible: if a newer version or another program made it, or an earlier
            version and ``create`` is false.
        """
        with self._connection.calling() as db:
            await self._connection.recognise()
            stored = await db[META].find_one({"_id": "schema"})
        if stored is not None:
            _check_version(stored, self._connection.name)
            if stored["version"] < VERSION and not create:
                lost = await self._upgrade.lost() if stored["version"] < OWN_CHOICES else 0
                text = "; subscriptions of visitors that then no longer count for their users"
                raise StorageOutdated(
                    f"{self._connection.name}: made by an earlier version of engage (store version "
                    f"{stored['version']}; this is version {VERSION}): start `engage serve` once, "
                    f"which brings the store up to date{f'{text}: {lost}' if lost else ''}"
                )
        elif not create:
            raise StorageMissing(
                f"{self._connection.name}: there is no engage store; `engage serve` creates one"
            )
        if create:
            await self._build()
            if stored is None:
                await self._begin()
                document = {
                    "_id": "schema",
                    "version": VERSION,
                    "minReader": MIN_READER,
                    "engage": ENGAGE_VERSION,
                    "createdAt": DatetimeMS(time.time_ns() // 1_000_000),
                }
                # Another process may have inserted it a moment earlier.
                with self._connection.calling() as db, contextlib.suppress(DuplicateKeyError):
                    await db[META].insert_one(document)
            else:
                await self._migrate(stored["version"])
            await self._warn_of_shard_keys()

    async def _migrate(self, version: int) -> None:
        """Bring a store of an earlier version up to date."""
        if version >= VERSION:
            return
        # From now on, an older version would misread the store, or enter no arrivals.
        await self._upgrade.fence()
        if version < OWN_CHOICES:
            await self._upgrade.run()
        await self._begin()
        with self._connection.calling() as db:
            # Another process, of a still newer version, may have done more since.
            earlier = {"_id": "schema", "version": {"$lt": VERSION}}
            done = {"version": VERSION, "minReader": MIN_READER, "engage": ENGAGE_VERSION}
            await db[META].update_one(earlier, {"$set": done})
        _log.info("%s: store version %d is now %d", self._connection.name, version, VERSION)

    async def close(self) -> None:
        """Stop waiting for indexes; the server continues to build them."""
        for task in list(self._building):
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)

    # -------------------------------------------------------------------------------- indexes
    async def _build(self) -> None:
        task = asyncio.create_task(self._indexes())
        self._building.add(task)
        task.add_done_callback(self._building.discard)
        # Half of a call's time: after a fault, the core opens the store again and waits only as
        # long as for one call.
        try:
            done, _ = await asyncio.wait({task}, timeout=self._connection.timeout / 2)
        except asyncio.CancelledError:
            # Otherwise each attempt to open the store would leave a task behind.
            await self.close()
            raise
        if done:
            task.result()
        else:
            # If the server does not answer at all, the time limit of the task ends it.
            _log.warning("indexes of a large collection are being built; engage works as usual")
            task.add_done_callback(_log_result)

    async def _indexes(self) -> None:
        for collection in SAFE_SHARD_KEYS:
            indexes = list(INDEXES.get(collection, ()))
            if collection in (USERS, VISITORS):
                indexes += [(identifier_index(trait), {}) for trait in self._traits]
            for attempt in range(_MAX_ATTEMPTS):
                try:
                    await self._make_indexes(collection, indexes)
                except StorageUnavailable:
                    # Another process may be creating the same collection at this moment.
                    if attempt == _MAX_ATTEMPTS - 1:
                        raise
                    await asyncio.sleep(0.1 * (attempt + 1))
                else:
                    break

    async def _make_indexes(
        self, collection: str, indexes: Iterable[tuple[Mapping[str, int], Mapping[str, Any]]]
    ) -> None:
        with self._connection.calling() as db:
            count = await db[collection].estimated_document_count()
        seconds = _BUILD_SECONDS if count > _LARGE else None
        with self._connection.calling(seconds=seconds) as db:
            existing = await _existing(db, collection)
            missing = [
                {"key": dict(keys), "name": index_name(keys), **options}
                for keys, options in indexes
                if tuple(keys.items()) not in existing
            ]
            if missing:
                await _create(db, collection, missing)

    # ------------------------------------------------------------------------------- sharding
    async def _warn_of_shard_keys(self) -> None:
        """Log the collections that are sharded on a key under which an ``_id`` can be stored twice;
        nothing if the user may not read the shard keys."""
        with self._connection.calling() as db:
            hello = await db.command("isMaster")
            if hello.get("msg") != "isdbgrid":
                return
            query = {"_id": {"$in": [f"{db.name}.{name}" for name in SAFE_SHARD_KEYS]}}
            try:
                documents = await db.client["config"]["collections"].find(query).to_list(None)
            except OperationFailure as error:
                _log.info("the shard keys cannot be read (code %s)", error.code)
                return
        for document in documents:
            collection = document["_id"].split(".", 1)[1]
            key = document.get("key") or {}
            if not key.keys() <= SAFE_SHARD_KEYS[collection]:
                _log.error(
                    "%s: the collection %s is sharded on %s, which lets one message id be stored "
                    "twice (an _id is unique within a shard only): shard it on {_id: 'hashed'}",
                    self._connection.name,
                    collection,
                    dict(key),
                )


def _check_version(document: Mapping[str, Any], name: str) -> None:
    """:raises StorageIncompatible: if this version cannot read the store."""
    version, min_reader = document.get("version"), document.get("minReader")
    if not isinstance(version, int) or not isinstance(min_reader, int):
        raise StorageIncompatible(f"{name}: the collection meta is not engage's")
    if min_reader > VERSION:
        made = document.get("engage")
        newer = f"engage {made}" if made else "that version of engage"
        raise StorageIncompatible(
            f"{name}: made or brought up to date by a newer version of engage (store version "
            f"{version}, readable from version {min_reader} on; this is version {VERSION}): use "
            f"{newer} or newer, or another database"
        )


async def _existing(db: Any, collection: str) -> set[tuple[tuple[str, Any], ...]]:
    """Return the keys of the indexes of a collection."""
    try:
        reply = await db.command({"listIndexes": collection})
    except OperationFailure as error:
        if error.code == _NAMESPACE_NOT_FOUND:
            return set()
        raise
    # A collection has at most 64 indexes; the first batch of the reply contains up to 101.
    return {tuple(index["key"].items()) for index in reply["cursor"]["firstBatch"]}


async def _create(db: Any, collection: str, indexes: list[dict[str, Any]]) -> None:
    try:
        await db.command({"createIndexes": collection, "indexes": indexes})
    except OperationFailure as error:
        if error.code not in _CONFLICTS:
            raise
        if len(indexes) > 1:
            # The server created none of them.
            for index in indexes:
                await _create(db, collection, [index])
            return
        # An operator created it: it is not for engage to change.
        _log.warning("an index of %s exists with other options; it is left as it is", collection)


def _log_result(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        error = task.exception()
        if isinstance(error, StorageUnavailable | PyMongoError):
            _log.warning("the indexes cannot be built: %s", error)
        elif error is not None:
            _log.error("the indexes cannot be built", exc_info=error)
        else:
            _log.info("all indexes are built")


class Preparation:
    """Finds or creates the store, and completes writes that a crash cut off.

    :param complete: completes it.
    :param later: called if that cannot be done now.
    :param index: indexes identifiers that were declared since the last start.
    """

    def __init__(
        self,
        connection: Connection,
        schema: Schema,
        *,
        complete: Callable[[], Awaitable[None]],
        later: Callable[[], None],
        index: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._complete = complete
        self._later = later
        self._index = index
        #: Whether the store is prepared.
        self.done = False
        #: Whether the collections, the indexes and the version are.
        self._created = False
        self._task: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until the store is prepared; create it if there is none.

        The preparation continues when the time of the call is over: an overloaded server would
        never be done if each call began again.

        :raises StorageError: if it fails, or takes longer.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.prepare(create=True))
            self._task.add_done_callback(_retrieve_exception)
        task = self._task
        done, _ = await asyncio.wait([task], timeout=_WAIT * self._connection.timeout)
        if not done:
            raise StorageUnavailable(f"{self._connection.name}: the store is still being prepared")
        task.result()

    async def prepare(self, *, create: bool) -> None:
        """Prepare the store now, however long it takes.

        :param create: whether to create missing parts.
        """
        self._connection.connect()
        if not self._created:
            await self._schema.prepare(create=create)
            self._created = create
        try:
            await self._complete()
        except StorageError:
            # The server may be too busy for it; a command that only reads may run with credentials
            # that only allow reading. Nothing of it was acknowledged: it can be done later.
            _log.info("writes that a crash may have cut off were not completed", exc_info=True)
            if create:
                self._later()
        try:
            await self._index()
        except StorageError:
            if create:
                raise
            _log.info("the identifiers were not indexed", exc_info=True)
        self.done = True

    async def stop(self) -> None:
        """Stop preparing. The server continues to build indexes."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._schema.close()

    def forget(self) -> None:
        """Prepare the store again before the next call: it was closed."""
        self.done = self._created = False


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it if no call waits for it."""
    if not task.cancelled():
        task.exception()
