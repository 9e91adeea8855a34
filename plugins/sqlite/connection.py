# SPDX-License-Identifier: Apache-2.0
"""Opening the file; SQLite's errors as errors of engage; statements for many rows."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from engage.api import (
    StorageContext,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)

from . import schema

#: Rows of one statement, greatest first. There are few sizes, so that SQLite compiles a statement
#: once for each and keeps it.
_CHUNK_SIZES: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)

#: Errors of the disk rather than of the call: after one, the last writes may not be on the disk.
_DISK_ERRORS: Final = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT})

#: Errors of a lock that another connection holds: the connection itself still works.
_LOCK_ERRORS: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})

_MEANINGS: Final = {
    sqlite3.SQLITE_BUSY: "locked by another process",
    sqlite3.SQLITE_LOCKED: "locked by another connection",
    sqlite3.SQLITE_FULL: "the disk is full, or storage.sqlite.max_bytes is reached",
    sqlite3.SQLITE_IOERR: "the disk cannot be read or written",
    sqlite3.SQLITE_READONLY: "cannot be written",
    sqlite3.SQLITE_PERM: "permission denied",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened",
    sqlite3.SQLITE_CORRUPT: "the file is damaged",
    sqlite3.SQLITE_NOTADB: "not a SQLite database",
    sqlite3.SQLITE_INTERRUPT: "the call took too long",
}


#: Before this version, a commit can be lost in a rare case, which engage avoids:
#: https://sqlite.org/wal.html#walresetbug.
_RECOMMENDED: Final = (3, 51, 3)
#: The version of SQLite in this process, and whether a newer one is recommended.
SQLITE: Final = sqlite3.sqlite_version + (
    ""
    if sqlite3.sqlite_version_info >= _RECOMMENDED
    else f" ({'.'.join(map(str, _RECOMMENDED))} or newer is recommended)"
)

#: Seconds between two heartbeats of the process that writes, also during long work: the parent
#: expects about one a second.
ALIVE_SECONDS: Final = 0.25


def nothing() -> None:
    """Report to no one; see :attr:`Settings.alive`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of the writer and the reader; plain values, so that a helper can get them."""

    path: str
    #: Nothing is written while the disk has fewer free bytes.
    min_free_bytes: int
    #: Maximum size of the database file in bytes; 0: no limit.
    max_bytes: int
    #: Those of the core: time limits, limits of profiles, budgets, identifiers.
    context: StorageContext
    #: ``thread``, ``process`` or ``auto``.
    writer: str = "auto"
    #: Called again and again by the process that writes, also during long work: it does not hang.
    alive: Callable[[], None] = nothing

    @property
    def timeout(self) -> float:
        """Seconds that one call may take."""
        return self.context.write_timeout


# --------------------------------------------------------------------------------------- errors
def unavailable(path: str, error: Exception) -> StorageUnavailable:
    """Return an error of SQLite or of the operating system as one line that names the file."""
    if not isinstance(error, sqlite3.Error):
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return StorageUnavailable(f"{path}: {text}")
    code = primary_code(error)
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    kind = schema.NotADatabase if code == sqlite3.SQLITE_NOTADB else StorageUnavailable
    return kind(f"{path}: {_MEANINGS.get(code, str(error))} ({name})")


def denied(path: str, action: str) -> StorageUnavailable:
    """Return the error of a user who may not read a file, or write to it or to a folder.

    :param action: ``read`` or ``write to``.
    """
    if action == "write to" and os.statvfs(path).f_flag & os.ST_RDONLY:
        return StorageUnavailable(
            f"{path}: the file system is read-only for this process (a unit of systemd may say so);"
            " set storage.sqlite.path to a file in a folder that it may write to"
        )
    import pwd  # Windows has none.

    about = os.stat(path)
    try:
        user = pwd.getpwuid(about.st_uid).pw_name
    except KeyError:
        user = f"'#{about.st_uid}'"
    if about.st_uid == os.geteuid() or stat.S_ISDIR(about.st_mode):
        mode = stat.S_IMODE(about.st_mode)
        why = f"it belongs to {user}, and its mode is {mode:03o}"
        return StorageUnavailable(f"{path}: this user may not {action} it: {why}")
    return StorageUnavailable(f"{path}: only its owner may {action} it: sudo -u {user} engage …")


def primary_code(error: BaseException) -> int:
    """Return SQLite's primary error code, or 0 if the error has none."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_disk_error(error: BaseException) -> bool:
    """Return whether the last writes may not be on the disk."""
    return primary_code(error) in _DISK_ERRORS


def is_lock_error(error: BaseException) -> bool:
    """Return whether another connection held a lock; the connection itself still works."""
    return primary_code(error) in _LOCK_ERRORS


@contextlib.contextmanager
def translating_errors(path: str, *, opening: bool = False) -> Iterator[None]:
    """Turn errors of SQLite and of the operating system into :class:`StorageUnavailable`.

    :param opening: let :class:`StorageMissing` and :class:`StorageIncompatible` through. For a
        store that was open before, they mean that it is unavailable now.
    """
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise unavailable(path, error) from error
    except (StorageMissing, StorageIncompatible) as error:
        if opening or isinstance(error, StorageUnavailable):
            raise
        raise StorageUnavailable(str(error)) from error


# ------------------------------------------------------------------------------------- the file
def create_file(path: str) -> None:
    """Create an empty file that only its owner can read (SQLite gives -wal and -shm the same mode).

    A file that exists is left as it is.

    :raises OSError: if the file cannot be created.
    """
    if problem := missing_folder(path):
        raise FileNotFoundError(errno.ENOENT, problem)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def may(path: str, mode: int) -> bool:
    """Return whether the user of this process may use a file or a folder.

    :param mode: ``os.R_OK`` or ``os.W_OK``.
    """
    return sys.platform == "win32" or os.access(path, mode, effective_ids=True)


