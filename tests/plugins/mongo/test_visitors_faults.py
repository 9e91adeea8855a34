# SPDX-License-Identifier: Apache-2.0
"""Visitors on MongoDB when a process ends between the writes of one person, or others write it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymongo
import pytest

from engage.api import EventFilter, StorageUnavailable
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import TIME, all_pages
from engage.testing.processes import run_children
from support import mongo
from support.mongo_proxy import CLOSE, Proxy
from support.rules.visitors import decision, people_in, people_of, visit

pytestmark = pytest.mark.mongo

EMAIL = {WORKSPACE: ("email",)}


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as made:
        yield made


def url_of(proxy: Proxy) -> str:
    return proxy.url(f"engage_test_{os.urandom(6).hex()}")


def person() -> list[Any]:
    """Return events that write all collections of one person."""
    email = {"email": "x@y.z"}
    return [
        visit("1", "v", 1, traits=email),
        event("2", type="group", anonymous_id="v", groupId="g", at=2),
        identify("3", "u", 3, anonymous_id="v", traits=email),
        event("4", type="group", user_id="u", groupId="h", at=4),
        decision("5", "u2", "v", 5, linked=False),
    ]


@pytest.mark.parametrize(
    "collection",
    [
        "users",
        "visitors",
        "links",
        "memberships",
        "visitor_memberships",
        "claims",
        "visitor_claims",
    ],
)
async def test_a_crash_between_the_halves_of_a_person(
    tmp_path: Path, proxy: Proxy, collection: str
) -> None:
    """One collection has nothing of the write, and the others have all. The next start mends it."""
    url = url_of(proxy)
    dying = mongo.make_store(tmp_path, url, identifiers=EMAIL)
    await dying.open(create=True)
    await mongo.prepared(dying)
    proxy.rule = lambda name, command: CLOSE if command.get("update") == collection else None
    with pytest.raises(StorageUnavailable):
        await dying.write(person())
    await mongo.die(dying, proxy)
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as store:
        assert await people_in(store, WORKSPACE) == people_of(person())


@pytest.mark.parametrize("collection", ["visitors", "visitor_memberships", "visitor_claims"])
async def test_a_crash_during_expiry_leaves_nothing(
    tmp_path: Path, proxy: Proxy, collection: str
) -> None:
    """A claim has an e-mail address: it must not stay without the visitor."""
    url = url_of(proxy)
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as store:
        await store.write(person()[:2])
        proxy.rule = lambda name, command: CLOSE if command.get("delete") == collection else None
        with pytest.raises(StorageUnavailable):
            await store.expire_visitors(TIME + 9, limit=9)
        proxy.rule = None
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as store:
        assert await store.expire_visitors(TIME + 9, limit=9) == 1
    client: Any
    with pymongo.MongoClient(url) as client:
        db = client.get_default_database()
        for name in ("visitors", "visitor_memberships", "visitor_claims"):
            assert list(db[name].find()) == []


async def test_a_link_arrives_while_its_visitor_expires(tmp_path: Path, proxy: Proxy) -> None:
    """The user has the visitor or not, and never a part of it; a new event makes it again."""
    url = url_of(proxy)
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as store:
        *parts, link = person()[:3]
        await store.write(parts)
        go, held = threading.Event(), threading.Event()

        def hold(_name: str, command: Mapping[str, Any]) -> None:
            if command.get("delete") == "visitor_claims" and not held.is_set():
                held.set()
                assert go.wait(120)

        proxy.rule = hold
        expiring = asyncio.ensure_future(store.expire_visitors(TIME + 9, limit=9))
        assert await asyncio.to_thread(held.wait, 120)
        await store.write([link])
        go.set()
        assert await expiring == 1
        assert await people_in(store, WORKSPACE) == people_of([link])
        again = visit("again", "v", 9, traits={"a": 1})
        await store.write([again])
        assert await people_in(store, WORKSPACE) == people_of([link, again])


async def test_a_thousand_users_of_a_visitor_and_visitors_of_a_user(
    tmp_path: Path, proxy: Proxy
) -> None:
    """Each is one more than a user has links, and than are read at once."""
    many = range(1001)
    async with mongo.opened(tmp_path, url_of(proxy), identifiers=EMAIL) as store:
        await store.write([visit("hub", "hub", traits={"hub": 1, "email": "hub@b.c"})])
        hubs = [identify(f"h{n}", f"h{n}", received=n, anonymous_id="hub") for n in many]
        await store.write(hubs[::-1])
        visits = [visit(f"v{n}", f"v{n}", n, traits={"email": f"v{n}@b.c", "n": n}) for n in many]
        await store.write(visits)
        await store.write([identify(f"u{n}", "u", received=n, anonymous_id=f"v{n}") for n in many])
        assert store.dropped_changes == 1
        proxy.seen.clear()
        users = {user.user_id: user for user in await all_pages(store.scan_users, WORKSPACE)}
        assert proxy.seen.count("find") < 100
        assert {name for name, user in users.items() if "hub" in user.traits} == {"h0"}
        # The 100 that were linked first are merged, and belong to the user with all others.
        assert users["u"].traits == {"email": "v99@b.c", "n": 99}
        assert users["u"].anonymous_ids == sorted(f"v{n}" for n in range(1000))
        wanted = ["hub@b.c", "v99@b.c", "v100@b.c", "v1000@b.c"]
        found = await store.find_users(WORKSPACE, "email", wanted)
        assert found == {"hub@b.c": ["h0"], "v99@b.c": ["u"]}
        found = await store.find_visitors(WORKSPACE, "email", wanted)
        assert found == {"v1000@b.c": ["v1000"]}
        await store.write([decision(f"d{n}", f"h{n}", "hub", linked=False) for n in many[:-1]])
        visitor = await store.visitor(WORKSPACE, "hub")
        assert visitor is not None
        assert visitor.user_id == "h1000"


#: The code of a process that writes histories, an event at a time, until it is killed.
_CHILD = """
import asyncio, json, random, sys
from pathlib import Path
job = json.loads(sys.stdin.readline())
sys.path[:0] = job["path"]
from engage.testing.processes import print_line
from support.rules.visitors import history
from support import mongo

