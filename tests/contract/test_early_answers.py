# SPDX-License-Identifier: Apache-2.0
"""Answers that no handler gives have the usual shape, and scripts of web pages can read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.http_client import Answer
from support.server_inprocess import BASIC, Serving, Valve, serving
from support.waiting import eventually

ORIGIN = "https://shop.example.com"
BODY = b'{"userId": "u", "event": "E"}'
EXPOSED = "Retry-After, X-Request-Id"


def head(path: str = "/v1/t", *lines: str, origin: str | None = ORIGIN) -> bytes:
    """Return a head without its last empty line."""
    first = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: {BASIC}"]
    if origin is not None:
        first.append(f"Origin: {origin}")
    return "\r\n".join([*first, f"Content-Length: {len(BODY)}", *lines, ""]).encode()


def arguments(count: int) -> str:
    return "&".join(f"a{number}=1" for number in range(count))


async def ask(server: Serving, data: bytes) -> Answer:
    async with await server.connect() as client:
        await client.send(data)
        return await client.answer()


def check(answer: Answer, status: int, code: str) -> None:
    """Check the usual shape, and the headers that a handler of events adds."""
    assert (answer.status, answer.json["status"]) == (status, status)
    assert (answer.json["success"], answer.json["code"]) == (False, code)
    assert answer.json["requestId"] == answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["connection"] == "close"
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-expose-headers"] == EXPOSED
    assert answer.headers["vary"] == "Origin"


async def test_a_query_of_too_many_arguments_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for query in (arguments(1000), "&" * 999):
            answer = await ask(server, head(f"/v1/t?{query}") + b"\r\n" + BODY)
            assert answer.status == 200, answer.body
        for query in (arguments(1001), "&" * 1000):
            answer = await ask(server, head(f"/v1/t?{query}") + b"\r\n" + BODY)
            check(answer, 400, "invalid_request")
            assert "the limit is 1000" in answer.json["message"]


@pytest.mark.parametrize(
    "lines", [["X-Long: " + "a" * 70_000], ["X: y"] * 101], ids=["long", "many"]
)
@pytest.mark.parametrize("path", ["/v1/t?x=y", "//v1/t"])
async def test_a_large_head_is_answered(tmp_path: Path, path: str, lines: list[str]) -> None:
    async with serving(tmp_path) as server:
        check(await ask(server, head(path, *lines) + b"\r\n"), 431, "headers_too_large")


async def test_a_slow_head_is_answered(tmp_path: Path) -> None:
    for key in ("head_timeout", "request_timeout"):
        async with serving(tmp_path, server=f"{key} = 0.3") as server:
            answer = await ask(server, head())
            check(answer, 408, "request_timeout")
            assert f"(server.{key})" in answer.json["message"]


async def test_a_connection_too_many_is_answered(tmp_path: Path) -> None:
    valve = Valve("write")
    async with (
        serving(tmp_path, server="max_connections = 1", meddle=valve) as server,
        await server.connect() as busy,
    ):
        valve.gate.clear()
        await busy.send(head() + b"\r\n" + BODY)
        listener = server.app.listener
        assert listener is not None
        await eventually(lambda: any(one.serving for one in listener.connections))
        answer = await ask(server, head() + b"\r\n" + BODY)
        check(answer, 503, "overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        valve.gate.set()


@pytest.mark.parametrize(
    ("path", "allowed"), [("/healthz", "*"), ("/nowhere", "*"), ("http://a/v1/b?x", ORIGIN)]
)
async def test_each_route_is_answered_like_its_handler(
    tmp_path: Path, path: str, allowed: str
) -> None:
    async with serving(tmp_path) as server:
        answer = await ask(server, head(path, *["X: y"] * 101) + b"\r\n")
        assert answer.headers["access-control-allow-origin"] == allowed
        credentials = answer.headers.get("access-control-allow-credentials")
        assert credentials == ("true" if allowed == ORIGIN else None)


async def test_an_origin_that_is_not_listed_is_not_echoed(tmp_path: Path) -> None:
    config = f'[cors]\norigins = ["{ORIGIN}"]\n'
    async with serving(tmp_path, config_extra=config) as server:
        many = ["X: y"] * 101
        check(await ask(server, head("/v1/t", *many) + b"\r\n"), 431, "headers_too_large")
        for origin in ("https://evil.example.com", f"{ORIGIN}\r\nOrigin: {ORIGIN}", None):
            answer = await ask(server, head("/v1/t", *many, origin=origin) + b"\r\n")
            assert answer.status == 431
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["vary"] == "Origin"


async def test_bytes_that_are_not_http_get_a_bare_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        answer = await ask(server, head("/v1/t", "X : y") + b"\r\n" + BODY)
        assert (answer.status, answer.body) == (400, b"")
        assert answer.headers == {"content-length": "0", "connection": "close"}
