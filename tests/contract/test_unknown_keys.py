# SPDX-License-Identifier: Apache-2.0
"""Requests with an unknown write key: they wait for the keys in the store, within limits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.audit import Actor
from engage.keys import table as keys
from engage.keys.changes import create_key
from engage.store.facade import Storage
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

    def __call__(self, store: Storage) -> None:
        read: Callable[[str], Awaitable[int]] = store.records_version

        async def counted(kind: str) -> int:
            self.count += kind == "key"
            return await read(kind)

        store.records_version = counted  # type: ignore[method-assign]


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
    items = [{"type": "track", **EVENT, "properties": {"x": "y" * 5000}}] * 90
    async with serving(tmp_path) as server:
        for number in range(len(places(""))):
            key = await create(server, f"key-{number}")
            answer = await server.send(**places(key)[number])
            assert (number, answer.status) == (number, 200)
        assert len(await server.events()) == 5
        # With a large body, too.
        in_header, in_body = await create(server, "header"), await create(server, "body")
        large: dict[str, Any] = {"batch": items}
        assert (await server.send("/v1/batch", large, key=basic(in_header))).status == 200
        large["writeKey"] = in_body
        assert (await server.send("/v1/batch", large, key=None)).status == 200
        assert len(await server.events()) == 185


async def test_a_wrong_key_is_refused_in_each_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for number, request in enumerate(places("nope")):
            answer = await server.send(**request)
            # After WAIT_SECONDS it would be a 503.
            assert (number, answer.status) == (
                number,
                404 if "projects" in request["path"] else 401,
            )


async def test_what_cannot_be_a_key_does_not_wait(tmp_path: Path) -> None:
    reads = Reads()
    async with serving(tmp_path, meddle=reads) as server:
        await asyncio.sleep(0)
        before = reads.count
        for sent in ("Basic é", "Basic", "Basic a=b c", "Digest nope", "x" * 600):
            assert (await server.send("/v1/track", EVENT, key=sent)).status == 401
        answer = await server.send("/v1/track", {**EVENT, "writeKey": "x" * 600}, key=None)
        assert answer.status == 401
        assert reads.count == before


def busy(server: Serving) -> int:
    """Return how many requests are being answered."""
    assert server.app.listener is not None
    return sum(connection.serving for connection in server.app.listener.connections)


async def test_only_a_refresh_that_began_later_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key is created while a refresh runs that has read the version before."""
    monkeypatch.setattr(keys, "WAIT_SECONDS", 60.0)  # The disk may need long for the key.
    gate = asyncio.Event()
    reading = asyncio.Event()
    hanging = asyncio.Event()

    def meddle(store: Storage) -> None:
        read: Callable[[str], Awaitable[int]] = store.records_version

        async def late(kind: str) -> int:
            version = await read(kind)
            if kind == "key-override" and reading.is_set():
                hanging.set()
                await gate.wait()
            return version

        store.records_version = late  # type: ignore[method-assign]

    async with serving(tmp_path, meddle=meddle) as server:
        reading.set()
        first = asyncio.create_task(server.send("/v1/track", EVENT, key=basic("nope")))
        await hanging.wait()
        key = await create(server)
        second = asyncio.create_task(server.send("/v1/track", EVENT, key=basic(key)))
        await eventually(lambda: busy(server) == 2)
        reading.clear()
        gate.set()
        assert (await first).status == 401
        assert (await second).status == 200


async def test_a_flood_of_unknown_keys_costs_one_read_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known keys are served meanwhile, and a new key works at its first use."""
    # On a slow machine, a read may take seconds.
    monkeypatch.setattr(keys, "WAIT_SECONDS", 3600.0)
    second = 0.2  # The shorter it is, the shorter is the test.
    reads, done = Reads(), asyncio.Event()
    statuses: Counter[int] = Counter()
    async with serving(tmp_path, meddle=reads, refresh_gap=second) as server:

        async def flood(number: int) -> None:
            # Half of the bodies are large: not all of these may wait.
            event = {**EVENT, "x": "x" * 40_000 * (number % 2)}
            async with await server.connect() as client:
                while not done.is_set():
                    body = {**event, "writeKey": f"unknown-{number}-{sum(statuses.values())}"}
                    answer = await server.send("/v1/track", body, key=None, client=client)
                    statuses[answer.status] += 1
                    if answer.status == 503:
                        await asyncio.sleep(0.05)

        before, began = reads.count, time.monotonic()
        flooding = [asyncio.create_task(flood(number)) for number in range(200)]
        async with await server.connect() as client:
            while statuses[401] < 400:
                assert (await server.track(client)).status == 200
                await asyncio.sleep(0.02)
        # A read for each of these seconds, and one for every two seconds of the clock.
        taken = time.monotonic() - began
        assert reads.count - before <= taken / second + taken / 2 + 2
        for number in range(len(places(""))):
            key = await create(server, f"key-{number}")
            assert (await server.send(**places(key)[number])).status == 200
        done.set()
        await asyncio.gather(*flooding)
        assert set(statuses) <= {401, 503}


async def test_only_so_many_requests_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one gets a 503 at once; known keys are served. Who hangs up makes room."""
    monkeypatch.setattr(keys, "WAIT_SECONDS", 3600.0)
    monkeypatch.setattr(keys, "MAX_WAITING", 210)
    valve = Valve("records_version")
    async with serving(tmp_path, meddle=valve) as server:
        for _ in range(keys.MAX_WAITING):
            async with await server.connect() as client:
                head = f"POST /v1/track HTTP/1.1\r\nHost: a\r\nAuthorization: {basic('nope')}\r\n"
                await client.send(head.encode() + b"Content-Length: 1000\r\n\r\n{")
        await eventually(lambda: busy(server) == 0)
        valve.gate.clear()
        tasks = [
            asyncio.create_task(server.send("/v1/track", EVENT, key=basic(f"unknown-{number}")))
            for number in range(keys.MAX_WAITING + 1)
        ]
        await eventually(lambda: any(task.done() for task in tasks))
        assert (await server.track()).status == 200
        valve.gate.set()
        answers = [await task for task in tasks]
        [refused] = [answer for answer in answers if answer.status != 401]
        assert (refused.status, refused.json["code"]) == (503, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 5


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
