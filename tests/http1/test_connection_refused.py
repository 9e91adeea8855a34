# SPDX-License-Identifier: Apache-2.0
"""The HTTP connection with a small application, over raw sockets: requests that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
from tornado.web import Application

from engage.http1 import connection as connection_module
from engage.http1.shares import Shares, make_shares
from support.each import each
from support.http_client import RawClient, request
from support.http_echo import Echo, on_uvloop, running
from support.waiting import eventually

if TYPE_CHECKING:
    from engage.http1.exchange import Exchange

HOST = b"Host: a\r\n"
POST = b"POST /echo HTTP/1.1\r\n" + HOST


def head_of(size: int) -> bytes:
    """Return a head of that many bytes."""
    return (b"GET /echo HTTP/1.1\r\n" + HOST + b"X: ").ljust(size - 4, b"a") + b"\r\n\r\n"


@each(
    "data",
    [
        POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        *(POST + b"Content-Length: 3, 3\r\n\r\nabc", POST + b"Content-Length: +3\r\n\r\nabc"),
        *(POST + b"Content-Length: -3\r\n\r\nabc", POST + b"Content-Length: 0x3\r\n\r\nabc"),
        POST + b"Content-Length:\r\n\r\nabc",
        POST + b"Content-Length: 99999999999999999999\r\n\r\nabc",
        POST + b"Content-Length: 00000000000000000003\r\n\r\nabc",
        POST + b"Content-Length: " + b"0" * 4000 + b"3\r\n\r\nabc",
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /echo HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        *(POST + b"Content-Length : 3\r\n\r\nabc", POST + b" Content-Length: 3\r\n\r\nabc"),
        *(POST + b"X: a\r\n folded\r\n\r\n", POST + b"X: a\nY: b\r\n\r\n"),
        *(POST + b"X: a\rY: b\r\n\r\n", POST + b"X: a\0b\r\n\r\n", POST + b"X: a\x01b\r\n\r\n"),
        *(POST + b": nothing\r\n\r\n", POST + b"no colon\r\n\r\n", POST + b"X\xe9: a\r\n\r\n"),
        *(POST + b"X: a\n\n", b"POST /echo HTTP/1.1\n" + b"Host: a\n\n"),
        *(b"POST /echo HTTP/1.1\r\n\r\n", POST + b"Host: b\r\n\r\n"),
        *(b"POST /echo HTTP/1.1\r\nHost: a b\r\n\r\n", b"POST /echo HTTP/1.2\r\n" + HOST + b"\r\n"),
        *(b"POST /echo HTTP/2.0\r\n" + HOST + b"\r\n", b"POST /echo HTTP/0.9\r\n" + HOST + b"\r\n"),
        *(b"POST /echo\r\n" + HOST + b"\r\n", b"POST /echo HTTP/1.1 \r\n" + HOST + b"\r\n"),
        b"POST /echo x HTTP/1.1\r\n" + HOST + b"\r\n",
        b"OPTIONS /echo RTSP/1.0\r\n" + HOST + b"\r\n",
        *(b"SOURCE /echo ICE/1.0\r\n" + HOST + b"\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        b"P\xd6ST /echo HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 9 10\r\n" + POST + b"\r\n",
        *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0", b"{}"),
        b"\nGET /echo HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
async def test_bytes_that_are_not_http_are_refused(data: bytes) -> None:
    """With a bare 400, and the connection closes; no handler runs, and the rest is not read."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(data + request(b"smuggled"))
        answer = await client.answer()
        assert (answer.status, answer.body) == (400, b"")
        assert answer.headers["connection"] == "close"
        assert await client.closed()
        assert server.seen == []


