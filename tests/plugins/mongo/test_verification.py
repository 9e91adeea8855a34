# SPDX-License-Identifier: Apache-2.0
"""``engage verify`` on MongoDB: each kind of damage is found, and none in a healthy store."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymongo
import pytest

from engage.testing.factories import IDENTIFIERS
from engage.verify import Report
from support import mongo
from support.commands import run
from support.exports import on_store
from support.server_process import start_server
from support.sqlite import CONFIG
from support.verifying import fill, healthy, small, verified, verify_while_used

pytestmark = pytest.mark.mongo

ATOMIC = mongo.kinds()[-1]
SEEN = {"_id": "acme:api:seen"}
ANN = {"_id": "acme:ann"}
VISITOR = {"_id": "acme:a-1"}
LINK = {"_id": "acme:3:ann:a-1"}
CONFLICT = {"reason": "message_id_conflict"}


def change(collection: str, query: dict[str, Any], **fields: Any) -> Callable[[Any], None]:
    """Return a function that sets fields of the documents of a query; ``__`` stands for a dot."""

    def damage(db: Any) -> None:
        update = {"$set": {name.replace("__", "."): value for name, value in fields.items()}}
        assert db[collection].update_many(query, update).modified_count

    return damage


def remove(collection: str, **query: Any) -> Callable[[Any], None]:
    """Return a function that deletes documents."""

    def damage(db: Any) -> None:
        assert db[collection].delete_many(query).deleted_count

    return damage


def later(collection: str, query: dict[str, Any], path: str) -> Callable[[Any], None]:
    """Return a function that makes a time a second later."""

    def damage(db: Any) -> None:
        value = document = db[collection].find_one(query)
        for name in path.split("."):
            value = value[name]
        moved = value + datetime.timedelta(seconds=1)
        db[collection].update_one({"_id": document["_id"]}, {"$set": {path: moved}})

    return damage


def again(db: Any) -> None:
    """Store an event a second time."""
    document = db.events.find_one(SEEN)
    db.events.insert_one({**document, "_id": "acme:api:again"})


def twice(db: Any) -> None:
    """Store a user of no event."""
    document = db.users.find_one(ANN)
    db.users.insert_one({**document, "_id": "acme:eve", "userId": "eve"})


#: Name → what it is found as, and what does it.
DAMAGE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an event that set a trait is deleted": ("users", remove("events", _id="acme:api:i")),
    "an event is not valid": ("events", change("events", SEEN, event=7)),
    "an event has another type": ("events", change("events", SEEN, type="click")),
    "an event has no time": ("events", change("events", SEEN, receivedAt="now")),
    "an event has no place": ("events", change("events", SEEN, _seq=3)),
    "an event has another message id": ("events", change("events", SEEN, messageId="m")),
    "an event is stored twice": ("events", again),
    "an erased event has its content": ("events", change("events", SEEN, type="erased", _raw=b"")),
    "an erased event has its body": (
        "events",
        lambda db: db.events.update_one(
            SEEN, {"$set": {"type": "erased", "_raw": b"x"}, "$unset": {"messageId": 1}}
        ),
    ),
    "a user's event is another's": ("users", change("events", {"_id": "acme:api:i"}, userId="x")),
    "a trait is changed": ("users", change("users", ANN, traits__plan__v="free")),
    "a trait has a later time": ("users", later("users", ANN, "traits.plan.t")),
    "a trait is lost": (
        "users",
        lambda db: db.users.update_one(ANN, {"$unset": {"traits.plan": 1}}),
    ),
    "a user is lost": ("users", remove("users", **ANN)),
    "a user of no event": ("users", twice),
    "a user was created later": ("users", later("users", ANN, "createdAt")),
    "a user has another id": ("users", change("users", ANN, userId="bob")),
    "a membership is lost": ("users", remove("memberships", user="acme:ann")),
    "a membership has ended": (
        "users",
        change("memberships", {"user": "acme:ann"}, assigned__v=False),
    ),
    "a visitor is lost": ("visitors", remove("visitors", **VISITOR)),
    "a visitor's trait is changed": ("visitors", change("visitors", VISITOR, traits__n__v=2)),
    "a group's trait is changed": (
        "groups",
        change("groups", {"groupId": "crew"}, traits__size__v=9),
    ),
    "a link is lost": ("links", remove("links", **LINK)),
    "a link has a later version": ("links", later("links", LINK, "first.t")),
    "a link does not count": ("links", change("links", LINK, decision={"v": False})),
    "a link is another user's": ("links", change("links", LINK, user="acme:bob")),
    "an identifier is not found": ("users", change("users", ANN, traits__email__i="acme:x@y.z")),
    "a choice is reversed": (
        "choices",
        lambda db: [
            db.subscriptions.update_one(
                {"_id": one["_id"]},
                {"$set": {"choices.news.subscribed": not one["choices"]["news"]["subscribed"]}},
            )
            for one in db.subscriptions.find().limit(1)
        ],
    ),
    "a choice is another's": ("subscriptions", change("subscriptions", {}, anonymousId="x")),
    "a choice is lost": ("choices", lambda db: db.subscriptions.delete_many({})),
    "a record is lost": ("choices", lambda db: db.subscription_history.delete_many({})),
    "a change is forgotten": (
        "subscription_history",
        lambda db: db.subscription_history.update_many({}, {"$set": {"changeId": "other"}}),
    ),
    "a budget is wrong": ("dead letters", change("dead_letters", CONFLICT, size=1)),
    "a letter is in another budget": (
        "dead letters",
        change("dead_letters", CONFLICT, budget="api"),
    ),
    "the letter of a conflict is cut": (
        "conflicts",
        change("dead_letters", CONFLICT, truncated=True),
    ),
    "the letter of a conflict is lost": ("conflicts", remove("dead_letters", **CONFLICT)),
    "a suppressed address is another": (
        "suppressions",
        change("suppressions", {}, address="x@b.c"),
    ),
}


@pytest.fixture(params=mongo.kinds())
def url(request: pytest.FixtureRequest) -> str:
    """A new database on each kind of server."""
    return mongo.shared(request.param).url()


@contextlib.contextmanager
def raw(url: str) -> Any:
    client: Any
    with pymongo.MongoClient(url, tz_aware=True) as client:
        yield client.get_default_database()


async def verified_after(folder: Path, url: str, damage: Callable[[Any], None]) -> Report:
    """Verify a store that was filled and changed."""
    async with mongo.opened(folder, url, identifiers=IDENTIFIERS) as store:
        await small(store)
    with raw(url) as db:
        damage(db)
    async with mongo.opened(folder, url, identifiers=IDENTIFIERS) as store:
        return await verified(store)


@pytest.mark.parametrize("name", DAMAGE)
async def test_damage_is_found(tmp_path: Path, name: str) -> None:
    what, damage = DAMAGE[name]
    report = await verified_after(tmp_path, mongo.shared(ATOMIC).url(), damage)
    assert what in report.different, (report.different, report.differences, report.failures)


@pytest.mark.parametrize("seed", range(2))
async def test_a_healthy_store_has_no_differences(tmp_path: Path, url: str, seed: int) -> None:
    async with mongo.opened(tmp_path, url, identifiers=IDENTIFIERS) as store:
        await fill(store, seed=seed, count=200, changes=15)
        report = await verified(store)
    healthy(report)
    assert report.checked["links"] > 10


async def test_a_server_in_use_has_no_differences(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    storage = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
    retention = "[retention]\nevents_days = 1\n"
    with start_server(tmp_path, storage=storage, config_extra=retention) as server:
        first, _ = await verify_while_used(server)
    assert first["checked"]["users"] >= 12


def test_a_repair_is_refused(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    _, start, workspaces = CONFIG.partition("[[workspaces]]")
    path = tmp_path / "engage.toml"
    path.write_text(
        f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n{start}{workspaces}'
    )
    on_store(path, lambda store: store.check())
    done = run("verify", "--repair", "--config", path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "engage: this storage cannot repair itself: see docs/verify.md#repairing\n"
    )


async def test_what_a_crash_cut_off_is_unprovable(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url, identifiers=IDENTIFIERS) as store:
        await small(store)
        with raw(url) as db:
            # As if the process of another host had ended between the two writes.
            db.users.delete_one(ANN)
            db.events.update_one({"_id": "acme:api:i"}, {"$set": {"_mark": "1.2"}})
        report = await verified(store)
        healthy(report)
        assert {what for what, why in report.unprovable if "crash" in why} >= {"users"}
    # The next one that opens the store completes it.
    async with mongo.opened(tmp_path, url, identifiers=IDENTIFIERS) as store:
        report = await verified(store)
    healthy(report)
    assert not [why for _, why in report.unprovable if "crash" in why]
