# SPDX-License-Identifier: Apache-2.0
"""What may differ between the drivers: opening, time limits, failures, cancellations, closing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pymongo.errors
import pytest

from engage.api import EventFilter, Status, StorageUnavailable
from engage.testing import WORKSPACE, event, identify
from engage.testing.storage.failures import FailureTests
from engage.testing.storage.histories import HistoryTests
from engage_plugins.mongo.connection import Connection
from engage_plugins.mongo.store import MongoStorage
from support import mongo
from support.mongo_conformance import OnServer
from support.mongo_proxy import SILENCE, Proxy

pytestmark = pytest.mark.mongo


@pytest.fixture(params=["motor", "pymongo"])
def driver(request: pytest.FixtureRequest) -> Iterator[str]:
    """The driver of the stores that a test makes."""
    yield request.param
    mongo.collect_sockets()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of a server."""
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as made:
        yield made


def new(tmp_path: Path, url: str, driver: str, **context: Any) -> MongoStorage:
    return mongo.make_store(tmp_path, url, options={"driver": driver}, **context)


@contextlib.asynccontextmanager
async def opened(
    tmp_path: Path, proxy: Proxy, driver: str, options: str = ""
) -> AsyncIterator[tuple[MongoStorage, str]]:
    """Open a store behind a proxy; yield it with its connection string."""
    url = proxy.url(f"engage_test_{os.urandom(6).hex()}", options)
    async with mongo.opened(tmp_path, url, options={"driver": driver}) as made:
        yield made, url
        proxy.rule = None


async def message_ids(made: MongoStorage) -> list[str]:
    page = await made.scan(EventFilter(), after=None, limit=1000)
    return [one.message_id for one in page.items]


@pytest.mark.long
class TestAsyncMongoClient(HistoryTests, FailureTests, OnServer):
    """With ``pymongo.AsyncMongoClient``, each call answers and fails as with motor."""

    driver = "pymongo"
    kind = mongo.kinds()[-1]
    examples = 10

    @pytest.fixture(autouse=True)
    def _collected(self) -> Iterator[None]:
        yield
        mongo.collect_sockets()


# ------------------------------------------------------------------------------------- opening
async def test_the_url_overrides_defaults(driver: str) -> None:
    def connected(url: str) -> Any:
        made = Connection(url, driver=driver, allow_weak=False, timeout=8)
        made.connect()
        return made

    made = connected("mongodb://127.0.0.1:1/x")
    client = made.db.client
    assert client.write_concern.document == {"w": "majority", "j": True}
    assert client.options.retry_writes
    assert (client.options.timeout, client.options.server_selection_timeout) == (8.0, 3.0)
    await made.close()
    given = "timeoutMS=1234&serverSelectionTimeoutMS=567&retryWrites=false&maxPoolSize=7"
    made = connected(f"mongodb://127.0.0.1:1/x?{given}")
    options = made.db.client.options
    assert (options.timeout, options.server_selection_timeout) == (1.234, 0.567)
    assert not options.retry_writes
    assert options.pool_options.max_pool_size == 7
    await made.close()


async def test_a_store_with_slow_indexes_is_opened_in_the_time_of_a_call(
    tmp_path: Path, proxy: Proxy, driver: str
) -> None:
    """An overloaded server answers about indexes only when it has made all earlier writes."""
    async with opened(tmp_path, proxy, driver) as (made, url):
        await made.write([event("a")])
    proxy.rule = lambda name, _: SILENCE if name == "listIndexes" else None
    made = new(tmp_path, url, driver, write_timeout=4.0)
    async with asyncio.timeout(60):
        await made.open(create=True)
    await made.write([event("b")])
    assert await message_ids(made) == ["a", "b"]
    await made.close()


async def test_an_attempt_to_open_that_is_cancelled_leaves_no_task(
    tmp_path: Path, proxy: Proxy, driver: str
) -> None:
    async with opened(tmp_path, proxy, driver) as (_, url):
        pass
    proxy.rule = lambda name, _: SILENCE if name == "listIndexes" else None
    before = asyncio.all_tasks()
    made = new(tmp_path, url, driver)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await made.open(create=True)
    assert asyncio.all_tasks() == before
    await made.close()


# ------------------------------------------------------------------------------------- failures
def _failing(name: str, reply: dict[str, Any]) -> Any:
    return lambda command, _: reply if command == name else None


