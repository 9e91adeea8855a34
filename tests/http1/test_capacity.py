# SPDX-License-Identifier: Apache-2.0
"""The rule: a client that keeps the server waiting cannot shut out the others.

What a client that has proven nothing can make the server hold is bounded, per connection and in
total, before it is parsed: connections, bytes of heads and bodies, pipelined requests, and answers
that it does not read. When there is no room, the client goes that stalls, not the one that comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engage.http1 import capacity as capacity_module
from engage.http1.connection import Connection
from support.http_client import RawClient, request
from support.http_echo import LARGE, Running, Wire, on_uvloop, running
from support.waiting import eventually

POST = b"POST /echo HTTP/1.1\r\nHost: a\r\n"


class Clients(contextlib.AsyncExitStack):
    """Connects clients and closes them in the end."""

    def __init__(self, server: Running) -> None:
        super().__init__()
        self.server = server

    async def connect(self, data: bytes = b"") -> RawClient:
        """Connect and send, and wait until the server has both."""
        before = set(self.server.listener.connections)
        client = await self.enter_async_context(await RawClient.connect(self.server.port))
        new = await eventually(lambda: set(self.server.listener.connections) - before)
        await client.send(data)
        if data:
            connection: Connection = new.pop()
            await eventually(lambda: connection.held or not connection.idle)
        return client


async def is_open(client: RawClient) -> bool:
    """Whether the server has neither closed the connection nor sent anything."""
    try:
        await asyncio.wait_for(client.reader.read(1), 0.05)
    except TimeoutError:
        return True
    except ConnectionError:
        return False
    return False


def held(server: Running) -> int:
    return server.listener.shared.capacity.held


# --------------------------------------------------------------------------------- connections
async def test_heads_that_never_end_cost_nobody_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection goes from which nothing has come for the longest time."""
    monkeypatch.setattr(capacity_module, "SPARE", 4)
    async with running(max_connections=4) as server, Clients(server) as clients:
        hostile = [await clients.connect(b"P") for _ in range(8)]
        await hostile[0].send(b"O")
        await eventually(lambda: held(server) == 9)
        more = [await clients.connect(b"P") for _ in range(3)]
        for client in hostile[1:4]:
            answer = await client.answer()
            assert (answer.status, answer.json["code"]) == (503, "overloaded")
            assert await client.closed()
        for client in [hostile[0], *hostile[4:], *more]:
            assert await is_open(client)
        assert (await server.ask(request(b"new"))).body == b"new"


async def test_a_request_that_is_answered_is_never_closed_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many connections come; another request is answered 503."""
    monkeypatch.setattr(capacity_module, "SPARE", 2)
    async with running(max_connections=1) as server, Clients(server) as clients:
        gate = server.settings["gate"] = asyncio.Event()
        busy = await clients.connect(request(b"busy"))
        for _ in range(6):
            await clients.connect(b"P")
        answer = await server.ask(request(b"new"))
        assert (answer.status, answer.json["code"]) == (503, "overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        gate.set()
        assert (await busy.answer()).body == b"busy"


async def test_a_body_that_does_not_come_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler answers why, and the connection closes."""
    monkeypatch.setattr(capacity_module, "SPARE", 0)
    async with running(max_connections=2) as server, Clients(server) as clients:
        hostile = await clients.connect(POST + b"Content-Length: 9\r\n\r\n123")
        await clients.connect()
        assert (await server.ask(request(b"new"))).body == b"new"
        assert (await hostile.answer()).body == b"overloaded"
        assert await hostile.closed()


async def test_connections_that_send_nothing_cost_nobody_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They count as heads of which nothing has come; the oldest is closed in silence."""
    monkeypatch.setattr(capacity_module, "SPARE", 2)
    async with running(max_connections=2) as server, Clients(server) as clients:
        hostile = [await clients.connect() for _ in range(5)]
        assert await hostile[0].closed()
        assert await is_open(hostile[1])
        assert (await server.ask(request(b"new"))).body == b"new"


async def test_a_second_head_that_never_ends_counts_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that has had an answer has still proven nothing."""
    monkeypatch.setattr(capacity_module, "SPARE", 2)
    async with running(max_connections=2) as server, Clients(server) as clients:
        hostile = [await clients.connect() for _ in range(2)]
        for client in hostile:
            await client.send(request(b"x"))
            assert (await client.answer()).status == 200
            await client.send(b"P")
        await eventually(lambda: not any(one.idle for one in server.listener.connections))
        for _ in range(3):
            assert (await server.ask(request(b"new"))).body == b"new"


