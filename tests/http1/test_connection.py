# SPDX-License-Identifier: Apache-2.0
"""The HTTP connection with a small application, over raw sockets: requests that are accepted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tornado.web import Application

from engage.http1 import shared as shared_module
from engage.http1.listener import Listener
from engage.http1.shared import Bounds
from engage.monitoring.metrics import Metrics
from support.http_client import RawClient, request
from support.http_echo import BOUNDS, Echo, Wire, on_uvloop, running
from support.loop_time import check_time, longest_hold
from support.waiting import eventually


async def test_a_connection_is_kept_open() -> None:
    """For three requests."""
    async with running() as server, await RawClient.connect(server.port) as client:
        for body in (b"a", b"b" * 90_000, b"c"):
            await client.send(request(body))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, body)
            assert "connection" not in answer.headers
            assert "date" in answer.headers


async def test_a_request_may_arrive_in_any_pieces() -> None:
    async with running() as server, await RawClient.connect(server.port) as client:
        chunked = b"3\r\nabc\r\n0\r\n\r\n"
        data = request(b"xyz") + request(
            chunked, length=False, headers={"Transfer-Encoding": "chunked"}
        )
        for index in range(len(data)):
            await client.send(data[index : index + 1])
            await asyncio.sleep(0)
        assert (await client.answer()).body == b"xyz"
        assert (await client.answer()).body == b"abc"


async def test_pipelined_requests_are_answered_in_order() -> None:
    """200 requests in one piece, some chunked and some with a length."""
    async with running() as server, await RawClient.connect(server.port) as client:
        data = b""
        for index in range(100):
            data += request(b"n%d" % index)
            data += request(
                b"1\r\nm\r\n1\r\n:\r\n0\r\nTrailer: x\r\n\r\n",
                length=False,
                headers={"Transfer-Encoding": "chunked"},
            )
        await client.send(data)
        for index in range(100):
            assert (await client.answer()).body == b"n%d" % index
            assert (await client.answer()).body == b"m:"


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    """A request that the handler refuses by its head gets no ``100 Continue``."""
    async with running() as server:
        expect = {"Expect": "100-continue", "Content-Length": "3"}
        async with await RawClient.connect(server.port) as client:
            await client.send(request(None, headers=expect))
            assert (await client.answer()).status == 100
            await client.send(b"abc")
            assert (await client.answer()).body == b"abc"
            # A client that does not wait gets no ``100 Continue``.
            await client.send(request(b"abc", headers={"Expect": "100-continue"}))
            assert (await client.answer()).status == 200
        async with await RawClient.connect(server.port) as client:
            await client.send(request(None, headers={**expect, "X-Refuse": "1"}))
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (403, "close")


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        *(("1.1", "", None), ("1.1", "close", "close"), ("1.1", "Close, x", "close")),
        *(("1.1", "keep-alive", None), ("1.0", "", "close"), ("1.0", "Keep-Alive", "keep-alive")),
    ],
)
async def test_version_and_header_decide_whether_a_connection_stays(
    version: str, connection: str, kept: str | None
) -> None:
    async with running() as server, await RawClient.connect(server.port) as client:
        header = f"Connection: {connection}\r\n" if connection else ""
        await client.send(f"GET /echo HTTP/{version}\r\nHost: a\r\n{header}\r\n".encode())
        answer = await client.answer()
        assert (answer.status, answer.headers.get("connection")) == (200, kept)
        if kept == "close":
            assert await client.closed()
        else:
            await client.send(request(b"again"))
            assert (await client.answer()).body == b"again"


async def test_answers_without_a_length_are_sent() -> None:
    """In chunks, or until the connection closes; the answer to HEAD has no body."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(request(None, method="HEAD"))
        answer = await client.answer(method="HEAD")
        assert (answer.status, answer.headers["content-length"]) == (200, "5")
        await client.send(request(None, method="GET", target="/stream"))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in head
        assert await client.reader.readexactly(21) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        await client.send(b"GET /stream HTTP/1.0\r\n\r\n")
        data = await client.reader.read()
        assert b"chunked" not in data
        assert data.endswith(b"\r\n\r\nonetwo")


@pytest.mark.parametrize(
    ("target", "uri"),
    [
        *(("/echo?a=b", b"/echo?a=b"), ("http://example.com/echo/x", b"/echo/x")),
        *(("HTTPS://example.com/echo?y", b"/echo?y"), ("*", b"*")),
    ],
)
async def test_a_target_may_have_any_form(target: str, uri: bytes) -> None:
    """For example the absolute form, which clients send to proxies."""
    async with running() as server:
        answer = await server.ask(request(None, method="OPTIONS", target=target))
        assert (answer.status, answer.body) == (200, uri)


@pytest.mark.parametrize("method", ["BREW", "PROPFIND", "get", "M-SEARCH", "CONNECT"])
async def test_other_methods_reach_the_application(method: str) -> None:
    """Methods that the parser knows and others, with a body and without."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(request(b"body", method=method))
        assert (await client.answer()).status == 405
        await client.send(request(b"again"))
        assert (await client.answer()).body == b"again"


async def test_an_upgrade_is_not_followed() -> None:
    """``curl --http2`` requests one, with a body."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMA"}
    async with running() as server:
        answer = await server.ask(request(b"body", headers=headers))
        assert (answer.status, answer.body) == (200, b"body")


