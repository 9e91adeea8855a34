# SPDX-License-Identifier: Apache-2.0
"""The journal of arrivals, where a process may end at a bad moment."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymongo
import pytest

from engage.testing import event
from engage.testing.factories import TIME
from engage.testing.harness import eventually
from engage_plugins.mongo import arrivals
from support import mongo
from support.mongo_proxy import Proxy

pytestmark = pytest.mark.mongo


@contextlib.contextmanager
def raw(url: str) -> Iterator[Any]:
    with pymongo.MongoClient[dict[str, Any]](url) as client:
        yield client.get_default_database()


async def test_what_is_being_entered_is_still_covered(tmp_path: Path) -> None:
    """A process that dies before its entry is stored leaves a document that leads to the events."""
    inserting, go = threading.Event(), threading.Event()

    def rule(name: str, command: Mapping[str, Any]) -> None:
        if name == "insert" and command["insert"] == "arrivals":
            inserting.set()
            assert go.wait(60)

    server = mongo.shared(mongo.proxied_kind())
    with Proxy(server.address) as proxy:
        url = proxy.url(server.url().rpartition("/")[2].partition("?")[0])
        async with mongo.opened(tmp_path, url) as store:
            proxy.rule = rule
            await store.write([event("entering")])
            await asyncio.to_thread(inserting.wait, 60)
            # Such an old event updates the document.
            await store.write([event("old", received=-(10**8))])
            with raw(url) as db:
                (mine,) = db.meta.find({"_id": {"$regex": "^writer:"}})
                entering = db.events.find_one({"_id": {"$regex": ":entering$"}})
            go.set()
            assert mine["since"] <= entering["receivedAt"]
            assert mine["before"] <= entering["_seq"]


async def test_a_process_that_was_taken_over_registers_before_it_acknowledges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = mongo.shared(mongo.proxied_kind()).url()
    async with mongo.opened(tmp_path, url) as store:
        recent = time.time_ns() // 1_000_000 - TIME
        await store.write([event("a", received=recent)])
        await eventually(_entered(url, 1), AssertionError)
        with raw(url) as db:
            # As another process does after the document was the same for 30 seconds.
            db.meta.delete_many({"_id": {"$regex": "^writer:"}})
            monkeypatch.setattr(arrivals, "BEAT", -1.0)
            await store.write([event("b", received=recent)])
            (mine,) = db.meta.find({"_id": {"$regex": "^writer:"}})
            assert mine["before"] <= db.events.find_one({"_id": {"$regex": ":b$"}})["_seq"]


async def test_entries_expire_with_their_events(tmp_path: Path) -> None:
    """Entry 0 and the last one stay."""
    url = mongo.shared(mongo.proxied_kind()).url()
    async with mongo.opened(tmp_path, url) as store:
        for number in range(3):
            await store.write([event(f"m{number}", received=number)])
            await eventually(_entered(url, number + 1), AssertionError)
        assert await store.expire(TIME + 2, limit=10) == 2
        with raw(url) as db:
            assert [document["_id"] for document in db.arrivals.find().sort("_id")] == [0, 3]
        assert await store.expire(TIME + 9, limit=10, force=True) == 1
        with raw(url) as db:
            assert [document["_id"] for document in db.arrivals.find().sort("_id")] == [0, 3]


def _entered(url: str, count: int) -> Any:
    async def check() -> None:
        with raw(url) as db:
            assert sum(document.get("count", 0) for document in db.arrivals.find()) == count

    return check
