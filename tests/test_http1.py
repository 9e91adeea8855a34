# SPDX-License-Identifier: Apache-2.0
"""The HTTP connection under a small Tornado application, with raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw import Answer, RawClient, listening, request
from support.waiting import eventually
from tornado.web import Application, RequestHandler, stream_request_body

from engage.exchange import Failure
from engage.http1 import Connection
from engage.listener import Bounds, Listener
from engage.metrics import NullMetrics

BOUNDS: dict[str, Any] = {
    "header_bytes": 4096,
    "body_bytes": 100_000,
    "inflight_bytes": 1_000_000,
    "request_timeout": 30.0,
    "idle_timeout": 30.0,
    "max_connections": 50,
}


@stream_request_body
class Echo(RequestHandler):
    """Answers with what it got; refuses at once when asked to."""

    def initialize(self) -> None:
        """Begin with nothing."""
        self.parts: list[bytes] = []
        self.prepared = False

    def prepare(self) -> None:
        """Refuse by the head."""
        self.prepared = True
        if self.request.headers.get("X-Refuse"):
            self.set_status(403)
            self.finish("refused")
        else:
            self.say_why()

    def data_received(self, chunk: bytes) -> None:
        """Collect the body."""
        self.parts.append(chunk)

    def on_connection_close(self) -> None:
        """The body will not be complete."""
        if self.prepared and not self._finished:
            self.say_why()
        super().on_connection_close()

    def say_why(self) -> None:
        """Say why there is no body."""
        failure = self.request.connection.failure
        if isinstance(failure, Failure):
            self.set_status(418)
            self.finish(failure.value)

    async def post(self) -> None:
        """Echo."""
        gate = self.settings.get("gate")
        if gate is not None:
            await gate.wait()
        self.settings["seen"].append(b"".join(self.parts))
        self.finish(b"".join(self.parts) or self.request.uri)

    put = get = head = options = post


class Stream(RequestHandler):
    """Does not know how long its answer is."""

    async def get(self) -> None:
        """Answer in parts."""
        for part in ("one", "two"):
            self.write(part)
            await self.flush()


class Running:
    """A listener on a free port."""

    def __init__(self, listener: Listener, port: int, settings: dict[str, Any]) -> None:
        self.listener = listener
        self.port = port
        self.settings = settings

    @property
    def seen(self) -> list[bytes]:
        """Bodies that a handler got."""
        seen: list[bytes] = self.settings["seen"]
        return seen

    async def ask(self, data: bytes, **arguments: Any) -> Answer:
        """Send on a connection of its own, read one answer."""
        async with await RawClient.connect(self.port) as client:
            await client.send(data)
            return await client.answer(**arguments)


@contextlib.asynccontextmanager
async def running(**changed: Any) -> AsyncIterator[Running]:
    """Run a listener, with other bounds if wanted."""
    application = Application([(r"/echo.*|\*", Echo), ("/stream", Stream)], seen=[])
    listener = Listener(application, Bounds(**BOUNDS | changed), NullMetrics())
    sock = listening()
    await listener.serve(sock)
    try:
        yield Running(listener, sock.getsockname()[1], application.settings)
    finally:
        listener.close()
        await eventually(lambda: not listener.connections)


# --------------------------------------------------------------------------------- what is taken
async def test_answers_and_keeps_the_connection() -> None:
    """Three requests, one connection."""
    async with running() as server, await RawClient.connect(server.port) as client:
        for body in (b"a", b"b" * 90_000, b"c"):
            await client.send(request(body))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, body)
            assert "connection" not in answer.headers
            assert "date" in answer.headers


async def test_one_byte_at_a_time() -> None:
    """However the bytes are cut."""
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
    """200 requests in one piece, chunked and with a length."""
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


async def test_a_pipeline_waits_for_a_slow_handler_within_bounds() -> None:
    """While a handler is busy, the client is not read for ever."""
    async with running() as server, await RawClient.connect(server.port) as client:
        gate = server.settings["gate"] = asyncio.Event()
        await client.send(request(b"first"))
        one = request(b"z" * 50_000)
        sending = asyncio.create_task(client.send(one * 400))
        connection = await eventually(lambda: next(iter(server.listener.connections), None))
        await eventually(lambda: connection._paused)
        assert len(connection._buffer) < 1_000_000
        gate.set()
        for _ in range(401):
            assert (await client.answer()).status == 200
        await sending


async def test_expect_100_continue() -> None:
    """The client is told to send; refused by the head, it is not."""
    async with running() as server:
        expect = {"Expect": "100-continue", "Content-Length": "3"}
        async with await RawClient.connect(server.port) as client:
            await client.send(request(None, headers=expect))
            assert (await client.answer()).status == 100
            await client.send(b"abc")
            assert (await client.answer()).body == b"abc"
            # Who does not wait is not told.
            await client.send(request(b"abc", headers={"Expect": "100-continue"}))
            assert (await client.answer()).status == 200
        async with await RawClient.connect(server.port) as client:
            await client.send(request(None, headers={**expect, "X-Refuse": "1"}))
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (403, "close")


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        ("1.1", "", None),
        ("1.1", "close", "close"),
        ("1.1", "Close, x", "close"),
        ("1.1", "keep-alive", None),
        ("1.0", "", "close"),
        ("1.0", "Keep-Alive", "keep-alive"),
    ],
)
async def test_keep_alive(version: str, connection: str, kept: str | None) -> None:
    """As the version and the header say."""
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


async def test_head_and_answers_without_a_length() -> None:
    """HEAD has no body; what has no length comes in chunks, or ends with the connection."""
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
        ("/echo?a=b", b"/echo?a=b"),
        ("http://example.com/echo/x", b"/echo/x"),
        ("HTTPS://example.com/echo?y", b"/echo?y"),
        ("*", b"*"),
    ],
)
async def test_forms_of_the_target(target: str, uri: bytes) -> None:
    """Also the absolute form, which a proxy gets."""
    async with running() as server:
        answer = await server.ask(request(None, method="OPTIONS", target=target))
        assert (answer.status, answer.body) == (200, uri)


@pytest.mark.parametrize("method", ["BREW", "PROPFIND", "get", "M-SEARCH", "CONNECT"])
async def test_other_methods_reach_the_application(method: str) -> None:
    """Known to the parser or not, with a body or without."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(request(b"body", method=method))
        assert (await client.answer()).status == 405
        await client.send(request(b"again"))
        assert (await client.answer()).body == b"again"


