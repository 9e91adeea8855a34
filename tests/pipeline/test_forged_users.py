# SPDX-License-Identifier: Apache-2.0
"""Many users with the address of another person, made by anyone who has the public write key.

A signed link works all the same, webhook deliveries still go to the person, and requests with a
wrong hash do not stop the events of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import Kind, Recipient, StorageContext, Subject, TranslatedEvent
from engage.errors import ApiError
from engage.subscriptions.links import subscription_hash
from engage.subscriptions.recipients import Recipients
from engage.testing.factories import identify, store_all
from engage_plugins.mongo.store import MongoStorage
from engage_plugins.sqlite.store import SqliteStorage
from support import mongo
from support.pipeline import SECRET, Core, make_core, send_event

EMAIL = "ada@example.com"
IDENTIFIERS = {"acme": ("email", "phone"), "other": ("email", "phone")}
#: Milliseconds from 2025 back to 1970.
AGES = 1_735_689_600_000


@contextlib.asynccontextmanager
async def forged(tmp_path: Path, kind: str, count: int) -> AsyncIterator[Core]:
    """Open a store with a person and users with the same address: half of them were made before,
    half of them after, with timestamps of 1970 and of now."""
    context = StorageContext(base_dir=tmp_path, identifiers=IDENTIFIERS, write_timeout=60)
    store: Any
    if kind == "sqlite":
        store = SqliteStorage.from_options({"min_free_bytes": 0}, context)
    else:
        url = mongo.shared(mongo.kinds()[-1]).url()
        store = MongoStorage.from_options({"url": url}, context)
    await store.open(create=True)
    try:

        async def forge(first: int, last: int, received: int) -> None:
            for start in range(first, last, 5000):
                await store.write(
                    [
                        identify(
                            f"f{number}",
                            f"forged-{number}",
                            -AGES if number % 2 else received,
                            received=received,
                            traits={"email": EMAIL},
                        )
                        for number in range(start, min(start + 5000, last))
                    ]
                )

        await forge(0, count // 2, 10)
        await store_all(store, identify("p", "ada", 20, traits={"email": " Ada@Example.com"}))
        await forge(count // 2, count, 30)
        yield make_core(store, write_timeout=60)
    finally:
        await store.close()


async def follow(core: Core, *, right: bool = True) -> Any:
    """Send the request of the person's signed link, which has no user id."""
    signature = subscription_hash(
        SECRET,
        subject=Subject(Kind.USER, "ada"),
        workspace_id="acme",
        identifier=EMAIL,
        identifier_key="email",
    )
    body = {
        "workspaceId": "acme",
        "identifier": EMAIL,
        "identifierKey": "email",
        "hash": signature if right else "0" * 64,
        "changes": {"news": False},
    }
    return await core.pipeline.subscriptions(orjson.dumps(body))


COUNTS = [2_000, pytest.param(100_000, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
async def test_a_signed_link_works(tmp_path: Path, count: int) -> None:
    async with forged(tmp_path, "sqlite", count) as core:
        assert (await follow(core))["news"] is False


@pytest.mark.mongo
@pytest.mark.parametrize("count", [100, 3_000])
async def test_a_signed_link_works_on_mongodb(tmp_path: Path, count: int) -> None:
    async with forged(tmp_path, "mongo", count) as core:
        assert (await follow(core))["news"] is False
        # Who claims an address before its owner does gets the deliveries: docs/security.md.
        assert (await recipient(core)).startswith("forged-")
        with pytest.raises(ApiError):
            await follow(core, right=False)


async def recipient(core: Core) -> str:
    """Return the user to whom a webhook delivery for the address goes."""
    recipients = Recipients(core.store, 60)
    event = TranslatedEvent({}, Recipient("email", EMAIL))
    (document,) = await recipients.identify("acme", "sendgrid", [event])
    return str(document["userId"])


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)])
async def test_deliveries_stay_with_the_person(tmp_path: Path, kind: str) -> None:
    """However many users are made afterwards, and whatever timestamps they have."""
    async with forged(tmp_path, kind, 0) as core:
        for received in (30, 31, 32):
            await core.store.write(
                [
                    identify(
                        f"f{received}-{number}",
                        f"0-{received}-{number}",
                        -AGES if number % 2 else 30,
                        received=received,
                        traits={"email": EMAIL},
                    )
                    for number in range(100)
                ]
            )
        assert await recipient(core) == "ada"
        # The person is identified again, and again from another device whose clock is wrong.
        await core.store.write([identify("q", "ada", 9, received=99, traits={"email": EMAIL})])
        assert await recipient(core) == "ada"


@pytest.mark.timing
async def test_wrong_hashes_do_not_stop_the_events_of_others(tmp_path: Path) -> None:
    """Each of them is compared with all users."""
    async with forged(tmp_path, "sqlite", 100_000) as core:

        async def guess() -> None:
            while True:
                with pytest.raises(ApiError):
                    await follow(core, right=False)

        bogus = [asyncio.create_task(guess()) for _ in range(20)]
        latencies = []
        for number in range(300):
            started = time.monotonic()
            item = {"userId": "u", "event": "e", "messageId": str(number)}
            await send_event(core, item)
            latencies.append(time.monotonic() - started)
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in bogus)
        # Single ones may wait for the disk.
        assert statistics.median(latencies) < 0.5
        # The right link is found all the same.
        assert (await follow(core))["news"] is False
        for task in bogus:
            task.cancel()
        await asyncio.wait(bogus)


@pytest.mark.parametrize("batch", [1, 40, 300])
async def test_the_claims_of_a_user_are_bounded(tmp_path: Path, batch: int) -> None:
    """The conformance suite tests what the claims are good for."""

    def address(user: str, number: int, at: int) -> Any:
        email = {"email": f"{number}@example.com"}
        return identify(f"{user}-{number}-{at}", user, at, traits=email)

    async with forged(tmp_path, "sqlite", 0) as core:
        claims = [address("bob", number, 100 + number) for number in range(300)]
        for start in range(0, len(claims), batch):
            await core.store.write(claims[start : start + batch])
        with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
            query = "SELECT count(*), max(count) FROM (SELECT count(*) AS count FROM claims"
            assert db.execute(f"{query} GROUP BY profile)").fetchone() == (1, 100)
