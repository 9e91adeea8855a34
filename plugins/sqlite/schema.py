# SPDX-License-Identifier: Apache-2.0
"""The tables, their version, and how a file is recognised as a store of engage.

Text columns are compared byte by byte (SQLite's BINARY collation), NUL included; no function of
SQLite that stops at NUL is applied to them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from engage.api import (
    ENGAGE_VERSION,
    TRUSTED,
    Kind,
    StorageIncompatible,
    StorageMissing,
    StorageOutdated,
    StorageUnavailable,
)
from engage.store.profiles import USER, VISITOR

_log = logging.getLogger("engage.storage.sqlite")

#: Version of the tables. It increases with every addition to them.
VERSION: Final = 2
#: The oldest version that can read the tables. It increases when a change would mislead older ones.
MIN_READER: Final = 2
#: ``PRAGMA application_id``: "engg".
APPLICATION_ID: Final = 0x656E6767

_LINKS_FIRST: Final = """CREATE INDEX links_first
    ON links (workspace, anonymous_id, received_at, message_id, origin)
    WHERE received_at IS NOT NULL AND undone = 0"""
_IDENTIFIERS_KIND: Final = """CREATE INDEX identifiers_kind
    ON identifiers (workspace, trait, value, kind, claimed_at, profile)"""
# How many visitors there are.
_VISITOR_TOTALS: Final = """CREATE TABLE visitor_totals (
    workspace TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID"""
# Registers: the greatest (at, not lifted) wins. group_id is empty for all of the channel.
_SUPPRESSIONS: Final = """CREATE TABLE suppressions (
    number INTEGER PRIMARY KEY, workspace TEXT NOT NULL, channel TEXT NOT NULL,
    address TEXT NOT NULL, group_id TEXT NOT NULL, reason TEXT NOT NULL, at INTEGER NOT NULL,
    lifted INTEGER NOT NULL, how TEXT NOT NULL, source_id TEXT NOT NULL,
    UNIQUE (workspace, channel, address, group_id, reason))"""

# kind is that of the user or visitor, as in profiles.
_CHOICES: Final = """CREATE TABLE choices (
    id INTEGER PRIMARY KEY, workspace TEXT NOT NULL, kind INTEGER NOT NULL, name TEXT NOT NULL,
    group_id TEXT NOT NULL, subscribed INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    change_id TEXT NOT NULL, UNIQUE (workspace, kind, name, group_id))"""
_HISTORY_SUBJECT: Final = "CREATE INDEX history_subject ON history (workspace, kind, name)"

_TABLES: Final = (
    # Numbers of the store itself: version, min_reader, opens (how often it was opened), merged (the
    # keys of all events up to this one are in event_keys), epoch (another one for each writer) and
    # incarnation (another one for each store, also for one that is restored: cursors have it); and
    # a text, engage: the version of engage that made the tables or brought them up to date.
    "CREATE TABLE store (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    # seq is the order of commits: it is assigned inside the write transaction, and SQLite runs one
    # of these at a time. AUTOINCREMENT, so that the number of an expired event is never used again.
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL,
        workspace TEXT NOT NULL, origin TEXT NOT NULL, message_id TEXT NOT NULL,
        type TEXT NOT NULL, user_id TEXT, anonymous_id TEXT, name TEXT,
        received_at INTEGER NOT NULL, timestamp INTEGER NOT NULL, body BLOB NOT NULL)""",
    # A new event has a random key, and a unique index would change another page for each of them.
    # So the keys of the newest events are only in the events, and are merged into this table in
    # order, many at a time, in parts: see keys/. A key may be here without its event.
    """CREATE TABLE event_keys (
        part INTEGER NOT NULL, key BLOB NOT NULL, seq INTEGER NOT NULL,
        PRIMARY KEY (part, key)) WITHOUT ROWID""",
    # Events arrive nearly in this order, so the index costs little; expiry and --since use it.
    "CREATE INDEX events_received ON events (received_at)",
    # No event made a user without created_at exist: it has links, or made a choice. The chosen_
    # times are those of the choices. Of visitors, changed_at is when the last event was received.
    """CREATE TABLE profiles (
        id INTEGER PRIMARY KEY, workspace TEXT NOT NULL, kind INTEGER NOT NULL, name TEXT NOT NULL,
        created_at INTEGER, updated_at INTEGER,
        traits INTEGER NOT NULL, trait_bytes INTEGER NOT NULL,
        links INTEGER NOT NULL, memberships INTEGER NOT NULL,
        chosen_first INTEGER, chosen_last INTEGER, changed_at INTEGER,
        UNIQUE (workspace, kind, name))""",
    _VISITOR_TOTALS,
    # Registers: the greatest (timestamp, message_id, origin) wins. size counts towards the limit;
    # it is 0 for what does not count: a declared identifier trait, and a trait that is removed.
    """CREATE TABLE traits (
        profile INTEGER NOT NULL, trait TEXT NOT NULL, timestamp INTEGER NOT NULL,
        message_id TEXT NOT NULL, origin TEXT NOT NULL, size INTEGER NOT NULL, value BLOB NOT NULL,
        PRIMARY KEY (profile, trait)) WITHOUT ROWID""",
    """CREATE TABLE memberships (
        profile INTEGER NOT NULL, group_id TEXT NOT NULL, timestamp INTEGER NOT NULL,
        message_id TEXT NOT NULL, origin TEXT NOT NULL, assigned INTEGER NOT NULL,
        PRIMARY KEY (profile, group_id)) WITHOUT ROWID""",
    # The first event that made the link; without received_at there was none, but an operator's
    # decision, whose version is beside it: whether the link is undone.
    """CREATE TABLE links (
        profile INTEGER NOT NULL, anonymous_id TEXT NOT NULL, workspace TEXT NOT NULL,
        received_at INTEGER, message_id TEXT NOT NULL, origin TEXT NOT NULL,
        decided_at INTEGER NOT NULL, decision_id TEXT NOT NULL, decision_origin TEXT NOT NULL,
        undone INTEGER NOT NULL, PRIMARY KEY (profile, anonymous_id)) WITHOUT ROWID""",
    _LINKS_FIRST,
    # The current values of declared identifier traits, in the form in which they are looked up.
    """CREATE TABLE identifiers (
        profile INTEGER NOT NULL, trait TEXT NOT NULL, workspace TEXT NOT NULL, value TEXT NOT NULL,
        claimed_at INTEGER NOT NULL, kind INTEGER NOT NULL,
        PRIMARY KEY (profile, trait)) WITHOUT ROWID""",
    _IDENTIFIERS_KIND,
    # When an event first set a trait of a user or visitor to a value: see
    # Storage.find_users. Only for declared identifier traits, and for values that the user
    # does not have now; a row for the current value may exist as well.
    """CREATE TABLE claims (
        profile INTEGER NOT NULL, trait TEXT NOT NULL, value TEXT NOT NULL,
        received_at INTEGER NOT NULL, PRIMARY KEY (profile, trait, value)) WITHOUT ROWID""",
    # The traits for which the table of identifiers is complete.
    """CREATE TABLE indexed (
        workspace TEXT NOT NULL, trait TEXT NOT NULL,
        PRIMARY KEY (workspace, trait)) WITHOUT ROWID""",
    _CHOICES,
    "CREATE TABLE changes (key BLOB PRIMARY KEY) WITHOUT ROWID",
    """CREATE TABLE history (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, change_id TEXT NOT NULL, workspace TEXT NOT NULL,
        kind INTEGER NOT NULL, name TEXT NOT NULL, group_id TEXT NOT NULL, before INTEGER,
        after INTEGER NOT NULL, at INTEGER NOT NULL, how TEXT NOT NULL,
        secret TEXT NOT NULL DEFAULT '', user_agent TEXT NOT NULL DEFAULT '',
        address TEXT NOT NULL DEFAULT '')""",
    _HISTORY_SUBJECT,
    _SUPPRESSIONS,
    """CREATE TABLE letters (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, id TEXT NOT NULL,
        workspace TEXT NOT NULL, origin TEXT NOT NULL, write_key_id TEXT, user_id TEXT,
        anonymous_id TEXT, message_id TEXT, reason TEXT NOT NULL, message TEXT NOT NULL,
        errors BLOB NOT NULL, item BLOB NOT NULL, truncated INTEGER NOT NULL,
        headers BLOB NOT NULL, received_at INTEGER NOT NULL, size INTEGER NOT NULL,
        operation TEXT, envelope BLOB)""",
    "CREATE INDEX letters_received ON letters (received_at)",
    # For the budgets. api is 1 for refused items of the API, 2 for its conflicts, 0 for deliveries.
    """CREATE TABLE letter_totals (
        workspace TEXT NOT NULL, api INTEGER NOT NULL,
        count INTEGER NOT NULL, size INTEGER NOT NULL,
        PRIMARY KEY (workspace, api)) WITHOUT ROWID""",
    """CREATE TABLE records (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, workspace TEXT NOT NULL,
        id TEXT NOT NULL, body BLOB NOT NULL, at INTEGER NOT NULL, version INTEGER NOT NULL,
        UNIQUE (kind, workspace, id))""",
    "CREATE INDEX records_at ON records (kind, at)",
    # How often records of a kind were written or deleted.
    """CREATE TABLE record_versions (
        kind TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID""",
    # The labels are a JSON array. A row stays: the order of the registers depends on its
    # number, and there are few.
    """CREATE TABLE count_series (
        number INTEGER PRIMARY KEY, name TEXT NOT NULL, workspace TEXT NOT NULL,
        labels TEXT NOT NULL, UNIQUE (name, workspace, labels))""",
    # The primary key serves reading in the order of time, and expiring.
    """CREATE TABLE counts (
        step INTEGER NOT NULL, at INTEGER NOT NULL, series INTEGER NOT NULL,
        process TEXT NOT NULL, value INTEGER NOT NULL,
        PRIMARY KEY (step, at, series, process)) WITHOUT ROWID""",
)

