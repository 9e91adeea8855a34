# SPDX-License-Identifier: Apache-2.0
"""The connection: the only module that names the driver's clients.

:func:`_connected` makes them. This package makes only calls that motor's client and
``pymongo.AsyncMongoClient`` share: ``aggregate``, ``list_indexes`` and the like are awaited with
one and not with the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import bson
import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    InvalidOperation,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)

from engage.api import ConfigError, StorageUnavailable

from .documents import MAX_BYTES, any_of
from .url import DEFAULT_DATABASE, parse_url

_log = logging.getLogger("engage.storage.mongo")

#: The code for a document whose ``_id`` is stored already.
DUPLICATE: Final = 11000
#: The codes for a document that is too large: BSONObjectTooLarge, and the two for one that an
#: update or an upsert would make. If one of them fails a whole command, it concerns one document of
#: the command, and the others may be stored.
BSON_OBJECT_TOO_LARGE: Final = 10334
TOO_LARGE: Final = frozenset({BSON_OBJECT_TOO_LARGE, 17419, 17420})
#: The codes for a document that the server can never take, as it publishes them: BadValue,
#: TypeMismatch, Overflow (nested too deeply), InvalidBSON, DollarPrefixedFieldName, InvalidIdField,
#: EmptyFieldName, DottedFieldName, and those above. DocumentValidationFailure (121) is left out on
#: purpose: a mistake in a validator must not refuse every event.
PERMANENT: Final = frozenset({2, 14, 15, 22, 52, 53, 56, 57}) | TOO_LARGE

#: Advice for errors that an operator can mend, by code.
_EXPLANATIONS: Final = {
    13: "the user of the connection string lacks a permission",
    18: "wrong credentials",
}

#: Dates are read as milliseconds, so that no date is out of range and none is rounded.
CODEC: Final[CodecOptions[Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)

_RAW: Final = CODEC.with_options(document_class=RawBSONDocument)

#: Statements of one update command at most, and documents that one command reads or deletes.
BATCH: Final = 1000
#: What an update does that changes nothing: it waits until what was read is durable.
UNCHANGED: Final = {"$setOnInsert": {"_none": 0}}
#: The same for FerretDB 1. It has 100 connections to its SQLite file, takes one for each statement
#: that changes a document, and keeps it until the end of the command: with more statements, those
#: of the commands that run at the same time included, it hangs.
_MAX_STATEMENTS_FERRETDB: Final = 12
#: Bytes of a message or a command that are not documents.
_MESSAGE_OVERHEAD: Final = 16 * 1024
#: A page of a scan may take this many times as long as another call: no client waits for it, and
#: FerretDB reads and sorts the whole collection for each.
_SCAN: Final = 10
#: How often a change is tried again because another caller changed the same document.
MAX_ATTEMPTS: Final = 50
#: Seconds within which a server must be found.
_SELECTION_SECONDS: Final = 3.0
#: Seconds that closing may spend on a last call, and on ending the sessions with the server.
CLOSE_SECONDS: Final = 1.0
#: Seconds between two attempts to reach a server whose answer was lost.
_RETRY_PAUSE: Final = 0.05


class Connection:
    """A client with its database. :meth:`connect` makes them.

    :param url: the connection string.
    :param driver: ``motor``, or ``pymongo`` for its asynchronous client.
    :param allow_weak: accept one that allows acknowledged events to be lost.
    :param timeout: seconds of one call, unless the connection string says ``timeoutMS``.
    :raises ConfigError: if the connection string cannot be used. The message never quotes it: it
        may contain a password.
    """

    def __init__(
        self, url: str, *, driver: str = "motor", allow_weak: bool, timeout: float
    ) -> None:
        self._url = url
        self._driver = driver
        self._parsed = parse_url(url)
        self.weaknesses = self._parsed.weaknesses()
        if self.weaknesses and not allow_weak:
            raise ConfigError(
                f"url: {self.weaknesses[0]} (remove the option, or set "
                "storage.mongo.allow_weak_acknowledgement = true)"
            )
        self.timeout = self._parsed.seconds("timeoutMS", timeout)
        self._selection_timeout = self._parsed.seconds(
            "serverSelectionTimeoutMS", _SELECTION_SECONDS
        )
        #: Hosts and database, for messages; never the credentials.
        self.name = self._parsed.name
        self._max_statements = BATCH
        #: Entered for every update of documents that another call may be updating.
        self.updating: AbstractAsyncContextManager[Any] = contextlib.nullcontext()
        self._client: Any = None
        self._end: Callable[[], Awaitable[None]]
        self._db: Any = None

    @property
    def db(self) -> Any:
        """The database; set by :meth:`connect`.

        :raises StorageUnavailable: if it is closed, maybe under a call that waited.
        """
        if self._db is None:
            raise StorageUnavailable("the storage is not open")
        return self._db

    def connect(self) -> None:
        """Make the client, without connecting to a server yet. Idempotent.

        :raises StorageUnavailable: if the DNS does not have the hosts of a ``mongodb+srv`` string.
        """
        if self._client is not None:
            return
        defaults: dict[str, Any] = {
            "appname": "engage",
            "serverSelectionTimeoutMS": int(self._selection_timeout * 1000),
            "timeoutMS": int(self.timeout * 1000),
            "retryWrites": True,
            "w": "majority",
            "journal": True,
        }
        if self._parsed.is_srv:
            # The driver also waits this long for the DNS, and no other limit ends that.
            defaults["connectTimeoutMS"] = int(self.timeout * 500)
        defaults = {
            name: value
            for name, value in defaults.items()
            if name.lower() not in self._parsed.options
        }
        try:
            client, self._end = _connected(self._driver, self._url, defaults)
            database = client.get_default_database(DEFAULT_DATABASE)
        except (PyMongoError, OSError, ValueError) as error:
            raise StorageUnavailable(
                f"{self.name}: the connection string cannot be used ({type(error).__name__})"
            ) from None
        self._client = client
        # Another member than the primary may not have writes that were acknowledged a moment ago.
        self._db = database.with_options(
            codec_options=CODEC, read_preference=pymongo.ReadPreference.PRIMARY
        )

    async def recognise(self) -> None:
        """Find out which server it is. To be called within :meth:`calling`, before the first
        :meth:`update`."""
        info = await self.db.command("buildInfo")
        if "ferretdbVersion" in info:
            self._max_statements = _MAX_STATEMENTS_FERRETDB
            # It reads a document and later replaces it, so another update would be lost.
            self.updating = asyncio.Lock()
        else:
            self._max_statements, self.updating = BATCH, contextlib.nullcontext()

    async def close(self) -> None:
        """Close the client. Idempotent."""
        client, self._client, self._db = self._client, None, None
        if client is None:
            return
        # The client ends its sessions with the server, which may not answer.
        with pymongo.timeout(CLOSE_SECONDS), contextlib.suppress(TimeoutError):
            # The asynchronous client waits for its monitors without a limit.
            async with asyncio.timeout(self.timeout):
                await self._end()

    @contextlib.contextmanager
    def calling(self, *, seconds: float | None = None, scan: bool = False) -> Iterator[Any]:
        """Limit the time of the calls of the driver inside, taken together, and translate errors.

        Yields the database.

        :param seconds: the time limit; by default that of the storage.
        :param scan: whether it is a page of a scan.
        :raises StorageUnavailable: for every error of the driver.
        :raises asyncio.CancelledError: if the task is cancelled meanwhile: the driver may lose it.
        """
        db = self.db
        task = asyncio.current_task()
        cancellations = task.cancelling() if task is not None else 0
        if seconds is None:
            seconds = self.timeout * (_SCAN if scan else 1)
            if not self._client.topology_description.has_writable_server():
                # Under a limit for the whole call, the driver would look for a server until it is
                # over.
                seconds = min(seconds, self._selection_timeout)
        try:
            with pymongo.timeout(seconds):
                yield db
        except PyMongoError as error:
            raise self.unavailable(error) from _without_documents(error)
        except (BSONError, LookupError, TypeError, ValueError) as error:
            _log.error("%s: the server sent an unexpected answer", self.name, exc_info=error)
            raise StorageUnavailable(
                f"{self.name}: the server sent an unexpected answer ({type(error).__name__})"
            ) from error
        finally:
            # PyMongo's asynchronous client sends with asyncio.wait_for. Before Python 3.12, that
            # loses a cancellation that arrives when the sending is done already.
            if task is not None and task.cancelling() > cancellations:
                raise asyncio.CancelledError

    def unavailable(self, error: BaseException) -> StorageUnavailable:
        """Return the driver's error as one of engage, with its kind and code, never a document."""
        code = getattr(error, "code", None)
        text = type(error).__name__ + (f", code {code}" if code is not None else "")
        if isinstance(error, ServerSelectionTimeoutError):
            text = f"no server answers, or none of them is a primary ({text})"
        elif isinstance(error, ConfigurationError):
            why = (
                "the DNS does not have this name"
                if self._parsed.is_srv
                else "the version of the server is not supported"
            )
            text = f"{why} ({text})"
        elif code in _EXPLANATIONS:
            text = f"{_EXPLANATIONS[code]} ({text})"
        return StorageUnavailable(f"{self.name}: {text}")

    # ----------------------------------------------------------------- the server's own limits
    def _announced(self, name: str, default: int) -> int:
        servers = self._client.topology_description.server_descriptions().values()
        return min((getattr(node, name) for node in servers if node.is_writable), default=default)

    @property
    def max_bytes(self) -> int:
        """Maximum size of a document, and of a command, as the server announces it."""
        document = self._announced("max_bson_size", MAX_BYTES)
        message = self._announced("max_message_size", 3 * MAX_BYTES)
        return min(MAX_BYTES, document, max(message - _MESSAGE_OVERHEAD, 1))

    def chunks(self, ids: Iterable[str]) -> Iterator[list[str]]:
        """Cut a list of ids so that each part fits into one command."""
        limit = self.max_bytes // 2
        chunk: list[str] = []
        size = 0
        for key in ids:
            # A character has at most 4 bytes; an element of a list has some more.
            size += 4 * len(key) + 16
            if chunk and size > limit:
                yield chunk
                chunk, size = [], 4 * len(key) + 16
            chunk.append(key)
        if chunk:
            yield chunk

    async def read(
        self,
        collection: str,
        values: Iterable[str],
        fields: Mapping[str, Any] | None = None,
        *,
        by: str = "_id",
        **conditions: Any,
    ) -> list[Mapping[str, Any]]:
        """Return the documents of which the field ``by`` has one of these values."""
        documents: list[Mapping[str, Any]] = []
        for chunk in self.chunks(values):
            documents += await self.find(collection, {by: any_of(chunk), **conditions}, fields)
        return documents

    async def find(
        self, collection: str, query: Mapping[str, Any], fields: Mapping[str, Any] | None = None
    ) -> list[Mapping[str, Any]]:
        """Return all documents of a query. To be called within :meth:`calling`."""
        if isinstance(query.get("_id"), str):  # It needs no cursor.
            document = await self.db[collection].find_one(query, fields)
            return [] if document is None else [document]
        items: list[Mapping[str, Any]] = await self.db[collection].find(query, fields).to_list(None)
        return items

    # ----------------------------------------------------------------------------- writing
    def _concern(self) -> dict[str, Any]:
        concern: dict[str, Any] = dict(self._client.write_concern.document)
        return concern

    async def update(self, collection: str, statements: Sequence[Mapping[str, Any]]) -> list[int]:
        """Send update statements, unordered, in as few commands as they fit into.

        Not ``bulk_write``: this way the answer has the same form with every server. Statements must
        be idempotent: they are sent again after a lost answer. To be called within :meth:`calling`.

        :param statements: each ``{"q", "u", "upsert", "multi"}``.
        :return: for each statement 0, or the code for which the server can never apply it.
        :raises PyMongoError: if at least one is not durable.
        """
        codes = [0] * len(statements)
        for start, part in self._commands(statements):
            todo = list(range(start, start + len(part)))
            races = 0
            while todo:
                some = [part[index - start] for index in todo]
                reply = await self._command("update", collection, some)
                failures = reply.get("writeErrors", ())
                if not failures:
                    break
                for failure in failures:
                    index, code = todo[failure["index"]], failure["code"]
                    if code in PERMANENT:
                        codes[index] = code
                    elif code == DUPLICATE and races < MAX_ATTEMPTS:
                        races += 1
                    else:
                        raise OperationFailure("an update failed", code)
                # Send all others again: not every server goes on after the first failure.
                todo = [index for index in todo if not codes[index]]
        return codes

    async def delete(self, collection: str, queries: Sequence[Mapping[str, Any]]) -> int:
        """Delete one document for each query. To be called within :meth:`calling`.

        :return: how many there were; after a lost answer they are sent again, and it is less.
        """
        deleted = 0
        for _, part in self._commands([{"q": query, "limit": 1} for query in queries]):
            reply = await self._command("delete", collection, part)
            for failure in reply.get("writeErrors", ()):
                raise OperationFailure("a deletion failed", failure["code"])
            deleted += reply["n"]
        return deleted

    def _commands(self, statements: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, list[Any]]]:
        limit = min(self._max_statements, self._announced("max_write_batch_size", BATCH))
        return _commands(statements, limit, self.max_bytes)

    async def _command(
        self, kind: str, collection: str, statements: list[Any]
    ) -> Mapping[str, Any]:
        command = {
            kind: collection,
            "ordered": False,
            "writeConcern": self._concern(),
            f"{kind}s": statements,
        }
        async with self.updating:
            try:
                reply: Mapping[str, Any] = await self.db.command(command)
            except AutoReconnect:
                # The driver's retryable writes do this for its own commands.
                await asyncio.sleep(_RETRY_PAUSE)
                reply = await self.db.command(command)
        failure = reply.get("writeConcernError")
        if failure:
            raise OperationFailure("the write concern failed", failure.get("code"))
        # FerretDB leaves the count out if every statement failed.
        if "n" not in reply and not reply.get("writeErrors"):
            raise LookupError("the answer to an update has no count")
        return reply

    async def insert(self, collection: str, documents: Sequence[bytes]) -> dict[int, int]:
        """Insert encoded documents, unordered. To be called within :meth:`calling`.

        :return: position → code (:data:`DUPLICATE` or one of :data:`PERMANENT`) of the documents
            that were not stored.
        :raises PyMongoError: if at least one is not durable; in any case if the write concern
            failed.
        """
        limit = self.max_bytes
        large = {index for index, document in enumerate(documents) if len(document) > limit}
        # The driver measures before it sends: one large document would fail the whole call.
        fitting = [index for index in range(len(documents)) if index not in large]
        raw = [RawBSONDocument(documents[index], _RAW) for index in fitting]
        codes = await self._insert(collection, raw) if raw else {}
        refused = {fitting[index]: code for index, code in codes.items()}
        return refused | dict.fromkeys(large, BSON_OBJECT_TOO_LARGE)

    async def _insert(self, collection: str, raw: Sequence[RawBSONDocument]) -> dict[int, int]:
        try:
            await self.db[collection].insert_many(raw, ordered=False)
        except BulkWriteError as error:
            details: Mapping[str, Any] = error.details
            for failure in details.get("writeConcernErrors") or ():
                raise OperationFailure("the write concern failed", failure.get("code")) from None
            codes = {fault["index"]: fault["code"] for fault in details.get("writeErrors") or ()}
            for code in codes.values():
                if code != DUPLICATE and code not in PERMANENT:
                    raise OperationFailure("an insert failed", code) from None
            return codes
        except OperationFailure as error:
            if error.code not in TOO_LARGE:
                raise
            # The server refused the whole command because of one document: find it by halves.
            if len(raw) == 1:
                return {0: error.code}
            half = len(raw) // 2
            first = await self._insert(collection, raw[:half])
            second = await self._insert(collection, raw[half:])
            return first | {half + index: code for index, code in second.items()}
        return {}


