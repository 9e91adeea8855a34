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
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import bson
import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    InvalidName,
    InvalidOperation,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)

from engage.api import ConfigError, StorageUnavailable

log = logging.getLogger("engage.storage.mongo")

#: Makes the client. When motor ends: ``make_client: Any = pymongo.AsyncMongoClient``.
make_client: Any = AsyncIOMotorClient

DEFAULT_URL: Final = "mongodb://localhost:27017/engage"
DEFAULT_DATABASE: Final = "engage"

#: Another document with this ``_id`` is stored.
DUPLICATE: Final = 11000
#: A document that the server can never take, by its published codes: BadValue, TypeMismatch,
#: Overflow (nested too deeply), InvalidBSON, DollarPrefixedFieldName, InvalidIdField,
#: EmptyFieldName, DottedFieldName, BSONObjectTooLarge. Deliberately not here:
#: DocumentValidationFailure (121), because a mistake in a validator must not refuse every event.
PERMANENT: Final = frozenset({2, 14, 15, 22, 52, 53, 56, 57, 10334})

#: Codes of which a person can see from these words what to do.
_WORDS: Final = {13: "the user of the connection string may not do this", 18: "wrong credentials"}

#: Dates come back as milliseconds, so that none is out of range and none is rounded.
CODEC: Final[CodecOptions[Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)

_RAW: Final = CODEC.with_options(document_class=RawBSONDocument)

#: Statements and bytes of one update command; servers take at least these.
_STATEMENTS: Final = 1000
_COMMAND_BYTES: Final = 16 * 1024 * 1024
#: Races of two upserts that one command may lose.
_RACES: Final = 100
#: Seconds within which a server must be found.
_SELECTION: Final = 3.0
#: Seconds between two attempts to reach a server whose answer was lost.
_PAUSE: Final = 0.05


def _options_of(url: str) -> dict[str, str]:
    """:return: the options in a connection string, names in lower case, the last of a name."""
    query = url.partition("?")[2]
    pairs = (part.partition("=") for part in re.split("[&;]", query) if part)
    return {name.lower(): value for name, _, value in pairs}


def weaknesses(url: str) -> list[str]:
    """:return: what in the connection string lets an acknowledged event be lost; one line each."""
    given = _options_of(url)
    found = []
    w = given.get("w", "majority")
    if w == "0":
        raise ConfigError(
            "url: w=0 acknowledges nothing at all, not even a repeated message id; remove it"
        )
    if w != "majority":
        found.append(
            f"w={w[:80]}: engage answers 200 before a majority of the replica set has the event; "
            "a failover may lose it"
        )
    if given.get("journal", "true").lower() != "true":
        found.append(
            f"journal={given['journal'][:80]}: engage answers 200 before the event is in the "
            "journal; a power cut may lose it"
        )
    return found


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
        self._given = _options_of(url)
        self.weaknesses = weaknesses(url)
        if self.weaknesses and not allow_weak:
            raise ConfigError(
                f"url: {self.weaknesses[0]} (remove the option, or set "
                "storage.mongo.allow_weak_acknowledgement = true)"
            )
        self.timeout = self._seconds("timeoutms", timeout)
        self._selection = self._seconds("serverselectiontimeoutms", _SELECTION)
        if not url.startswith("mongodb+srv://"):
            try:
                found = pymongo.uri_parser.parse_uri(url, warn=False)
            except (PyMongoError, ValueError):
                raise ConfigError(
                    "url: not a valid connection string (percent-encode user and "
                    "password; the options are those of the MongoDB drivers)"
                ) from None
            hosts = ",".join(f"{host}:{port}" for host, port in found["nodelist"])
            #: Hosts and database, for people; never the credentials.
            self.name = f"mongodb://{hosts}/{found['database'] or DEFAULT_DATABASE}"
        else:
            host = url.removeprefix("mongodb+srv://").partition("?")[0]
            self.name = "mongodb+srv://" + host.rpartition("@")[2]
        self.make_client = make_client
        self._client: Any = None
        #: The database; set by :meth:`connect`.
        self.db: Any = None

    def _seconds(self, option: str, default: float) -> float:
        try:
            return float(self._given[option]) / 1000 or default
        except (KeyError, ValueError):
            return default

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
        defaults = {
            name: value for name, value in defaults.items() if name.lower() not in self._given
        }
        try:
            client = self.make_client(self._url, **defaults)
            database = client.get_default_database(DEFAULT_DATABASE)
        except (ConfigurationError, InvalidName, OSError) as error:
            raise StorageUnavailable(
                f"MongoDB: the connection string cannot be used ({type(error).__name__})"
            ) from None
        self._client = client
        # Reading elsewhere than at the primary could miss what was acknowledged a moment ago.
        self.db = database.with_options(
            codec_options=CODEC, read_preference=pymongo.ReadPreference.PRIMARY
        )

    async def close(self) -> None:
        """Close the client. Idempotent."""
        client, self._client, self.db = self._client, None, None
        if client is not None:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

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

    def unavailable(self, error: BaseException) -> StorageUnavailable:
        """:return: the driver's error in our words: its kind and code, never a document."""
        code = getattr(error, "code", None)
        said = type(error).__name__ + (f", code {code}" if code is not None else "")
        if isinstance(error, ServerSelectionTimeoutError):
            said = f"no server answers there, or none that is a primary ({said})"
        elif code in _WORDS:
            said = f"{_WORDS[code]} ({said})"
        return StorageUnavailable(f"{self.name}: {said}")

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
        for start, part in _parts(statements):
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
        if not documents:
            return {}
        raw = [RawBSONDocument(document, _RAW) for document in documents]
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
        return {}


def _parts(statements: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, list[Any]]]:
    """Cut statements into commands; each is encoded once here, to be measured and sent as it is."""
    part: list[Any] = []
    start = size = 0
    for index, statement in enumerate(statements):
        encoded = bson.encode(statement)
        if part and (len(part) == _STATEMENTS or size + len(encoded) > _COMMAND_BYTES):
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