async def test_answers_nobody_reads_count_as_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that is to be closed once its answer is read stays within the limit."""
    monkeypatch.setattr(capacity_module, "SPARE", 2)
    async with running(max_connections=2) as server, Clients(server) as clients:
        for _ in range(12):
            client = await clients.connect()
            transport: Any = client.writer.transport
            transport.pause_reading()
            data = request(b"x" * 90_000) * 80 + request(b"x", headers={"Connection": "close"})
            sending = asyncio.create_task(client.send(data))
            clients.callback(sending.cancel)
            await asyncio.sleep(0.01)
        await eventually(lambda: len(server.listener.connections) <= 5)
        await eventually(lambda: held(server) <= 1_000_000 + 500_000)


# --------------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_stalled_uploads_do_not_shut_out_others(framing: str) -> None:
    """The one that has been silent longest is answered 503; small and large requests get in."""
    async with running(inflight_bytes=300_000, max_connections=30) as server:
        async with Clients(server) as clients:
            hostile = []
            for _ in range(3):
                if framing == "length":
                    data = POST + b"Content-Length: 99900\r\n\r\n" + b"x" * 99_800
                else:
                    data = POST + b"Transfer-Encoding: chunked\r\n\r\n18600\r\n" + b"x" * 99_800
                hostile.append(await clients.connect(data))
                await asyncio.sleep(0.02)
            share = 300_000 // (2 * (30 + capacity_module.SPARE))
            room = 300_000 - held(server)
            filler = await clients.connect(POST + b"X: " + b"y" * (room - len(POST) - 3))
            assert held(server) == 300_000
            assert room <= share
            await clients.connect(b"P")  # A byte more than there is room for.
            answer = await hostile[0].answer()
            assert (answer.status, answer.body) == (418, b"overloaded")
            assert await hostile[0].closed()
            small = await server.ask(request(b"small"))
            assert (small.status, small.body) == (200, b"small")
            assert await is_open(hostile[1])
            assert await is_open(hostile[2])
            for _ in range(5):
                large = await server.ask(request(b"z" * 100_000))
                assert large.status == 200
            assert (await hostile[1].answer()).status == 418
            assert await is_open(filler)  # It holds no more than its share.
        await eventually(lambda: held(server) == 0)


async def test_connections_within_their_share_leave_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many they are: the shares of all connections take half of the memory."""
    monkeypatch.setattr(capacity_module, "SPARE", 30)
    async with running(inflight_bytes=1_000_000, max_connections=20) as server:
        share = 1_000_000 // (2 * (20 + 30))
        async with Clients(server) as clients:
            head = POST + b"Content-Length: 99000\r\n\r\n"
            body = head + b"x" * (share - len(head))
            hostile = [await clients.connect(body) for _ in range(20)]
            heads = [await clients.connect(POST + b"X: " + b"y" * 4000) for _ in range(25)]
            assert held(server) < 500_000
            assert all(await asyncio.gather(*map(is_open, hostile + heads)))
            await hostile[0].send(b"x" * (99_000 - len(body) + len(head)))
            assert (await hostile[0].answer()).status == 200
            assert (await server.ask(request(b"new"))).body == b"new"


async def test_pipelined_requests_count() -> None:
    """What is sent ahead is counted; past the limit it is dropped and the connection closed."""
    async with running(inflight_bytes=200_000, max_connections=30) as server:
        gate = server.settings["gate"] = asyncio.Event()
        async with Clients(server) as clients:
            busy = await clients.connect(request(b"1"))
            await busy.send(request(b"x" * 60_000))
            await eventually(lambda: held(server) > 60_000)
            others = []
            for _ in range(5):
                client = await clients.connect(request(b"2"))
                await client.send(request(b"x" * 60_000))
                others.append(client)
            await asyncio.sleep(0.1)
            assert held(server) <= 200_000
            gate.set()
            assert (await busy.answer()).body == b"1"
            assert (await busy.answer()).status == 200
            closing = [await client.answer() for client in others]
            assert all(answer.body == b"2" for answer in closing)
            assert closing[-1].headers["connection"] == "close"
            assert await others[-1].closed()
        await eventually(lambda: held(server) == 0)


