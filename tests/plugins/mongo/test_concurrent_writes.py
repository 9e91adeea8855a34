# SPDX-License-Identifier: Apache-2.0
"""Writes that run at the same time: inserts overlap, and changes of profiles do not."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pymongo
import pytest

from engage.api import Event, Outcome, ProfileLimits, Status, StorageUnavailable
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import change, ids
from engage.testing.harness import eventually
from engage_plugins.mongo.store import MongoStorage
from support import mongo
from support.mongo_proxy import CLOSE, CUT, LOSE_REPLY, Proxy
from support.waiting import wait_for

pytestmark = pytest.mark.mongo

KIND = mongo.proxied_kind()


class Held:
    """A rule of a proxy that holds some commands until it is told to let them go."""

    def __init__(self, is_wanted: Callable[[str, Mapping[str, Any]], bool]) -> None:
        self.is_wanted = is_wanted
        self.count = 0
        self._go = threading.Event()

    def __call__(self, name: str, command: Mapping[str, Any]) -> None:
        if not self._go.is_set() and self.is_wanted(name, command):
            self.count += 1
            assert self._go.wait(120)

    def release(self) -> None:
        self._go.set()


def updates_users(name: str, command: Mapping[str, Any]) -> bool:
    return name == "update" and command["update"] == "users"


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_for, condition, what=what)


@pytest.fixture
def proxy() -> Any:
    with Proxy(mongo.shared(KIND).address) as made:
        yield made


def url_of(proxy: Proxy, options: str = "") -> str:
    name = mongo.shared(KIND).url().rpartition("/")[2].partition("?")[0]
    return proxy.url(name, options)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


async def test_events_without_changes_do_not_wait_for_changes(tmp_path: Path, proxy: Proxy) -> None:
    async with mongo.opened(tmp_path, url_of(proxy)) as store:
        proxy.rule = held = Held(updates_users)
        changing = asyncio.ensure_future(store.write([identify("i", "u", traits={"a": 1})]))
        await until(lambda: held.count, "the update of the user")
        assert statuses(await store.write([event("e")])) == [Status.STORED]
        assert not changing.done()
        held.release()
        assert statuses(await changing) == [Status.STORED]


async def test_changes_wait_for_each_other(tmp_path: Path, proxy: Proxy) -> None:
    """The events of the second write are inserted meanwhile, but it reads no profile yet."""
    async with mongo.opened(tmp_path, url_of(proxy)) as store:
        proxy.rule = held = Held(updates_users)
        first = asyncio.ensure_future(store.write([identify("1", "u", traits={"a": 1})]))
        await until(lambda: held.count, "the update of the user")
        proxy.seen.clear()
        second = asyncio.ensure_future(store.write([identify("2", "u", 1, traits={"a": 2})]))
        await until(lambda: "insert" in proxy.seen, "the second insert")
        await asyncio.sleep(0.1)
        assert not {"find", "update"} & set(proxy.seen)
        held.release()
        await asyncio.gather(first, second)
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.traits == {"a": 2}


async def test_a_duplicate_waits_for_the_changes_of_the_first(tmp_path: Path, proxy: Proxy) -> None:
    """Otherwise a crash of the server could undo what the duplicate acknowledged."""
    async with mongo.opened(tmp_path, url_of(proxy)) as store:
        proxy.rule = held = Held(updates_users)
        written = identify("i", "u", traits={"a": 1})
        first = asyncio.ensure_future(store.write([written]))
        await until(lambda: held.count, "the update of the user")
        again = asyncio.ensure_future(store.write([written, event("e")]))
        plain = asyncio.ensure_future(store.write([event("i"), event("f")]))
        await until(lambda: proxy.seen.count("insert") >= 3, "the inserts")
        await asyncio.sleep(0.1)
        assert not again.done()
        assert not plain.done()
        held.release()
        assert statuses(await first) == [Status.STORED]
        assert statuses(await again) == [Status.DUPLICATE, Status.STORED]
        assert statuses(await plain) == [Status.DUPLICATE, Status.STORED]


async def test_a_repeated_change_is_answered_with_all_choices(tmp_path: Path, proxy: Proxy) -> None:
    """Also if the user has none when the repetition begins."""
    direct = mongo.shared(KIND).url()
    name = direct.rpartition("/")[2].partition("?")[0]
    async with (
        mongo.opened(tmp_path, proxy.url(name)) as store,
        mongo.opened(tmp_path, direct) as other,
    ):
        proxy.rule = held = Held(
            lambda name, command: name == "find" and command["find"] == "subscription_history"
        )
        repeated = asyncio.ensure_future(store.apply(change("1", a=True)))
        await until(lambda: held.count and proxy.seen.count("find") > 1, "both to be read")
        assert await other.apply(change("1", a=True)) == {"a": True}
        held.release()
        assert await repeated == {"a": True}


async def test_a_failed_insert_ends_with_its_write(tmp_path: Path, proxy: Proxy) -> None:
    """Also while the write waits to change profiles; the lock is not kept."""
    async with mongo.opened(tmp_path, url_of(proxy, "retryWrites=false")) as store:
        proxy.rule = held = Held(updates_users)
        first = asyncio.ensure_future(store.write([identify("1", "u", traits={"a": 1})]))
        await until(lambda: held.count, "the update of the user")
        proxy.rule = lambda name, command: CLOSE if name == "insert" else None
        second = asyncio.ensure_future(store.write([identify("2", "u", 1, traits={"a": 2})]))
        await asyncio.sleep(0.1)
        held.release()
        assert statuses(await first) == [Status.STORED]
        with pytest.raises(StorageUnavailable):
            await second
        proxy.rule = None
        assert statuses(await store.write([identify("3", "u", 2)])) == [Status.STORED]
        assert sorted(await ids(store)) == ["1", "3"]


async def test_a_cancelled_write_lets_the_others_go_on(tmp_path: Path, proxy: Proxy) -> None:
    async with mongo.opened(tmp_path, url_of(proxy)) as store:
        proxy.rule = held = Held(updates_users)
        first = asyncio.ensure_future(store.write([identify("1", "u", traits={"a": 1})]))
        await until(lambda: held.count, "the update of the user")
        waiting = [
            asyncio.ensure_future(store.write([identify(name, "u", 1, traits={name: 1})]))
            for name in "23"
        ]
        await until(lambda: proxy.seen.count("insert") >= 3, "the inserts")
        waiting[0].cancel()
        first.cancel()
        held.release()
        assert statuses(await waiting[1]) == [Status.STORED]
        await asyncio.gather(first, waiting[0], return_exceptions=True)

        async def merged() -> None:
            profile = await store.profile(WORKSPACE, "u")
            assert profile is not None
            assert profile.traits == {"a": 1, "2": 1, "3": 1}

        # The changes of the cancelled ones are completed in the background.
        await eventually(merged, AssertionError)


@pytest.mark.parametrize("kind", mongo.kinds())
async def test_writes_at_the_same_time_keep_the_limits(tmp_path: Path, kind: str) -> None:
    limits = ProfileLimits(traits=5, trait_bytes=10_000, links=7, memberships=7)
    url = mongo.shared(kind).url()
    async with mongo.opened(tmp_path, url, profile_limits=limits) as store:
        for turn in range(10):
            user = f"u{turn}"
            before = store.dropped_changes
            writes = [
                [
                    identify(f"{turn}-{call}", user, traits={f"{call}-{n}": n for n in range(4)}),
                    *(
                        event(f"{turn}-{call}-{n}", user_id=user, anonymous_id=f"{turn}.{call}.{n}")
                        for n in range(5)
                    ),
                ]
                for call in range(2)
            ]
            await asyncio.gather(*map(store.write, writes))
            profile = await store.profile(WORKSPACE, user)
            assert profile is not None
            assert len(profile.traits) == 5
            assert len(profile.anonymous_ids) == 7
            assert store.dropped_changes - before == 3 + 3


@pytest.mark.long
async def test_what_was_acknowledged_survives_faults(tmp_path: Path, proxy: Proxy) -> None:
    """Writes overlap while connections are cut at random. Each event is sent until it is
    acknowledged, by two callers. Another process would see each once, and all changes."""
    url = url_of(proxy, "timeoutMS=3000&serverSelectionTimeoutMS=1000")
    chance = random.Random(1)
    faults = (*[None] * 27, CUT, LOSE_REPLY, CLOSE)
    newest: dict[str, int] = {}
    stored: Counter[str] = Counter()
    failures = 0

    async def send(store: MongoStorage, events: Sequence[Event]) -> None:
        nonlocal failures
        while True:
            try:
                outcomes = await store.write(events)
            except StorageUnavailable:
                failures += 1
                await asyncio.sleep(0.01)
                continue
            for one, outcome in zip(events, outcomes, strict=True):
                stored[one.message_id] += outcome.status is Status.STORED
            return

    async with mongo.opened(tmp_path, url) as store:
        proxy.rule = lambda name, command: (
            chance.choice(faults) if name in ("insert", "update", "find") else None
        )
        for turn in range(12):
            batches = []
            for call in range(2):
                user = f"u{chance.randrange(4)}"
                name, at = f"{turn}-{call}", 2 * turn + call
                newest[user] = max(at, newest.get(user, 0))
                batches.append(
                    [
                        event(f"{name}-a", anonymous_id="visitor"),
                        identify(name, user, at, traits={"at": at, name: True}),
                    ]
                )
            batches.append([event(f"{turn}-plain")])
            await asyncio.gather(*(send(store, batch) for batch in batches * 2))
        proxy.rule = None
        # A second process takes over what the first one left.
        async with mongo.opened(tmp_path, url) as second:
            assert failures > 0
            assert max(stored.values()) <= 1
            assert sorted(await ids(second)) == sorted(stored)
            for user, at in newest.items():
                profile = await second.profile(WORKSPACE, user)
                assert profile is not None
                assert profile.traits["at"] == at
            await eventually(lambda: _without_marks(url), AssertionError)


async def _without_marks(url: str) -> None:
    client: Any
    with pymongo.MongoClient(url) as client:
        assert client.get_default_database().events.count_documents({"_mark": {"$exists": 1}}) == 0