async def test_an_upgrade_is_not_followed() -> None:
    """``curl --http2`` asks for one, with a body."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMA"}
    async with running() as server:
        answer = await server.ask(request(b"body", headers=headers))
        assert (answer.status, answer.body) == (200, b"body")


async def test_empty_lines_between_requests() -> None:
    """Some clients end a body with one."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(b"\r\n\r\n" + request(b"one") + b"\r\n" + request(b"two"))
        assert (await client.answer()).body == b"one"
        assert (await client.answer()).body == b"two"


async def test_a_client_that_says_no_more_is_answered() -> None:
    """``printf … | nc -N``: all that it sent."""
    async with running() as server, await RawClient.connect(server.port) as client:
        server.settings["gate"] = gate = asyncio.Event()
        await client.send(request(b"one") + request(b"two"))
        client.half_close()
        await asyncio.sleep(0)
        gate.set()
        assert (await client.answer()).body == b"one"
        assert (await client.answer()).body == b"two"
        assert await client.closed()


async def test_who_hangs_up_does_not_cancel() -> None:
    """The body was complete: the handler finishes its work."""
    async with running() as server:
        gate = server.settings["gate"] = asyncio.Event()
        async with await RawClient.connect(server.port) as client:
            await client.send(request(b"kept"))
            await eventually(lambda: any(one.serving for one in server.listener.connections))
            client.writer.transport.abort()
        gate.set()
        await eventually(lambda: server.seen == [b"kept"])