@each(
    "body",
    [
        *(b"x\r\n", b"3\r\nabcd\r\n0\r\n\r\n", b"3\nabc\n0\n\n", b"3\r\nabc\n0\r\n\r\n"),
        *(b"+3\r\nabc\r\n0\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n", b" 3\r\nabc\r\n0\r\n\r\n"),
        *(b"3 \r\nabc\r\n0\r\n\r\n", b"-1\r\n", b"\r\n0\r\n\r\n", b"fffffffff\r\n"),
        *(b"3;a\x00b\r\nabc\r\n0\r\n\r\n", b"3;" + b"e" * 2000, b"0\r\nno colon\r\n\r\n"),
        *(b"0\r\n folded: x\r\n\r\n", b"0\r\n" + b"a: b\r\n" * 2000, b"1\r\na\r\n" * 20_000),
        b"1;" + b"e" * 1000 + b"\r\na\r\n" + (b"1;" + b"e" * 1000 + b"\r\na\r\n") * 100,
    ],
)
async def test_bad_chunks_are_refused(body: bytes) -> None:
    """With a bare 400, and the connection closes; no handler continues."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        answer = await client.answer()
        assert (answer.status, answer.body) == (400, b"")
        assert await client.closed()
        assert server.seen == []


@each(
    "head",
    [
        *(b"GET /" + b"a" * 200_000, b"GET /echo HTTP/1.1\r\nX: " + b"a" * 200_000, head_of(4097)),
        *(head_of(4200)[:4097], b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 101 + b"\r\n"),
    ],
)
async def test_a_large_head_is_refused(head: bytes) -> None:
    """With 431 in the error shape, whether the head is complete or not."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(head_of(4096))
        assert (await client.answer()).status == 200
        await client.send(head)
        answer = await client.answer()
        assert (answer.status, answer.json["code"]) == (431, "headers_too_large")
        assert answer.headers["x-request-id"] == answer.json["requestId"]
        assert await client.closed()


async def test_a_slow_head_is_refused() -> None:
    """With 408, even if more bytes arrive."""
    async with running(head_timeout=0.4) as server, await RawClient.connect(server.port) as client:
        answering = asyncio.create_task(client.answer())
        for byte in b"POST /echo HTTP/1.1\r\nX: " + b"slow" * 1000:
            await client.send(bytes([byte]))
            await asyncio.sleep(0.02)
            if answering.done():
                break
        answer = await answering
        assert (answer.status, answer.json["code"]) == (408, "request_timeout")
        assert await client.closed()


@pytest.mark.parametrize("framing", ["Content-Length: 50", "Transfer-Encoding: chunked"])
async def test_a_slow_body_is_refused(framing: str) -> None:
    """The handler answers with the reason, and the connection closes."""
    async with running(request_timeout=0.4) as server:
        async with await RawClient.connect(server.port) as client:
            await client.send(POST + framing.encode() + b"\r\n\r\n" + b"a\r\n12345")
            answer = await client.answer()
            assert (answer.status, answer.body) == (418, b"timeout")
            assert answer.headers["connection"] == "close"
            assert await client.closed()
        assert server.seen == []


async def test_idle_connections_are_closed() -> None:
    """Without an answer, because there was no request."""
    async with (
        running(idle_timeout=1.5) as server,
        await RawClient.connect(server.port) as silent,
        await RawClient.connect(server.port) as used,
    ):
        await used.send(request(b"x"))
        assert (await used.answer()).status == 200
        assert await silent.closed()
        assert await used.closed()


async def test_a_body_shorter_than_its_length_is_refused() -> None:
    """A client that still reads gets the answer of the handler."""
    async with running() as server:
        for framing in (b"Content-Length: 50", b"Transfer-Encoding: chunked"):
            async with await RawClient.connect(server.port) as client:
                await client.send(POST + framing + b"\r\n\r\n3\r\nab")
                client.half_close()
                answer = await client.answer()
                assert (answer.status, answer.body) == (418, b"truncated")
                assert await client.closed()
        assert server.seen == []


class _Unread(Echo):
    """Leaves the body unread until the gate opens; refuses a request as :class:`Echo` does."""

    def prepare(self) -> None:
        """Wait."""
        cast("Exchange", self.request.connection).leave_unread()
        self._waiting = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        self.settings["seen"].append(b"waits")
        await self.settings["gate"].wait()
        super().prepare()
        if not self._finished:
            cast("Exchange", self.request.connection).read_on()


