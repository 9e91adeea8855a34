# SPDX-License-Identifier: Apache-2.0
"""Rare answers of a MongoDB server: small limits, unexpected or not durable answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest

from engage.api import EventFilter, Status, StorageUnavailable, SubscriptionChange
from engage.testing import WORKSPACE, event, identify, letter
from engage.testing.factories import count, record, user
from engage_plugins.mongo import schema
from engage_plugins.mongo.store import MongoStorage
from support import mongo
from support.mongo_proxy import Proxy

pytestmark = pytest.mark.mongo


def store(tmp_path: Path, proxy: Proxy, database: str) -> MongoStorage:
    """Make a store with new connections, like that of another process."""
    url = proxy.url(database, "retryWrites=false")
    return mongo.make_store(tmp_path, url, identifiers={WORKSPACE: ("email",)})


def change(name: str) -> SubscriptionChange:
    return SubscriptionChange(
        id=name, workspace_id=WORKSPACE, subject=user("u"), at=1, how="api", choices={"g": True}
    )


@contextlib.asynccontextmanager
async def opened(
    tmp_path: Path, announced: Mapping[str, Any] | None = None
) -> AsyncIterator[tuple[MongoStorage, Proxy, str]]:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        proxy.announced = announced or {}
        database = f"engage_test_{os.urandom(6).hex()}"
        made = store(tmp_path, proxy, database)
        await made.open(create=True)
        try:
            yield made, proxy, database
        finally:
            proxy.rule = None
            await made.close()


# -------------------------------------------------------------------------------- announced limits
async def test_the_limits_of_the_server_are_respected(tmp_path: Path) -> None:
    small = {"maxBsonObjectSize": 40_000, "maxMessageSizeBytes": 1_000_000, "maxWriteBatchSize": 7}
    async with opened(tmp_path, small) as (made, proxy, _):
        counts: list[int] = []
        sizes: list[int] = []

        def look(name: str, command: Mapping[str, Any]) -> None:
            counts.append(max(len(command.get(key, ())) for key in ("updates", "documents")))
            if name in ("find", "update"):
                sizes.append(len(bson.encode(command)))

        proxy.rule = look
        # The longest ids: those of all users together do not fit into one command.
        users = [f"{n:03}" + "\N{GRINNING FACE}" * 500 for n in range(60)]
        many = [identify(f"i{n}", user, n, traits={"n": n}) for n, user in enumerate(users)]
        large = event("large", properties={"text": "x" * 50_000})
        outcomes = await made.write([*many, large])
        assert [outcome.status for outcome in outcomes] == [Status.STORED] * 60 + [Status.REFUSED]
        outcomes = await made.write([*many, large])
        assert [one.status for one in outcomes] == [Status.DUPLICATE] * 60 + [Status.REFUSED]
        assert max(counts) == 7
        assert max(sizes) <= 40_000 + 16 * 1024
        profile = await made.profile(WORKSPACE, users[-1])
        assert profile is not None
        assert profile.traits == {"n": 59}


@pytest.mark.parametrize("code", [10334, 17419, 17420])
async def test_a_document_that_is_too_large_is_refused_alone(tmp_path: Path, code: int) -> None:
    async with opened(tmp_path) as (made, proxy, _):
        proxy.rule = lambda name, command: (
            {"ok": 0.0, "code": code, "errmsg": "BSONObj size is invalid"}
            if name == "insert" and any("x" in document["_id"] for document in command["documents"])
            else None
        )
        outcomes = await made.write([event(message_id) for message_id in ("a", "b", "x", "c")])
        assert [one.status.name for one in outcomes] == ["STORED", "STORED", "REFUSED", "STORED"]


# ------------------------------------------------------------------------------- unexpected answers
@pytest.mark.parametrize(
    "reply",
    [
        {"ok": 0},
        {"ok": 1},
        {"ok": 1, "n": 0, "writeErrors": [{"index": 0}]},
        {"ok": 1, "n": 0, "writeErrors": [{"index": 99, "code": 2, "errmsg": "x"}]},
    ],
)
async def test_an_unexpected_answer_is_unavailability(
    tmp_path: Path, reply: dict[str, Any]
) -> None:
    async with opened(tmp_path) as (made, proxy, _):
        proxy.rule = lambda name, _: reply if name not in ("isMaster", "ismaster") else None
        for call in (
            made.find(WORKSPACE, "api", "a"),
            made.scan(EventFilter(), after=None, limit=1),
            made.profile(WORKSPACE, "u"),
            made.find_users(WORKSPACE, "email", ["a@b"]),
            made.state(WORKSPACE, user("u")),
            made.apply(change("c")),
            made.recent(EventFilter(), limit=1),
            made.recent(EventFilter(type="page"), limit=1),
            made.recent_dead_letters(None, limit=1),
            made.dead_letter(WORKSPACE, "a"),
            *(made.put_record(record("a"), expected_version=one) for one in (None, 0, 1)),
            made.get_record("key", WORKSPACE, "a"),
            made.list_records("key", limit=1),
            made.records_version("key"),
            made.delete_record("key", WORKSPACE, "a"),
            made.expire_records("key", 1, limit=1),
            made.put_counts([count(1)]),
            made.counts(60, since=0, until=1, limit=1),
            made.scan_counts(after=None, limit=1),
            made.expire_counts(60, 1, limit=1),
        ):
            with pytest.raises(StorageUnavailable):
                await call
        with pytest.raises(StorageUnavailable):
            await made.write([identify("a", "u", 1, traits={"n": 1})])


# ------------------------------------------------------------------- writes that a failover undoes
NOT_DURABLE = {"code": 64, "errmsg": "waiting for replication timed out"}


def without_majority(collection: str) -> Any:
    """Make writes to a collection change nothing, and their write concern time out."""

    def rule(name: str, command: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if name in ("insert", "update") and command[name] == collection:
            return {"ok": 1, "n": 1, "nModified": 0, "writeConcernError": NOT_DURABLE}
        return None

    return rule


@pytest.mark.parametrize("collection", ["subscriptions", "subscription_history"])
@pytest.mark.parametrize("repeated", [True, False])
async def test_a_choice_that_was_only_read_is_not_acknowledged(
    tmp_path: Path, collection: str, repeated: bool
) -> None:
    async with opened(tmp_path) as (made, proxy, _):
        assert await made.apply(change("c")) == {"g": True}
        again = change("c" if repeated else "d")
        proxy.rule = without_majority(collection)
        with pytest.raises(StorageUnavailable, match="64"):
            await made.apply(again)
        proxy.rule = None
        assert await made.apply(again) == {"g": True}
        history = await made.history(WORKSPACE, user("u"), after=None, limit=10)
        assert [one.change_id for one in history.items] == ["c"]


async def test_a_dead_letter_that_was_only_read_is_not_acknowledged(tmp_path: Path) -> None:
    async with opened(tmp_path) as (made, proxy, _):
        assert await made.put([letter("a")]) == 0
        proxy.rule = without_majority("dead_letters")
        with pytest.raises(StorageUnavailable, match="64"):
            await made.put([letter("a")])
        proxy.rule = None
        assert await made.put([letter("a"), letter("b")]) == 0
        page = await made.scan_dead_letters(WORKSPACE, after=None, limit=10)
        assert [item.id for item in page.items] == [letter("a").id, letter("b").id]


@pytest.mark.parametrize("expected", [None, 0, 1])
async def test_a_record_or_a_counter_that_no_majority_has_is_not_acknowledged(
    tmp_path: Path, expected: int | None
) -> None:
    async with opened(tmp_path) as (made, proxy, _):
        if expected == 1:
            assert await made.put_record(record("a")) == 1

        def rule(name: str, command: Mapping[str, Any]) -> Mapping[str, Any] | None:
            if name == "findAndModify":
                return {"ok": 1, "value": None, "writeConcernError": NOT_DURABLE}
            found: Mapping[str, Any] | None = without_majority("records")(name, command)
            return found

        proxy.rule = rule
        with pytest.raises(StorageUnavailable, match="64"):
            await made.put_record(record("a"), expected_version=expected)
        proxy.rule = without_majority("meta")
        with pytest.raises(StorageUnavailable, match="64"):
            await made.put_record(record("b"), expected_version=0)
        proxy.rule = without_majority("counts")
        with pytest.raises(StorageUnavailable, match="64"):
            await made.put_counts([count(1)])


async def test_changes_of_profiles_that_were_only_read_are_written(tmp_path: Path) -> None:
    async with opened(tmp_path) as (made, proxy, database):
        await made.write([event("a", user_id="u", anonymous_id="v")])
        await made.write([identify("b", "u", 2, traits={"plan": "pro"})])
        written: list[Mapping[str, Any]] = []

        def look(name: str, command: Mapping[str, Any]) -> None:
            if name == "update":
                written.extend({**update, "in": command["update"]} for update in command["updates"])

        proxy.rule = look
        other = store(tmp_path, proxy, database)
        await other.open(create=True)
        try:
            await other.write([event("c", user_id="u", anonymous_id="v")])
            assert [one for one in written if one["in"] == "links"]
            written.clear()
            await other.write([identify("d", "u", 1, traits={"plan": "old"})])
            assert [one for one in written if one["in"] == "users"]
            profile = await other.profile(WORKSPACE, "u")
            assert profile is not None
            assert (profile.traits, profile.anonymous_ids) == ({"plan": "pro"}, ["v"])
        finally:
            await other.close()


async def test_an_index_of_the_operator_does_not_prevent_others(tmp_path: Path) -> None:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        database = f"engage_test_{os.urandom(6).hex()}"
        refused = "workspaceId_1_userId_1_timestamp_1"

        def rule(name: str, command: Mapping[str, Any]) -> Mapping[str, Any] | None:
            if name == "createIndexes" and any(
                index["name"] == refused for index in command["indexes"]
            ):
                return {"ok": 0.0, "code": 86, "errmsg": "the same name, other keys"}
            return None

        proxy.rule = rule
        made = store(tmp_path, proxy, database)
        await made.open(create=True)
        try:
            with pymongo.MongoClient[Any](proxy.url(database)) as client:
                names = set(client[database]["events"].index_information())
        finally:
            await made.close()
        assert refused not in names
        assert len(names) == 1 + len(schema.INDEXES["events"]) - 1