# ------------------------------------------------------------------------------- what is refused
HOST = b"Host: a\r\n"
POST = b"POST /echo HTTP/1.1\r\n" + HOST


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        POST + b"Content-Length: 3, 3\r\n\r\nabc",
        POST + b"Content-Length: +3\r\n\r\nabc",
        POST + b"Content-Length: -3\r\n\r\nabc",
        POST + b"Content-Length: 0x3\r\n\r\nabc",
        POST + b"Content-Length:\r\n\r\nabc",
        POST + b"Content-Length: 99999999999999999999\r\n\r\nabc",
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /echo HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length : 3\r\n\r\nabc",
        POST + b" Content-Length: 3\r\n\r\nabc",
        POST + b"X: a\r\n folded\r\n\r\n",
        POST + b"X: a\nY: b\r\n\r\n",
        POST + b"X: a\rY: b\r\n\r\n",
        POST + b"X: a\0b\r\n\r\n",
        POST + b"X: a\x01b\r\n\r\n",
        POST + b": nothing\r\n\r\n",
        POST + b"no colon\r\n\r\n",
        POST + b"X\xe9: a\r\n\r\n",
        POST + b"X: a\n\n",
        b"POST /echo HTTP/1.1\n" + b"Host: a\n\n",
        b"POST /echo HTTP/1.1\r\n\r\n",
        POST + b"Host: b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"POST /echo HTTP/1.2\r\n" + HOST + b"\r\n",
        b"POST /echo HTTP/2.0\r\n" + HOST + b"\r\n",
        b"POST /echo HTTP/0.9\r\n" + HOST + b"\r\n",
        b"POST /echo\r\n" + HOST + b"\r\n",
        b"POST /echo HTTP/1.1 \r\n" + HOST + b"\r\n",
        b"POST /echo x HTTP/1.1\r\n" + HOST + b"\r\n",
        b"OPTIONS /echo RTSP/1.0\r\n" + HOST + b"\r\n",
        b"SOURCE /echo ICE/1.0\r\n" + HOST + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"P\xd6ST /echo HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 9 10\r\n" + POST + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0",
        b"{}",
        b"\nGET /echo HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
async def test_what_is_not_http(data: bytes) -> None:
    """A bare 400 and a close; no handler hears of it, and nothing that follows is read."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(data + request(b"smuggled"))
        answer = await client.answer()
        assert (answer.status, answer.body) == (400, b"")
        assert answer.headers["connection"] == "close"
        assert await client.closed()
        assert server.seen == []


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b" 3\r\nabc\r\n0\r\n\r\n",
        b"3 \r\nabc\r\n0\r\n\r\n",
        b"-1\r\n",
        b"\r\n0\r\n\r\n",
        b"fffffffff\r\n",
        b"3;a\x00b\r\nabc\r\n0\r\n\r\n",
        b"3;" + b"e" * 2000,
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\n" + b"a: b\r\n" * 2000,
        b"1\r\na\r\n" * 20_000,
        b"1;" + b"e" * 1000 + b"\r\na\r\n" + (b"1;" + b"e" * 1000 + b"\r\na\r\n") * 100,
    ],
)
async def test_bad_chunks(body: bytes) -> None:
    """A bare 400 and a close, and no handler goes on."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        answer = await client.answer()
        assert (answer.status, answer.body) == (400, b"")
        assert await client.closed()
        assert server.seen == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 200_000,
        b"GET /echo HTTP/1.1\r\nX: " + b"a" * 200_000,
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 4096 + b"\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 101 + b"\r\n",
    ],
)
async def test_large_heads(head: bytes) -> None:
    """431 in the error shape, whether the head ends or not."""
    async with running() as server, await RawClient.connect(server.port) as client:
        await client.send(head)
        answer = await client.answer()
        assert (answer.status, answer.json["code"]) == (431, "headers_too_large")
        assert answer.headers["x-request-id"] == answer.json["requestId"]
        assert await client.closed()


async def test_slow_head() -> None:
    """408, however often another byte comes."""
    async with (
        running(request_timeout=0.4) as server,
        await RawClient.connect(server.port) as client,
    ):
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
async def test_slow_body(framing: str) -> None:
    """The handler says why it has no body, and the connection closes."""
    async with running(request_timeout=0.4) as server:
        async with await RawClient.connect(server.port) as client:
            await client.send(POST + framing.encode() + b"\r\n\r\n" + b"a\r\n12345")
            answer = await client.answer()
            assert (answer.status, answer.body) == (418, b"timeout")
            assert answer.headers["connection"] == "close"
            assert await client.closed()
        assert server.seen == []


