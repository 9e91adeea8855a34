# SPDX-License-Identifier: Apache-2.0
"""Visitors on MongoDB: links of earlier versions, the number of queries, floods, and expiry."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymongo
import pytest

from engage.api import ProfileLimits
from engage.store import changes
from engage.store import identifiers as planned
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import TIME, all_pages, user, visitor
from engage_plugins.mongo import people_steps as people
from engage_plugins.mongo import profiles
from engage_plugins.mongo.store import MongoStorage
from support import mongo
from support.mongo_proxy import Proxy
from support.rules.visitors import decision, visit
from support.waiting import wait_for

pytestmark = pytest.mark.mongo

ATOMIC = mongo.kinds()[-1]
EMAIL = {WORKSPACE: ("email",)}


@contextlib.contextmanager
def raw(url: str) -> Any:
    """Return the database, through the driver."""
    client: Any
    with pymongo.MongoClient(url) as client:
        yield client.get_default_database()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as made:
        yield made


def url_of(proxy: Proxy) -> str:
    return proxy.url(f"engage_test_{os.urandom(6).hex()}")


async def owner(store: MongoStorage, anonymous_id: str) -> str | None:
    visitor = await store.visitor(WORKSPACE, anonymous_id)
    assert visitor is not None
    found: str | None = visitor.user_id
    return found


async def test_a_link_without_a_version_is_older_than_all(tmp_path: Path) -> None:
    """Earlier versions of engage stored such links."""
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url) as store:
        await store.write([identify("1", "old", 5), identify("2", "new", 6), visit("3", "v", 1)])
        with raw(url) as db:
            link = {"workspaceId": WORKSPACE, "user": f"{WORKSPACE}:old", "anonymousId": "v"}
            db.links.insert_one({"_id": f"{WORKSPACE}:3:old:v", **link})
        linked = event("4", user_id="new", anonymous_id="v", received=2)
        await store.write([linked, event("5", user_id="old", anonymous_id="v", received=9)])
        assert await owner(store, "v") == "old"
        await store.write([decision("6", "old", "v", 9, linked=False)])
        assert await owner(store, "v") == "new"
        await store.write([decision("7", "old", "v", 10, linked=True)])
        assert await owner(store, "v") == "old"


async def test_a_decision_alone_is_no_link(tmp_path: Path) -> None:
    """Neither one that takes none of the room for links, nor one whose link had no room."""
    limits = ProfileLimits(links=1)
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url, profile_limits=limits) as store:
        await store.write([identify("1", "u"), *(visit(name, name) for name in "vwx")])
        await store.write([decision("2", "u", "v", linked=False)])
        await store.write([decision("3", "u", "w", linked=True)])
        assert store.dropped_changes == 0
        await store.write([decision("4", "u", "x", linked=True)])
        assert store.dropped_changes == 1
        found = [await owner(store, name) for name in "vwx"]
        assert found == [None, "u", None]
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.anonymous_ids == ["w"]


async def test_a_known_link_becomes_earlier(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once a second, a write looks for erasures.
    monkeypatch.setattr("engage_plugins.mongo.profiles.ERASURES_SECONDS", 600)
    url = url_of(proxy)
    async with mongo.opened(tmp_path, url) as store:

        async def commands(name: str, received: int) -> list[str]:
            proxy.seen.clear()
            await store.write([event(name, user_id="u", anonymous_id="v", received=received)])
            return sorted(name for name in proxy.seen if name not in ("isMaster", "ismaster"))

        for name, received, is_known in (("1", 5, False), ("2", 6, True), ("3", 4, False)):
            expected = ["insert"] if is_known else ["find", "insert", "update"]
            assert await commands(name, received) == expected
        with raw(url) as db:
            assert int(db.links.find_one()["first"]["t"].timestamp() * 1000) == TIME + 4


async def test_a_page_needs_a_constant_number_of_queries(tmp_path: Path, proxy: Proxy) -> None:
    async with mongo.opened(tmp_path, url_of(proxy), identifiers=EMAIL) as store:
        for number in range(20):
            email = {"email": f"{number % 2}@b.c"}
            await store.write(
                [
                    visit(f"a{number}", f"v{number}", traits=email),
                    event(f"b{number}", type="group", anonymous_id=f"v{number}", groupId="g"),
                    identify(f"c{number}", f"u{number}", 1, anonymous_id=f"v{number}"),
                ]
            )

        async def queries(call: Any) -> int:
            proxy.seen.clear()
            await call
            return proxy.seen.count("find")

        for scan in (store.scan_users, store.scan_visitors):
            few, many = [await queries(scan(WORKSPACE, after=None, limit=n)) for n in (2, 20)]
            assert few == many <= 8
        await store.write([identify("one", "one", traits={"email": "one@b.c"}, anonymous_id="v1")])
        few, many = [
            await queries(store.find_users(WORKSPACE, "email", [value]))
            for value in ("one@b.c", "0@b.c")
        ]
        assert few <= many <= 15
        # A user without links needs three.
        await store.write([identify("alone", "alone")])
        assert await queries(store.profile(WORKSPACE, "alone")) == 3


async def test_a_page_with_very_many_visitors_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(people, "BATCH", 3)
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url) as store:
        for number in range(12):
            name, user = f"v{number}", f"u{number % 5}"
            await store.write([visit(f"a{number}", name, traits={name: number})])
            await store.write([identify(f"b{number}", user, anonymous_id=name)])
        await store.write([identify("alone", "alone")])
        users = await all_pages(store.scan_users, WORKSPACE)
        assert {one.user_id: set(one.traits) for one in users} == {
            "alone": set(),
            **{f"u{user}": {f"v{n}" for n in range(user, 12, 5)} for user in range(5)},
        }


async def test_very_many_links_of_an_anonymous_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone can make them; neither that visitor nor the others of a page get a wrong owner."""
    monkeypatch.setattr(people, "BATCH", 2)
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url) as store:
        names = ("a", "m", "z")
        await store.write([visit(name, name) for name in names])
        await store.write(
            [
                identify(f"{name}{number}", f"u{number}", received=9 - number, anonymous_id=name)
                for name in names
                for number in range(9)
            ]
        )
        await store.write([decision("d", "u8", "m", linked=False)])
        found = await all_pages(store.scan_visitors, WORKSPACE)
        assert {one.anonymous_id: one.user_id for one in found} == {"a": "u8", "m": "u7", "z": "u8"}


