# SPDX-License-Identifier: Apache-2.0
"""Make the stores of this folder, with the version of engage that is installed.

They are stores that an earlier version of engage made, so that the tests can migrate them. Check
out the last commit that writes the version, and run there::

    PYTHONPATH=tests python tests/data/stores/make.py

It writes ``sqlite-2.db.gz`` (the file of the store) and ``mongo-2.json`` (the documents of each
collection, as MongoDB Extended JSON), with the number of the version. From version 4 on, it also
writes ``sqlite-4-merged.db.gz``, a store some of whose keys are in the table of keys, and
``sqlite-4-merged.db-keys.gz``, what that store saved when it was closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pymongo
from bson import json_util

from engage.api import EventStore, StorageContext, SubscriptionChange
from engage.testing.factories import TIME, event, identify, letter
from engage_plugins.mongo import schema as mongo_schema
from engage_plugins.mongo.store import MongoStorage
from engage_plugins.sqlite import keys, merge
from engage_plugins.sqlite import schema as sqlite_schema
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.events import row_of
from engage_plugins.sqlite.store import SqliteStorage
from support import mongo
from support.sqlite import settings

HERE = Path(__file__).parent
#: As the tests open the stores.
IDENTIFIERS = {"acme": ("email", "phone")}

#: Two people and a user that somebody else made with Ada's address.
EVENTS = [
    identify("1", "ada", 10, traits={"email": "Ada@Example.com", "plan": "pro", "n": None}),
    identify("2", "bob", 20, traits={"email": "bob@example.com", "phone": "+1 2"}),
    identify("3", "forged", 30, traits={"email": "ada@example.com"}),
    identify("4", "ada", 40, traits={"email": "ada@example.com"}, anonymous_id="visitor"),
    event("5", type="group", user_id="ada", groupId="g", at=50, traits={"size": 3}),
    event("6", user_id="ada", at=60),
]


async def fill(store: EventStore) -> None:
    """Write the records."""
    await store.open(create=True)
    for one in EVENTS:
        await store.write([one])
    assert isinstance(store, SqliteStorage | MongoStorage)
    await store.put([letter("bad")])
    choices = {"news": True}
    await store.apply(
        SubscriptionChange(
            id="c", workspace_id="acme", user_id="ada", choices=choices, at=TIME + 70, how="api"
        )
    )
    await store.close()


def make_sqlite(context: StorageContext) -> None:
    """Make the store of SQLite."""
    asyncio.run(fill(SqliteStorage.from_options({}, context)))
    path = context.base_dir / "engage.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    compress(path, f"sqlite-{sqlite_schema.VERSION}.db.gz")


def make_merged(folder: Path) -> None:
    """Make a store of SQLite whose events have numbers as message ids, and are merged after 20.

    The events 0 to 29 are deleted when their keys are merged. Then 3 and 7 are stored again, and
    the key of 3 is merged again.
    """
    keys.MERGE_KEYS = (20, 40)
    merge.LEAST_KEYS = 3
    path = folder / "merged.db"
    engine = Engine(settings(path))
    engine.open(True, True)
    write(engine, range(60))
    assert engine.expire(TIME + 30, 30, True) == 30
    write(engine, [3, *range(60, 108), 7, *range(108, 115)], later=1000)
    engine.close()
    compress(path, f"sqlite-{sqlite_schema.VERSION}-merged.db.gz")
    compress(folder / "merged.db-keys", f"sqlite-{sqlite_schema.VERSION}-merged.db-keys.gz")


def write(engine: Engine, names: Iterable[int], later: int = 0) -> None:
    """Write events, each in a transaction of its own."""
    for name in names:
        engine.write([row_of(event(str(name), at=name + later))])
        engine.work()


def compress(path: Path, name: str) -> None:
    """Write a compressed copy of a file into this folder."""
    (HERE / name).write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def make_mongo(context: StorageContext) -> None:
    """Make the store of MongoDB."""
    url = mongo.shared(mongo.kinds()[-1]).url()
    asyncio.run(fill(MongoStorage.from_options({"url": url}, context)))
    found = {}
    client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(url)
    with client:
        db = client.get_default_database()
        for name in sorted(db.list_collection_names()):
            if not name.startswith("system."):
                found[name] = list(db[name].find().sort("_id"))
    name = f"mongo-{mongo_schema.VERSION}.json"
    (HERE / name).write_text(json_util.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = StorageContext(base_dir=Path(folder), identifiers=IDENTIFIERS)
        make_sqlite(context)
        make_merged(Path(folder))
        make_mongo(context)
