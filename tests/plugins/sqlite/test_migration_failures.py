# SPDX-License-Identifier: Apache-2.0
"""A store is brought up to date completely or not at all, by one of several processes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    StorageContext,
    StorageUnavailable,
)
from engage.testing.factories import ids
from engage_plugins.sqlite import migration
from engage_plugins.sqlite import schema as sqlite_schema
from engage_plugins.sqlite.migration import migrate
from engage_plugins.sqlite.store import SqliteStorage
from support.earlier_stores import Earlier, has_everything
from support.waiting import eventually


async def test_a_migration_without_room_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Earlier(tmp_path, "sqlite", 3)
    size = (tmp_path / "engage.db").stat().st_size
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * size - 1)
    monkeypatch.setattr(migration.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageUnavailable, match="make room, or copy the store"):
        async with earlier.opened(create=True, min_free_bytes=0):
            pass
    monkeypatch.undo()
    with pytest.raises(StorageUnavailable, match=r"more than storage\.sqlite\.max_bytes"):
        async with earlier.opened(create=True, max_bytes=int(size * 1.5)):
            pass
    assert earlier.version() == 3
    async with earlier.opened(create=True):
        pass
    assert earlier.version() == sqlite_schema.VERSION


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_the_log_shows_that_a_migration_waits_for_a_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It waits longer than one call may take, but not silently."""
    earlier = Earlier(tmp_path, "sqlite", 3)
    context = StorageContext(base_dir=tmp_path, identifiers={}, write_timeout=2.0)
    store = SqliteStorage.from_options({"writer": kind}, context)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        opening = asyncio.create_task(store.open(create=True))
        await eventually(lambda: "another program has locked it" in caplog.text)
        # Once, and every 30 s.
        await asyncio.sleep(3)
        assert caplog.text.count("another program has locked it") == 1
        assert not opening.done()
        other.execute("ROLLBACK")
    await opening
    await store.close()
    assert earlier.version() == sqlite_schema.VERSION


async def test_a_migration_does_not_wait_indefinitely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "_WAIT", 1.5)
    earlier = Earlier(tmp_path, "sqlite", 3)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageUnavailable, match="another program has locked it for 2 s"):
            async with earlier.opened(create=True):
                pass
    assert earlier.version() == 3


#: It kills itself when the log has a size.
_MIGRATES = """
import os, pathlib, signal, sqlite3, sys
from engage_plugins.sqlite import migration
path, size = pathlib.Path(sys.argv[1]), float(sys.argv[2])
log = path.with_name("engage.db-wal")

def look():
    if log.exists() and log.stat().st_size > size:
        os.kill(os.getpid(), signal.SIGKILL)

db = sqlite3.connect(path, isolation_level=None)
db.execute("PRAGMA cache_size = 10")
db.set_progress_handler(look, 10_000)
migration.migrate(db, str(path), 0)
"""


def migrate_until(path: Path, size: float) -> None:
    """Bring a store up to date in a process, which is killed when the log has this size."""
    done = subprocess.run([sys.executable, "-c", _MIGRATES, str(path), str(size)])
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", [0.0, 0.2, 0.4, 0.6, 0.8])
async def test_a_migration_that_is_killed_has_no_effect(tmp_path: Path, at: float) -> None:
    earlier = Earlier(tmp_path, "sqlite", 3)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db, db:
        db.execute(
            "WITH RECURSIVE n(x) AS (SELECT 7 UNION ALL SELECT x + 1 FROM n WHERE x < 30000) "
            "INSERT INTO events SELECT x, randomblob(16), workspace, origin, 'n' || x, type, "
            "user_id, anonymous_id, name, received_at, timestamp, body FROM n, events WHERE seq = 1"
        )
    # It writes 12 MB.
    migrate_until(tmp_path / "engage.db", at * 10_000_000)
    version = earlier.version()
    async with earlier.opened(create=False) as store:
        assert len(await ids(store)) == 30_000
    if at < 0.8:
        assert version == 3
    async with earlier.opened(create=True) as store:
        assert len(await ids(store)) == 30_000
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        assert db.execute("SELECT count(*) FROM event_keys").fetchone() == (30_000,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_an_interrupted_migration_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Earlier(tmp_path, "sqlite", 1)
    steps = sqlite_schema.MIGRATIONS
    failing = {**steps, 4: [*steps[4], "INSERT INTO nowhere VALUES (1)"]}
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", failing)
    with pytest.raises(StorageUnavailable):
        async with earlier.opened(create=True):
            pass
    assert earlier.version() == 1
    async with earlier.opened(create=False) as store:
        await has_everything(store)
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", steps)
    async with earlier.opened(create=True) as store:
        await has_everything(store)
    assert earlier.version() == sqlite_schema.VERSION


_OPENS = """
import asyncio, pathlib, sys
from engage.api import StorageContext
from engage.testing.factories import event
from engage_plugins.sqlite.migration import migrate
from engage_plugins.sqlite.store import SqliteStorage

async def main():
    context = StorageContext(base_dir=pathlib.Path(sys.argv[1]), identifiers={})
    store = SqliteStorage.from_options({}, context)
    sys.stdin.readline()
    await store.open(create=True)
    await store.write([event("by " + sys.argv[2])])
    await store.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_several_processes_bring_a_store_up_to_date(tmp_path: Path, version: int) -> None:
    """All workers and the console start at once."""
    earlier = Earlier(tmp_path, "sqlite", version)
    command = [sys.executable, "-c", _OPENS, str(tmp_path)]
    started = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE) for number in range(4)
    ]
    for one in started:
        assert one.stdin is not None
        one.stdin.close()
    assert [one.wait(60) for one in started] == [0] * 4
    assert earlier.version() == sqlite_schema.VERSION
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        found = [one for (one,) in db.execute("SELECT message_id FROM events ORDER BY seq")]
    assert found[:6] == ["1", "2", "3", "4", "5", "6"]
    assert sorted(found[6:]) == [f"by {number}" for number in range(4)]


class Unreadable(sqlite3.Connection):
    """A connection that meets an error of the disk when a transaction begins."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return super().execute(sql, *parameters)


def test_only_a_lock_delays_the_change_of_the_tables(tmp_path: Path) -> None:
    """An error of the disk is reported at once, not after an hour."""
    Earlier(tmp_path, "sqlite", 3)
    path = str(tmp_path / "engage.db")
    with (
        contextlib.closing(sqlite3.connect(path, factory=Unreadable)) as db,
        pytest.raises(sqlite3.OperationalError, match="disk I/O error"),
    ):
        migrate(db, path, 0)