async def test_a_flood_of_visitors_hides_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their claims are older, and more than those that are read at once."""
    monkeypatch.setattr(people, "BATCH", 4)
    monkeypatch.setattr(planned, "MAX_CANDIDATES", 12)
    for module in (people, planned):
        monkeypatch.setattr(module, "MAX_USERS", 3)
    url = mongo.shared(ATOMIC).url()
    email = {"email": "a@b.c"}
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as store:
        await store.write([visit(f"f{n}", f"f{n}", received=n, traits=email) for n in range(50)])
        users = [identify(f"u{n}", f"u{n}", received=100 + n, traits=email) for n in range(9)]
        await store.write(users)

        async def found() -> list[str]:
            return list((await store.find_users(WORKSPACE, "email", ["a@b.c"]))["a@b.c"])

        assert await found() == ["u0", "u1", "u2"]
        # The claim of a visitor is the person's, also if the user's own is one of the latest.
        await store.write([event("l", user_id="u8", anonymous_id="f5")])
        assert await found() == ["u8", "u0", "u1"]
        # A value that does not win finds nobody.
        await store.write([identify("x", "u0", 5, traits={"email": "x@b.c"})])
        await store.write([identify("y", "u1", 5, anonymous_id="w")])
        await store.write([visit("z", "w", 9, traits={"email": "x@b.c"})])
        assert await found() == ["u8", "u2", "u3"]
        visitors = await store.find_visitors(WORKSPACE, "email", ["a@b.c"])
        assert visitors == {"a@b.c": ["f0", "f1", "f2"]}
        held = await all_pages(store.holders, WORKSPACE, "email", "a@b.c", limit=7)
        assert sorted(held) == sorted(
            [*(visitor(f"f{n}") for n in range(50)), *(user(f"u{n}") for n in range(1, 9))]
        )


async def test_all_holders_of_a_common_value_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their claims, and then those without one."""
    monkeypatch.setattr(people, "MAX_USERS", 3)
    url = mongo.shared(ATOMIC).url()
    email, other = {"email": "a@b.c"}, {"email": "x@b.c"}
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as store:
        names = [f"u{n}" for n in range(10, 30)]
        await store.write([identify(n, n, 1, received=9, traits=email) for n in names])
        await store.write([identify(f"{n}x", n, 2, traits=other) for n in names[:9]])
        await store.write([identify(n, n, 20 - at, traits=email) for at, n in enumerate("abcdefg")])
        with raw(url) as db:
            db.claims.delete_many({"userId": {"$in": ["c", "e", "u22"]}})
        names = [n for n in names[9:] if n != "u22"]
        wanted = [user(n) for n in (*names, *"gfdba", "u22", *"ec")]
        for limit in (1, 2, 5, 50):
            assert (
                await all_pages(store.holders, WORKSPACE, "email", "a@b.c", limit=limit) == wanted
            )
        # So many had the value earlier that the claims do not tell in time who has it.
        monkeypatch.setattr(people, "_CLAIM_PAGES", 1)
        monkeypatch.setattr(planned, "MAX_CANDIDATES", 4)
        users = await store.find_users(WORKSPACE, "email", ["a@b.c"])
        assert [*map(user, users["a@b.c"])] == [*wanted[:3], user("u22")]
        for limit in (1, 2, 5, 50):
            held = await all_pages(store.holders, WORKSPACE, "email", "a@b.c", limit=limit)
            assert {*held} == {*wanted}


