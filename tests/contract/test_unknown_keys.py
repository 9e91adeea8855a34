# SPDX-License-Identifier: Apache-2.0
"""Requests with an unknown write key: they wait for the keys in the store, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engage.api import EventStore, StorageUnavailable
from engage.keys import table as keys
from engage.keys.changes import create_key
from engage.upkeep.audit import Actor
from support.http_client import Answer
from support.server_inprocess import BASIC, Serving, Valve, basic, serving
from support.waiting import eventually

EVENT = {"userId": "u", "event": "E"}
ACTOR = Actor(who="ann", origin="test")


async def create(server: Serving, key_id: str = "ios") -> str:
    """Create a key, as another process would."""
    workspaces = server.app.config.workspaces
    made = await create_key(
        server.app.store, workspaces, "acme", key_id, actor=ACTOR, now=1_795_253_400_000
    )
    return made.key


class Reads:
    """Counts how often the version of the records is read."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, store: EventStore) -> None:
        read: Callable[[str], Awaitable[int]] = store.records_version  # type: ignore[attr-defined]

        async def counted(kind: str) -> int:
            self.count += kind == "key"
            return await read(kind)

        store.records_version = counted  # type: ignore[attr-defined]


def places(key: str) -> list[dict[str, Any]]:
    """Return the requests that have a key in each of its places."""
    return [
        {"path": "/v1/track", "body": EVENT, "key": basic(key)},
        {"path": "/v1/track", "body": EVENT, "key": f"Basic {key}"},
        {"path": f"/v1/track?writeKey={key}", "body": EVENT, "key": None},
        {"path": "/v1/track", "body": {**EVENT, "writeKey": key}, "key": None},
        {
            "path": "/v1/batch",
            "body": {"batch": [{"type": "track", **EVENT}], "writeKey": key},
            "key": None,
        },
        {"path": f"/v1/projects/{key}/settings", "method": "GET", "key": None},
        {"path": "/sourceConfig", "method": "GET", "key": basic(key)},
    ]


async def test_a_new_key_works_at_its_first_use_in_each_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for number in range(len(places(""))):
            key = await create(server, f"key-{number}")
            answer = await server.send(**places(key)[number])
            assert (number, answer.status) == (number, 200)
        assert len(await server.events()) == 5


async def test_a_wrong_key_is_refused_in_each_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for number, request in enumerate(places("nope")):
            answer = await server.send(**request)
            # After WAIT_SECONDS it would be a 503.
            assert (number, answer.status) == (
                number,
                404 if "projects" in request["path"] else 401,
            )


@pytest.mark.parametrize("sent", ["Basic é", "Basic", "Basic a=b c", "Digest nope", "x" * 600])
async def test_what_cannot_be_a_key_does_not_wait(tmp_path: Path, sent: str) -> None:
    reads = Reads()
    async with serving(tmp_path, meddle=reads) as server:
        await asyncio.sleep(0)
        before = reads.count
        answer = await server.send("/v1/track", EVENT, key=sent)
        assert answer.status == 401
        answer = await server.send("/v1/track", {**EVENT, "writeKey": "x" * 600}, key=None)
        assert answer.status == 401
        assert reads.count == before


async def test_only_a_refresh_that_began_later_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key is created while a refresh runs that has read the version before."""
    monkeypatch.setattr(keys, "WAIT_SECONDS", 60.0)  # The disk may need long for the key.
    gate = asyncio.Event()
    reading = asyncio.Event()
    hanging = asyncio.Event()

    def meddle(store: EventStore) -> None:
        read: Callable[[str], Awaitable[int]] = store.records_version  # type: ignore[attr-defined]

        async def late(kind: str) -> int:
            version = await read(kind)
            if kind == "key-override" and reading.is_set():
                hanging.set()
                await gate.wait()
            return version

        store.records_version = late  # type: ignore[attr-defined]

    async with serving(tmp_path, meddle=meddle) as server:
        reading.set()
        first = asyncio.create_task(server.send("/v1/track", EVENT, key=basic("nope")))
        await hanging.wait()
        key = await create(server)
        waiting = server.app.keys._waiting
        second = asyncio.create_task(server.send("/v1/track", EVENT, key=basic(key)))
        await eventually(lambda: server.app.keys._waiting > waiting)
        reading.clear()
        gate.set()
        assert (await first).status == 401
        assert (await second).status == 200


async def test_a_flood_of_unknown_keys_costs_one_read_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known keys are served meanwhile, and the requests that cannot wait get a 503."""
    # On a slow machine, a read may take seconds.
    monkeypatch.setattr(keys, "WAIT_SECONDS", 30.0)
    monkeypatch.setattr(keys, "MAX_WAITING", 100)
    reads = Reads()
    seconds = 5.0
    async with serving(tmp_path, meddle=reads, refresh_gap=keys.GAP_SECONDS) as server:
        before, began = reads.count, time.monotonic()
        end = began + seconds
        statuses: dict[int, int] = {}
        refused: list[Answer] = []

        async def flood(number: int) -> None:
            sent = 0
            async with await server.connect() as client:
                while time.monotonic() < end:
                    sent += 1
                    key = basic(f"unknown-{number}-{sent}")
                    answer = await server.send("/v1/track", EVENT, key=key, client=client)
                    statuses[answer.status] = statuses.get(answer.status, 0) + 1
                    if answer.status == 503:
                        refused.append(answer)
                        await asyncio.sleep(0.05)

        flooding = [asyncio.create_task(flood(number)) for number in range(150)]
        async with await server.connect() as client:
            while time.monotonic() < end:
                assert (await server.track(client)).status == 200
                await asyncio.sleep(0.02)
        await asyncio.gather(*flooding)
        took = time.monotonic() - began
        assert reads.count - before <= took + 2
        assert 401 in statuses
        assert set(statuses) <= {401, 503}
        assert statuses[401] <= keys.MAX_WAITING * (took + 2)
        for answer in refused:
            assert answer.json["code"] == "overloaded"
            assert 1 <= int(answer.headers["retry-after"]) <= 5
        # A new key still works.
        assert (
            await server.send("/v1/track", EVENT, key=basic(await create(server)))
        ).status == 200