#: The number of the user to whom an anonymous id ``v.name`` was linked first.
_FIRST_USER: Final = """(SELECT l.profile FROM links l WHERE l.workspace = v.workspace
    AND l.anonymous_id = v.name AND l.received_at IS NOT NULL AND l.undone = 0
    ORDER BY l.received_at, l.message_id, l.origin, l.profile LIMIT 1)"""
_EXISTS: Final = "(o.created_at NOT NULL OR o.chosen_first NOT NULL)"
_VISITORS: Final = "(SELECT workspace, name FROM ids WHERE is_visitor)"
#: The changes without effect of the ids of visitors, as version 1 kept them.
_IDLE: Final = """FROM ids i CROSS JOIN changes c
    ON c.key > CAST(change_key(i.workspace, i.name) || zeroblob(8) AS BLOB)
    AND c.key < CAST(change_key(i.workspace, i.name) || x'ffffffffffffffff' AS BLOB)
    WHERE i.is_visitor"""
#: Make the choices of the table ``taken``, and their records.
_TAKE: Final = (
    "INSERT INTO history (change_id, workspace, kind, name, group_id, before, after, at, how) "
    "SELECT change_id, workspace, kind, name, group_id, before, 0, at, 'upgrade' FROM taken "
    "WHERE NOT EXISTS (SELECT 1 FROM changes WHERE key = change_key(workspace, change_id))",
    "INSERT INTO choices (workspace, kind, name, group_id, subscribed, updated_at, change_id) "
    "SELECT workspace, kind, name, group_id, 0, at, change_id FROM taken "
    "WHERE NOT EXISTS (SELECT 1 FROM changes WHERE key = change_key(workspace, change_id)) "
    "ON CONFLICT (workspace, kind, name, group_id) DO UPDATE SET subscribed = 0, "
    "updated_at = excluded.updated_at, change_id = excluded.change_id",
    "INSERT OR IGNORE INTO changes SELECT change_key(workspace, change_id) FROM taken",
)