async def test_idle_connections_are_closed() -> None:
    """In silence: there was no question."""
    async with running(idle_timeout=0.3) as server:
        async with await RawClient.connect(server.port) as client:
            assert await client.closed()
        async with await RawClient.connect(server.port) as client:
            await client.send(request(b"x"))
            assert (await client.answer()).status == 200
            assert await client.closed()


async def test_a_body_shorter_than_its_length() -> None:
    """The handler says so to a client that still listens."""
    async with running() as server:
        for framing in (b"Content-Length: 50", b"Transfer-Encoding: chunked"):
            async with await RawClient.connect(server.port) as client:
                await client.send(POST + framing + b"\r\n\r\n3\r\nab")
                client.half_close()
                answer = await client.answer()
                assert (answer.status, answer.body) == (418, b"truncated")
                assert await client.closed()
        assert server.seen == []


@pytest.mark.parametrize("size", [100_001, 3_000_000, 60_000_000])
async def test_a_body_too_long(size: int) -> None:
    """Declared or not: the client gets its answer, though it goes on sending for a while."""
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
                # What is thrown away is bounded; up to there nobody is reset.
                assert await client.closed(reset=size > 20 * 2**20)
        assert server.seen == []
        assert server.listener.inflight == 0


async def test_a_refused_body_is_skipped() -> None:
    """Refused by its head: the rest is thrown away, the connection goes on."""
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
        # What is no chunk ends it; it has been answered.
        await client.send(request(b"5\r\nab", headers=chunked, length=False))
        assert (await client.answer()).status == 403
        await client.send(b"cdeXX" + request(b"smuggled"))
        assert await client.closed()
        assert server.seen == [b"next", b"last"]


async def test_bodies_in_memory_are_bounded() -> None:
    """Past ``inflight_bytes`` a request fails; once others are answered, there is room again."""
    async with running(inflight_bytes=150_000) as server:
        gate = server.settings["gate"] = asyncio.Event()
        async with await RawClient.connect(server.port) as first:
            await first.send(request(b"a" * 90_000))
            await eventually(lambda: server.listener.inflight == 90_000)
            answer = await server.ask(request(b"b" * 90_000))
            assert (answer.status, answer.body) == (418, b"overloaded")
            assert server.listener.inflight == 90_000
            gate.set()
            assert (await first.answer()).status == 200
            assert (await server.ask(request(b"c" * 90_000))).status == 200
            assert server.listener.inflight == 0


