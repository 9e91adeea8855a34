# SPDX-License-Identifier: Apache-2.0
"""Brings the store of an earlier version up to date, in place and in one transaction.

Version 4 writes all events to a new table, so it takes long if there are many, and needs room for
them twice: once in the log, and once in the file, whose old pages are free only afterwards.
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
from .connection import is_lock_error

#: Seconds that a process waits for another one that brings the store up to date.
_WAIT: Final = 3600.0

#: Events from which the log reports when it begins and ends.
_REPORTED: Final = 100_000

_log = logging.getLogger("engage.storage.sqlite")


def migrate(db: sqlite3.Connection, path: str, min_free_bytes: int) -> None:
    """Bring a store of an earlier version up to date, or leave it as it is.

    Several processes can do it at the same time: one does it, and the others wait.

    :param min_free_bytes: what must be left free on the disk.
    :raises StorageUnavailable: if there is not enough room.
    :raises sqlite3.Error: if it fails; the store is as it was.
    """
    deadline = time.monotonic() + _WAIT
    while schema.version_of(db) < schema.VERSION:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            # Another process probably does it at this moment. SQLite has waited already.
            if not is_lock_error(error) or time.monotonic() > deadline:
                raise
            continue
        _migrate_locked(db, path, min_free_bytes)


def _migrate_locked(db: sqlite3.Connection, path: str, min_free_bytes: int) -> None:
    # What an operator added to the tables, such as a view, keeps its text.
    db.execute("PRAGMA legacy_alter_table = ON")
    start, count = time.monotonic(), 0
    try:
        version = schema.version_of(db)
        if version < schema.KEYS_VERSION:
            _require_room(db, path, min_free_bytes)
            (count,) = db.execute("SELECT count(*) FROM events").fetchone()
            if count >= _REPORTED:
                _log.info("SQLite: %s: writing %d events to a new table", path, count)
            added = _added_by_operator(db)
            schema.apply_migrations(db, version)
            for statement in added:
                db.execute(statement)
        else:
            schema.apply_migrations(db, version)
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


def _require_room(db: sqlite3.Connection, path: str, min_free_bytes: int) -> None:
    """Check that the events fit on the disk twice more, and into the file once more."""
    pages, unused, size, most = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size", "max_page_count")
    )
    used = pages - unused
    free = shutil.disk_usage(Path(path).parent).free
    needed = 2 * used * size + min_free_bytes
    if free < needed:
        raise StorageUnavailable(
            f"{path}: bringing the store up to date needs {needed >> 20} MiB on its disk, and "
            f"{free >> 20} MiB are free; make room, or copy the store to another disk with "
            "`engage copy`"
        )
    if 2 * used > most:
        raise StorageUnavailable(
            f"{path}: bringing the store up to date needs a file of {2 * used * size >> 20} MiB, "
            "more than storage.sqlite.max_bytes; increase it, or copy the store with `engage copy`"
        )
