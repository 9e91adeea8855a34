# SPDX-License-Identifier: Apache-2.0
"""Stores that earlier versions of engage made are brought up to date by ``engage serve``, in place.

``tests/data/stores/`` has them, with the script that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson import json_util
from click.testing import CliRunner, Result

from engage.api import (
    Count,
    CountStore,
    EventStore,
    Record,
    RecordStore,
    Status,
    StorageContext,
    StorageUnavailable,
)
from engage.cli import main
from engage.testing.factories import TIME, all_pages, identify, ids, letter, store_all
from engage_plugins.mongo import schema as mongo_schema
from engage_plugins.mongo.store import MongoStorage
from engage_plugins.sqlite import migration
from engage_plugins.sqlite import schema as sqlite_schema
from engage_plugins.sqlite.migration import migrate
from engage_plugins.sqlite.store import SqliteStorage
from support import mongo
from support.sqlite import config_file
from support.waiting import eventually

STORES = Path(__file__).parents[1] / "data/stores"
EMAIL = "ada@example.com"


class Earlier:
    """A store of an earlier version."""

    def __init__(self, folder: Path, kind: str, version: int) -> None:
        self.kind = kind
        self.made = version
        self._context = StorageContext(base_dir=folder, identifiers={"acme": ("email", "phone")})
        if kind == "sqlite":
            self._path = folder / "engage.db"
            content = (STORES / f"sqlite-{version}.db.gz").read_bytes()
            self._path.write_bytes(gzip.decompress(content))
        else:
            self._url = mongo.shared(mongo.kinds()[-1]).url()
            text = (STORES / f"mongo-{version}.json").read_text("utf-8")
            for name, documents in json_util.loads(text).items():
                with self._client() as client:
                    client.get_default_database()[name].insert_many(documents)

    def _client(self) -> Any:
        return pymongo.MongoClient(self._url)

    def version(self) -> int:
        """Return the version that the store has now."""
        if self.kind == "sqlite":
            with contextlib.closing(sqlite3.connect(self._path)) as db:
                version: int = sqlite_schema.version_of(db)
                return version
        with self._client() as client:
            found = client.get_default_database().meta.find_one({"_id": "schema"})
            return int(found["version"])

    def set_version(self, version: int) -> None:
        """Let the store be of a later version than it is."""
        if self.kind == "sqlite":
            with contextlib.closing(sqlite3.connect(self._path)) as db:
                db.execute("UPDATE store SET value = ? WHERE name = 'version'", (version,))
                db.commit()
        else:
            with self._client() as client:
                changed = {"$set": {"version": version}}
                client.get_default_database().meta.update_one({"_id": "schema"}, changed)

    @contextlib.asynccontextmanager
    async def opened(self, *, create: bool, **options: Any) -> AsyncIterator[Any]:
        """Open the store with this version of engage."""
        made: EventStore
        if self.kind == "sqlite":
            made = SqliteStorage.from_options({"writer": "thread", **options}, self._context)
        else:
            made = MongoStorage.from_options({"url": self._url}, self._context)
        await made.open(create=create)
        try:
            yield made
        finally:
            await made.close()


@pytest.fixture(params=["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)])
def version_1(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    return Earlier(tmp_path, request.param, 1)


@pytest.fixture(
    params=[
        pytest.param((kind, version), id=f"{kind}-{version}", marks=marks)
        for kind, versions, marks in (
            ("sqlite", (1, 2, 3, 4), ()),
            ("mongo", (1, 2), pytest.mark.mongo),
        )
        for version in versions
    ]
)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    """A store of each version before this one."""
    return Earlier(tmp_path, *request.param)


async def has_everything(store: Any) -> None:
    """Check that the store has what ``make.py`` wrote."""
    assert await ids(store) == ["1", "2", "3", "4", "5", "6"]
    ada = await store.profile("acme", "ada")
    assert ada.traits == {"email": EMAIL, "plan": "pro", "n": None}
    assert (list(ada.anonymous_ids), list(ada.groups)) == (["visitor"], ["g"])
    assert (ada.created_at, ada.updated_at) == (TIME + 10, TIME + 70)
    users = await all_pages(store.scan_users, None)
    assert sorted(one.user_id for one in users) == ["ada", "bob", "forged"]
    assert await store.state("acme", "ada") == {"news": True}
    assert await all_pages(store.scan_dead_letters, None) == [letter("bad")]
    assert await store.find_users("acme", "phone", ["+12"]) == {"+12": ["bob"]}
    assert await store.find_users("acme", "email", [EMAIL]) == {EMAIL: ["ada", "forged"]}
    assert await all_pages(store.holders, "acme", "email", EMAIL, limit=1) == ["ada", "forged"]


async def test_a_server_brings_a_store_up_to_date(earlier: Earlier) -> None:
    assert earlier.version() == earlier.made
    for _ in range(2):
        async with earlier.opened(create=True) as store:
            await has_everything(store)
        assert (
            earlier.version()
            == {"sqlite": sqlite_schema, "mongo": mongo_schema}[earlier.kind].VERSION
        )


async def test_claims_before_they_were_recorded_are_the_oldest(version_1: Earlier) -> None:
    """The users who had an address then come before all later ones."""
    async with version_1.opened(create=True) as store:
        email = {"email": EMAIL}
        await store_all(store, identify("f", "0", -(10**12), received=10**9, traits=email))
        # Their claims stay when they have another value for a while, too.
        await store_all(store, identify("7", "ada", 10**9, traits={"email": "new@example.com"}))
        assert await store.find_users("acme", "email", [EMAIL]) == {EMAIL: ["forged", "0"]}
        await store_all(store, identify("8", "ada", 10**9 + 1, traits=email))
        assert await store.find_users("acme", "email", [EMAIL]) == {EMAIL: ["ada", "forged", "0"]}


async def test_other_commands_read_an_earlier_store_and_leave_it_as_it_is(
    earlier: Earlier,
) -> None:
    async with earlier.opened(create=False) as store:
        await has_everything(store)
        await store.check()
        if isinstance(store, RecordStore):
            assert await store.get_record("key", "acme", "k") is None
            assert await store.records_version("key") == 0
            assert list((await store.list_records(None, limit=9)).items) == []
        if isinstance(store, CountStore):
            assert list((await store.counts(60, since=0, until=TIME, limit=9)).items) == []
            assert list((await store.scan_counts(after=None, limit=9)).items) == []
        recent = await store.recent_dead_letters(None, limit=9)
        if recent is not None:
            assert list(recent.items) == [letter("bad")]
        assert await store.dead_letter("acme", "bad") == letter("bad")
    assert earlier.version() == earlier.made


@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_a_command_that_writes_asks_for_a_server_first(tmp_path: Path, version: int) -> None:
    """The store has no place for what it writes. (MongoDB makes collections as needed.)"""
    earlier = Earlier(tmp_path, "sqlite", version)
    record = Record(kind="key", workspace_id="acme", id="k", body=b"{}", at=TIME)
    count = Count(step=60, at=TIME, process="p", name="events", workspace_id="", labels=(), value=1)
    async with earlier.opened(create=False) as store:
        writes: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: store.write([identify("9", "ada")]),
            lambda: store.put([letter("worse")]),
            lambda: store.put_record(record),
            lambda: store.delete_record("key", "acme", "k"),
            lambda: store.put_counts([count]),
        )
        for write in writes:
            with pytest.raises(StorageUnavailable, match="start `engage serve` once"):
                await write()
        assert await ids(store) == ["1", "2", "3", "4", "5", "6"]
        # A server brings the store up to date meanwhile.
        async with earlier.opened(create=True):
            pass
        assert await store.put_record(record, expected_version=0) == 1
        assert await store.put([letter("worse", operation="track", envelope=b"{}")]) == 0


#: How version 3 stores an event.
_INSERT_3 = (
    "INSERT INTO events (key, workspace, origin, message_id, type, received_at, timestamp, body) "
    "VALUES (x'00', 'acme', 'api', 'old', 'track', 1, 1, '{}') ON CONFLICT (key) DO NOTHING"
)


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_a_process_of_an_earlier_version_stores_no_more_events(
    tmp_path: Path, version: int
) -> None:
    """It would not see which events are duplicates. Each statement fails, and it answers 503."""
    earlier = Earlier(tmp_path, "sqlite", version)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as old:
        with old:
            old.execute(_INSERT_3)
        async with earlier.opened(create=True) as store:
            assert await ids(store) == ["1", "2", "3", "4", "5", "6", "old"]
            for _ in range(2):
                with pytest.raises(sqlite3.OperationalError, match="ON CONFLICT"):
                    old.execute(_INSERT_3)
            # It finds no connection that it may use, either.
            (least,) = old.execute("SELECT value FROM store WHERE name = 'min_reader'").fetchone()
            assert least > version
            assert await ids(store) == ["1", "2", "3", "4", "5", "6", "old"]


def test_a_process_of_version_4_notices_the_migration(tmp_path: Path) -> None:
    """It compares the epoch in each transaction, and then finds a store that it cannot read."""
    Earlier(tmp_path, "sqlite", 4)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as db:
        query = "SELECT value FROM store WHERE name = 'epoch'"
        (epoch,) = db.execute(query).fetchone()
        assert epoch
        migrate(db, str(tmp_path / "engage.db"), 0)
        assert db.execute(query).fetchone() != (epoch,)
        (least,) = db.execute("SELECT value FROM store WHERE name = 'min_reader'").fetchone()
        assert least > 4


@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_events_are_the_same_after_the_migration(tmp_path: Path, version: int) -> None:
    """Their numbers are, which are cursors, and no number of an expired event is used again."""
    earlier = Earlier(tmp_path, "sqlite", version)
    columns = "seq, key, workspace, origin, message_id, type, user_id, anonymous_id, name"
    query = f"SELECT {columns}, received_at, timestamp, body FROM events ORDER BY seq"
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db, db:
        db.execute("DELETE FROM events WHERE seq IN (1, 6)")
        db.execute("CREATE INDEX mine ON events (name)")
        db.execute("CREATE VIEW also_mine AS SELECT user_id FROM events")
        before = db.execute(query).fetchall()
    async with earlier.opened(create=True) as store:
        outcomes = await store.write([identify(one[4], "ada", 99) for one in before])
        assert [one.status for one in outcomes] == [Status.DUPLICATE] * 4
        for one in before:
            assert (await store.find(*one[2:5])).message_id == one[4]
        assert await store.find("acme", "api", "6") is None
        await store_all(store, identify("6", "ada", 99))
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        after = db.execute(query).fetchall()
        assert after[:-1] == before
        assert after[-1][0] == 7
        assert [row[0] for row in db.execute("SELECT user_id FROM also_mine")][-1] == "ada"
        assert db.execute("PRAGMA index_info(mine)").fetchall()
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_store_without_events_keeps_its_next_number(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path, "sqlite", 3)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db, db:
        db.execute("DELETE FROM events")
    async with earlier.opened(create=True) as store:
        await store_all(store, identify("1", "ada", 99))
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        assert db.execute("SELECT seq FROM events").fetchall() == [(7,)]


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


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_check_shows_that_a_store_is_to_be_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """How long it takes, and how much space it needs; if there is less, it fails."""
    earlier = Earlier(tmp_path, "sqlite", version)
    size = (tmp_path / "engage.db").stat().st_size
    config = config_file(tmp_path)

    def run() -> Result:
        return CliRunner().invoke(main, ["check", "--config", str(config)])

    result = run()
    assert result.exit_code == 0, result.output
    (line,) = [one for one in result.output.splitlines() if one.startswith("notice")]
    assert f"store version {version}" in line
    assert "(about 6)" in line
    assert re.search(r"takes about 1 s and needs \d+ MiB on the disk, of which \d+ MiB", line)
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(migration.shutil, "disk_usage", lambda _: usage)
    result = run()
    assert result.exit_code == 1
    assert re.search(r"needs \d+ MiB on its disk, and \d+ MiB are free", result.output)
    monkeypatch.undo()
    config.write_text(config.read_text().replace("min_free_bytes = 0", f"max_bytes = {size // 2}"))
    assert "more than storage.sqlite.max_bytes" in run().output
    assert earlier.version() == version


def test_check_has_nothing_to_show_about_a_current_store(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path, "sqlite", 3)

    async def serve() -> None:
        async with earlier.opened(create=True):
            pass

    asyncio.run(serve())
    result = CliRunner().invoke(main, ["check", "--config", str(config_file(tmp_path))])
    assert result.exit_code == 0, result.output
    assert "notice" not in result.output


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


#: Slowly, so that it can be killed in the middle.
_MIGRATES = """
import sqlite3, sys, time
from engage_plugins.sqlite import migration
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 10")
db.set_progress_handler(lambda: time.sleep(0.001), 10_000)
migration.migrate(db, sys.argv[1], 0)
"""


def migrate_until(path: Path, size: float) -> None:
    """Bring a store up to date in a process, and kill it when the log has this size."""
    log = path.with_name("engage.db-wal")
    command = [sys.executable, "-c", _MIGRATES, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.stat().st_size > size):
        time.sleep(0.001)
    process.kill()
    process.wait()


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


async def test_a_version_between_gets_only_what_is_missing(version_1: Earlier) -> None:
    async with version_1.opened(create=True):
        pass
    # A later version that this one can read: nothing is done to it.
    version_1.set_version(1000)
    async with version_1.opened(create=True) as store:
        await has_everything(store)
    assert version_1.version() == 1000


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


def test_migrations_are_numbered_up_to_the_version() -> None:
    for schema in (sqlite_schema, mongo_schema):
        numbers = list(schema.MIGRATIONS)
        assert numbers == list(range(2, schema.VERSION + 1))


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_no_command_brings_a_store_up_to_date(tmp_path: Path, version: int) -> None:
    """Not even one that creates a store if there is none."""
    earlier = Earlier(tmp_path, "sqlite", version)
    config, other = config_file(tmp_path, "engage"), config_file(tmp_path, "other")

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(one) for one in arguments])

    for command in (("check",), ("export", "events"), ("export", "users"), ("keys", "list")):
        result = run(*command, "--config", config)
        assert result.exit_code == 0, result.stderr
    writing = ("keys", "add", "--workspace", "acme", "--id", "new", "--config", config)
    result = run(*writing)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "start `engage serve` once" in result.stderr
    result = run("copy", "--from", config, "--to", other)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "events\tcopied=6\t" in result.stdout
    assert run(*writing[:-1], other).exit_code == 0
    result = run("copy", "--from", other, "--to", config)
    assert result.exit_code == 1
    assert "start `engage serve` once" in result.stderr
    assert earlier.version() == version


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_new_store_is_like_one_that_was_brought_up_to_date(tmp_path: Path, version: int) -> None:
    def tables(db: sqlite3.Connection) -> list[str]:
        rows = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        return sorted(re.sub(r"\s+", " ", sql) for (sql,) in rows)

    Earlier(tmp_path, "sqlite", version)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as db:
        migrate(db, str(tmp_path / "engage.db"), 0)
        migrated = tables(db)
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        sqlite_schema.create(db)
        assert tables(db) == migrated


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
