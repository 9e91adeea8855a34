# SPDX-License-Identifier: Apache-2.0
"""Opening the file, and SQLite's errors in our words."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from engage.api import (
    DeadLetterBudget,
    ProfileLimits,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)

from . import schema

#: Rows of one statement, greatest first: few sizes, so that each is compiled once and kept.
_SIZES: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)

#: What is wrong with the disk rather than with the call: nothing is believed until a checkpoint.
_DISK_ERRORS: Final = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT})

_MEANINGS: Final = {
    sqlite3.SQLITE_BUSY: "locked by another process",
    sqlite3.SQLITE_LOCKED: "locked by another connection",
    sqlite3.SQLITE_FULL: "the disk is full, or storage.sqlite.max_bytes is reached",
    sqlite3.SQLITE_IOERR: "the disk cannot be read or written",
    sqlite3.SQLITE_READONLY: "cannot be written",
    sqlite3.SQLITE_PERM: "no permission",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened",
    sqlite3.SQLITE_CORRUPT: "damaged",
    sqlite3.SQLITE_NOTADB: "not a SQLite database",
    sqlite3.SQLITE_INTERRUPT: "took too long",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that the writer and the reader need to know; plain values."""

    path: str
    #: Below so many free bytes on the disk nothing is written.
    min_free_bytes: int
    #: The database file does not grow beyond; 0: no limit.
    max_bytes: int
    #: Seconds that one call may take.
    timeout: float
    limits: ProfileLimits
    budget: DeadLetterBudget
    identifiers: Mapping[str, Sequence[str]]
    #: ``thread``, ``process`` or ``auto``.
    writer: str = "auto"


def unavailable(path: str, error: Exception) -> StorageUnavailable:
    """:return: an error of SQLite or of the system, as one line that names the file."""
    if not isinstance(error, sqlite3.Error):
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return StorageUnavailable(f"{path}: {text}")
    code = primary_code(error)
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    kind = schema.NotADatabase if code == sqlite3.SQLITE_NOTADB else StorageUnavailable
    return kind(f"{path}: {_MEANINGS.get(code, str(error))} ({name})")


def primary_code(error: BaseException) -> int:
    """:return: SQLite's primary error code; 0 when there is none."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_disk_error(error: BaseException) -> bool:
    """:return: whether what was written may not be on the disk."""
    return primary_code(error) in _DISK_ERRORS


@contextlib.contextmanager
def in_our_words(path: str, *, opening: bool = False) -> Iterator[None]:
    """Turn errors of SQLite and of the system into :class:`StorageUnavailable`.

    :param opening: a store that is missing or somebody else's is told apart only then: of one that
        was open it is just another way to be unavailable.
    """
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise unavailable(path, error) from error
    except (StorageMissing, StorageIncompatible) as error:
        if opening or isinstance(error, StorageUnavailable):
            raise
        raise StorageUnavailable(str(error)) from error


def make_file(path: str) -> None:
    """Make the file, empty, for its owner only (SQLite gives its -wal and -shm the same mode).

    :raises OSError: it cannot be made; that it is there already is no error.
    """
    if not os.path.isdir(folder := os.path.dirname(path) or "."):
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}; make it first")
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def file_identity(path: str) -> tuple[int, int]:
    """:return: which file stands at ``path``.

    :raises StorageMissing: there is none.
    :raises StorageUnavailable: it is a folder, or the like.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise StorageMissing(f"{path}: there is no store; `engage serve` makes one") from None
    except OSError as error:
        raise unavailable(path, error) from error
    if not os.path.isfile(path):
        raise StorageUnavailable(f"{path}: not a file")
    return found.st_dev, found.st_ino