@pytest.mark.parametrize(
    "reply",
    [
        {"ok": 0.0, "code": 2, "errmsg": "of the command, not of a document"},
        {"ok": 0.0, "code": 13, "errmsg": "unauthorised"},
        {"ok": 0.0, "code": 8000, "errmsg": "over quota"},
        {"ok": 1, "n": 1, "writeErrors": [{"index": 0, "code": 121, "errmsg": "validator"}]},
        {"ok": 1, "n": 1, "writeErrors": [{"index": 0, "code": 112, "errmsg": "E11000 BadValue"}]},
        {"ok": 1, "n": 2, "writeConcernError": {"code": 64, "errmsg": "waiting timed out"}},
        {
            "ok": 1,
            "n": 1,
            "writeErrors": [{"index": 0, "code": 11000, "errmsg": "E11000 duplicate key"}],
            "writeConcernError": {"code": 100, "errmsg": "not enough members"},
        },
    ],
)
async def test_all_other_codes_fail_the_write(
    tmp_path: Path, proxy: Proxy, driver: str, reply: dict[str, Any]
) -> None:
    """They cause neither a dead letter nor a success, and the text of an error decides nothing."""
    async with opened(tmp_path, proxy, driver, "retryWrites=false") as (made, _):
        proxy.rule = _failing("insert", reply)
        with pytest.raises(StorageUnavailable) as raised:
            await made.write([event("a"), event("b")])
        assert "unauthorised" not in str(raised.value)
        proxy.rule = _failing("update", reply)
        with pytest.raises(StorageUnavailable):
            await made.write([identify("c", "u", 1)])
        proxy.rule = None
        outcomes = await made.write([event("a"), event("b"), identify("c", "u", 1)])
        assert Status.REFUSED not in {outcome.status for outcome in outcomes}
        assert await made.profile(WORKSPACE, "u") is not None


async def test_a_call_that_is_not_answered_fails_in_its_time(
    tmp_path: Path, proxy: Proxy, driver: str
) -> None:
    async with opened(tmp_path, proxy, driver, "timeoutMS=2000") as (made, _):
        proxy.rule = lambda name, _: SILENCE if name in ("insert", "find") else None
        async with asyncio.timeout(60):
            with pytest.raises(StorageUnavailable):
                await made.write([event("a")])
            with pytest.raises(StorageUnavailable):
                await made.profile(WORKSPACE, "u")


# --------------------------------------------------------------------------------- cancellations
async def test_no_cancellation_is_lost(tmp_path: Path, proxy: Proxy, driver: str) -> None:
    """Closing the store cancels its own tasks and waits for them, whatever the driver is doing."""
    ended = 0
    async with opened(tmp_path, proxy, driver) as (made, _):
        # Within these turns of the loop, a call begins to wait for the answer.
        for turns in range(12):
            await made.check()  # makes the connection that the next call uses
            call = asyncio.create_task(made.check())
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled = call.cancel()
            await asyncio.wait([call])
            assert call.cancelled() == cancelled, turns
            ended += cancelled
    assert ended > 1


async def test_a_cancelled_call_that_fails_is_cancelled(driver: str) -> None:
    """A loop that tries again after each failure must end."""
    made = Connection("mongodb://127.0.0.1:1/x", driver=driver, allow_weak=False, timeout=8)
    made.connect()

    async def fail() -> None:
        with made.calling():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            raise pymongo.errors.AutoReconnect

    call = asyncio.create_task(fail())
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    await made.close()


# ------------------------------------------------------------------------------------- closing
async def test_closing_does_not_stop_the_loop_when_the_server_is_silent(
    tmp_path: Path, proxy: Proxy, driver: str
) -> None:
    """A driver ends the sessions of a server that has them; the servers of the tests have none."""
    proxy.announced = {"logicalSessionTimeoutMinutes": 30}
    async with opened(tmp_path, proxy, driver) as (made, _):
        await made.write([event("a")])
        proxy.rule = lambda name, _: SILENCE if name == "endSessions" else None
        closing = asyncio.ensure_future(made.close())
        # This ends the test if the loop is blocked.
        late = threading.Timer(20, proxy.cut)
        late.start()
        turns = 0
        while not closing.done():
            await asyncio.sleep(0.01)
            turns += 1
        late.cancel()
        assert "endSessions" in proxy.seen
        assert turns > 5