def _connected(
    driver: str, url: str, options: Mapping[str, Any]
) -> tuple[Any, Callable[[], Awaitable[None]]]:
    """Make the client of a driver; return it, and what closes it."""
    if driver == "pymongo":
        client: Any = pymongo.AsyncMongoClient(url, **options)
        return client, client.close
    # It takes time and memory that the other driver does not need.
    from motor.motor_asyncio import AsyncIOMotorClient

    client = AsyncIOMotorClient(url, **options)
    # It waits for the server in the thread that calls it: not in that of the event loop.
    return client, functools.partial(asyncio.to_thread, client.close)


def _commands(
    statements: Sequence[Mapping[str, Any]], max_statements: int, max_bytes: int
) -> Iterator[tuple[int, list[Any]]]:
    """Cut statements into commands. Each is encoded once, to be measured and then sent as it is."""
    part: list[Any] = []
    start = size = 0
    for index, statement in enumerate(statements):
        encoded = bson.encode(statement)
        if part and (len(part) == max_statements or size + len(encoded) > max_bytes):
            yield start, part
            part, start, size = [], index, 0
        part.append(RawBSONDocument(encoded, _RAW))
        size += len(encoded)
    if part:
        yield start, part


def _without_documents(error: PyMongoError) -> BaseException:
    """Return the error, or a copy without the documents that some carry into tracebacks."""
    if isinstance(error, OperationFailure):
        return OperationFailure(type(error).__name__, error.code)
    if isinstance(error, InvalidOperation):
        return InvalidOperation("the client is closed")
    return error


async def all_of(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all calls, and raise an error of one."""
    waiting = [*calls]
    if len(waiting) == 1:  # A task for it would cost as much as the rest of a small plan.
        return [await waiting[0]]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
