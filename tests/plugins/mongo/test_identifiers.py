# SPDX-License-Identifier: Apache-2.0
"""The claims of identifier traits on MongoDB: their number, and the commands that they need."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pymongo
import pytest

from engage.api import MAX_CLAIMS, Event, StorageUnavailable
from engage.testing import WORKSPACE, identify
from engage.testing.factories import TIME
from engage_plugins.mongo.store import MongoStorage
from support import mongo
from support.mongo_proxy import CLOSE, Proxy

pytestmark = pytest.mark.mongo

ATOMIC = mongo.kinds()[-1]
EMAIL = {WORKSPACE: ("email",)}


@contextlib.contextmanager
def raw(url: str) -> Any:
    """Return the database, through the driver."""
    client: Any
    with pymongo.MongoClient(url) as client:
        yield client.get_default_database()


def claims_of(url: str, user: str) -> dict[str, int]:
    """Return a user's claims: value → milliseconds after ``TIME``; the late one is ``late``."""
    with raw(url) as db:
        found = {}
        for claim in db.claims.find({"userId": user}):
            value = claim["held"].split(":", 3)[-1]
            late = claim["_id"].endswith(":email:")
            found["late" if late else value] = int(claim["at"].timestamp() * 1000) - TIME
        return found


def count_of(url: str, user: str) -> int:
    """Return how many claims the document of a user counts."""
    with raw(url) as db:
        counts = db.users.find_one({"userId": user}).get("claims", {})
        return int(counts.get("email", 0))


def address(user: str, number: int, at: int) -> Event:
    email = {"email": f"{number}@example.com"}
    return identify(f"{user}-{number}-{at}", user, at, traits=email)


@pytest.mark.parametrize("size", [1, 40, 1000])
async def test_the_claims_of_a_user_are_bounded(tmp_path: Path, size: int) -> None:
    """Also when two processes write in turn, of which one has just been started."""
    url = mongo.shared(ATOMIC).url()
    values = [address("bob", number, number) for number in range(300)]
    async with (
        mongo.opened(tmp_path, url, identifiers=EMAIL) as store,
        mongo.opened(tmp_path, url, identifiers=EMAIL) as two,
    ):
        for start in range(0, len(values), size):
            await (store, two)[start // size % 2].write(values[start : start + size])
        first = {f"{number}@example.com": number for number in range(MAX_CLAIMS)}
        assert claims_of(url, "bob") == {**first, "late": 299}
        assert count_of(url, "bob") == MAX_CLAIMS
        # Values that have a claim, in a process that does not know them.
        async with mongo.opened(tmp_path, url, identifiers=EMAIL) as third:
            for number in (0, 99, 0, 150):
                await third.write([address("bob", number, 1000 + number)])
            await third.write([address("bob", 150, 2000)])
        assert claims_of(url, "bob") == {**first, "late": 1150}
        # An event that arrives late, and does not set the current value.
        await store.write([address("bob", 200, -5), address("bob", 7, -5)])
        assert claims_of(url, "bob") == {**first, "7@example.com": -5, "late": 1150}


async def test_an_unchanged_value_needs_no_command(tmp_path: Path) -> None:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}")
        seen: Counter[tuple[str, str]] = Counter()

        def watch(name: str, command: Mapping[str, Any]) -> None:
            if command.get(name) in ("users", "claims"):
                seen[name, command[name]] += 1

        proxy.rule = watch

        async def commands(made: MongoStorage, event: Event) -> dict[tuple[str, str], int]:
            seen.clear()
            await made.write([event])
            return dict(seen)

        usual = {("find", "users"): 1, ("update", "users"): 1}
        async with mongo.opened(tmp_path, url, identifiers=EMAIL) as made:
            assert await commands(made, address("ann", 1, 1)) == {**usual, ("update", "claims"): 1}
            assert await commands(made, address("ann", 1, 2)) == usual
            # Another value may have been claimed before.
            both = {**usual, ("find", "claims"): 1, ("update", "claims"): 1}
            assert await commands(made, address("ann", 2, 3)) == both
            assert await commands(made, address("ann", 1, 4)) == both
            assert await commands(made, address("ann", 1, 5)) == usual
        async with mongo.opened(tmp_path, url, identifiers=EMAIL) as made:
            # Another process does not know whether the claim is durable.
            assert await commands(made, address("ann", 1, 6)) == {**usual, ("update", "claims"): 1}
            assert await commands(made, address("ann", 1, 7)) == usual
        assert claims_of(url, "ann") == {"1@example.com": 1, "2@example.com": 3}
        assert count_of(url, "ann") == 2


@pytest.mark.parametrize("lost", ["users", "claims"])
async def test_what_a_failure_cut_off_is_counted_once(tmp_path: Path, lost: str) -> None:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}", "timeoutMS=20000")
        async with mongo.opened(tmp_path, url, identifiers=EMAIL) as made:
            proxy.rule = lambda name, command: (
                CLOSE if name == "update" and command["update"] == lost else None
            )
            with pytest.raises(StorageUnavailable):
                await made.write([address("ann", 1, 1)])
            proxy.rule = None
            await made.write([address("ann", 1, 1)])
            assert claims_of(url, "ann") == {"1@example.com": 1}
            assert count_of(url, "ann") == 1


async def test_a_user_without_a_claim_is_last(tmp_path: Path) -> None:
    """A client can choose the timestamps of a user, and so when the user was created."""
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url, identifiers=EMAIL) as made:
        await made.write([address("ann", 1, 1000)])
        await made.write([address("forged", 1, 1)])
        await made.write([address("older", 1, 0)])
        with raw(url) as db:
            db.claims.delete_many({"userId": {"$ne": "ann"}})
        users = await made.find_users(WORKSPACE, "email", ["1@example.com"])
        assert users == {"1@example.com": ["ann", "older", "forged"]}
