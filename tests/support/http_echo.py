# SPDX-License-Identifier: Apache-2.0
"""The HTTP connection with a small Tornado application behind it, which echoes requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from tornado.web import Application, RequestHandler, stream_request_body

from engage.http1.exchange import Failure
from engage.http1.listener import Listener
from engage.http1.shared import Bounds
from engage.http1.shares import Shares
from engage.monitoring.metrics import Metrics
from support.http_client import Answer, RawClient, listening
from support.waiting import eventually

BOUNDS: dict[str, Any] = {
    "header_bytes": 4096,
    "pipelined_bytes": 65536,
    "body_bytes": 100_000,
    "inflight_bytes": 1_000_000,
    "head_timeout": 30.0,
    "request_timeout": 30.0,
    "idle_timeout": 30.0,
    "max_connections": 50,
}


@stream_request_body
class Echo(RequestHandler):
    """A handler that answers with the body; for some paths it refuses by the head."""

    def initialize(self) -> None:
        """Set the settings and an empty body."""
        self.parts: list[bytes] = []
        self.prepared = False

    def prepare(self) -> None:
        """Refuse a request by its head."""
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
        """Answer why the body is incomplete."""
        if self.prepared and not self._finished:
            self.say_why()
        super().on_connection_close()

    def say_why(self) -> None:
        """Answer with the reason for a missing body."""
        failure = getattr(self.request.connection, "failure", None)
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
    """A handler whose answer has no length."""

    async def get(self) -> None:
        """Answer in pieces."""
        for part in ("one", "two"):
            self.write(part)
            await self.flush()


#: What :class:`Large` answers with.
LARGE = b"x" * 300_000


class Large(RequestHandler):
    """Has the same large content for every client."""

    def get(self) -> None:
        """Answer with it."""
        self.finish(LARGE)


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
        """Send bytes on a new connection, and read one answer."""
        async with await RawClient.connect(self.port) as client:
            await client.send(data)
            return await client.answer(**arguments)


class Wire(asyncio.Transport):
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes | bytearray | memoryview] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self.written.append(data)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closing = True

    def nothing(self, *_: object, **__: object) -> None:
        """Accept a call that changes nothing here."""

    abort = close
    write_eof = set_write_buffer_limits = pause_reading = resume_reading = nothing


@contextlib.asynccontextmanager
async def running(shares: Shares | None = None, **changed: Any) -> AsyncIterator[Running]:
    """Run a listener, with other bounds if wanted.

    :param shares: how many connections the other workers have; ``None`` if there are no others.
    """
    routes = [(r"/echo.*|\*", Echo), ("/stream", Stream), ("/large", Large)]
    application = Application(routes, seen=[])
    listener = Listener(application, Bounds(**BOUNDS | changed), Metrics())
    sock = listening()
    await listener.serve(sock, shares)
    try:
        yield Running(listener, sock.getsockname()[1], application.settings)
    finally:
        listener.close()
        await eventually(lambda: not listener.connections)


def on_uvloop(test: Coroutine[Any, Any, None]) -> None:
    """Run a test on uvloop, which the server uses and which has different transports."""
    try:
        uvloop = pytest.importorskip("uvloop", reason="there is none for Windows")
    except BaseException:
        test.close()
        raise
    uvloop.run(test)
