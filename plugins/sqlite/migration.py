# SPDX-License-Identifier: Apache-2.0
"""Brings the store of an earlier version up to date, in place and in one transaction.

Version 4 writes all events to a new table, and version 5 their keys. That takes long if there are
many, and needs room for them twice: once in the log, and once in the file, whose old pages are free
only afterwards.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Final

from engage.api import StorageUnavailable

from . import schema
from .connection import Settings, is_lock_error

#: Seconds that a process waits for another program that has locked the store, seconds between two
#: lines in the log about it, and seconds of each attempt.
_WAIT: Final = 600.0
_WAIT_REPORT: Final = 30.0
_ATTEMPT: Final = 1.0

#: Seconds for each million events, measured on two shared cores with events of 0.6 KB: from the
#: versions before 4, and from version 4.
_SECONDS_PER_MILLION: Final = (5.0, 0.5)
#: Bytes of the table of keys for each event: 36 for a key, and there are up to half as many keys of
#: deleted events.
_KEY_BYTES: Final = 56
#: Events from which the log reports when it begins and ends.
_REPORTED: Final = 100_000

_log = logging.getLogger("engage.storage.sqlite")


def migrate(db: sqlite3.Connection, path: str, min_free_bytes: int) -> None:
    """Bring a store of an earlier version up to date, or leave it as it is.

    Several processes can do it at the same time: one does it, and the others wait.

    :param min_free_bytes: what must be left free on the disk.
    :raises StorageUnavailable: if there is not enough room, or if another program has locked the
        store for too long.
    :raises sqlite3.Error: if it fails; the store is as it was.
    """
    (patience,) = db.execute("PRAGMA busy_timeout").fetchone()
    db.execute(f"PRAGMA busy_timeout = {round(_ATTEMPT * 1000)}")
    started = next_report = time.monotonic()
    while schema.version_of(db) < schema.VERSION:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not is_lock_error(error):
                raise
            # Another process of engage may do it at this moment, or an operator uses the file.
            now = time.monotonic()
            if now - started > _WAIT:
                raise StorageUnavailable(
                    f"{path}: the store has to be brought up to date, and another program has "
                    f"locked it for {now - started:.0f} s"
                ) from error
            if now >= next_report:
                next_report = now + _WAIT_REPORT
                _log.warning(
                    "SQLite: %s: the store has to be brought up to date, and another program has "
                    "locked it; waiting for it for at most %.0f s more",
                    path,
                    _WAIT - (now - started),
                )
            continue
        _migrate_locked(db, path, min_free_bytes)
    db.execute(f"PRAGMA busy_timeout = {patience}")


def notice(db: sqlite3.Connection, settings: Settings) -> str | None:
    """Return what the next server has to do with a store before it can use it.

    :param db: a connection to the store; nothing is changed.
    :return: one line, or ``None`` if it has nothing to do that takes long.
    :raises StorageUnavailable: if there is not enough room for it.
    """
    version = schema.version_of(db)
    if version >= schema.PARTS_VERSION:
        return None
    has_keys = version >= schema.KEYS_VERSION
    most = 0
    if settings.max_bytes:
        most = settings.max_bytes // db.execute("PRAGMA page_size").fetchone()[0]
    needed, free = _require_room(db, version, settings.path, settings.min_free_bytes, most)
    count = _about_how_many(db)
    seconds = max(1, round(count / 1e6 * _SECONDS_PER_MILLION[has_keys]))
    what = "the keys of its events" if has_keys else "its events"
    return (
        f"made by an earlier version of engage (store version {version}): the next `engage serve` "
        f"writes {what} (about {count}) to a new table, which takes about {seconds} s and "
        f"needs {needed >> 20} MiB on the disk, of which {free >> 20} MiB are free"
    )


def _about_how_many(db: sqlite3.Connection) -> int:
    """Return about how many events there are: counting them would read a whole index."""
    # Two queries, because min and max in one would read the whole table.
    first, last = (
        db.execute(f"SELECT {one}(seq) FROM events").fetchone()[0] for one in ("min", "max")
    )
    return 0 if first is None else int(last - first + 1)


def _migrate_locked(db: sqlite3.Connection, path: str, min_free_bytes: int) -> None:
    # What an operator added to the tables, such as a view, keeps its text.
    db.execute("PRAGMA legacy_alter_table = ON")
    start, count = time.monotonic(), 0
    try:
        version = schema.version_of(db)
        if version < schema.PARTS_VERSION:
            _require_room(db, version, path, min_free_bytes)
            count = _about_how_many(db)
            if count >= _REPORTED:
                what = "events" if version < schema.KEYS_VERSION else "keys of events"
                _log.info("SQLite: %s: writing about %d %s to a new table", path, count, what)
        added = _added_by_operator(db) if version < schema.KEYS_VERSION else []
        schema.apply_migrations(db, version)
        for statement in added:
            db.execute(statement)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    finally:
        db.execute("PRAGMA legacy_alter_table = OFF")
    if count:
        # The log has all events. Otherwise the first write after it would have to copy them.
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if count >= _REPORTED:
        _log.info("SQLite: %s: done after %.0f s", path, time.monotonic() - start)


def _added_by_operator(db: sqlite3.Connection) -> list[str]:
    """Return the statements of the indexes and triggers on events that engage did not make."""
    rows = db.execute(
        "SELECT sql FROM sqlite_master WHERE tbl_name = 'events' AND type IN ('index', 'trigger') "
        "AND sql IS NOT NULL AND name <> 'events_received'"
    )
    return [statement for (statement,) in rows.fetchall()]


def _require_room(
    db: sqlite3.Connection, version: int, path: str, min_free_bytes: int, max_pages: int = 0
) -> tuple[int, int]:
    """Check that what is written anew fits on the disk twice more, and into the file once more.

    :param max_pages: the maximum size of the file; 0: that of the connection.
    :return: the bytes that are needed on the disk, and those that are free.
    :raises StorageUnavailable: if there is not enough room.
    """
    pages, unused, size, most = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size", "max_page_count")
    )
    used = pages - unused
    written = _about_how_many(db) * _KEY_BYTES // size + 1
    if version < schema.KEYS_VERSION:
        written += used
    free = shutil.disk_usage(Path(path).parent).free
    needed = 2 * written * size + min_free_bytes
    if free < needed:
        raise StorageUnavailable(
            f"{path}: bringing the store up to date needs {needed >> 20} MiB on its disk, and "
            f"{free >> 20} MiB are free; make room, or copy the store to another disk with "
            "`engage copy`"
        )
    if used + written > (max_pages or most):
        needed = (used + written) * size
        raise StorageUnavailable(
            f"{path}: bringing the store up to date needs a file of {needed >> 20} MiB, "
            "more than storage.sqlite.max_bytes; increase it, or copy the store with `engage copy`"
        )
    return needed, free
