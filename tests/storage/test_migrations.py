# SPDX-License-Identifier: Apache-2.0
"""Stores that earlier versions of engage made are brought up to date by ``engage serve``, in place.

``tests/data/stores/`` has them, with the script that made them.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import sqlite3
import subprocess
import sys
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
    StorageContext,
    StorageUnavailable,
)
from engage.cli import main
from engage.testing.factories import TIME, all_pages, identify, ids, letter, store_all
from engage_plugins.mongo import schema as mongo_schema
from engage_plugins.mongo.store import MongoStorage
from engage_plugins.sqlite import schema as sqlite_schema
from engage_plugins.sqlite.store import SqliteStorage
from support import mongo
from support.sqlite import config_file

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
    async def opened(self, *, create: bool) -> AsyncIterator[Any]:
        """Open the store with this version of engage."""
        made: EventStore
        if self.kind == "sqlite":
            made = SqliteStorage.from_options({}, self._context)
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
        for version in (1, 2)
        for kind, marks in (("sqlite", ()), ("mongo", pytest.mark.mongo))
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


@pytest.mark.parametrize("version", [1, 2])
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


async def test_a_process_of_the_version_before_goes_on(tmp_path: Path) -> None:
    """What it writes after the migration, as its statements do, is read as an earlier letter."""
    earlier = Earlier(tmp_path, "sqlite", 2)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as old:
        columns = [row[1] for row in old.execute("PRAGMA table_info(letters)")][1:]
        async with earlier.opened(create=True) as store:
            names = ", ".join(columns)
            values = ", ".join({"key": "x'00'", "id": "'old'"}.get(name, name) for name in columns)
            with old:
                old.execute(f"INSERT INTO letters ({names}) SELECT {values} FROM letters")
            found = await all_pages(store.scan_dead_letters, None)
            assert found == [letter("bad"), letter("old")]


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
    failing = {**steps, 3: [*steps[3], "INSERT INTO nowhere VALUES (1)"]}
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


@pytest.mark.parametrize("version", [1, 2])
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


@pytest.mark.parametrize("version", [1, 2])
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


@pytest.mark.parametrize("version", [1, 2])
def test_a_new_store_is_like_one_that_was_brought_up_to_date(tmp_path: Path, version: int) -> None:
    def tables(db: sqlite3.Connection) -> list[str]:
        rows = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        return sorted(re.sub(r"\s+", " ", sql) for (sql,) in rows)

    Earlier(tmp_path, "sqlite", version)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as db:
        sqlite_schema.migrate(db)
        migrated = tables(db)
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        sqlite_schema.create(db)
        assert tables(db) == migrated
