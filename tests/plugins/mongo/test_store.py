# SPDX-License-Identifier: Apache-2.0
"""What the MongoDB storage has beyond the conformance suite: marks, indexes, shards."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pymongo
import pytest

from engage.api import (
    ConfigError,
    DeadLetterBudget,
    EventFilter,
    Status,
    StorageIncompatible,
    StorageUnavailable,
    SubscriptionChange,
)
from engage.registry import load_plugins
from engage.store.choices import MAX_IDLE
from engage.testing import WORKSPACE, event, identify, letter
from engage.testing.factories import count, user
from engage_plugins.mongo import connection, schema, store
from engage_plugins.mongo.store import MongoStorage
from support import mongo
from support.mongo_proxy import CLOSE, Proxy, closing_updates
from support.waiting import eventually

pytestmark = pytest.mark.mongo

KINDS = mongo.kinds()
#: The kind of server on which several connections may change one document.
ATOMIC = KINDS[-1]
#: The kind of server that tests may cut off.
PROXIED = mongo.proxied_kind()
IDENTIFIERS: dict[str, Any] = {"identifiers": {WORKSPACE: ("email",)}}


def new(tmp_path: Path, url: str, **context: Any) -> MongoStorage:
    return mongo.make_store(tmp_path, url, **{**IDENTIFIERS, **context})


def opened(
    tmp_path: Path, url: str, **context: Any
) -> contextlib.AbstractAsyncContextManager[MongoStorage]:
    return mongo.opened(tmp_path, url, **{**IDENTIFIERS, **context})


_clients: list[Any] = []


def raw(url: str) -> Any:
    """Return the database, through the driver; it is closed after the test."""
    made: Any = pymongo.MongoClient(url)
    _clients.append(made)
    return made.get_default_database()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


async def message_ids(made: MongoStorage) -> list[str]:
    page = await made.scan(EventFilter(), after=None, limit=1000)
    return [one.message_id for one in page.items]


# ------------------------------------------------------------------------------------- options
async def test_the_name_of_the_store_has_no_credentials(tmp_path: Path) -> None:
    port = mongo.free_port()
    url = f"mongodb://user:s3cret@127.0.0.1:{port}/x?serverSelectionTimeoutMS=100"
    made = new(tmp_path, url)
    with pytest.raises(StorageUnavailable) as raised:
        await made.open(create=False)
    assert str(raised.value).startswith(f"mongodb://127.0.0.1:{port}/x: ")


def test_the_storage_is_an_ordinary_plugin() -> None:
    plugin = load_plugins().storages["mongo"]
    assert plugin.schema["properties"]["url"]["writeOnly"] is True


# --------------------------------------------------------------------------------------- codes
def test_permanent_codes_are_a_closed_list() -> None:
    """The codes are those that the server publishes; every other code is unavailability."""
    names = {
        2: "BadValue",
        14: "TypeMismatch",
        15: "Overflow",
        22: "InvalidBSON",
        52: "DollarPrefixedFieldName",
        53: "InvalidIdField",
        56: "EmptyFieldName",
        57: "DottedFieldName",
        10334: "BSONObjectTooLarge",
        17419: "what an update would make of a document is too large",
        17420: "what an upsert would make is too large",
    }
    assert names.keys() == connection.PERMANENT


async def test_a_foreign_unique_index_acknowledges_nothing(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    async with opened(tmp_path, url) as made:
        raw(url).events.create_index("event", unique=True)
        await made.write([event("a")])
        with pytest.raises(StorageUnavailable, match="unique"):
            await made.write([event("b")])
        assert await message_ids(made) == ["a"]


async def test_a_write_is_as_few_commands_as_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once a second, a write looks for erasures.
    monkeypatch.setattr("engage_plugins.mongo.profiles.ERASURES_SECONDS", 600)
    server = mongo.shared(PROXIED)
    with Proxy(server.address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}")
        async with opened(tmp_path, url) as made:

            async def commands(*events: Any) -> list[str]:
                proxy.seen.clear()
                await made.write(events)
                return sorted(name for name in proxy.seen if name not in ("isMaster", "ismaster"))

            assert await commands(*(event(str(n)) for n in range(500))) == ["insert"]
            many = [identify(f"i{n}", f"u{n % 50}", n, traits={"n": n}) for n in range(200)]
            assert await commands(*many) == ["find", "insert", "update"]
            linked = [event(f"t{n}", user_id="u1", anonymous_id="v", received=n) for n in range(3)]
            assert await commands(linked[0]) == ["find", "insert", "update"]
            # The link is known to be durable and needs no command.
            assert await commands(*linked[1:]) == ["insert"]


async def test_a_call_that_waits_while_the_store_is_closed_fails(tmp_path: Path) -> None:
    """An error of another kind would end the task that writes the counters, until a restart."""
    async with opened(tmp_path, mongo.shared(ATOMIC).url()) as made:
        made._connection.updating = turn = asyncio.Lock()
        async with turn:
            call = asyncio.create_task(made.put_counts([count(1)]))
            await eventually(lambda: turn._waiters)
            await made.close()
        with pytest.raises(StorageUnavailable, match="not open"):
            await call


# ------------------------------------------------------------------- marks and unfinished changes
async def _marked(url: str) -> int:
    return int(raw(url).events.count_documents({"_mark": {"$exists": True}}))


async def test_marks_are_removed_after_the_acknowledgement(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    async with opened(tmp_path, url) as made:
        await made.write([identify("m", "u", 1, traits={"a": 1}), event("n")])
        document = raw(url).events.find_one({"_id": f"{WORKSPACE}:api:m"})
        assert document is not None
        await eventually(lambda: not raw(url).events.find_one({"_mark": {"$exists": True}}))
        await made.write([identify("o", "u", 2)])
    assert await _marked(url) == 0


async def test_marks_are_removed_by_the_ids_of_their_events(tmp_path: Path) -> None:
    """A query for marks would ask all shards of a cluster. FerretDB reads all events for each
    statement, so there is one for many events."""
    queries: list[Any] = []

    def note(name: str, command: Mapping[str, Any]) -> None:
        if name == "update" and command["update"] == "events":
            queries.extend(update["q"] for update in command["updates"])

    with Proxy(mongo.shared(PROXIED).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")
        async with opened(tmp_path, url) as made:
            proxy.rule = note
            await made.write([identify(f"m{n}", "u", n) for n in range(30)] + [event("n")])
            await eventually(lambda: not raw(url).events.find_one({"_mark": {"$exists": True}}))
    # It is sent again if the store is closed before the answer is there.
    (ids,) = {frozenset(query["_id"]["$in"]) for query in queries}
    assert ids == {f"{WORKSPACE}:api:m{n}" for n in range(30)}


async def _cut_off(tmp_path: Path, url: str, proxy: Proxy, events: Sequence[Any]) -> None:
    """Insert events without applying their changes, like a process that is killed."""
    dying = new(tmp_path, url)
    await dying.open(create=True)
    await mongo.prepared(dying)
    proxy.rule = closing_updates
    with pytest.raises(StorageUnavailable):
        await dying.write(events)
    await mongo.die(dying, proxy)


async def test_changes_that_a_crash_cut_off_are_applied_when_the_store_is_opened(
    tmp_path: Path,
) -> None:
    with Proxy(mongo.shared(PROXIED).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")
        many = [identify(f"m{n}", f"u{n}", n, anonymous_id="v", traits={"n": n}) for n in range(5)]
        await _cut_off(tmp_path, url, proxy, many)
        assert await _marked(url) == 5
        assert raw(url).users.count_documents({}) == 0
        async with opened(tmp_path, url) as made:
            for number in range(5):
                profile = await made.profile(WORKSPACE, f"u{number}")
                assert profile is not None
                assert profile.traits == {"n": number}
                assert profile.anonymous_ids == ["v"]
            assert await _marked(url) == 0


async def test_changes_that_a_crash_cut_off_are_applied_when_the_event_comes_again(
    tmp_path: Path,
) -> None:
    """Those of the stored event, before the repeat is acknowledged."""
    with Proxy(mongo.shared(PROXIED).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")
        async with opened(tmp_path, url) as living:
            first = identify("m", "u", 1, traits={"which": "stored"})
            await _cut_off(tmp_path, url, proxy, [first])
            again = identify("m", "u", 9, traits={"which": "again", "more": 1})
            (outcome,) = await living.write([again])
            assert outcome.status is Status.DUPLICATE
            profile = await living.profile(WORKSPACE, "u")
            assert profile is not None
            assert profile.traits == {"which": "stored"}


async def test_a_process_completes_changes_that_failed(tmp_path: Path) -> None:
    with Proxy(mongo.shared(PROXIED).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")
        async with opened(tmp_path, url) as made:
            proxy.rule = closing_updates
            with pytest.raises(StorageUnavailable):
                await made.write([identify("m", "u", 1, traits={"a": 1})])
            proxy.rule = None
            await eventually(lambda: raw(url).users.find_one({"_id": f"{WORKSPACE}:u"}))
            await eventually(lambda: not raw(url).events.find_one({"_mark": {"$exists": True}}))


def change(name: str, wanted: bool = True, whose: str = "u") -> SubscriptionChange:
    return SubscriptionChange(
        id=name, workspace_id=WORKSPACE, subject=user(whose), choices={"g": wanted}, at=1, how="t"
    )


async def test_a_choice_and_its_record_are_one_write(tmp_path: Path) -> None:
    """After a crash between the two, the record is still in the history."""
    with Proxy(mongo.shared(PROXIED).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")

        async def history(made: MongoStorage) -> list[tuple[str, bool | None, bool]]:
            page = await made.history(WORKSPACE, None, after=None, limit=100)
            return [(change.change_id, change.before, change.after) for change in page.items]

        dying = new(tmp_path, url)
        await dying.open(create=True)
        await mongo.prepared(dying)
        for whose in ("u", "v"):
            await dying.state(WORKSPACE, user(whose))

        def rule(name: str, command: Any) -> Any:
            return CLOSE if name == "insert" and command["insert"] == schema.HISTORY else None

        proxy.rule = rule
        for whose in ("u", "v"):
            with pytest.raises(StorageUnavailable):
                await dying.apply(change(f"first-{whose}", True, whose))
        await mongo.die(dying, proxy)

        def busy(name: str, command: Any) -> Any:
            found = name == "find" and "pending" in command["filter"]
            return {"ok": 0.0, "code": 50, "errmsg": "too slow"} if found else None

        # The next change of the same user completes it, if opening the store does not.
        proxy.rule = busy
        async with opened(tmp_path, url) as living:
            assert dict(await living.apply(change("first-u", True))) == {"g": True}
            assert dict(await living.apply(change("second", False))) == {"g": False}
            assert await history(living) == [("first-u", None, True), ("second", True, False)]
        proxy.rule = None
        async with opened(tmp_path, url) as made:
            assert sorted(await history(made)) == [
                ("first-u", None, True),
                ("first-v", None, True),
                ("second", True, False),
            ]


async def test_a_living_process_completes_the_history(tmp_path: Path) -> None:
    with Proxy(mongo.shared(PROXIED).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")
        async with opened(tmp_path, url) as made:

            def rule(name: str, command: Any) -> Any:
                return CLOSE if name == "insert" and command["insert"] == schema.HISTORY else None

            proxy.rule = rule
            with pytest.raises(StorageUnavailable):
                await made.apply(change("1"))
            assert await made.state(WORKSPACE, user("u")) == {"g": True}
            proxy.rule = None
            # Without another change of the user.
            await eventually(lambda: raw(url)[schema.HISTORY].find_one({"changeId": "1"}))


async def test_changes_without_effect_are_bounded_for_each_user(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()

    async with opened(tmp_path, url) as made:
        await made.apply(change("on"))
        for number in range(40):
            await made.apply(change(f"idle {number}"))
            found = raw(url)[schema.HISTORY].count_documents({})
            assert found == 1 + min(number + 1, MAX_IDLE)
        await made.apply(change("off", False))
        assert dict(await made.apply(change(f"idle {40 - MAX_IDLE}"))) == {"g": False}
        assert dict(await made.apply(change(f"idle {39 - MAX_IDLE}"))) == {"g": True}


# ------------------------------------------------------------------------------------- the schema
async def test_several_processes_may_prepare_the_store_at_once(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    stores = [new(tmp_path, url) for _ in range(6)]
    await asyncio.gather(*(one.open(create=True) for one in stores))
    await asyncio.gather(*(one.check() for one in stores))
    indexes = raw(url).events.index_information()
    for keys, _ in schema.INDEXES[schema.EVENTS]:
        assert schema.index_name(keys) in indexes
    assert "traits.email.i_1_createdAt_1__id_1" in raw(url).users.index_information()
    for one in stores:
        await one.close()


async def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    async with opened(tmp_path, url):
        meta = raw(url).meta
    # A newer one that this version can read, and one that it cannot.
    meta.update_one({"_id": "schema"}, {"$set": {"version": 99}})
    async with opened(tmp_path, url) as made:
        await made.check()
    meta.update_one({"_id": "schema"}, {"$set": {"minReader": 99}})
    for create in (True, False):
        with pytest.raises(StorageIncompatible, match="newer"):
            await new(tmp_path, url).open(create=create)
    meta.replace_one({"_id": "schema"}, {"whose": "somebody else's"})
    with pytest.raises(StorageIncompatible, match="not engage's"):
        await new(tmp_path, url).open(create=True)


async def test_an_identifier_may_be_declared_later(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    async with opened(tmp_path, url) as made:
        users = [
            identify(f"m{n}", f"u{n}", n, traits={"code.x": f"c{n % 2}", "n": n}) for n in range(9)
        ]
        await made.write(users)
        assert await made.find_users(WORKSPACE, "code.x", ["c1"]) == {}
    later = {"identifiers": {WORKSPACE: ("email", "code.x", "n")}}
    async with opened(tmp_path, url, **later) as made:
        found = await made.find_users(WORKSPACE, "code.x", ["c0", "c1", "c2"])
        assert found == {"c0": ["u0", "u2", "u4", "u6", "u8"], "c1": ["u1", "u3", "u5", "u7"]}
        # A user whose value changes afterwards is found only by the new value.
        await made.write([identify("m", "u1", 100, traits={"code.x": "c2"})])
        found = await made.find_users(WORKSPACE, "code.x", ["c1", "c2"])
        assert found == {"c1": ["u3", "u5", "u7"], "c2": ["u1"]}


def test_too_many_identifiers_are_an_error(tmp_path: Path) -> None:
    names = {WORKSPACE: [f"t{number}" for number in range(41)]}
    with pytest.raises(ConfigError, match="subscription_identifiers"):
        new(tmp_path, "mongodb://h/x", identifiers=names)


@pytest.mark.parametrize(
    ("collection", "key", "safe"),
    [
        ("events", {"_id": "hashed"}, True),
        ("events", {"workspaceId": 1, "_id": 1}, True),
        ("events", {"workspaceId": 1, "messageId": "hashed"}, True),
        ("events", {"receivedAt": 1}, False),
        ("events", {"userId": "hashed"}, False),
        ("users", {"workspaceId": 1, "userId": 1}, True),
        ("users", {"createdAt": 1}, False),
        ("links", {"user": "hashed"}, True),
        ("dead_letters", {"reason": 1}, False),
    ],
)
async def test_a_shard_key_that_breaks_uniqueness_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, collection: str, key: Any, safe: bool
) -> None:
    """The proxy answers like a mongos."""
    with Proxy(mongo.shared(PROXIED).address) as proxy:
        database = f"engage_test_{os.urandom(6).hex()}"

        def mongos(name: str, command: Any) -> Any:
            if name in ("ismaster", "isMaster", "hello"):
                return {
                    "ismaster": True,
                    "msg": "isdbgrid",
                    "maxBsonObjectSize": 16777216,
                    "maxMessageSizeBytes": 48000000,
                    "maxWriteBatchSize": 1000,
                    "maxWireVersion": 17,
                    "minWireVersion": 0,
                    "ok": 1.0,
                }
            if name == "find" and command["$db"] == "config":
                entry = {"_id": f"{database}.{collection}", "key": key}
                batch = [entry] if entry["_id"] in command["filter"]["_id"]["$in"] else []
                return {
                    "cursor": {"id": 0, "ns": "config.collections", "firstBatch": batch},
                    "ok": 1.0,
                }
            return None

        proxy.rule = mongos
        async with opened(tmp_path, proxy.url(database)) as made:
            await made.write([event("m")])
    said = f"the collection {collection} is sharded on {key}"
    warned = any(said in line for line in caplog.messages)
    assert warned is not safe


# ------------------------------------------------------------------------------------ retention
@pytest.mark.parametrize("kind", KINDS)
async def test_writes_continue_while_many_events_are_expired(tmp_path: Path, kind: str) -> None:
    count = 2000 if kind == "ferretdb" else 10_000
    url = mongo.shared(kind).url()
    async with opened(tmp_path, url) as made, opened(tmp_path, url) as other:
        old = [event(f"old{number}", at=number) for number in range(count)]
        for start in range(0, count, 2000):
            await other.write(old[start : start + 2000])
        border = old[-1].received_at + 1
        written: list[str] = []
        done = False

        async def write() -> None:
            while not done:
                name = f"new{len(written)}"
                (outcome,) = await made.write([event(name, at=count + 10)])
                assert outcome.status is Status.STORED
                written.append(name)

        writer = asyncio.create_task(write())
        try:
            await eventually(lambda: len(written) > 3)
            deleted, during = 0, []
            while deleted < count:
                before = len(written)
                deleted += await other.expire(border, limit=500)
                during.append(len(written) - before)
        finally:
            done = True
            await writer
        assert deleted == count
        assert any(during)
        assert sorted(await message_ids(made))[:1000] == sorted(written)[:1000]


# --------------------------------------------------------------------------------- dead letters
async def test_budgets_hold_approximately_for_several_processes(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    budget = DeadLetterBudget(api_count=20, api_bytes=10**6)
    async with (
        opened(tmp_path, url, dead_letter_budget=budget) as one,
        opened(tmp_path, url, dead_letter_budget=budget) as two,
    ):
        assert await one.put([letter(f"a{number}") for number in range(15)]) == 0
        assert await two.put([letter(f"b{number}") for number in range(15)]) == 10
        assert raw(url).dead_letters.count_documents({}) == 20


def test_the_numbers_of_the_module_are_documented() -> None:
    """The docs state the constants of the module."""
    page = (Path(__file__).parents[3] / "docs" / "storage-mongo.md").read_text()
    for collection, indexes in schema.INDEXES.items():
        assert f"`{collection}`" in page
        for keys, _ in indexes:
            assert "`{" + ", ".join(f"{name}: {way}" for name, way in keys.items()) + "}`" in page
    for code in connection.PERMANENT:
        assert str(code) in page
    assert store.MongoStorage.__doc__