async def test_too_many_connections() -> None:
    """An idle one makes room; if all are busy, the newcomer is told."""
    async with running(max_connections=2) as server, contextlib.AsyncExitStack() as stack:
        gate = server.settings["gate"] = asyncio.Event()

        async def connect() -> RawClient:
            return await stack.enter_async_context(await RawClient.connect(server.port))

        idle, busy = await connect(), await connect()
        await busy.send(request(b"1"))
        await eventually(lambda: any(one.serving for one in server.listener.connections))
        also_busy = await connect()
        assert await idle.closed()
        await also_busy.send(request(b"2"))
        await eventually(lambda: all(one.serving for one in server.listener.connections))
        told = await connect()
        await told.send(request(b"3"))
        answer = await told.answer()
        assert (answer.status, answer.json["code"]) == (503, "overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        assert await told.closed()
        gate.set()
        assert (await busy.answer()).body == b"1"
        assert (await also_busy.answer()).body == b"2"


async def test_a_client_that_never_reads() -> None:
    """It is not answered without end, and in the end it is cut off."""
    async with (
        running(request_timeout=0.5) as server,
        await RawClient.connect(server.port) as client,
    ):
        client.writer.transport.pause_reading()
        sending = asyncio.create_task(client.send(request(b"x" * 90_000) * 500))
        await eventually(lambda: not server.listener.connections)
        assert len(server.seen) < 400
        sending.cancel()


# --------------------------------------------------------------------------------------- the end
async def test_draining() -> None:
    """Answers say so, what is in flight is answered, idle connections close."""
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


async def test_draining_and_a_pipeline() -> None:
    """What was not begun is not answered, but the answer before it arrives, and no reset."""
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


async def test_draining_has_an_end() -> None:
    """What takes too long is cut off, and that is said."""
    async with running() as server, await RawClient.connect(server.port) as client:
        server.settings["gate"] = asyncio.Event()
        await client.send(request(b"x"))
        await eventually(lambda: any(one.serving for one in server.listener.connections))
        assert not await server.listener.drain(0.1)
        assert await client.closed()


@pytest.mark.parametrize(
    "test",
    [
        test_answers_and_keeps_the_connection,
        test_a_pipeline_waits_for_a_slow_handler_within_bounds,
        test_expect_100_continue,
        test_a_client_that_says_no_more_is_answered,
        test_who_hangs_up_does_not_cancel,
        test_a_body_shorter_than_its_length,
        test_a_refused_body_is_skipped,
        test_bodies_in_memory_are_bounded,
        test_too_many_connections,
        test_a_client_that_never_reads,
        test_draining,
        test_draining_has_an_end,
    ],
)
def test_with_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The loop that the server runs on has transports of its own."""
    uvloop = pytest.importorskip("uvloop", reason="there is none for Windows")
    uvloop.run(test())


@pytest.mark.parametrize("size", [100_001, 3_000_000])
def test_a_body_too_long_with_uvloop(size: int) -> None:
    """Likewise."""
    uvloop = pytest.importorskip("uvloop", reason="there is none for Windows")
    uvloop.run(test_a_body_too_long(size))


class _Wire(asyncio.Transport):
    """A transport that only remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See :class:`asyncio.WriteTransport`."""
        assert not self.closing
        self.sent += bytes(data)

    def can_write_eof(self) -> bool:
        """See :class:`asyncio.WriteTransport`."""
        return True

    def write_eof(self) -> None:
        """See :class:`asyncio.WriteTransport`."""

    def close(self) -> None:
        """See :class:`asyncio.BaseTransport`."""
        self.closing = True

    abort = close

    def pause_reading(self) -> None:
        """See :class:`asyncio.ReadTransport`."""

    resume_reading = pause_reading


_PIECES = [
    request(b"abc"),
    request(b"3\r\nabc\r\n0\r\n\r\n", length=False, headers={"Transfer-Encoding": "chunked"}),
    request(None, method="GET"),
    request(None, method="HEAD"),
    request(b"x", headers={"X-Refuse": "1"}),
    request(b"x", headers={"Expect": "100-continue"}),
    request(b"x", headers={"Connection": "close"}),
    request(b"x" * 3000),
    b"\r\n",
]


@given(
    st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3), st.binary(max_size=3)), max_size=3),
    st.lists(st.integers(0, 4000), max_size=12),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes(
    pieces: list[bytes],
    changes: list[tuple[int, int, bytes]],
    cuts: list[int],
    hangs_up: bool,
) -> None:
    """Requests, some broken, cut anywhere: no exception, only answers, and all is let go."""
    data = b"".join(pieces)
    for at, cut, noise in changes:
        data = data[:at] + noise + data[at + cut :]

    async def feed() -> tuple[bytes, Listener]:
        application = Application([(r"/echo.*|\*", Echo)], seen=[], log_function=lambda _: None)
        bounds = Bounds(**BOUNDS | {"header_bytes": 500, "body_bytes": 2000})
        listener = Listener(application, bounds, NullMetrics())
        connection, wire = Connection(listener), _Wire()
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
        return wire.sent, listener

    sent, listener = asyncio.run(feed())
    assert listener.inflight == 0
    assert not listener.connections
    while sent:
        head, separator, sent = sent.partition(b"\r\n\r\n")
        assert separator
        assert head.startswith(b"HTTP/1.1 ")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        # The answer to a HEAD has a length and no body; what follows it begins another answer.
        if length is not None and not sent.startswith(b"HTTP/1.1 "):
            sent = sent[int(length[1]) :]
