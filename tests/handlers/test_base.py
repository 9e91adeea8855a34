# SPDX-License-Identifier: Apache-2.0
"""The base of handlers without the rest of the server. ``contract/`` tests it with all of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tornado import httputil, web
from tornado.httpserver import HTTPServer

from engage.errors import ApiError
from engage.handlers.base import Handler, Route
from support.http_client import Answer, RawClient, listening, request


class _Connection:
    context = None

    def set_close_callback(self, callback: object) -> None:
        """As Tornado wants it."""


def _cleared(handler_class: type[web.RequestHandler]) -> dict[str, Any]:
    request = httputil.HTTPServerRequest(
        connection=_Connection(),  # type: ignore[arg-type]
        start_line=httputil.RequestStartLine("GET", "/", "HTTP/1.0"),
    )
    handler = handler_class.__new__(handler_class)
    handler.request = request
    handler.application = web.Application()
    handler.clear()
    return {name: value for name, value in vars(handler).items() if name.startswith("_")}


def test_clear_sets_what_tornado_sets() -> None:
    """``Handler.clear`` replaces Tornado's: a new version may have more to clear."""
    ours, theirs = _cleared(Handler), _cleared(web.RequestHandler)
    ours.pop("_headers")
    theirs.pop("_headers")
    assert ours == theirs


class _Page(Handler):
    """A page as a console might have one: it needs nothing of the ingestion of events."""

    def initialize(self) -> None:
        self.route = Route(name="page", allowed=("GET", "POST", "OPTIONS"))

    def check(self) -> None:
        if "X-Refuse" in self.request.headers:
            raise ApiError("not_found", "there is no such page")

    def get(self) -> None:
        self.answer(b"<p>hello</p>", content_type="text/html", headers={"Vary": "Cookie"})

    def post(self) -> None:
        raise RuntimeError("a secret")


@contextlib.asynccontextmanager
async def _page() -> AsyncIterator[RawClient]:
    """Serve a page with Tornado's own HTTP server, and connect to it."""
    sock = listening()
    server = HTTPServer(web.Application([("/page", _Page)], log_function=lambda _: None))
    server.add_socket(sock)
    try:
        async with await RawClient.connect(sock.getsockname()[1]) as client:
            yield client
    finally:
        server.stop()
        await server.close_all_connections()


async def _ask(client: RawClient, method: str, **headers: str) -> Answer:
    await client.send(request(b"", method=method, target="/page", headers=headers))
    return await client.answer(method=method)


async def test_a_handler_answers_with_the_common_headers() -> None:
    async with _page() as client:
        answer = await _ask(client, "GET", **{"X-Request-Id": "from-client"})
        assert (answer.status, answer.body) == (200, b"<p>hello</p>")
        assert answer.headers["content-type"] == "text/html"
        assert answer.headers["vary"] == "Cookie"
        assert answer.headers["x-request-id"] == "from-client"
        assert answer.headers["x-content-type-options"] == "nosniff"
        answer = await _ask(client, "OPTIONS")
        assert (answer.status, answer.headers["allow"]) == (204, "GET, POST, OPTIONS")
        assert "x-request-id" in answer.headers


async def test_a_handler_answers_every_error_in_the_same_shape() -> None:
    async with _page() as client:
        answer = await _ask(client, "GET", **{"X-Refuse": "1"})
        assert (answer.status, answer.json["code"]) == (404, "not_found")
        answer = await _ask(client, "DELETE")
        assert (answer.status, answer.json["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "GET, POST, OPTIONS"
        answer = await _ask(client, "POST")
        assert (answer.status, answer.json["code"]) == (500, "internal_error")
        assert answer.json["requestId"] == answer.headers["x-request-id"]
        assert b"a secret" not in answer.body