async def test_empty_lines_between_requests_are_ignored() -> None:
    """Some clients send one after a body."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(b"\r\n\r\n" + request(b"one") + b"\r\n" + request(b"two"))
        assert (await client.answer()).body == b"one"
        assert (await client.answer()).body == b"two"


async def test_a_client_that_closes_its_side_is_answered() -> None:
    """All requests of ``printf … | nc -N`` are answered."""
    async with running() as server, await RawClient.connect(server.port) as client:
        server.settings["gate"] = gate = asyncio.Event()
        await client.send(request(b"one") + request(b"two"))
        client.half_close()
        await asyncio.sleep(0)
        gate.set()
        assert (await client.answer()).body == b"one"
        assert (await client.answer()).body == b"two"
        assert await client.closed()


async def test_a_client_that_hangs_up_does_not_cancel_its_request() -> None:
    """The body was complete, so the handler finishes."""
    async with running() as server:
        gate = server.settings["gate"] = asyncio.Event()
        async with await RawClient.connect(server.port) as client:
            await client.send(request(b"kept"))
            await eventually(lambda: any(one.serving for one in server.listener.connections))
            client.writer.transport.abort()
        gate.set()
        await eventually(lambda: server.seen == [b"kept"])


@pytest.mark.parametrize(
    "test",
    [
        test_a_connection_is_kept_open,
        test_a_client_that_waits_for_100_continue_gets_it,
        test_a_client_that_closes_its_side_is_answered,
        test_a_client_that_hangs_up_does_not_cancel_its_request,
    ],
)
def test_the_connection_works_with_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Some of the tests above, on the other event loop."""
    on_uvloop(test())


_PIECES = [
    request(b"abc"),
    request(b"3\r\nabc\r\n0\r\n\r\n", length=False, headers={"Transfer-Encoding": "chunked"}),
    *(request(None, method="GET"), request(None, method="HEAD")),
    *(request(b"x", headers={"X-Refuse": "1"}), request(b"x", headers={"Expect": "100-continue"})),
    *(request(b"x", headers={"Connection": "close"}), request(b"x" * 3000), b"\r\n"),
]


@given(
    st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3), st.binary(max_size=3)), max_size=3),
    st.lists(st.integers(0, 4000), max_size=12),
    st.booleans(),
)
@settings(max_examples=80)
def test_any_bytes_are_answered_without_an_exception(
    pieces: list[bytes],
    changes: list[tuple[int, int, bytes]],
    cuts: list[int],
    hangs_up: bool,
) -> None:
    """Requests, some of them broken, cut anywhere; afterwards no memory is held."""
    data = b"".join(pieces)
    for at, cut, noise in changes:
        data = data[:at] + noise + data[at + cut :]

    async def feed() -> tuple[bytes, Listener]:
        application = Application([(r"/echo.*|\*", Echo)], seen=[], log_function=lambda _: None)
        bounds = Bounds(**BOUNDS | {"header_bytes": 500, "body_bytes": 2000})
        listener = Listener(application, bounds, Metrics())
        connection, wire = listener.make_connection(), Wire()
        connection.connection_made(wire)
        edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for start, end in itertools.pairwise(edges):
            if wire.closing:
                break
            connection.data_received(data[start:end])
            await asyncio.sleep(0)
        if not wire.closing and not hangs_up:
            connection.eof_received()
        for _ in range(60):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        return b"".join(map(bytes, wire.written)), listener

    sent, listener = asyncio.run(feed())
    assert listener.shared.capacity.held == 0
    assert not listener.connections
    while sent:
        head, separator, sent = sent.partition(b"\r\n\r\n")
        assert separator
        assert head.startswith(b"HTTP/1.1 ")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        # The answer to HEAD has a length and no body; the next bytes begin another answer.
        if length is not None and not sent.startswith(b"HTTP/1.1 "):
            sent = sent[int(length[1]) :]


async def check_turns(
    data: bytes, *, clients: int, answer: Callable[[Any], bool], limit: float
) -> None:
    """Send the same on many connections; check that no turn of the loop takes ``limit`` seconds."""

    async def hold() -> float:
        bounds: dict[str, Any] = {"inflight_bytes": 100_000_000, "header_bytes": 65536}
        async with running(**bounds) as server, contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(await RawClient.connect(server.port))
                for _ in range(clients)
            ]
            return await longest_hold(ask(opened))

    async def ask(opened: list[RawClient]) -> None:
        sending = [asyncio.create_task(client.send(data)) for client in opened]
        for client in opened:
            assert answer(await client.answer())
        await asyncio.gather(*sending)

    await check_time(hold, limit)


@pytest.mark.timing
async def test_many_clients_with_very_many_chunks_do_not_hold_the_loop_together() -> None:
    """Decoding is deferred to later turns of the loop; a turn decodes for a few milliseconds, not
    for a few milliseconds for each connection."""
    body = b"5\r\n     \r\n" * 15_000 + b"0\r\n\r\n"
    data = request(body, length=False, headers={"Transfer-Encoding": "chunked"})
    await check_turns(
        data, clients=40, answer=lambda answer: len(answer.body) == 75_000, limit=0.08
    )


@pytest.mark.timing
async def test_many_clients_with_large_heads_do_not_hold_the_loop_together() -> None:
    query = "&".join(["a=%61%61%61" + "%62" * 14] * 999)
    data = request(b"x", target=f"/echo?{query}")
    assert len(data) > 50_000
    await check_turns(data, clients=40, answer=lambda answer: answer.body == b"x", limit=0.05)


async def test_a_turn_does_a_part_of_what_connections_defer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5 ms of it, however many connections wait. Each of their calls takes 2 ms here."""
    now, turn = 0.0, 0
    called: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)

    class Waiting:
        def work(self) -> None:
            nonlocal now
            now += 0.002
            called.append(turn)

    async with running() as server:
        monkeypatch.setattr(shared_module, "time", clock)
        for connection in [Waiting() for _ in range(30)]:
            server.listener.shared.defer(connection.work)
        while len(called) < 30:
            await asyncio.sleep(0)
            turn += 1
    assert set(Counter(called).values()) == {3}