@pytest.mark.parametrize(
    ("headers", "cut", "status", "body"),
    [
        *(({}, None, 200, b"whole"), ({}, -1, 418, b"truncated")),
        *(({"X-Refuse": "1"}, None, 403, b"refused"), ({"X-Refuse": "1"}, -1, 403, b"refused")),
    ],
)
async def test_a_client_closes_its_side_while_its_body_is_unread(
    headers: dict[str, str],
    cut: int | None,
    status: int,
    body: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its body is whole shows later."""
    monkeypatch.setattr(connection_module, "DISCARD_SECONDS", 1000.0)
    with make_shares(1) as file:
        shares = Shares(file.fileno(), 0)
    async with running(shares) as server, await RawClient.connect(server.port) as client:
        application = cast("Application", server.listener.shared.application)
        application.add_handlers(".*", [("/unread", _Unread)])
        gate = server.settings["gate"] = asyncio.Event()
        data = request(b"whole", target="/unread", headers=headers)
        await client.send(data[:-5])
        (connection,) = await eventually(lambda: server.seen and server.listener.connections)
        await client.send(data[-5:cut])
        client.half_close()
        await eventually(lambda: connection.ended)
        gate.set()
        answer = await client.answer()
        assert (answer.status, answer.body) == (status, body)
        assert await client.closed()


class _Hasty(asyncio.Event):
    """The gate of a handler: the client closes its side just before it gets an answer."""

    def __init__(self, client: RawClient) -> None:
        super().__init__()
        self._descriptor: int = client.writer.get_extra_info("socket").fileno()

    async def wait(self) -> Literal[True]:
        """Wait, then close."""
        await super().wait()
        with socket.socket(fileno=os.dup(self._descriptor)) as sock, contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        return True


async def test_a_client_closes_its_side_while_a_refused_body_is_to_be_discarded() -> None:
    """What it has sent after that body is answered, too."""
    async with running() as server, await RawClient.connect(server.port) as client:
        application = cast("Application", server.listener.shared.application)
        application.add_handlers(".*", [("/unread", _Unread)])
        gate = server.settings["gate"] = _Hasty(client)
        data = request(b"whole", target="/unread", headers={"X-Refuse": "1"})
        await client.send(data[:-5])
        (connection,) = await eventually(lambda: server.seen and server.listener.connections)
        before = connection.held
        await client.send(data[-5:] + request(b"next"))
        await eventually(lambda: connection.held > before + 5)
        gate.set()
        assert (await client.answer()).status == 403
        assert (await client.answer()).body == b"next"
        assert await client.closed()


@pytest.mark.parametrize("size", [100_001, 3_000_000, 30_000_000])
async def test_a_body_that_is_too_long_is_refused(size: int) -> None:
    """Declared or not; the client gets the answer although it goes on sending for a while."""
    async with running() as server:
        for chunked in (False, True):
            async with await RawClient.connect(server.port) as client:
                if chunked:
                    head = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size
                else:
                    head = POST + b"Content-Length: %d\r\n\r\n" % size
                sending = asyncio.create_task(client.send(head + b"x" * size))
                answer = await client.answer()
                assert (answer.status, answer.body) == (418, b"too large")
                assert answer.headers["connection"] == "close"
                await sending
                # The server discards a bounded part of the rest before it resets the connection.
                assert await client.closed(reset=size > 20 * 2**20)
        assert server.seen == []
        assert server.listener.shared.capacity.held == 0


async def test_a_refused_body_is_skipped() -> None:
    """It was refused by its head; the body is discarded, and the connection stays."""
    async with running() as server, await RawClient.connect(server.port) as client:
        headers = {"X-Refuse": "1"}
        await client.send(request(None, headers={**headers, "Content-Length": "90000"}))
        assert (await client.answer()).status == 403
        await client.send(b"x" * 90_000 + request(b"next"))
        assert (await client.answer()).body == b"next"
        chunked = {**headers, "Transfer-Encoding": "chunked"}
        await client.send(request(b"5\r\nab", headers=chunked, length=False))
        assert (await client.answer()).status == 403
        await client.send(b"cde\r\n0\r\n\r\n" + request(b"last"))
        assert (await client.answer()).body == b"last"
        # Bytes that are not a chunk close the connection; the request was answered before.
        await client.send(request(b"5\r\nab", headers=chunked, length=False))
        assert (await client.answer()).status == 403
        await client.send(b"cdeXX" + request(b"smuggled"))
        assert await client.closed()
        assert server.seen == [b"next", b"last"]


async def test_a_client_that_never_reads_is_cut_off() -> None:
    """The server stops answering it, and closes the connection in the end."""
    async with (
        running(request_timeout=0.5) as server,
        await RawClient.connect(server.port) as client,
    ):
        transport: Any = client.writer.transport
        transport.pause_reading()
        sending = asyncio.create_task(client.send(request(b"x" * 90_000) * 500))
        await eventually(lambda: not server.listener.connections)
        assert len(server.seen) < 400
        sending.cancel()


@pytest.mark.parametrize(
    "test",
    [
        test_a_body_shorter_than_its_length_is_refused,
        test_a_client_closes_its_side_while_a_refused_body_is_to_be_discarded,
        test_a_refused_body_is_skipped,
        test_a_client_that_never_reads_is_cut_off,
    ],
)
def test_the_refusals_work_with_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Some of the tests above, on the other event loop."""
    on_uvloop(test())


@pytest.mark.parametrize("size", [100_001, 3_000_000])
def test_a_body_that_is_too_long_is_refused_with_uvloop(size: int) -> None:
    """The same on the other event loop."""
    on_uvloop(test_a_body_that_is_too_long_is_refused(size))
