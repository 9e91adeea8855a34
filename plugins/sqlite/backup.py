# SPDX-License-Identifier: Apache-2.0
"""Backups: one file with all of a store, and a store made of one.

The pages are copied within one read transaction, by SQLite's online backup: outside of one, it
starts again after each commit of another process. Meanwhile the log of the store cannot begin anew,
so it grows by what is written; that ends before the copy is examined. Only the copy is written: any
user who may read the store can make a backup, with or without a server.

A file gets its name when it is complete. Until then it has another one (:data:`UNFINISHED`), and
the next call deletes what a killed process left.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import sqlite3
import struct
import sys
import time
from collections.abc import Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from engage.api import Backup, OnBytes, StorageIncompatible, StorageUnavailable

from . import schema
from .checkpoint import sync
from .connection import FileConnection, Settings, missing_folder, translating_errors
from .writer.lock import WriterLock, holder, require_writable

#: What the name of a file ends in until it is complete. SQLite may append to it.
UNFINISHED: Final = ".engage-unfinished"
#: Bytes that are copied between two syncs. Otherwise the system writes all of them at once, and
#: the syncs of the store wait for that.
_SYNC_BYTES: Final = 8 * 1024 * 1024
#: Bytes that are copied between two reports.
_STEP_BYTES: Final = 1024 * 1024

#: The names in the table ``store`` that only a backup has: when it was made, and its events.
_MADE_AT, _EVENTS = "backup_at", "backup_events"


class _Header(NamedTuple):
    """The header of a database: https://www.sqlite.org/fileformat2.html, section 1.3."""

    magic: bytes
    page: int
    pages: int
    free: int

    @property
    def page_bytes(self) -> int:
        return 65536 if self.page == 1 else self.page


_HEADER: Final = struct.Struct(">16sH10xII")
_MAGIC: Final = b"SQLite format 3\0"
#: Where the versions of the format are, and those of a database that has no log beside it.
_FORMAT: Final = 18
_ALONE: Final = (1, 1)
#: The length of the SHA-256 of the pages, which follows them: SQLite has no checksums.
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


# --------------------------------------------------------------------------------------- backup
def back_up(
    settings: Settings, target: Path, without: Collection[str], on_bytes: OnBytes
) -> Backup:
    """Write a backup; see :meth:`BackupStore.back_up`."""
    _refuse(settings, target)
    store = FileConnection(settings, readonly=True)
    with _naming(settings.path), contextlib.ExitStack() as stack:
        stack.callback(store.drop)
        made_at = time.time_ns() // 1_000_000
        source = store.connection()
        source.execute("BEGIN")
        schema.require_readable(source)
        (events,) = source.execute("SELECT count(*) FROM events").fetchone()
        with _naming(target), _unfinished(target) as (path, file):
            _copy_pages(settings, source, path, file, on_bytes)
            store.drop()
            _clear_free_pages(file)
            file.seek(_FORMAT)
            file.write(bytes(_ALONE))
            with contextlib.closing(_connect(path)) as db:
                _mark(db, made_at, events, without)
                (problem,) = db.execute("PRAGMA integrity_check(1)").fetchone()
                (copied,) = db.execute("SELECT count(*) FROM events").fetchone()
            if problem != "ok" or copied != events:
                raise StorageIncompatible(
                    f"{target}: damaged: {problem}, {copied} events instead of {events}"
                )
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())
            sync(file.fileno())
            _refuse(settings, target)
            _publish(path, target)
            return Backup(made_at=made_at, events=events, size=target.stat().st_size)


def _naming(path: str | Path) -> contextlib.AbstractContextManager[None]:
    return translating_errors(str(path), opening=True)


def _refuse(settings: Settings, target: Path) -> None:
    """Check that a file can be made, and that it does not look like one of the store.

    :raises StorageUnavailable: if not.
    """
    if target.is_dir():
        problem = "a folder; give the name of a new file in it"
    elif os.path.lexists(target):
        problem = "there is a file already, and it is not replaced"
    elif os.path.realpath(target).startswith(f"{settings.path}-") or UNFINISHED in target.name:
        problem = "engage has files with such names, and deletes them; choose another one"
    else:
        problem = missing_folder(str(target))
    if problem:
        raise StorageUnavailable(f"{target}: {problem}")