#: How many subscriptions of visitors were the latest choice of a user, in version 1.
_STOPPING: Final = f"""SELECT count(*) FROM (SELECT *, user_id AS name FROM choices) v
    CROSS JOIN profiles o ON o.id = {_FIRST_USER} AND {_EXISTS} LEFT JOIN choices c
    ON c.workspace = v.workspace AND c.user_id = o.name AND c.group_id = v.group_id
    WHERE v.subscribed AND ifnull(c.updated_at < v.updated_at, 1) AND NOT EXISTS (
        SELECT 1 FROM profiles n WHERE n.workspace = v.workspace AND n.kind = {USER}
        AND n.name = v.name AND n.created_at NOT NULL)"""

_RESERVED: Final = f"FROM traits WHERE substr(trait, 1, {len(TRUSTED)}) = '{TRUSTED}'"

#: Make it another store than each that it is a copy of; or make sure that it is a known one.
RENEW: Final = "INSERT OR REPLACE INTO store VALUES ('incarnation', random())"
_MAKE_KNOWN: Final = RENEW.replace("REPLACE", "IGNORE")
_IS_KNOWN: Final = "SELECT count(*) FROM store WHERE name = 'incarnation'"

#: Version → the statements that make a store of it from one of the version before.
MIGRATIONS: Final[Mapping[int, Sequence[str]]] = {
    0: (
        "ALTER TABLE profiles ADD COLUMN chosen_first INTEGER",
        "ALTER TABLE profiles ADD COLUMN chosen_last INTEGER",
        "ALTER TABLE profiles ADD COLUMN changed_at INTEGER",
        _VISITOR_TOTALS,
        "ALTER TABLE links ADD COLUMN workspace TEXT NOT NULL DEFAULT ''",
        # Older than all.
        "ALTER TABLE links ADD COLUMN received_at INTEGER DEFAULT 0",
        "ALTER TABLE links ADD COLUMN message_id TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE links ADD COLUMN origin TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE links ADD COLUMN decided_at INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE links ADD COLUMN decision_id TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE links ADD COLUMN decision_origin TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE links ADD COLUMN undone INTEGER NOT NULL DEFAULT 0",
        "UPDATE links SET workspace = (SELECT workspace FROM profiles WHERE id = profile)",
        _LINKS_FIRST,
        f"ALTER TABLE identifiers ADD COLUMN kind INTEGER NOT NULL DEFAULT {USER}",
        "DROP INDEX identifiers_claimed",
        _IDENTIFIERS_KIND,
        "ALTER TABLE choices ADD COLUMN change_id TEXT NOT NULL DEFAULT ''",
    ),
    1: (
        "ALTER TABLE history ADD COLUMN secret TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE history ADD COLUMN user_agent TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE history ADD COLUMN address TEXT NOT NULL DEFAULT ''",
        _SUPPRESSIONS,
    ),
    # Choices were of an id, which was a user's or a visitor's: see "Choices from earlier versions"
    # in docs/events.md.
    2: (
        # A client could set these traits.
        f"UPDATE profiles SET traits = traits - t.count, trait_bytes = trait_bytes - t.bytes FROM "
        f"(SELECT profile, sum(size > 0) AS count, sum(size) AS bytes {_RESERVED} GROUP BY profile)"
        " t WHERE t.profile = profiles.id",
        f"DELETE {_RESERVED}",
        # The ids, and as what each occurs: 1 as a user's, 2 as a visitor's, 3 in one event as both.
        "CREATE TEMP TABLE seen (workspace, name, bits, PRIMARY KEY (workspace, name, bits))",
        "INSERT INTO seen SELECT workspace, user_id, 0 FROM choices "
        "UNION SELECT workspace, user_id, 0 FROM history",
        f"INSERT OR IGNORE INTO seen SELECT s.workspace, s.name, 1 + (p.kind = {VISITOR}) "
        "FROM seen s CROSS JOIN profiles p ON p.workspace = s.workspace AND p.name = s.name "
        f"AND (p.kind = {VISITOR} OR p.kind = {USER} AND (p.created_at NOT NULL OR p.links > 0))",
        "INSERT OR IGNORE INTO seen SELECT s.workspace, s.name, 2 FROM seen s "
        "CROSS JOIN links l ON l.workspace = s.workspace AND l.anonymous_id = s.name "
        "AND l.received_at IS NOT NULL AND l.undone = 0",
        "INSERT OR IGNORE INTO seen SELECT s.workspace, s.name, "
        "(s.name IS e.user_id) + 2 * (s.name IS e.anonymous_id) "
        "FROM events e CROSS JOIN seen s ON s.workspace = e.workspace "
        "AND s.name IN (e.user_id, e.anonymous_id) AND s.bits = 0 "
        "WHERE EXISTS (SELECT 1 FROM seen)",
        "CREATE TEMP TABLE ids (workspace, name, is_visitor, is_both, "
        "PRIMARY KEY (workspace, name))",
        "INSERT INTO ids SELECT workspace, name, max(bits & 1) = 0 AND max(bits & 2) = 2, "
        "max(bits & 1) * 2 = max(bits & 2) FROM seen GROUP BY workspace, name",
        "DROP TABLE seen",
        "DROP INDEX history_user",
        f"ALTER TABLE history ADD COLUMN kind INTEGER NOT NULL DEFAULT {USER}",
        "ALTER TABLE history RENAME COLUMN user_id TO name",
        f"UPDATE history SET kind = {VISITOR} WHERE (workspace, name) IN {_VISITORS}",
        _HISTORY_SUBJECT,
        "CREATE TEMP TABLE idle AS SELECT c.key, CAST(change_key(i.workspace, i.name, "
        f"'{Kind.VISITOR.value}') || substr(c.key, 17) AS BLOB) AS new {_IDLE}",
        "INSERT OR IGNORE INTO changes SELECT new FROM idle",
        "DELETE FROM changes WHERE key IN (SELECT key FROM idle)",
        "DROP TABLE idle",
        "ALTER TABLE choices RENAME TO earlier",
        _CHOICES,
        f"INSERT INTO choices SELECT c.id, c.workspace, {VISITOR} * i.is_visitor, c.name, "
        "c.group_id, c.subscribed, c.updated_at, c.change_id FROM (SELECT *, user_id AS name "
        "FROM earlier) c CROSS JOIN ids i USING (workspace, name)",
        "DROP TABLE earlier",
        f"DELETE FROM profiles WHERE kind = {USER} AND (workspace, name) IN {_VISITORS}",
        # Unsubscriptions that are also of a visitor, and then those that are also of its user.
        "CREATE TEMP TABLE taken (workspace, kind, name, group_id, before, at, change_id)",
        f"INSERT INTO taken SELECT workspace, {VISITOR}, name, group_id, NULL, updated_at, "
        "'upgrade-visitor-' || id FROM choices CROSS JOIN ids USING (workspace, name) "
        "WHERE is_both AND NOT subscribed",
        *_TAKE,
        f"INSERT INTO taken SELECT v.workspace, {USER}, o.name, v.group_id, c.subscribed, "
        "max(v.updated_at), 'upgrade-user-' || v.id FROM choices v CROSS JOIN profiles o ON o.id = "
        f"{_FIRST_USER} AND {_EXISTS} "
        f"LEFT JOIN choices c ON c.workspace = o.workspace AND c.kind = {USER} "
        "AND c.name = o.name AND c.group_id = v.group_id "
        f"WHERE v.kind = {VISITOR} AND NOT v.subscribed "
        "AND (c.id IS NULL OR c.subscribed AND c.updated_at < v.updated_at) "
        "GROUP BY o.id, v.group_id",
        *_TAKE,
        "UPDATE profiles SET chosen_first = ifnull(chosen_first, updated_at), "
        f"chosen_last = ifnull(chosen_last, updated_at) WHERE kind = {USER} "
        "AND (workspace, name) IN (SELECT workspace, name FROM taken)",
        "DROP TABLE taken",
        "DROP TABLE ids",
    ),
}


