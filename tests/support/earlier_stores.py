# SPDX-License-Identifier: Apache-2.0
"""Stores that earlier versions of engage made: ``tests/data/stores`` has them."""

from __future__ import annotations

import contextlib
import gzip
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pymongo
from bson import json_util

from engage.api import (
    EventStore,
    StorageContext,
)
from engage.testing.factories import TIME, all_pages, ids, letter
from engage_plugins.mongo.store import MongoStorage
from engage_plugins.sqlite import schema as sqlite_schema
from engage_plugins.sqlite.store import SqliteStorage
from support import mongo

STORES = Path(__file__).parents[1] / "data/stores"
EMAIL = "ada@example.com"


class Earlier:
    """A store of an earlier version."""

    def __init__(self, folder: Path, kind: str, version: int, *, merged: bool = False) -> None:
        """
        :param merged: take the SQLite store that has keys of events in its table of keys, and the
            file that it saved when it was closed.
        """
        self.kind = kind
        self.made = version
        # A migration writes much, and the disk of a busy machine may then stall.
        self._context = StorageContext(
            base_dir=folder, identifiers={"acme": ("email", "phone")}, write_timeout=60
        )
        if kind == "sqlite":
            self._path = folder / "engage.db"
            name = f"sqlite-{version}-merged" if merged else f"sqlite-{version}"
            for ending in (".db", ".db-keys") if merged else (".db",):
                content = (STORES / f"{name}{ending}.gz").read_bytes()
                self._path.with_suffix(ending).write_bytes(gzip.decompress(content))
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