def _copy_pages(
    settings: Settings, source: sqlite3.Connection, path: Path, file: FileIO, on_bytes: OnBytes
) -> None:
    """Copy all pages.

    :param source: in a read transaction.
    """
    pages, size = (
        source.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
    )
    folder = os.path.dirname(settings.path)
    kept = settings.min_free_bytes
    same_disk = os.stat(folder).st_dev == os.fstat(file.fileno()).st_dev
    _require_room(path, pages * size + (kept if same_disk else 0))
    synced = 0

    def report(_: int, remaining: int, total: int) -> None:
        nonlocal synced
        copied = (total - remaining) * size
        if copied - synced >= _SYNC_BYTES:
            synced = copied
            sync(file.fileno())
            if shutil.disk_usage(folder).free < kept:
                raise StorageUnavailable(
                    f"{settings.path}: the backup ended, because the store's log has grown "
                    "meanwhile and its disk has less than storage.sqlite.min_free_bytes left"
                )
        on_bytes(copied, total * size)

    with contextlib.closing(_connect(path)) as copy:
        source.backup(copy, pages=_STEP_BYTES // size, progress=report, sleep=0.01)


def _clear_free_pages(file: FileIO) -> None:
    """Overwrite the free pages: what was deleted, such as an expired event, may be in them.

    The format of their list: https://www.sqlite.org/fileformat2.html, section 1.5.
    """
    header = _header(file)
    size, trunk = header.page_bytes, header.free
    while trunk:
        file.seek((trunk - 1) * size)
        page = file.read(size)
        following, count = struct.unpack_from(">II", page)
        used = 8 + 4 * count
        for leaf in struct.unpack_from(f">{count}I", page, 8):
            file.seek((leaf - 1) * size)
            file.write(bytes(size))
        file.seek((trunk - 1) * size + used)
        file.write(bytes(size - used))
        trunk = following


def _mark(db: sqlite3.Connection, made_at: int, events: int, without: Collection[str]) -> None:
    """Delete records, and note that this is a backup."""
    db.execute("BEGIN")
    marks = ", ".join("?" * len(without))
    db.execute(f"DELETE FROM records WHERE kind IN ({marks})", list(without))
    notes = [(_MADE_AT, made_at), (_EVENTS, events)]
    db.executemany("INSERT OR REPLACE INTO store VALUES (?, ?)", notes)
    db.execute("COMMIT")


# -------------------------------------------------------------------------------------- restore
def read(source: Path) -> Backup:
    """Return what is in the file of a backup, and check that it can be restored.

    :raises StorageIncompatible: if it cannot.
    :raises StorageUnavailable: if it cannot be read.
    """
    with _naming(source):
        with open(source, "rb", buffering=0) as file:
            header = _header(file)
            size = file.seek(0, os.SEEK_END)
        if header.magic != _MAGIC:
            raise StorageIncompatible(f"{source}: not a backup of a SQLite store")
        expected = header.pages * header.page_bytes + _DIGEST_BYTES
        if size not in (expected, expected - _DIGEST_BYTES):  # The latter is another database.
            raise StorageIncompatible(
                f"{source}: truncated or damaged: {size} bytes instead of {expected}"
            )
        uri = source.absolute().as_uri() + "?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            schema.verify(db, str(source))
            notes = dict(db.execute("SELECT name, value FROM store"))
    if _MADE_AT not in notes:
        raise StorageIncompatible(
            f"{source}: a store, and not a backup, which `engage backup` makes: name it as path in "
            "[storage.sqlite] to use it"
        )
    return Backup(made_at=notes[_MADE_AT], events=notes[_EVENTS], size=size)


@contextlib.contextmanager
def restoring(settings: Settings, source: Path, on_bytes: OnBytes) -> Iterator[tuple[Path, Backup]]:
    """Make a store of a backup; inside of the context, it has another path and can be changed.

    :raises StorageError: see :meth:`BackupStore.restore`.
    """
    backup = read(source)
    store = Path(settings.path)
    require_writable(settings.path)
    with _writing_alone(settings.path), _naming(store):
        for name in (settings.path, settings.path + "-wal", settings.path + "-journal"):
            if os.path.lexists(name):
                raise StorageUnavailable(
                    f"{name}: there is a store already, and it is not replaced: move it away"
                )
        with _unfinished(store) as (path, file):
            _require_room(path, backup.size + settings.min_free_bytes)
            with open(source, "rb") as reading, open(path, "wb") as writing:
                left, digest = backup.size - _DIGEST_BYTES, hashlib.sha256()
                while part := reading.read(min(left, _STEP_BYTES)):
                    digest.update(part)
                    writing.write(part)
                    left -= len(part)
                    on_bytes(backup.size - left, backup.size)
                if reading.read() != digest.digest():
                    raise StorageIncompatible(f"{source}: damaged: its SHA-256 is another one")
            with contextlib.closing(_connect(path)) as db:
                db.execute("DELETE FROM store WHERE name IN (?, ?)", (_MADE_AT, _EVENTS))
                db.execute(schema.RENEW)
            yield path, backup
            _connect(path).close()
            sync(file.fileno())
            _publish(path, store)


@contextlib.contextmanager
def _writing_alone(store: str) -> Iterator[None]:
    """Hold the lock of the writer: no other process makes a store meanwhile."""
    lock = WriterLock.acquire(store)
    if lock is None:
        other = holder(store)
        raise StorageUnavailable(
            f"{store}: process {other.pid if other else '?'} writes to it: stop it before you "
            "restore a backup"
        )
    try:
        yield
    finally:
        lock.release()


# ------------------------------------------------------------------------------ unfinished files
@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[tuple[Path, FileIO]]:
    """A file beside ``target``, which is locked and is deleted at the end if it is not published.

    :raises StorageUnavailable: if another process writes it.
    """
    for left in target.parent.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(OSError), open(left, "r+b", buffering=0) as file:
            if _lock(file):
                _delete(left)
    path = target.with_name(target.name + UNFINISHED)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise StorageUnavailable(f"{target}: another process is writing it") from None
    with open(descriptor, "r+b", buffering=0) as file:
        if not _lock(file) or not path.exists():
            raise StorageUnavailable(f"{target}: another process is writing it")
        try:
            yield path, file
        finally:
            _delete(path)


def _lock(file: FileIO) -> bool:
    """Lock a file until it is closed, and return whether no other process had done that."""
    if sys.platform == "win32":
        return True  # An open file cannot be deleted there.
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _delete(path: Path) -> None:
    """Delete an unfinished file."""
    _delete_beside(path)
    path.unlink(missing_ok=True)


def _delete_beside(path: Path) -> None:
    """Delete what SQLite and a writer made beside an unfinished file."""
    for file in path.parent.glob(f"{glob.escape(path.name)}-*"):
        file.unlink(missing_ok=True)


def _publish(path: Path, target: Path) -> None:
    """Give a complete file its name."""
    _delete_beside(path)
    os.rename(path, target)
    if sys.platform != "win32":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _require_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise StorageUnavailable(
            f"{path.parent}: {free >> 20} MiB are free on this disk, and {needed >> 20} MiB are "
            "needed"
        )


def _header(file: FileIO) -> _Header:
    file.seek(0)
    return _Header(*_HEADER.unpack(file.read(_HEADER.size).ljust(_HEADER.size, b"\0")))


def _connect(path: Path) -> sqlite3.Connection:
    """Open an unfinished file. It is then without a log, and its end is in the file itself."""
    db = sqlite3.connect(path, isolation_level=None)
    # If this process is killed, the file is deleted: nothing has to be undone or synced before.
    for pragma in ("journal_mode = OFF", "synchronous = OFF", "secure_delete = ON"):
        db.execute(f"PRAGMA {pragma}")
    return db