class NotADatabase(StorageIncompatible, StorageUnavailable):
    """The file is not a SQLite database: an error at the start, and of a request later."""


def inspect_file(path: str) -> None:
    """Check that a file is a store, before it is opened for writing.

    Otherwise SQLite would take the -wal of the store that was at this path for a leftover of this
    file, and delete it.

    SQLite itself is used for this ("immutable": the file alone, no locks), because closing a file
    that this process opened would release the locks of all its connections to the file.

    :raises StorageMissing: if the file is empty.
    :raises StorageIncompatible: if it is something else.
    :raises OSError: if it does not exist.
    :raises sqlite3.Error: if it cannot be read.
    """
    if os.stat(path).st_size == 0:
        raise StorageMissing(f"{path}: an empty file, not a store")
    if os.path.exists(path + "-journal"):
        # A process was killed while it created the tables: SQLite has to roll that back first.
        return
    uri = Path(path).absolute().as_uri() + "?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        try:
            _check_application(db, path)
        except sqlite3.DatabaseError as error:
            # Without its log, a file in the middle of a checkpoint looks damaged.
            if error.sqlite_errorcode != sqlite3.SQLITE_CORRUPT:
                raise


def has_log(path: str) -> bool:
    """Return whether there is a log beside ``path`` that is not empty, with or without the file."""
    try:
        return os.stat(path + "-wal").st_size > 0
    except FileNotFoundError:
        return False


