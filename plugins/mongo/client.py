# SPDX-License-Identifier: Apache-2.0
"""The connection: the one place that names the driver.

Only calls that motor and ``pymongo.AsyncMongoClient`` share are made anywhere in this package:
``aggregate``, ``list_indexes`` and the like are awaited by one and not by the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import bson
import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from motor.motor_asyncio import AsyncIOMotorClient
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

from .documents import MOST_BYTES
from .url import DEFAULT_DATABASE, read

log = logging.getLogger("engage.storage.mongo")

#: Makes the client. When motor ends: ``make_client: Any = pymongo.AsyncMongoClient``.
make_client: Any = AsyncIOMotorClient

#: Another document with this ``_id`` is stored.
DUPLICATE: Final = 11000
#: A document that the server can never take, by its published codes: BadValue, TypeMismatch,
#: Overflow (nested too deeply), InvalidBSON, DollarPrefixedFieldName, InvalidIdField,
#: EmptyFieldName, DottedFieldName, and those for what is too large. Deliberately not here:
#: DocumentValidationFailure (121), because a mistake in a validator must not refuse every event.
PERMANENT: Final = frozenset({2, 14, 15, 22, 52, 53, 56, 57, 10334, 17419, 17420})
#: Of these, what says that a document is too large: BSONObjectTooLarge, and the two for what an
#: update or an upsert would make of it. Also where a whole command is refused, it is not for
#: anything else in the command.
TOO_LARGE: Final = frozenset({10334, 17419, 17420})

#: Codes of which a person can see from these words what to do.
_WORDS: Final = {13: "the user of the connection string may not do this", 18: "wrong credentials"}

#: Dates come back as milliseconds, so that none is out of range and none is rounded.
CODEC: Final[CodecOptions[Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)

_RAW: Final = CODEC.with_options(document_class=RawBSONDocument)

#: Statements of one update command.
_STATEMENTS: Final = 1000
#: Of a message or a command: what is not documents.
_FRAME: Final = 16 * 1024
#: The code for a document that is larger than the server says it takes.
_TOO_LARGE: Final = 10334
#: Races of two upserts that one command may lose.
_RACES: Final = 100
#: Seconds within which a server must be found.
_SELECTION: Final = 3.0
#: Seconds that taking leave of a server may take.
_LEAVE: Final = 1.0
#: Seconds between two attempts to reach a server whose answer was lost.
_PAUSE: Final = 0.05


class Connection:
    """A client with its database, made by :meth:`connect` and not before.

    :param url: the connection string, not checked yet.
    :param allow_weak: accept one that lets an acknowledged event be lost.
    :param timeout: seconds of one call, unless the connection string says ``timeoutMS``.
    :raises ConfigError: the connection string cannot be used. Its text is never quoted: it may
        hold a password.
    """

    def __init__(self, url: str, *, allow_weak: bool, timeout: float) -> None:
        self._url = url
        self._read = read(url)
        self.weaknesses = self._read.weaknesses()
        if self.weaknesses and not allow_weak:
            raise ConfigError(
                f"url: {self.weaknesses[0]} (remove the option, or set "
                "storage.mongo.allow_weak_acknowledgement = true)"
            )
        self.timeout = self._read.seconds("timeoutMS", timeout)
        self._selection = self._read.seconds("serverSelectionTimeoutMS", _SELECTION)
        #: Hosts and database, for people; never the credentials.
        self.name = self._read.name
        self.make_client = make_client
        self._client: Any = None
        #: The database; set by :meth:`connect`.
        self.db: Any = None

    def connect(self) -> None:
        """Make the client. Talks to nobody yet.

        :raises StorageUnavailable: the host names of a ``mongodb+srv`` string are not to be had.
        """
        if self._client is not None:
            return
        defaults: dict[str, Any] = {
            "appname": "engage",
            "serverSelectionTimeoutMS": int(self._selection * 1000),
            "timeoutMS": int(self.timeout * 1000),
            "retryWrites": True,
            "w": "majority",
            "journal": True,
        }
        if self._read.is_srv:
            # Also how long the driver asks the DNS, which no other limit ends.
            defaults["connectTimeoutMS"] = int(self.timeout * 500)
        defaults = {
            name: value
            for name, value in defaults.items()
            if name.lower() not in self._read.options
        }
        try:
            client = self.make_client(self._url, **defaults)
            database = client.get_default_database(DEFAULT_DATABASE)
        except (PyMongoError, OSError, ValueError) as error:
            raise StorageUnavailable(
                f"{self.name}: the connection string cannot be used ({type(error).__name__})"
            ) from None
        self._client = client
        # Reading elsewhere than at the primary could miss what was acknowledged a moment ago.
        self.db = database.with_options(
            codec_options=CODEC, read_preference=pymongo.ReadPreference.PRIMARY
        )

    async def close(self) -> None:
        """Close the client. Idempotent."""
        client, self._client, self.db = self._client, None, None
        if client is None:
            return
        # It takes leave of the server, which may be silent. Motor's waits for that where it is
        # called: never in the thread of the event loop, which would stand still meanwhile.
        with pymongo.timeout(_LEAVE):
            if inspect.iscoroutinefunction(client.close):
                await client.close()
            else:
                await asyncio.to_thread(client.close)

    @contextlib.contextmanager
    def calling(self, *, seconds: float | None = None) -> Iterator[Any]:
        """Around calls of the driver: a time limit for all of them together, and our errors.

        :return: the database.
        :raises StorageUnavailable: for every error of the driver.
        """
        if self.db is None:
            raise StorageUnavailable("the storage is not open")
        if seconds is None:
            seconds = self.timeout
            if not self._client.topology_description.has_writable_server():
                # The driver looks for a server until the whole time is over, once there is a limit
                # for all of a call.
                seconds = min(seconds, self._selection)
        try:
            with pymongo.timeout(seconds):
                yield self.db
        except PyMongoError as error:
            raise self.unavailable(error) from _scrubbed(error)
        except (BSONError, LookupError, TypeError, ValueError) as error:
            log.error("%s: an answer that is not understood", self.name, exc_info=error)
            raise StorageUnavailable(
                f"{self.name}: an answer that is not understood ({type(error).__name__})"
            ) from error

    def unavailable(self, error: BaseException) -> StorageUnavailable:
        """:return: the driver's error in our words: its kind and code, never a document."""
        code = getattr(error, "code", None)
        said = type(error).__name__ + (f", code {code}" if code is not None else "")
        if isinstance(error, ServerSelectionTimeoutError):
            said = f"no server answers there, or none that is a primary ({said})"
        elif isinstance(error, ConfigurationError):
            why = "the DNS does not know it" if self._read.is_srv else "its version does not fit"
            said = f"{why} ({said})"
        elif code in _WORDS:
            said = f"{_WORDS[code]} ({said})"
        return StorageUnavailable(f"{self.name}: {said}")

    # ------------------------------------------------------------------- what the server takes
    def _announced(self, name: str, default: int) -> int:
        servers = self._client.topology_description.server_descriptions().values()
        return min((getattr(one, name) for one in servers if one.is_writable), default=default)

    @property
    def most_bytes(self) -> int:
        """Of one document, or of one command, as the server announces it."""
        most = self._announced("max_bson_size", MOST_BYTES)
        message = self._announced("max_message_size", 3 * MOST_BYTES)
        return min(MOST_BYTES, most, max(message - _FRAME, 1))

    def portions(self, ids: Sequence[str]) -> Iterator[list[str]]:
        """Cut ids so that each part fits into a command."""
        most = self.most_bytes // 2
        part: list[str] = []
        size = 0
        for one in ids:
            # At most 4 bytes a character, and those of an element of a list.
            size += 4 * len(one) + 16
            if part and size > most:
                yield part
                part, size = [], 4 * len(one) + 16
            part.append(one)
        if part:
            yield part

    def _concern(self) -> dict[str, Any]:
        concern: dict[str, Any] = dict(self._client.write_concern.document)
        return concern

    async def update(self, collection: str, statements: Sequence[Mapping[str, Any]]) -> list[int]:
        """Send update statements, unordered, in as few commands as they fit in.

        Not ``bulk_write``: one form of answer, whatever server. Statements must be idempotent: they
        are sent again after a lost answer. To be called within :meth:`calling`.

        :param statements: ``{"q", "u", "upsert", "multi"}`` each.
        :return: for each statement 0, or the code for which the server can never apply it.
        :raises PyMongoError: at least one is not durable.
        """
        codes = [0] * len(statements)
        most = min(_STATEMENTS, self._announced("max_write_batch_size", _STATEMENTS))
        for start, part in _parts(statements, most, self.most_bytes):
            todo = list(range(start, start + len(part)))
            races = 0
            while todo:
                reply = await self._command(collection, [part[index - start] for index in todo])
                failures = reply.get("writeErrors", ())
                if not failures:
                    break
                for failure in failures:
                    index, code = todo[failure["index"]], failure["code"]
                    if code in PERMANENT:
                        codes[index] = code
                    elif code == DUPLICATE and races < _RACES:
                        races += 1
                    else:
                        raise OperationFailure("an update failed", code)
                # All others once more: not every server goes on after the first that failed.
                todo = [index for index in todo if not codes[index]]
        return codes

    async def _command(self, collection: str, updates: list[Any]) -> Mapping[str, Any]:
        command = {
            "update": collection,
            "ordered": False,
            "writeConcern": self._concern(),
            "updates": updates,
        }
        try:
            reply: Mapping[str, Any] = await self.db.command(command)
        except AutoReconnect:
            # What the driver's retryable writes do for its own commands.
            await asyncio.sleep(_PAUSE)
            reply = await self.db.command(command)
        failure = reply.get("writeConcernError")
        if failure:
            raise OperationFailure("the write concern failed", failure.get("code"))
        return reply

    async def insert(self, collection: str, documents: Sequence[bytes]) -> dict[int, int]:
        """Insert encoded documents, unordered. To be called within :meth:`calling`.

        :return: position → code (:data:`DUPLICATE` or one of :data:`PERMANENT`) of those that were
            not stored.
        :raises PyMongoError: at least one is not durable; a write-concern error, whatever else.
        """
        most = self.most_bytes
        large = {index for index, document in enumerate(documents) if len(document) > most}
        # One of them would take the others along: the driver measures before it sends.
        fitting = [index for index in range(len(documents)) if index not in large]
        raw = [RawBSONDocument(documents[index], _RAW) for index in fitting]
        codes = await self._insert(collection, raw) if raw else {}
        found = {fitting[index]: code for index, code in codes.items()}
        return found | dict.fromkeys(large, _TOO_LARGE)

    async def _insert(self, collection: str, raw: Sequence[RawBSONDocument]) -> dict[int, int]:
        try:
            await self.db[collection].insert_many(raw, ordered=False)
        except BulkWriteError as error:
            details: Mapping[str, Any] = error.details
            for failure in details.get("writeConcernErrors") or ():
                raise OperationFailure("the write concern failed", failure.get("code")) from None
            codes = {one["index"]: one["code"] for one in details.get("writeErrors") or ()}
            for code in codes.values():
                if code != DUPLICATE and code not in PERMANENT:
                    raise OperationFailure("an insert failed", code) from None
            return codes
        except OperationFailure as error:
            if error.code not in TOO_LARGE:
                raise
            # The whole command was refused for one of its documents: which?
            if len(raw) == 1:
                return {0: error.code}
            half = len(raw) // 2
            first = await self._insert(collection, raw[:half])
            second = await self._insert(collection, raw[half:])
            return first | {half + index: code for index, code in second.items()}
        return {}


def _parts(
    statements: Sequence[Mapping[str, Any]], most: int, most_bytes: int
) -> Iterator[tuple[int, list[Any]]]:
    """Cut statements into commands; each is encoded once here, to be measured and sent as it is."""
    part: list[Any] = []
    start = size = 0
    for index, statement in enumerate(statements):
        encoded = bson.encode(statement)
        if part and (len(part) == most or size + len(encoded) > most_bytes):
            yield start, part
            part, start, size = [], index, 0
        part.append(RawBSONDocument(encoded, _RAW))
        size += len(encoded)
    if part:
        yield start, part


def _scrubbed(error: PyMongoError) -> BaseException:
    """:return: the error, or one like it without the documents that some carry into tracebacks."""
    if isinstance(error, OperationFailure):
        return OperationFailure(type(error).__name__, error.code)
    if isinstance(error, InvalidOperation):
        return InvalidOperation("the client is closed")
    return error