def lack_of_space(settings: Settings) -> str:
    """Return that the disk has not enough room for events; nothing if it has."""
    least = settings.min_free_bytes
    if not least or (free := shutil.disk_usage(os.path.dirname(settings.path)).free) >= least:
        return ""
    return (
        f"{free:,} bytes are free on the disk, less than storage.sqlite.min_free_bytes ({least:,}),"
        " so nothing is stored"
    )


def missing_folder(path: str) -> str:
    """Return that the folder of a file does not exist; nothing if it does."""
    folder = os.path.dirname(path) or "."
    return "" if os.path.isdir(folder) else f"the folder {folder} does not exist; create it"


def file_identity(path: str) -> tuple[int, int]:
    """Return the device and inode of the file that is at ``path`` now.

    :raises StorageMissing: if there is no file.
    :raises StorageUnavailable: if it is not a file, or cannot be examined.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise StorageMissing(f"{path}: there is no store") from None
    except OSError as error:
        raise unavailable(path, error) from error
    if not os.path.isfile(path):
        raise StorageUnavailable(f"{path}: not a file")
    return status.st_dev, status.st_ino


def connect(settings: Settings, *, readonly: bool) -> sqlite3.Connection:
    """Open an existing file, without looking at its content.

    :raises sqlite3.Error: if it cannot be opened.
    """
    db = sqlite3.connect(
        # SQLite copies the log when the last connection is closed, but not through one that cannot
        # write: the writer may have died of an error of the disk, so that all has to be copied.
        Path(settings.path).absolute().as_uri() + ("?mode=ro" if readonly else "?mode=rw"),
        uri=True,
        # SQLite waits for a lock, but less than the caller does: the caller then gets the reason.
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


class FileConnection:
    """A connection that is opened when it is needed, and opened again after an error."""

    def __init__(self, settings: Settings, *, readonly: bool) -> None:
        self.settings = settings
        self._readonly = readonly
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def connection(self) -> sqlite3.Connection:
        """Return a connection to the file that is at the path *now*, verified to be a store.

        This is checked each time: writes to a file that was moved would be lost.

        :raises StorageError: if there is no such file, or it cannot be opened.
        :raises sqlite3.Error: if SQLite cannot open it.
        """
        try:
            current = file_identity(self.settings.path)
        except (StorageMissing, StorageUnavailable):
            self.drop()
            raise
        if self._db is not None and current == self._file:
            return self._db
        self.drop()
        if not may(self.settings.path, os.R_OK):
            raise denied(self.settings.path, "read")
        schema.inspect_file(self.settings.path)
        db = connect(self.settings, readonly=self._readonly)
        try:
            self.prepare(db)
        except BaseException:
            db.close()
            raise
        self._db, self._file = db, current
        return db

    def prepare(self, db: sqlite3.Connection) -> None:
        """Make a new connection ready. Called once for each connection."""
        schema.verify(db, self.settings.path)

    def drop(self) -> None:
        """Close the connection; the next call opens another one."""
        db, self._db, self._file = self._db, None, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def interrupt(self) -> None:
        """End a running statement with an error. May be called from any thread."""
        db = self._db
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.interrupt()


# ----------------------------------------------------------------------------- values and rows
def insert(db: sqlite3.Connection, head: str, rows: Sequence[Sequence[Any]], tail: str = "") -> int:
    """Run ``INSERT INTO … VALUES (…), (…), …`` in as few statements as the chunk sizes allow.

    SQLite releases Python's lock for each statement, and getting it back may take 5 ms: a few large
    statements are faster than many small ones.

    :param head: ``INSERT INTO table (columns)``.
    :param tail: ``ON CONFLICT …``.
    :return: how many rows were inserted or updated.
    """
    count, start, left = 0, 0, len(rows)
    # Most calls have no row, or one.
    for size in _CHUNK_SIZES if left > 2 else (left or 1,):
        while left >= size:
            chunk = rows[start : start + size]
            statement = f"{head} VALUES {_marks(size, len(chunk[0]))} {tail}"
            values = [*itertools.chain.from_iterable(chunk)]
            count += db.execute(statement, values).rowcount
            start, left = start + size, left - size
    return count


def look_up(db: sqlite3.Connection, query: str, keys: Iterable[Sequence[Any]]) -> list[Any]:
    """Run a query that joins a table with ``{keys}``, whose columns are column1, column2, …

    Missing keys up to the next chunk size are NULL, which is equal to nothing.

    :return: the rows, in any order.
    """
    keys, most = list(keys), _CHUNK_SIZES[0]
    if not keys:
        return []
    if len(keys) > most:
        chunks = (keys[start : start + most] for start in range(0, len(keys), most))
        return [row for chunk in chunks for row in look_up(db, query, chunk)]
    size, width = 1 << (len(keys) - 1).bit_length(), len(keys[0])
    values = [*itertools.chain.from_iterable(keys)]
    values += [None] * ((size - len(keys)) * width)
    return db.execute(_statement(query, size, width), values).fetchall()


@functools.lru_cache(1024)
def _statement(query: str, count: int, width: int) -> str:
    return query.format(keys=f"(VALUES {_marks(count, width)})")


@functools.lru_cache
def _marks(count: int, width: int) -> str:
    """Return ``(?, …), (?, …), …`` for a number of rows of the same width."""
    return ",".join(["(" + ",".join("?" * width) + ")"] * count)
