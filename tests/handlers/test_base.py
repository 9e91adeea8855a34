# SPDX-License-Identifier: Apache-2.0
"""The base of handlers without the rest of the server. ``contract/`` tests it with all of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tornado import httputil

from engage.config import Cors, Limits
from engage.errors import Limit
from engage.handlers.base import Handler, Route
from engage.handlers.cors import CorsPolicy
from engage.http1.exchange import Exchange
from engage.http1.listener import Listener
from engage.http1.shared import Bounds
from engage.keys.limits import Guards
from engage.monitoring.metrics import Metrics
from support.http_client import Answer, RawClient, listening, request
from support.http_echo import BOUNDS
from support.waiting import eventually

#: What a page needs of the server: one origin may read its answers.
SERVICES: Any = types.SimpleNamespace(
    cors=CorsPolicy(Cors(origins=("https://a.example",))),
    body_limit=Limit(1000, "limits.body_bytes"),
    guards=Guards(Limits()),
    trusted_proxies=(),
)
ROUTE = Route(name="page", allowed=("GET", "PUT", "OPTIONS"))


class _Page(Handler):
    """A page as a console might have one: it needs nothing of the ingestion of events."""

    def get(self, name: str) -> None:
        self.answer(name.encode(), content_type="text/html", headers={"Vary": "Cookie"})

    def put(self, name: str) -> None:
        self.answer(self.body, headers={"X-Unsafe": "a\r\nb"} if name == "unsafe" else None)


class _Pages(httputil.HTTPServerConnectionDelegate):
    """Answers every path with a page whose name is the path."""

    def __init__(self) -> None:
        self.logged: list[int] = []

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> httputil.HTTPMessageDelegate:
        assert isinstance(request_conn, Exchange)
        log: Callable[[Handler], None] = lambda handler: self.logged.append(handler.status)  # noqa: E731
        segments = {"name": request_conn.request.path[1:]}
        return _Page(request_conn, ROUTE, SERVICES, log, segments)


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[tuple[_Pages, int]]:
    """Serve pages, and return them with their port."""
    pages = _Pages()
    listener = Listener(pages, Bounds(**BOUNDS), Metrics())
    sock = listening()
    await listener.serve(sock)
    try:
        yield pages, sock.getsockname()[1]
    finally:
        listener.close()
        await eventually(lambda: not listener.connections)


@contextlib.asynccontextmanager
async def _page() -> AsyncIterator[RawClient]:
    async with _serving() as (_, port), await RawClient.connect(port) as client:
        yield client


async def _ask(client: RawClient, method: str, **headers: str) -> Answer:
    await client.send(request(b"", method=method, target="/page", headers=headers))
    return await client.answer(method=method)


async def test_a_handler_answers_with_the_common_headers() -> None:
    async with _page() as client:
        answer = await _ask(client, "GET", **{"X-Request-Id": "from-client"})
        assert (answer.status, answer.body) == (200, b"page")
        assert answer.headers["content-type"] == "text/html"
        assert answer.headers["vary"] == "Origin, Cookie"
        assert answer.headers["x-request-id"] == "from-client"
        assert answer.headers["x-content-type-options"] == "nosniff"
        answer = await _ask(client, "OPTIONS")
        assert (answer.status, answer.headers["allow"]) == (204, "GET, PUT, OPTIONS")
        assert "x-request-id" in answer.headers


async def test_a_header_that_would_begin_another_is_a_crash() -> None:
    async with _page() as client:
        await client.send(request(b"{}", method="PUT", target="/safe"))
        assert (await client.answer()).body == b"{}"
        await client.send(request(b"{}", method="PUT", target="/unsafe"))
        answer = await client.answer()
        assert (answer.status, answer.json["code"]) == (500, "internal_error")
        assert "x-unsafe" not in answer.headers


async def test_the_handler_of_a_client_that_is_gone_before_its_body_ends() -> None:
    """It answers in vain: the client may have closed only one direction."""
    async with _serving() as (pages, port), await RawClient.connect(port) as client:
        await client.send(request(b"{}", method="PUT")[:-1])
        handling = await eventually(_handling)
        client.writer.transport.abort()
        await eventually(lambda: all(task.done() for task in handling))
    assert pages.logged in ([], [400])


async def test_a_request_that_is_cancelled_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving() as (pages, port), await RawClient.connect(port) as client:
        await client.send(request(b"{}", method="PUT")[:-1])
        [task] = await eventually(_handling)
        with caplog.at_level(logging.ERROR):
            task.cancel()
            assert (await client.answer()).status == 500
        assert task.cancelled()
        assert pages.logged == [500]


def _handling() -> list[asyncio.Task[object]]:
    """Return the tasks that handle a request and wait for its body."""
    return [task for task in asyncio.all_tasks() if "Handler" in repr(task.get_coro())]