def refuse_orphaned(path: str, has_log: bool) -> None:
    """Refuse to begin with an empty store where only the log of one is left.

    :param has_log: as :func:`has_log` returned, before the file was examined.
    :raises StorageIncompatible: if there is a log.
    """
    if has_log:
        raise StorageIncompatible(
            f"{path}: missing or empty, but its log {path}-wal contains acknowledged events: "
            "put the file back, or move the log elsewhere to start with an empty store"
        )


def _check_application(db: sqlite3.Connection, path: str) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise StorageIncompatible(f"{path}: a SQLite database that engage did not create")


def is_empty(db: sqlite3.Connection) -> bool:
    """Return whether the file contains no table; a file of zero bytes contains none."""
    return db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def create(db: sqlite3.Connection) -> None:
    """Create the tables in an empty file, inside a transaction that the caller began."""
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for statement in _TABLES:
        db.execute(statement)
    names = {"version": VERSION, "min_reader": MIN_READER, "opens": 0, "merged": 0, "epoch": 0}
    db.executemany("INSERT INTO store VALUES (?, ?)", [*names.items(), ("engage", ENGAGE_VERSION)])
    db.execute(RENEW)


def migrate(db: sqlite3.Connection, path: str) -> None:
    """Bring a store of an earlier version up to date, in one transaction.

    :raises sqlite3.Error: if it fails; the store is as it was.
    """
    if version_of(db) >= VERSION and db.execute(_IS_KNOWN).fetchone()[0]:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute(_MAKE_KNOWN)
        # Another process may have done it since.
        version = version_of(db)
        for number, statements in MIGRATIONS.items():
            if number > version:
                for statement in statements:
                    db.execute(statement)
        if version < VERSION:
            numbers = [(VERSION, "version"), (MIN_READER, "min_reader")]
            db.executemany("UPDATE store SET value = max(value, ?) WHERE name = ?", numbers)
            db.execute("INSERT OR REPLACE INTO store VALUES ('engage', ?)", (ENGAGE_VERSION,))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    if version < VERSION:
        _log.info("%s: store version %d is now %d", path, max(version, 1), VERSION)