def connect(settings: Settings, *, readonly: bool) -> sqlite3.Connection:
    """Open an existing file; nothing of its content is looked at yet.

    :raises sqlite3.Error: it cannot be opened.
    """
    db = sqlite3.connect(
        Path(settings.path).absolute().as_uri() + "?mode=rw",
        uri=True,
        # A lock is waited for, but so that the caller hears of it before its own time is up.
        timeout=settings.timeout * 0.75,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    try:
        db.execute("PRAGMA synchronous = FULL")
        # macOS only: fsync there does not reach the disk. No effect elsewhere.
        db.execute("PRAGMA fullfsync = ON")
        db.execute("PRAGMA checkpoint_fullfsync = ON")
        db.execute("PRAGMA secure_delete = FAST")
        if readonly:
            db.execute("PRAGMA query_only = ON")
            db.execute("PRAGMA cache_size = -16384")
        else:
            db.execute("PRAGMA cache_size = -65536")
    except BaseException:
        db.close()
        raise
    return db


class Session:
    """A connection that is opened when it is needed and opened anew after trouble."""

    def __init__(self, settings: Settings, *, readonly: bool) -> None:
        self.settings = settings
        self._readonly = readonly
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def connection(self) -> sqlite3.Connection:
        """:return: a connection to the file that stands at the path *now*, found to be a store.

        A file that was moved away would be written to without a trace: that is looked at each time.

        :raises StorageError: there is no such file, or it cannot be opened.
        :raises sqlite3.Error: the same.
        """
        try:
            standing = file_identity(self.settings.path)
        except (StorageMissing, StorageUnavailable):
            self.drop()
            raise
        if self._db is not None and standing == self._file:
            return self._db
        self.drop()
        schema.look_at(self.settings.path)
        db = connect(self.settings, readonly=self._readonly)
        try:
            self.prepare(db)
        except BaseException:
            db.close()
            raise
        self._db, self._file = db, standing
        return db

    def prepare(self, db: sqlite3.Connection) -> None:
        """Make a new connection ready. Called once for each."""
        schema.verify(db, self.settings.path)

    def drop(self) -> None:
        """Close the connection; the next call opens another."""
        db, self._db, self._file = self._db, None, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def interrupt(self) -> None:
        """Make a statement that is running end with an error. From any thread."""
        db = self._db
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.interrupt()


def key_of(*parts: str) -> bytes:
    """:return: 16 bytes that stand for these strings: different strings, different bytes.

    :raises UnicodeEncodeError: one holds a lone surrogate.
    """
    digest = blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


def is_text(value: str) -> bool:
    """:return: whether it can be stored: a lone surrogate is no character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def insert(db: sqlite3.Connection, head: str, rows: Sequence[Sequence[Any]], tail: str = "") -> int:
    """``INSERT INTO … VALUES (…), (…), …``, in as few statements as a set of few sizes allows.

    SQLite gives up Python's lock at each statement and may wait for it 5 ms: few are fast.

    :param head: ``INSERT INTO table (columns)``.
    :param tail: ``ON CONFLICT …``.
    :return: how many rows were inserted or updated.
    """
    count = 0
    for part in _parts(rows):
        marks = ",".join(["(" + ",".join("?" * len(part[0])) + ")"] * len(part))
        count += db.execute(f"{head} VALUES {marks} {tail}", _flat(part)).rowcount
    return count


def look_up(db: sqlite3.Connection, query: str, keys: Iterable[Sequence[Any]]) -> Iterator[Any]:
    """Run a query that joins a table with ``{keys}``, whose columns are column1, column2, …

    :return: the rows, in no order.
    """
    for part in _parts(list(keys)):
        marks = ",".join(["(" + ",".join("?" * len(part[0])) + ")"] * len(part))
        yield from db.execute(query.format(keys=f"(VALUES {marks})"), _flat(part))


def _parts(rows: Sequence[Sequence[Any]]) -> Iterator[Sequence[Sequence[Any]]]:
    start, left = 0, len(rows)
    for size in _SIZES:
        while left >= size:
            yield rows[start : start + size]
            start, left = start + size, left - size


def _flat(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for row in rows for value in row]
