# SPDX-License-Identifier: Apache-2.0
"""The upgrade of a store of version 1, in which a choice belonged to an id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest

from engage.api import (
    ENGAGE_VERSION,
    Event,
    StorageIncompatible,
    StorageUnavailable,
    Subject,
)
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import (
    AWKWARD,
    TIME,
    all_pages,
    change,
    count,
    unproven,
    user,
    visitor,
)
from engage_plugins.mongo import schema
from engage_plugins.mongo.documents import Sequencer, escape_key, scoped_id
from engage_plugins.mongo.store import MongoStorage
from support import mongo
from support.mongo_proxy import Proxy
from support.rules.visitors import visit
from support.verifying import verified

pytestmark = pytest.mark.mongo

ATOMIC = mongo.kinds()[-1]

#: Id, group, subscribed and time of each choice.
Choices = list[tuple[str, str, bool, int]]


@contextlib.contextmanager
def raw(url: str) -> Any:
    client: Any
    with pymongo.MongoClient(url) as client:
        yield client.get_default_database()


def choose(db: Any, choices: Choices, workspace: str = WORKSPACE) -> None:
    """Store choices as version 1 did, each with a later change without effect."""
    sequence = Sequencer()
    for name, group, subscribed, at in choices:
        key, when = scoped_id(workspace, name), bson.datetime_ms.DatetimeMS(TIME + at)
        whose = {"workspaceId": workspace, "userId": name}
        times = {"$min": {"firstChoiceAt": when}, "$max": {"lastChoiceAt": when}}
        db.users.update_one({"_id": key}, {**times, "$setOnInsert": whose}, upsert=True)
        for idle in (False, True):
            seq, change_id = sequence(), f"{name}-{group}-{at}-{idle}"
            known = {"subscribed": subscribed, "updatedAt": when, "changeId": change_id}
            found = {"groupId": group, "before": None, "after": subscribed}
            record = {"changeId": change_id, "_seq": seq, "at": when, "how": "link"}
            record["records"] = [] if idle else [found]
            update = {f"choices.{escape_key(group)}": known, "seq": seq}
            db.subscriptions.update_one(
                {"_id": key}, {"$set": {**whose, **update}, "$inc": {"version": 1}}, upsert=True
            )
            db.subscription_history.insert_one(
                {"_id": scoped_id(workspace, change_id), **whose, **record}
            )


EVENTS = [
    visit("1", "visitor"),
    visit("2", "both"),
    identify("3", "both"),
    identify("4", "user"),
    # Only an event has these ids.
    event("5", anonymous_id="seen"),
    event("6", user_id="user", anonymous_id="seen-both"),
    identify("7", "seen-both"),
    # Only a link has this one.
    event("8", type="alias", user_id="user", previousId="linked"),
    # These belong to somebody.
    visit("9", "mine"),
    visit("10", "yours"),
    identify("11", "owner", anonymous_id="mine"),
    identify("12", "owner", anonymous_id="yours"),
    identify("13", "owner", anonymous_id="both"),
    visit("14", "pet"),
    identify("15", "both", anonymous_id="pet"),
]
NAMES = ("visitor", "both", "user", "seen", "seen-both", "neither")
CHOICES: Choices = [
    *(
        (name, "a", False, 1)
        for name in ("visitor", "both", "user", "seen", "seen-both", "neither")
    ),
    *((name, "b", True, 2) for name in ("visitor", "both", "user", "seen", "seen-both", "neither")),
    ("linked", "a", False, 3),
    ("mine", "a", False, 4),
    ("mine", "b", False, 4),
    ("mine", "c", True, 4),
    ("yours", "a", False, 6),
    ("yours", "d", True, 6),
    ("pet", "c", False, 7),
    ("owner", "b", True, 5),
    ("owner", "d", False, 5),
]
EXPECTED = {
    visitor("visitor"): {"a": False, "b": True},
    visitor("seen"): {"a": False, "b": True},
    visitor("linked"): {"a": False},
    visitor("mine"): {"a": False, "b": False, "c": True},
    visitor("yours"): {"a": False, "d": True},
    # An unsubscription is the visitor's too.
    user("both"): {"a": False, "b": True, "c": False},
    visitor("pet"): {"c": False},
    visitor("both"): {"a": False},
    user("seen-both"): {"a": False, "b": True},
    visitor("seen-both"): {"a": False},
    user("neither"): {"a": False, "b": True},
    visitor("neither"): {"a": False},
    # Those of "seen-both" and "linked" are of visitors of this user.
    user("user"): {"a": False, "b": True},
    # A later choice of its own stays.
    user("owner"): {"a": False, "b": True, "d": False},
}


async def choices_of(store: MongoStorage) -> dict[Subject, dict[str, bool]]:
    found: dict[Subject, dict[str, bool]] = {}
    for state in await all_pages(store.scan_subscriptions, WORKSPACE, limit=3):
        found.setdefault(state.subject, {})[state.group_id] = state.subscribed
    return found


async def make(
    folder: Path, url: str, choices: Choices = CHOICES, events: Sequence[Event] = EVENTS
) -> None:
    """Make a store of version 1."""
    async with mongo.opened(folder, url) as store:
        await store.write(events)
    with raw(url) as db:
        fields = {"version": 1, "minReader": 1, "engage": "0.2.0"}
        db.meta.update_one({"_id": "schema"}, {"$set": fields})
        db.arrivals.drop()
        choose(db, choices)


def everything(url: str) -> dict[str, list[Any]]:
    names = ("users", "visitors", "links", "subscriptions", "subscription_history")
    with raw(url) as db:
        return {name: list(db[name].find().sort("_id")) for name in names}


async def is_upgraded(store: MongoStorage) -> None:
    assert await choices_of(store) == EXPECTED
    assert await unproven(store) == []
    users = {one.user_id for one in await all_pages(store.scan_users, WORKSPACE)}
    assert users == {"both", "user", "seen-both", "neither", "owner"}
    proofs: dict[Subject, list[tuple[Any, ...]]] = {
        visitor("visitor"): [("link", None, False, 1)],
        visitor("both"): [("upgrade", None, False, 1)],
        user("both"): [("link", None, False, 1)],
        user("user"): [("link", None, False, 1)],
    }
    for subject, expected in proofs.items():
        records = await all_pages(store.history, WORKSPACE, subject)
        assert expected == [
            (record.how, record.before, record.after, record.at - TIME)
            for record in records
            if record.group_id == "a"
        ]
    records = await all_pages(store.history, WORKSPACE, user("owner"))
    (proof,) = [record for record in records if record.group_id == "a"]
    # It is that of the visitor of which it was carried first; the last one holds.
    assert (proof.how, proof.before, proof.after) == ("upgrade", None, False)
    states = await all_pages(store.scan_subscriptions, WORKSPACE)
    (state,) = [one for one in states if one.subject == user("owner") and one.group_id == "a"]
    assert state.updated_at == TIME + 6


@pytest.fixture(params=mongo.kinds())
def url(request: pytest.FixtureRequest) -> str:
    """A new database on each kind of server."""
    return mongo.shared(request.param).url()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as made:
        yield made


async def test_each_choice_becomes_that_of_the_user_or_the_visitor(
    tmp_path: Path, url: str
) -> None:
    await make(tmp_path, url)
    async with mongo.opened(tmp_path, url) as store:
        await is_upgraded(store)
        # A change of version 1 has no effect if it is repeated, without effect as it was too.
        for name in ("True", "False"):
            again = change(f"visitor-a-1-{name}", anonymous_id="visitor", a=True)
            assert await store.apply(again) == EXPECTED[visitor("visitor")]
    with raw(url) as db:
        schema = db.meta.find_one({"_id": "schema"})
        assert (schema["version"], schema["minReader"], schema["engage"]) == (3, 3, ENGAGE_VERSION)
        assert db.subscription_history.count_documents({"userId": "visitor"}) == 0
        assert db.subscription_history.count_documents({"anonymousId": "visitor"}) == 4
        assert db.users.find_one({"userId": "visitor"}) is None
    before = everything(url)
    async with mongo.opened(tmp_path, url) as store:
        await is_upgraded(store)
        report = await verified(store)
        # The events of the tests do not say when they were received.
        assert {what for what, _ in report.differences} <= {"events"}
        assert report.checked["choices"] == 26
    assert everything(url) == before


async def test_what_clients_set_in_the_place_of_engage_goes(tmp_path: Path, url: str) -> None:
    await make(tmp_path, url)
    register = {"t": bson.datetime_ms.DatetimeMS(TIME), "m": "m", "o": "api", "v": "a@b.c"}
    names = ("email", "engage:trusted", "engage:trusted:email")
    forged = {"$set": {f"traits.{name}": register for name in names}}
    with raw(url) as db:
        db.users.update_one({"userId": "user"}, forged)
        db.visitors.update_one({"anonymousId": "visitor"}, forged)
    async with mongo.opened(tmp_path, url, identifiers={WORKSPACE: ["email"]}) as store:
        assert await store.certain(WORKSPACE, "user") == {"email": None}
    with raw(url) as db:
        for found in (
            db.users.find_one({"userId": "user"}),
            db.visitors.find_one({"anonymousId": "visitor"}),
        ):
            assert found["traits"].keys() == {"email"}


async def test_the_upgrade_may_be_killed_at_any_write(tmp_path: Path, proxy: Proxy) -> None:
    """Another process then completes it."""
    number = 0
    while True:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}")
        await make(tmp_path, url)
        left = number

        def rule(name: str, command: Mapping[str, Any]) -> Any:
            nonlocal left
            left -= name in ("insert", "update", "delete") and "counts" not in command.values()
            return {"ok": 0.0, "code": 50, "errmsg": "killed"} if left < 0 else None

        proxy.rule = rule
        dying = mongo.make_store(tmp_path, url)
        await dying.open(create=True)
        await mongo.die(dying, proxy)
        with raw(url) as db:
            # Once it has begun, the older version refuses the store.
            assert db.meta.find_one({"_id": "schema"})["minReader"] == (3 if number else 1)
        async with mongo.opened(tmp_path, url) as store:
            await is_upgraded(store)
        if left >= 0:
            break
        number += 1
    assert number > 10


async def test_several_hosts_may_upgrade_at_the_same_time(tmp_path: Path) -> None:
    for _ in range(5):
        url = mongo.shared(ATOMIC).url()
        await make(tmp_path, url)
        stores = [mongo.make_store(tmp_path, url) for _ in range(3)]
        await asyncio.gather(*(store.open(create=True) for store in stores))
        for store in stores:
            await mongo.prepared(store)
            await is_upgraded(store)
            await store.close()


async def test_awkward_ids_are_upgraded(tmp_path: Path, url: str) -> None:
    choices = [(name, name, bool(number % 2), number) for number, name in enumerate(AWKWARD)]
    seen = [event(f"m{n}", anonymous_id=name) for n, name in enumerate(AWKWARD)]
    await make(tmp_path, url, choices, seen)
    async with mongo.opened(tmp_path, url) as store:
        assert await choices_of(store) == {
            visitor(name): {group: subscribed} for name, group, subscribed, _ in choices
        }
        assert await unproven(store) == []
        assert await all_pages(store.scan_users, None) == []


async def test_check_says_which_choices_stop_counting(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    await make(tmp_path, url)
    before = everything(url)
    # Of "mine" c, and of "yours" d; not those of visitors who belong to nobody.
    expected = "up to date; subscriptions of visitors that then no longer count for their users: 2$"
    with pytest.raises(StorageIncompatible, match=expected):
        await mongo.make_store(tmp_path, url).open(create=False)
    assert everything(url) == before
    with raw(url) as db:
        choose(db, [("owner", "c", True, 3), ("owner", "d", True, 7)])
        expected = "; subscriptions of visitors that then no longer count for their users: 1$"
    with pytest.raises(StorageIncompatible, match=expected):
        await mongo.make_store(tmp_path, url).open(create=False)
    with raw(url) as db:
        choose(db, [("owner", "c", True, 8)])
    with pytest.raises(StorageIncompatible, match=r"start `engage serve` once, .* up to date$"):
        await mongo.make_store(tmp_path, url).open(create=False)


async def test_no_upgrade_while_another_version_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = mongo.shared(ATOMIC).url()
    await make(tmp_path, url)
    minute = int(time.time()) // 60 * 60_000
    fields: dict[str, Any] = {"step": 60, "name": "up", "workspace_id": ""}
    async with mongo.opened(tmp_path, mongo.shared(ATOMIC).url()) as store:
        pass
    with raw(url) as db:
        db.meta.update_one({"_id": "schema"}, {"$set": {"version": 3}})
    async with mongo.opened(tmp_path, url) as store:
        old = {**fields, "labels": ("0.2.0",)}
        mine = {**fields, "labels": (ENGAGE_VERSION,)}
        await store.put_counts(
            [
                count(1, at=minute, process="p", **old),
                count(1, at=minute, process="q", **old),
                count(1, at=minute, process="r", **mine),
                count(1, at=minute - 180_000, process="s", **{**old, "labels": ("0.1.0",)}),
            ]
        )
    with raw(url) as db:
        db.meta.update_one({"_id": "schema"}, {"$set": {"version": 1}})
    before = everything(url)
    store = mongo.make_store(tmp_path, url)
    await store.open(create=True)
    expected = r"another version use this store \(2 of engage 0.2.0\); stop all of them: engage "
    with pytest.raises(StorageUnavailable, match=expected + "brings it up to date 75 seconds"):
        await store.check()
    assert "2 of engage 0.2.0" in caplog.text
    assert everything(url) == before
    with raw(url) as db:
        db.counts.delete_many({"labels": ["0.2.0"]})
    await store.check()
    await is_upgraded(store)
    await store.close()


async def test_an_older_version_refuses_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = mongo.shared(ATOMIC).url()
    await make(tmp_path, url)
    async with mongo.opened(tmp_path, url):
        pass
    monkeypatch.setattr(schema, "VERSION", 1)
    for expected in (f"use engage {ENGAGE_VERSION} or", "use that version of engage or"):
        for create in (True, False):
            with pytest.raises(StorageIncompatible, match=f"store version 3, .*: {expected} newer"):
                await mongo.make_store(tmp_path, url).open(create=create)
        with raw(url) as db:
            db.meta.update_one({"_id": "schema"}, {"$unset": {"engage": ""}})


async def test_the_events_of_version_2_are_followed_first(tmp_path: Path, url: str) -> None:
    """They have no journal, and later ones do."""
    old = [event(f"m{number}", received=number) for number in range(5)]
    async with mongo.opened(tmp_path, url) as store:
        await store.write(old)
    with raw(url) as db:
        db.meta.update_one({"_id": "schema"}, {"$set": {"version": 2, "minReader": 2}})
        db.arrivals.drop()
    with pytest.raises(StorageIncompatible, match=r"start `engage serve` once, .* up to date$"):
        await mongo.make_store(tmp_path, url).open(create=False)
    names: list[str] = []
    cursor: str | None = None
    async with mongo.opened(tmp_path, url) as store:
        await store.write([event("new", received=1)])
        while len(names) < 6:
            page = await store.follow(after=cursor, limit=2)
            names += [one.message_id for one in page.items]
            assert page.cursor is not None
            cursor = page.cursor
            await asyncio.sleep(0.01)
    assert set(names) == {"m0", "m1", "m2", "m3", "m4", "new"}
    with raw(url) as db:
        found = db.meta.find_one({"_id": "schema"})
        assert (found["version"], found["minReader"]) == (3, 3)
