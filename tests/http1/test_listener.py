# SPDX-License-Identifier: Apache-2.0
"""All connections of a listener: their number, the memory that they hold, the drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from support.http_client import RawClient, request
from support.http_echo import on_uvloop, running
from support.waiting import eventually


async def test_bodies_in_memory_are_bounded() -> None:
    """Beyond ``inflight_bytes`` a request fails, until others have been answered."""
    async with running(inflight_bytes=150_000) as server:
        gate = server.settings["gate"] = asyncio.Event()
        async with await RawClient.connect(server.port) as first:
            await first.send(request(b"a" * 90_000))
            held = await eventually(lambda: server.listener.shared.capacity.held)
            answer = await server.ask(request(b"b" * 90_000))
            assert (answer.status, answer.body) == (418, b"overloaded")
            assert server.listener.shared.capacity.held == held > 90_000
            gate.set()
            assert (await first.answer()).status == 200
            assert (await server.ask(request(b"c" * 90_000))).status == 200
            assert server.listener.shared.capacity.held == 0


async def test_a_drain_answers_requests_and_closes_idle_connections() -> None:
    """Answers announce that the connection closes."""
    async with running() as server, contextlib.AsyncExitStack() as stack:
        gate = server.settings["gate"] = asyncio.Event()
        idle = await stack.enter_async_context(await RawClient.connect(server.port))
        busy = await stack.enter_async_context(await RawClient.connect(server.port))
        await busy.send(request(b"in flight"))
        await eventually(lambda: any(one.serving for one in server.listener.connections))
        server.listener.start_draining()
        late = await stack.enter_async_context(await RawClient.connect(server.port))
        await late.send(request(b"late"))
        await eventually(lambda: sum(one.serving for one in server.listener.connections) == 2)
        await server.listener.stop_accepting()
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(server.port)
        draining = asyncio.create_task(server.listener.drain(30.0))
        assert await idle.closed()
        gate.set()
        for client, body in ((busy, b"in flight"), (late, b"late")):
            answer = await client.answer()
            assert (answer.body, answer.headers["connection"]) == (body, "close")
            assert await client.closed()
        assert await draining


async def test_a_drain_cuts_a_pipeline_between_requests() -> None:
    """Requests that have not begun are not answered; the answer before arrives without a reset."""
    async with running() as server, await RawClient.connect(server.port) as client:
        gate = server.settings["gate"] = asyncio.Event()
        await client.send(request(b"one") + request(b"two" * 20_000) * 20)
        await eventually(lambda: any(one.serving for one in server.listener.connections))
        server.listener.start_draining()
        gate.set()
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"one", "close")
        assert await client.closed()
        assert server.seen == [b"one"]


async def test_a_drain_ends_after_its_time() -> None:
    """Requests that take too long are cut off and reported."""
    async with running() as server, await RawClient.connect(server.port) as client:
        server.settings["gate"] = asyncio.Event()
        await client.send(request(b"x"))
        await eventually(lambda: any(one.serving for one in server.listener.connections))
        assert not await server.listener.drain(0.1)
        assert await client.closed()


@pytest.mark.parametrize(
    "test",
    [
        test_bodies_in_memory_are_bounded,
        test_a_drain_answers_requests_and_closes_idle_connections,
        test_a_drain_ends_after_its_time,
    ],
)
def test_the_listener_works_with_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Some of the tests above, on the other event loop."""
    on_uvloop(test())