async def main():
    identifiers = {name: ("email",) for name in job["names"]}
    events = [one for name in job["names"] for one in history(random.Random(name).choice, name)]
    random.Random("order").shuffle(events)
    async with mongo.opened(Path(), job["url"], identifiers=identifiers) as store:
        for start in range(0, len(events), 3):
            await store.write(events[start : start + 3])
            print_line("written")

asyncio.run(main())
"""


async def test_a_killed_process_leaves_no_half_of_a_person(tmp_path: Path) -> None:
    """What is stored is applied when the store is opened again, without another event."""
    url = mongo.shared(mongo.durable_kind()).url()
    names = [f"w{number}" for number in range(6)]
    chance = random.Random(7)
    for _ in range(3):
        job = {"url": url, "names": names, "path": sys.path}
        async with run_children(_CHILD, [job]) as (child,):
            assert child.stdout is not None
            for _ in range(chance.randrange(1, 12)):
                await child.stdout.readline()
            await asyncio.sleep(chance.random() / 20)
            child.kill()
            await child.wait()
        identifiers = dict.fromkeys(names, ("email",))
        async with mongo.opened(tmp_path, url, identifiers=identifiers) as store:
            for name in names:
                stored = await all_pages(store.scan, EventFilter(workspace_id=name))
                assert await people_in(store, name) == people_of(stored), name


async def test_an_operator_decides_while_clients_send(tmp_path: Path) -> None:
    """The last decision holds, whatever arrives beside it, in two processes."""
    url = mongo.shared(mongo.kinds()[-1]).url()
    async with mongo.opened(tmp_path, url) as one, mongo.opened(tmp_path, url) as other:
        await one.write([visit("1", "v", traits={"a": 1}), identify("2", "u"), identify("3", "w")])
        for turn in range(20):
            linked = bool(turn % 2)
            await asyncio.gather(
                one.write([decision(f"d{turn}", "u", "v", turn, linked=linked)]),
                other.write([identify(f"i{turn}", "u", 99 - turn, anonymous_id="v")]),
                one.write([identify(f"j{turn}", "w", 199 - turn, anonymous_id="v")]),
            )
            for store in (one, other):
                visitor = await store.visitor(WORKSPACE, "v")
                assert visitor is not None
                assert visitor.user_id == ("u" if linked else "w")
