# SPDX-License-Identifier: Apache-2.0
"""engage.server.worker in the process of the test: what it does besides answering requests."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import Event, EventFilter, StorageUnavailable
from engage.config import load
from engage.http1.sockets import listen
from engage.registry import load_plugins
from engage.server import worker
from engage.store.facade import Storage
from engage.upkeep.retention import expire_periodically
from engage_plugins.sqlite.store import SqliteStorage
from support.http_client import RawClient
from support.memory_log import MemoryBroker
from support.server_inprocess import BASIC, Meddling, Valve
from support.server_process import config_text
from support.times import DAY, Times
from support.waiting import eventually


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    """Undo that a worker freezes objects in memory, for the tests after this one."""
    yield
    gc.unfreeze()


def _event(message_id: str, received_at: int) -> Event:
    return Event(
        workspace_id="acme",
        origin="api",
        message_id=message_id,
        type="track",
        user_id="u",
        anonymous_id=None,
        name="E",
        received_at=received_at,
        timestamp=received_at,
        body=orjson.dumps({"messageId": message_id, "type": "track"}),
    )


async def _ids(store: Storage) -> list[str]:
    page = await store.scan(EventFilter(), after=None, limit=10)
    return [event.message_id for event in page.items]


@pytest.mark.parametrize("number", [0, 1])
async def test_only_the_first_worker_expires_old_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(config_text(config_extra="[retention]\nevents_days = 30"))
    config, registry = load(path), load_plugins()
    store = registry.make_storage(config)
    await store.open(create=True)
    now = int(time.time() * 1000)
    await store.write([_event("old", now - 31 * DAY), _event("young", now - 29 * DAY)])

    rounds = 0

    async def observed(*arguments: object, **options: float) -> None:
        nonlocal rounds
        rounds += 1
        await functools.partial(expire_periodically, first=0, every=0.05)(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "expire_periodically", observed)
    ready = asyncio.Event()
    sock = listen("127.0.0.1", 0)
    one = worker.Worker(config, registry, sock, number=number, ready=ready.set)
    running = asyncio.create_task(one.run())
    await ready.wait()
    if number == 0:
        seen: list[str] = []

        async def look() -> None:
            while True:
                seen[:] = await _ids(store)
                await asyncio.sleep(0.02)

        looking = asyncio.create_task(look())
        await eventually(lambda: seen == ["young"])
        looking.cancel()
    one.stop()
    assert await running == 0
    assert rounds == (1 if number == 0 else 0)
    assert await _ids(store) == (["young"] if number == 0 else ["old", "young"])
    await store.close()


async def test_a_step_of_the_clock_ahead_expires_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if an event was received after it, and the time is not doubtful otherwise."""
    path = tmp_path / "engage.toml"
    path.write_text(config_text(config_extra="[retention]\nevents_days = 30"))
    config, registry = load(path), load_plugins()
    store = registry.make_storage(config)
    await store.open(create=True)
    times, rounds = Times(int(time.time() * 1000)), 0
    await store.write([_event("young", times.wall - DAY)])

    async def observed(store: Any, retention: Any, clock: Any) -> None:
        def counted() -> int:
            nonlocal rounds
            rounds += 1
            return int(clock())

        await expire_periodically(store, retention, counted, first=0, every=0.01, doubtful=0)

    monkeypatch.setattr(worker, "expire_periodically", observed)
    monkeypatch.setattr("engage.app.Clock", times.clock)
    ready = asyncio.Event()
    one = worker.Worker(config, registry, listen("127.0.0.1", 0), number=0, ready=ready.set)
    running = asyncio.create_task(one.run())
    await ready.wait()
    await eventually(lambda: rounds)
    times.step(400 * DAY)
    await store.write([_event("ahead", times.wall)])
    before = rounds
    await eventually(lambda: rounds > before + 2)
    one.stop()
    assert await running == 0
    assert await _ids(store) == ["young", "ahead"]
    await store.close()


async def test_a_worker_can_be_stopped_while_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(config_text())
    one = worker.Worker(load(path), load_plugins(), listen("127.0.0.1", 0), number=0)
    one.stop()
    assert await one.run() == 0


@pytest.mark.parametrize("away", ["fails", "hangs"])
async def test_a_worker_with_a_log_starts_answers_and_stops_without_its_store(
    tmp_path: Path, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its work in the background waits for the store, and requests for the keys in it."""
    broker = MemoryBroker()
    path = tmp_path / "engage.toml"
    path.write_text(
        config_text(server="metrics_port = 0", config_extra='[log]\nbackend = "memory"\n')
    )
    names = ("open", "check", "records_version", "put_counts", "recent", "budget_use")
    valve = Valve(*names)
    if away == "fails":
        valve.error = StorageUnavailable("away")
    else:
        valve.gate.clear()
    plugins: Any = Meddling(valve, broker)
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    ready = asyncio.Event()
    one = worker.Worker(load(path), plugins, sock, ready=ready.set, number=0)
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(120):
        await ready.wait()
    async with await RawClient.connect(port) as client:
        body = b'{"userId": "u", "event": "E"}'
        head = f"POST /v1/track HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n"
        await client.send(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await client.answer()).status == 503
        await client.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer()).status == 200
    one.stop()
    async with asyncio.timeout(120):
        assert await running == 0
    assert not broker.records
    assert not [record for record in caplog.records if record.exc_info]


async def test_nothing_is_expired_while_the_store_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(config_text(config_extra="[retention]\nevents_days = 30"))
    monkeypatch.setattr(
        worker, "expire_periodically", functools.partial(expire_periodically, first=0)
    )
    expiring: list[asyncio.Task[object]] = []
    close = SqliteStorage.close

    async def expire(self: Storage, before: int, *, limit: int, force: bool = False) -> int:
        """There is always more to expire."""
        task = asyncio.current_task()
        assert task is not None
        expiring[:] = [task]
        await self.check()
        return limit

    async def observed(self: SqliteStorage) -> None:
        assert all(task.done() for task in expiring)
        await close(self)

    monkeypatch.setattr(SqliteStorage, "expire", expire)
    monkeypatch.setattr(SqliteStorage, "close", observed)
    one = worker.Worker(load(path), load_plugins(), listen("127.0.0.1", 0), number=0)
    running = asyncio.create_task(one.run())
    await eventually(lambda: expiring)
    one.stop()
    assert await running == 0
    assert "expiring" not in caplog.text