@pytest.mark.parametrize("size", [0, 40_000], ids=["small bodies", "large bodies"])
async def test_a_new_key_works_at_its_first_use_during_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """300 connections send unknown keys without a pause; more could wait."""
    monkeypatch.setattr(keys, "WAIT_SECONDS", 3600.0)
    done = asyncio.Event()
    async with serving(tmp_path, refresh_gap=keys.GAP_SECONDS) as server:

        async def flood(number: int) -> None:
            sent = 0
            async with await server.connect() as client:
                while not done.is_set():
                    sent += 1
                    body = {**EVENT, "writeKey": f"unknown-{number}-{sent}", "x": "x" * size}
                    answer = await server.send("/v1/track", body, key=None, client=client)
                    assert answer.status in (401, 503)
                    if answer.status == 503:
                        await asyncio.sleep(0.05)

        flooding = [asyncio.create_task(flood(number)) for number in range(300)]
        table = server.app.keys
        await eventually(lambda: table._held > keys.MAX_HELD // 2 if size else table._waiting > 250)
        for number, request in enumerate(places("")):
            key = await create(server, f"key-{number}")
            request = places(key)[number]
            assert (await server.send(**request)).status == 200
        done.set()
        await asyncio.gather(*flooding)
        assert server.app.keys._held == server.app.keys._waiting == 0


async def test_only_so_many_requests_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one gets a 503 at once; known keys are served."""
    monkeypatch.setattr(keys, "WAIT_SECONDS", 3600.0)
    monkeypatch.setattr(keys, "MAX_WAITING", 210)
    valve = Valve("records_version")
    async with serving(tmp_path, meddle=valve) as server:
        valve.gate.clear()
        tasks = [
            asyncio.create_task(server.send("/v1/track", EVENT, key=basic(f"unknown-{number}")))
            for number in range(keys.MAX_WAITING)
        ]
        await eventually(lambda: server.app.keys._waiting == keys.MAX_WAITING)
        answer = await server.send("/v1/track", EVENT, key=basic("one-more"))
        assert (answer.status, answer.json["code"]) == (503, "overloaded")
        assert (await server.track()).status == 200
        valve.gate.set()
        assert {(await task).status for task in tasks} == {401}


async def test_a_waiting_request_leaves_its_body_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies of 1 MB whose key is in the header: the server holds a small part of each."""
    monkeypatch.setattr(keys, "WAIT_SECONDS", 3600.0)
    valve = Valve("records_version")
    async with serving(tmp_path, meddle=valve) as server:
        valve.gate.clear()
        body = b"x" * 1_000_000
        path = "/v1/track"
        tasks = [
            asyncio.create_task(server.send(path, body, key=basic(f"unknown-{number}")))
            for number in range(20)
        ]
        listener = server.app.listener
        assert listener is not None
        # They wait for their clients: they can give way when memory is short.
        await eventually(lambda: len(listener.shared.capacity.waiting) == 20)
        await asyncio.sleep(0.5)
        held = listener.shared.capacity.held
        assert 0 < held < 20 * 400_000
        assert (await server.track()).status == 200
        valve.gate.set()
        for task in tasks:
            assert (await task).status == 401
        await eventually(lambda: listener.shared.capacity.held == 0)


@pytest.mark.parametrize("known", [True, False])
async def test_a_client_that_expects_100_waits_for_it(tmp_path: Path, known: bool) -> None:
    async with serving(tmp_path) as server, await server.connect() as client:
        key = await create(server) if known else "nope"
        body = b'{"userId": "u", "event": "E"}'
        head = f"POST /v1/track HTTP/1.1\r\nHost: a\r\nAuthorization: {basic(key)}\r\n"
        head += f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        await client.send(head.encode())
        if not known:
            assert (await client.answer()).status == 401
            return
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        assert (await client.answer()).status == 200


async def test_a_large_body_with_a_new_key_is_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        items = [{"type": "track", **EVENT, "properties": {"x": "y" * 5000}}] * 90
        for number, encode in enumerate((basic, None)):
            key = await create(server, f"key-{number}")
            body = {"batch": items} if encode else {"batch": items, "writeKey": key}
            answer = await server.send("/v1/batch", body, key=encode(key) if encode else None)
            assert answer.status == 200
        assert len(await server.events()) == 180


async def test_a_client_that_hangs_up_while_it_waits_does_no_harm(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for _ in range(30):
            async with await server.connect() as client:
                head = f"POST /v1/track HTTP/1.1\r\nHost: a\r\nAuthorization: {basic('nope')}\r\n"
                await client.send(head.encode() + b"Content-Length: 1000\r\n\r\n{")
        table = server.app.keys
        await eventually(lambda: table._waiting == 0)
        assert (await server.track()).status == 200


async def test_until_the_keys_were_read_every_key_gets_a_503(tmp_path: Path) -> None:
    """Also a key of the config: an operator may have disabled it."""
    valve = Valve("records_version")
    valve.error = StorageUnavailable("away")
    async with serving(tmp_path, meddle=valve, works=False) as server:
        for key in ("nope", "test-write-key-of-acme"):
            for request in places(key):
                answer = await server.send(**request)
                assert (answer.status, answer.json["code"]) == (503, "storage_unavailable")
                assert int(answer.headers["retry-after"]) > 0
        assert (await server.send("/v1/track", EVENT, key=None)).status == 401
        assert (await server.send("/v1/track", EVENT, key="Digest x")).status == 401
        assert (await server.send("/readyz", method="GET", key=None)).status == 503
        valve.error = None
        await eventually(lambda: server.app.keys.loaded)
        assert (await server.track()).status == 200
        assert (await server.send("/v1/track", EVENT, key=basic("nope"))).status == 401


async def test_a_store_that_goes_away_later_changes_nothing(tmp_path: Path) -> None:
    valve = Valve("records_version")
    async with serving(tmp_path, meddle=valve) as server:
        key = await create(server)
        assert (await server.send("/v1/track", EVENT, key=basic(key))).status == 200
        valve.error = StorageUnavailable("away")
        assert (await server.send("/v1/track", EVENT, key=basic("nope"))).status == 503
        for sent in (BASIC, basic(key)):
            assert (await server.send("/v1/track", EVENT, key=sent)).status == 200


@pytest.mark.parametrize("whole", [True, False], ids=["complete bodies", "bodies that stall"])
async def test_waiting_requests_do_not_take_the_memory_of_others(
    tmp_path: Path, whole: bool
) -> None:
    """200 bodies of 300 kB would fill ``limits.inflight_bytes`` many times."""
    limits = "[limits]\ninflight_bytes = 8_000_000\nbody_bytes = 1_500_000\n"
    body = b'{"writeKey": "unknown", "x": "' + b"x" * 300_000 + b'"}'
    head = b"POST /v1/track HTTP/1.1\r\nHost: a\r\n"
    if whole:
        data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        data = head + b"Authorization: Basic unknown\r\nContent-Length: 1000000\r\n\r\n" + body
    reads = Reads()
    async with serving(
        tmp_path, config_extra=limits, meddle=reads, refresh_gap=keys.GAP_SECONDS
    ) as server:
        statuses: list[int] = []

        async def hostile() -> None:
            with contextlib.suppress(OSError, EOFError):
                async with await server.connect() as client:
                    await client.send(data)
                    statuses.append((await client.answer()).status)

        tasks = [asyncio.create_task(hostile()) for _ in range(200)]
        listener = server.app.listener
        assert listener is not None
        capacity = listener.shared.capacity
        most = 0
        async with await server.connect() as client:
            while not all(task.done() for task in tasks):
                most = max(most, capacity.held)
                assert (await server.track(client)).status == 200
                await asyncio.sleep(0.01)
        assert most <= 8_000_000
        assert set(statuses) <= {401, 503}
        assert server.app.keys._held == server.app.keys._waiting == 0


async def test_few_large_bodies_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 1 MB; the fifth gets a 503 at once."""
    monkeypatch.setattr(keys, "WAIT_SECONDS", 3600.0)
    valve = Valve("records_version")
    async with serving(tmp_path, meddle=valve) as server:
        valve.gate.clear()
        body = {"writeKey": "unknown", "x": "x" * 1_000_000}
        tasks = [asyncio.create_task(server.send("/v1/track", body, key=None)) for _ in range(6)]
        await eventually(lambda: sum(task.done() for task in tasks) == 2)
        valve.gate.set()
        codes = sorted([(await task).json["code"] for task in tasks])
        assert codes == ["invalid_write_key"] * 4 + ["overloaded"] * 2
