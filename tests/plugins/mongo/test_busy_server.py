# SPDX-License-Identifier: Apache-2.0
"""The MongoDB storage on a server that is too busy to answer in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import orjson
import pymongo
import pytest

from engage.api import StorageUnavailable
from engage.reading import export
from engage.testing import WORKSPACE, event, identify
from engage_plugins.mongo import schema, store, writer
from support import mongo
from support.mongo_proxy import Proxy, closing_updates
from support.waiting import eventually

pytestmark = pytest.mark.mongo

#: What a server answers if a command took longer than ``maxTimeMS``.
TOO_SLOW = {"ok": 0.0, "errmsg": "operation exceeded time limit", "code": 50}


async def test_a_store_is_prepared_over_several_calls(tmp_path: Path) -> None:
    """Each call has too little time for it, and ends before it is done."""

    def slow(_name: str, _command: Any) -> None:
        time.sleep(0.2)

    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=1000")
        async with mongo.opened(tmp_path, url):
            pass
        proxy.rule = slow
        made = mongo.make_store(tmp_path, url)
        async with asyncio.timeout(60):
            await made.open(create=True)
        for _ in range(60):
            with contextlib.suppress(TimeoutError, StorageUnavailable):
                # As long as the core waits.
                async with asyncio.timeout(1.0):
                    await made.write([event("a")])
                    break
        else:
            pytest.fail("the store was never prepared")
        proxy.rule = None
        await made.close()


async def test_a_store_works_although_cut_off_changes_cannot_be_completed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are completed later, a step after the other."""
    monkeypatch.setattr(store, "_PAUSE", 0.05)
    monkeypatch.setattr(writer, "_STEP", 4)
    searches = 0

    def busy(name: str, command: Any) -> Any:
        nonlocal searches
        marked = name == "find" and command["find"] == schema.EVENTS and command.get("limit") == 4
        searches += marked
        return TOO_SLOW if marked and searches <= 2 else None

    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=4000")
        dying = mongo.make_store(tmp_path, url)
        await dying.open(create=True)
        await mongo.prepared(dying)
        proxy.rule = closing_updates
        with pytest.raises(StorageUnavailable):
            await dying.write([identify(f"m{n}", f"u{n}", n, traits={"n": n}) for n in range(20)])
        await mongo.die(dying, proxy)
        proxy.rule = busy
        async with mongo.opened(tmp_path, url) as made:
            await made.write([event("a")])
            with contextlib.closing(pymongo.MongoClient[Any](url)) as client:
                events = client.get_default_database()[schema.EVENTS]
                await eventually(lambda: not events.find_one({"_mark": {"$exists": True}}))
            for number in range(20):
                user = await made.profile(WORKSPACE, f"u{number}")
                assert user is not None
                assert user.traits == {"n": number}


async def test_the_search_for_cut_off_changes_does_not_keep_a_server_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is repeated after the time of a call: FerretDB 1 reads all events for it."""
    monkeypatch.setattr(store, "_PAUSE", 0.05)
    searches: list[float] = []

    def busy(name: str, command: Any) -> Any:
        if name == "find" and command["find"] == schema.EVENTS and "limit" in command:
            searches.append(time.monotonic())
            time.sleep(0.3)
            return TOO_SLOW
        return closing_updates(name, command) if searches == [] else None

    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")
        async with mongo.opened(tmp_path, url) as made:
            proxy.rule = busy
            with pytest.raises(StorageUnavailable):
                await made.write([identify("m", "u", 1, traits={"n": 1})])
            await eventually(lambda: searches)
            await asyncio.sleep(1)
            assert len(searches) == 1
            await made.write([event("a")])
            proxy.rule = None


async def test_an_export_gets_through_although_pages_take_long_or_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page may take longer than any other call; one that fails is read again."""
    monkeypatch.setattr("engage.reading.scans.PAUSE", 0.0)
    pages = 0

    def busy(name: str, command: Any) -> Any:
        nonlocal pages
        if name != "find" or command["find"] != schema.EVENTS:
            return None
        pages += 1
        if pages == 2:
            time.sleep(2.5)
        return TOO_SLOW if pages in (1, 3, 4) else None

    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=60000")
        async with mongo.opened(tmp_path, url) as made:
            await made.write([event(f"m{number}", at=number) for number in range(1200)])
        async with mongo.opened(tmp_path, url.replace("60000", "2000")) as made:
            proxy.rule = busy
            events = export.export(made, "events", export.Selection())
            ids = [orjson.loads(record.json)["messageId"] async for record in events]
            proxy.rule = None
    assert ids == [f"m{number}" for number in range(1200)]
    assert pages > 4
