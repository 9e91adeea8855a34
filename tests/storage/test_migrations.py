# SPDX-License-Identifier: Apache-2.0
"""Stores that earlier versions of engage made are brought up to date by ``engage serve``, in place.

``tests/data/stores/`` has them, with the script that made them.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson import json_util

from engage.api import EventStore, StorageContext, StorageUnavailable
from engage.testing.factories import TIME, all_pages, identify, ids, letter, store_all
from engage_plugins.mongo import schema as mongo_schema
from engage_plugins.mongo.store import MongoStorage
from engage_plugins.sqlite import schema as sqlite_schema
from engage_plugins.sqlite.store import SqliteStorage
from support import mongo

STORES = Path(__file__).parents[1] / "data/stores"
EMAIL = "ada@example.com"


class Earlier:
    """A store of an earlier version."""

    def __init__(self, folder: Path, kind: str, version: int) -> None:
        self.kind = kind
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


async def test_a_server_brings_a_store_up_to_date(version_1: Earlier) -> None:
    """The users who had an address before the claims were recorded come before all later ones."""
    assert version_1.version() == 1
    for _ in range(2):
        async with version_1.opened(create=True) as store:
            await has_everything(store)
        assert (
            version_1.version()
            == {"sqlite": sqlite_schema, "mongo": mongo_schema}[version_1.kind].VERSION
        )
    async with version_1.opened(create=True) as store:
        email = {"email": EMAIL}
        await store_all(store, identify("f", "0", -(10**12), received=10**9, traits=email))
        # Their claims stay when they have another value for a while, too.
        await store_all(store, identify("7", "ada", 10**9, traits={"email": "new@example.com"}))
        assert await store.find_users("acme", "email", [EMAIL]) == {EMAIL: ["forged", "0"]}
        await store_all(store, identify("8", "ada", 10**9 + 1, traits=email))
        assert await store.find_users("acme", "email", [EMAIL]) == {EMAIL: ["ada", "forged", "0"]}


async def test_other_commands_read_an_earlier_store_and_leave_it_as_it_is(
    version_1: Earlier,
) -> None:
    async with version_1.opened(create=False) as store:
        await has_everything(store)
        await store.check()
    assert version_1.version() == 1


async def test_a_command_that_writes_asks_for_a_server_first(tmp_path: Path) -> None:
    """Its claims would not be recorded. (On MongoDB a collection is made when it is needed.)"""
    earlier = Earlier(tmp_path, "sqlite", 1)
    async with earlier.opened(create=False) as store:
        with pytest.raises(StorageUnavailable, match="start `engage serve` once"):
            await store.write([identify("9", "ada")])
        assert await ids(store) == ["1", "2", "3", "4", "5", "6"]


async def test_a_version_between_gets_only_what_is_missing(version_1: Earlier) -> None:
    async with version_1.opened(create=True):
        pass
    # A later version that this one can read: nothing is done to it.
    version_1.set_version(1000)
    async with version_1.opened(create=True) as store:
        await has_everything(store)
    assert version_1.version() == 1000


def test_migrations_are_numbered_up_to_the_version() -> None:
    for schema in (sqlite_schema, mongo_schema):
        numbers = list(schema.MIGRATIONS)
        assert numbers == list(range(2, schema.VERSION + 1))


def test_a_new_store_is_like_one_that_was_brought_up_to_date(tmp_path: Path) -> None:
    def tables(db: sqlite3.Connection) -> list[str]:
        rows = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        return sorted(re.sub(r"\s+", " ", sql) for (sql,) in rows)

    Earlier(tmp_path, "sqlite", 1)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as db:
        sqlite_schema.migrate(db)
        migrated = tables(db)
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        sqlite_schema.create(db)
        assert tables(db) == migrated