async def test_an_id_may_be_that_of_a_user_and_of_a_visitor(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    email = {"email": "a@b.c"}
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as store:
        await store.write(
            [
                visit("1", "x", traits=email, received=1),
                event("2", type="group", anonymous_id="x", groupId="of visitor"),
                identify("3", "x", received=5, traits=email),
                event("4", type="group", user_id="x", groupId="of user"),
            ]
        )
        profile, found = await store.profile(WORKSPACE, "x"), await store.visitor(WORKSPACE, "x")
        assert profile is not None
        assert found is not None
        assert (profile.groups, found.groups) == (["of user"], ["of visitor"])
        holders = await all_pages(store.holders, WORKSPACE, "email", "a@b.c", limit=1)
        assert holders == [user("x"), visitor("x")]
        with raw(url) as db:
            (claim,) = db.claims.find()
            assert int(claim["at"].timestamp() * 1000) == TIME + 5


async def test_expiry_looks_at_all_visitors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the old ones may belong to somebody. A call continues where the last one ended."""
    monkeypatch.setattr(profiles, "BATCH", 2)
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url) as store:
        free = {2, 5, 6, 7}
        for number in range(9):
            await store.write([visit(f"v{number}", f"v{number}", received=number)])
            if number not in free:
                await store.write([identify(f"u{number}", "u", anonymous_id=f"v{number}")])
        counts = [await store.expire_visitors(TIME + 8, limit=3) for _ in range(3)]
        assert counts == [3, 1, 0]
        await store.write([decision("d", "u", "v0", linked=False)])
        assert await store.expire_visitors(TIME + 8, limit=3) == 1
        left = {one.anonymous_id for one in await all_pages(store.scan_visitors, WORKSPACE)}
        assert left == {"v1", "v3", "v4", "v8"}


@pytest.mark.parametrize(
    ("step", "collection"),
    [
        ("update", "visitors"),
        ("delete", "visitor_memberships"),
        ("delete", "visitor_claims"),
        ("delete", "visitors"),
    ],
)
async def test_an_event_changes_a_visitor_that_is_being_deleted(
    tmp_path: Path, proxy: Proxy, step: str, collection: str
) -> None:
    """The event arrives before one of the steps."""
    go = threading.Event()
    held = 0

    def hold(name: str, command: Mapping[str, Any]) -> None:
        nonlocal held
        if command.get(step) == collection and not held:
            held += 1
            assert go.wait(120)

    def group(name: str, group_id: str, received: int) -> Any:
        return event(name, type="group", anonymous_id="v", groupId=group_id, received=received)

    email = {"email": "a@b.c"}
    async with mongo.opened(tmp_path, url_of(proxy), identifiers=EMAIL) as store:
        for name in ("v", "w"):
            await store.write([visit(f"{name}1", name, received=1, traits=email)])
        await store.write([group("g1", "g", 1), group("h1", "h", 1)])
        proxy.rule = hold
        expiring = asyncio.ensure_future(store.expire_visitors(TIME + 5, limit=9))
        await asyncio.to_thread(wait_for, lambda: held, what="the deletion")
        await store.write([visit("v2", "v", 2, received=9, traits=email), group("g2", "g", 9)])
        go.set()
        assert await expiring == 1
        (visitor,) = await all_pages(store.scan_visitors, WORKSPACE)
        assert visitor.anonymous_id == "v"
        assert visitor.traits == email
        # What was made again keeps what is newer; h is not of the new visitor.
        assert visitor.groups == (["g", "h"] if step == "update" else ["g"])
        assert await store.find_visitors(WORKSPACE, "email", ["a@b.c"]) == {"a@b.c": ["v"]}


async def test_visitors_are_not_counted_for_each_write(tmp_path: Path, proxy: Proxy) -> None:
    limits = ProfileLimits(visitors=2)
    async with mongo.opened(tmp_path, url_of(proxy), profile_limits=limits) as store:
        number = 0
        proxy.seen.clear()
        async with asyncio.timeout(60):
            while not number or await store.visitor(WORKSPACE, "1"):
                assert "delete" not in proxy.seen
                number += 1
                await store.write([visit(str(number), str(number))])
                await asyncio.sleep(0.01)
        assert number > 5
        assert Counter(proxy.seen)["count"] <= 3


async def test_a_bounded_number_of_visitors_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a write. The next one continues, and then finds those that it passed."""
    monkeypatch.setattr(changes, "_EXAMINED", 2)
    monkeypatch.setattr(changes, "_SEARCHES", 2)
    url = mongo.shared(ATOMIC).url()
    limits = ProfileLimits(visitors=9)
    async with mongo.opened(tmp_path, url, profile_limits=limits, identifiers=EMAIL) as store:

        async def left() -> set[str]:
            visitors = await all_pages(store.scan_visitors, WORKSPACE)
            return {one.anonymous_id for one in visitors}

        await store.write([identify("u", "u")])
        stay = [f"s{number}" for number in range(6)]
        for number, name in enumerate(stay):
            email = {"email": f"{name}@b.c"} if number in (1, 2) else {}
            await store.write([visit(name, name, received=number, traits=email)])
        await store.write([identify(f"l{n}", "u", anonymous_id=f"s{n}") for n in (0, 3, 4, 5)])
        await store.write([visit(name, name, received=9) for name in ("a", "b", "c")])
        store._cache.full.add(WORKSPACE)
        # Four are examined for those without an identifier, and then four for those with one.
        await store.write([visit("d", "d", received=10)])
        assert await left() == {*stay, *"abcd"} - {"s1"}
        await store.write([visit("e", "e", received=11)])
        assert await left() == {*stay, *"bcde"} - {"s1"}
        await store.write([visit(name, name, received=12) for name in "fghi"])
        assert len(await left()) == 9
        assert "s2" in await left()


async def test_an_event_changes_a_visitor_that_gives_way(tmp_path: Path, proxy: Proxy) -> None:
    """It stays, and the next one goes."""
    go, held = threading.Event(), threading.Event()

    def hold(_name: str, command: Mapping[str, Any]) -> None:
        if command.get("update") != "visitors" or held.is_set():
            return
        if any("$unset" in update["u"] for update in command["updates"]):
            held.set()
            assert go.wait(120)

    url = url_of(proxy)
    limits = ProfileLimits(visitors=2)
    async with (
        mongo.opened(tmp_path, url, profile_limits=limits) as store,
        mongo.opened(tmp_path, url) as other,
    ):
        await store.write([visit("1", "v", received=1, traits={"a": 1}), visit("2", "w")])
        store._cache.full.add(WORKSPACE)
        await store.write([visit("3", "w", received=2)])
        proxy.rule = hold
        writing = asyncio.ensure_future(store.write([visit("4", "x", received=3)]))
        assert await asyncio.to_thread(held.wait, 120)
        await other.write([visit("5", "v", received=9)])
        go.set()
        await writing
        found = {one.anonymous_id: one.traits for one in await all_pages(store.scan_visitors, None)}
        assert found == {"v": {"a": 1}, "x": {}}


async def test_a_visitor_of_a_user_that_a_write_links_does_not_give_way(tmp_path: Path) -> None:
    """The write does not read the user for itself."""
    url = mongo.shared(ATOMIC).url()
    limits = ProfileLimits(visitors=1)
    async with mongo.opened(tmp_path, url, profile_limits=limits) as store:
        await store.write([visit("1", "a1", received=1), identify("2", "ann", anonymous_id="a1")])
        store._cache.full.add(WORKSPACE)
        linking = event("3", user_id="ann", anonymous_id="a2", received=2)
        await store.write([linking, visit("4", "new", received=2)])
        found = {one.anonymous_id for one in await all_pages(store.scan_visitors, WORKSPACE)}
        assert "a1" in found


async def test_a_group_has_the_text_of_an_anonymous_id(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url) as store:
        await store.write([event("1", type="group", user_id="u", groupId="same", received=1)])
        both = event("2", type="group", user_id="u", anonymous_id="same", groupId="same", at=2)
        await store.write([both])
        assert await store.linked_to(WORKSPACE, "u") == ["same"]
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.groups == ["same"]