@pytest.mark.parametrize("target", ["/echo", "/large"])
async def test_a_client_that_reads_nothing_is_not_read_either(target: str) -> None:
    """Pipelined requests wait unread, and unread answers are bounded."""
    body, method = (b"x" * 60_000, "POST") if target == "/echo" else (None, "GET")
    one = request(body, method=method, target=target)
    async with running(inflight_bytes=100_000_000) as server, Clients(server) as clients:
        client = await clients.connect()
        transport: Any = client.writer.transport
        transport.pause_reading()
        sending = asyncio.create_task(client.send(one * (30_000_000 // len(one))))
        clients.callback(sending.cancel)
        await eventually(lambda: held(server) > 65_536)
        done, _ = await asyncio.wait([sending], timeout=0.5)
        assert not done
        # The allowance, what one call of the event loop reads, and an answer that is not read.
        assert held(server) <= 65_536 + 262_144 + 16_384 + 310_000
        # Closing would wait until the server has read what is still to be sent.
        transport.abort()


async def test_reading_goes_on_once_answers_are_read() -> None:
    """A client that pipelines much and reads late gets every answer."""
    async with running() as server, Clients(server) as clients:
        client = await clients.connect()
        transport: Any = client.writer.transport
        transport.pause_reading()
        sending = asyncio.create_task(client.send(request(b"x" * 60_000) * 300))
        await eventually(lambda: held(server) > 65_536)
        transport.resume_reading()
        for _ in range(300):
            assert len((await client.answer()).body) == 60_000
        await sending
        await eventually(lambda: held(server) == 0)


@pytest.mark.parametrize(("length", "paused"), [(65_536, False), (65_537, True)])
async def test_the_allowance_of_a_pipeline(length: int, paused: bool) -> None:
    """``limits.header_bytes`` may wait; with more, reading pauses until it is parsed."""
    async with running() as server, Clients(server) as clients:
        gate = server.settings["gate"] = asyncio.Event()
        first, last = request(b"1"), request(b"3")
        client = await clients.connect(first)
        size = length - len(request(b"x" * 60_000)) + 60_000
        await client.send(request(b"x" * size))
        await eventually(lambda: held(server) == len(first) + length)
        await client.send(last)
        await asyncio.sleep(0.1)
        if paused:
            assert held(server) == len(first) + length
        else:
            await eventually(lambda: held(server) == len(first) + length + len(last))
        gate.set()
        for body in (b"1", b"x" * size, b"3"):
            assert (await client.answer()).body == body


# ------------------------------------------------------------------------------------- the rest
async def test_a_new_connection_is_closed_if_nothing_comes() -> None:
    """``server.head_timeout`` bounds the silence before the first byte, not the one after it."""
    async with running(head_timeout=1.5) as server, Clients(server) as clients:
        used = await clients.connect()
        await used.send(request(b"x"))
        assert (await used.answer()).status == 200
        silent = await clients.connect()
        assert await silent.closed()
        assert await is_open(used)


async def test_the_time_of_a_body_is_not_that_of_a_head() -> None:
    """A body may take longer than ``server.head_timeout``."""
    async with running(head_timeout=1) as server, Clients(server) as clients:
        client = await clients.connect(POST + b"Content-Length: 4\r\n\r\n")
        for _ in range(4):
            await asyncio.sleep(0.3)
            await client.send(b"x")
        assert (await client.answer()).body == b"xxxx"


async def test_few_files_mean_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps descriptors for itself, whatever ``server.max_connections`` says."""
    monkeypatch.setattr("engage.http1.listener.open_file_limit", lambda: 8)
    async with running() as server, Clients(server) as clients:
        hostile = [await clients.connect() for _ in range(8)]
        assert await hostile[0].closed()
        assert len(server.listener.connections) == 4


@pytest.mark.parametrize(
    "test",
    [
        test_pipelined_requests_count,
        test_reading_goes_on_once_answers_are_read,
        lambda: test_a_client_that_reads_nothing_is_not_read_either("/echo"),
        lambda: test_a_client_that_reads_nothing_is_not_read_either("/large"),
    ],
)
def test_with_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The server's event loop has other transports than asyncio's."""
    on_uvloop(test())


async def test_the_content_of_a_file_is_not_copied() -> None:
    """All connections write the same object, so unread answers of files cost hardly any memory."""
    async with running() as server:
        connection, wire = server.listener.make_connection(), Wire()
        connection.connection_made(wire)
        connection.data_received(request(None, method="GET", target="/large"))
        await eventually(lambda: any(data is LARGE for data in wire.written))
        connection.connection_lost(None)
