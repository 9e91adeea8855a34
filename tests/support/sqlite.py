# SPDX-License-Identifier: Apache-2.0
"""SQLite stores: made of options or of a config file, and on a disk that is full."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from engage.api import (
    DeadLetterBudget,
    Event,
    Outcome,
    StorageContext,
    StorageUnavailable,
)
from engage.config import load
from engage.store import events as storing
from engage.store.facade import Storage
from engage.store.keys import key_of
from engage.testing import event
from engage.testing.factories import store_all
from engage_plugins.sqlite.connection import Settings
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.store import SqliteStorage
from support.exports import on_store, registry

CONFIG = """
[storage]
backend = "sqlite"
[storage.sqlite]
path = "{name}.db"
writer = "thread"
min_free_bytes = 0
[[workspaces]]
id = "acme"
[[workspaces.write_keys]]
id = "website"
key = "k-acme"
[[workspaces.subscription_groups]]
id = "news"
channel = "email"
type = "opt_in"
[[workspaces]]
id = "other"
"""

#: Make the tables of version 1, in which an id of a choice was a user's or a visitor's.
ONE_NAMESPACE = """
ALTER TABLE choices RENAME TO later;
CREATE TABLE choices (
    id INTEGER PRIMARY KEY, workspace TEXT NOT NULL, user_id TEXT NOT NULL,
    group_id TEXT NOT NULL, subscribed INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    change_id TEXT NOT NULL, UNIQUE (workspace, user_id, group_id));
INSERT OR IGNORE INTO choices SELECT id, workspace, name, group_id, subscribed, updated_at,
    change_id FROM later;
DROP TABLE later; DROP INDEX history_subject; ALTER TABLE history DROP COLUMN kind;
ALTER TABLE history RENAME COLUMN name TO user_id;
CREATE INDEX history_user ON history (workspace, user_id);
UPDATE store SET value = 1 WHERE name IN ('version', 'min_reader');
"""
#: Make the tables of a checkout from before suppressed addresses and the provenance of choices.
WITHOUT_SUPPRESSIONS = f"""{ONE_NAMESPACE}
DROP TABLE suppressions; ALTER TABLE history DROP COLUMN secret;
ALTER TABLE history DROP COLUMN user_agent; ALTER TABLE history DROP COLUMN address;
"""
#: Make those of a checkout from before visitors.
WITHOUT_VISITORS = f"""{WITHOUT_SUPPRESSIONS}
DROP TABLE visitor_totals; DROP INDEX links_first; DROP INDEX identifiers_kind;
ALTER TABLE profiles DROP COLUMN chosen_first; ALTER TABLE profiles DROP COLUMN chosen_last;
ALTER TABLE profiles DROP COLUMN changed_at; ALTER TABLE links DROP COLUMN workspace;
ALTER TABLE links DROP COLUMN received_at; ALTER TABLE links DROP COLUMN message_id;
ALTER TABLE links DROP COLUMN origin; ALTER TABLE links DROP COLUMN decided_at;
ALTER TABLE links DROP COLUMN decision_id; ALTER TABLE links DROP COLUMN decision_origin;
ALTER TABLE links DROP COLUMN undone; ALTER TABLE identifiers DROP COLUMN kind;
ALTER TABLE choices DROP COLUMN change_id;
CREATE INDEX identifiers_claimed
    ON identifiers (workspace, trait, value, claimed_at, profile);
"""


def config_file(folder: Path, name: str = "engage") -> Path:
    """Write a config with an SQLite store and the workspaces ``acme`` and ``other``."""
    path = folder / f"{name}.toml"
    path.write_text(CONFIG.format(name=name), encoding="utf-8")
    return path


@contextlib.asynccontextmanager
async def open_store(path: Path) -> AsyncIterator[Storage]:
    """Open (and create) the store of a config file."""
    store = registry().make_storage(load(path))
    await store.open(create=True)
    try:
        yield store
    finally:
        await store.close()


def new_store(folder: Path, *events: Event) -> Path:
    """Make a config with a store that has some events; to be called without an event loop."""
    path = config_file(folder)
    on_store(path, lambda store: store.write(events))
    return path


def make(
    tmp_path: Path,
    *,
    timeout: float = 60,
    budget: DeadLetterBudget = DeadLetterBudget(),  # noqa: B008 - frozen
    erasures_key: str | None = None,
    **options: Any,
) -> SqliteStorage:
    """Make the storage of options, as the registry does; open it afterwards.

    It writes in a thread, so that a test can disturb it, and need not start a process.
    """
    options.setdefault("writer", "thread")
    context = StorageContext(
        base_dir=tmp_path,
        identifiers={"acme": ["email"]},
        write_timeout=timeout,
        dead_letter_budget=budget,
        erasures_key=erasures_key,
    )
    return SqliteStorage.from_options(options, context)


def settings(path: Path, **context: Any) -> Settings:
    """Return the settings of an engine.

    :param context: fields of :class:`~engage.api.StorageContext`.
    """
    return Settings(
        path=str(path),
        min_free_bytes=0,
        max_bytes=0,
        context=StorageContext(
            base_dir=path.parent, **{"identifiers": {}, "write_timeout": 60, **context}
        ),
    )


def engine_of(store: SqliteStorage) -> Engine:
    """Return the engine of a storage that writes in a thread."""
    thread = store._writer._thread
    assert thread is not None
    assert thread.server.scheduler is not None
    return thread.server.scheduler.engine


def write(engine: Engine, *events: Event) -> list[Outcome]:
    """Write events, and return their outcomes."""
    others, _ = engine.run(storing.write, [[*map(storing.row_of, events)]])
    return [others.get(index, storing.STORED) for index in range(len(events))]


def find(engine: Engine, message_id: str) -> Event | None:
    """Return an event."""
    found: Event | None = engine.run(storing.find, ("acme", "api", message_id))
    return found


def expire(engine: Engine, before: int, limit: int, *, force: bool = False) -> int:
    """Delete the oldest events, and return how many."""
    deleted: int = engine.run(storing.expire, (before, limit, force))
    return deleted


def key(message_id: str) -> bytes:
    """Return the key of an event in the file."""
    return key_of("acme", "api", message_id)


def large(name: str) -> Event:
    """Make an event of 50 kB."""
    return event(name, properties={"text": "x" * 50_000})


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Hold SQLite's write lock, like a backup tool that hangs."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Limit the size of all files of this process, for root, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def until_full(store: SqliteStorage) -> list[str]:
    """Write until there is no space, and return the acknowledged message ids."""
    acknowledged: list[str] = []
    failures = 0
    for number in range(2000):
        try:
            await store_all(store, large(str(number)))
            acknowledged.append(str(number))
            failures = 0
        except StorageUnavailable as error:
            if "no answer within" in str(error):
                continue
            # A log that cannot grow begins again when it was copied: one failure is not final.
            failures += 1
            if failures == 5:
                return acknowledged
    raise AssertionError("it never became full")