def require_current(db: sqlite3.Connection, path: str) -> None:
    """Check that an earlier version did not make the tables.

    :raises StorageOutdated: if it did, and no server has brought the store up to date yet.
    """
    version = version_of(db)
    if version < VERSION:
        (stopping,) = db.execute(_STOPPING).fetchone() if version == 1 else (0,)
        note = f"; subscriptions of visitors that then no longer count for their users: {stopping}"
        raise StorageOutdated(
            f"{path}: made by an earlier version of engage (store version {version}; this is "
            f"version {VERSION}): start `engage serve` once, which brings the store up to date"
            f"{note if stopping else ''}"
        )


def version_of(db: sqlite3.Connection) -> int:
    """Return the version of a store: below 1 if it is of version 1 and from before additions to it,
    which were visitors and then suppressions."""
    (version,) = db.execute("SELECT value FROM store WHERE name = 'version'").fetchone()
    added = "SELECT count(*) FROM sqlite_master WHERE name IN ('visitor_totals', 'suppressions')"
    return int(version) if version != 1 else int(db.execute(added).fetchone()[0]) - 1


def verify(db: sqlite3.Connection, path: str) -> None:
    """Check that the file is a store that this version can read.

    :raises StorageMissing: if the file is empty.
    :raises StorageIncompatible: if it is something else, or a newer version made it.
    """
    if is_empty(db):
        raise StorageMissing(f"{path}: an empty file, not a store")
    _check_application(db, path)
    require_readable(db)


def require_readable(db: sqlite3.Connection) -> None:
    """Check that this version can read the tables.

    Call it in each transaction: a newer version may change the tables while this one has the file
    open.

    :raises StorageIncompatible: if only a newer version can.
    """
    (least,) = db.execute("SELECT value FROM store WHERE name = 'min_reader'").fetchone()
    if least > VERSION:
        _, _, path = db.execute("PRAGMA database_list").fetchone()
        made = db.execute("SELECT value FROM store WHERE name = 'engage'").fetchone()
        newer = f"engage {made[0]}" if made else "that version of engage"
        raise StorageIncompatible(
            f"{path}: made or brought up to date by a newer version of engage (store version "
            f"{version_of(db)}, readable from version {least} on; this is version {VERSION}): use "
            f"{newer} or newer, or another file"
        )
