# SPDX-License-Identifier: Apache-2.0
"""Answers that no handler gives have the usual shape, and scripts of web pages can read them.

When they are given is tested in ``http1/``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.http_client import Answer
from support.http_errors import check_error
from support.server_inprocess import BASIC, Serving, serving

ORIGIN = "https://shop.example.com"
BODY = b'{"userId": "u", "event": "E"}'
MANY = ["X: y"] * 101


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
    check_error(answer, status, code)
    assert answer.headers["connection"] == "close"
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-expose-headers"] == "Retry-After, X-Request-Id"
    assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    ("data", "server", "status", "code", "word"),
    [
        (head(f"/v1/t?{arguments(1001)}") + b"\r\n" + BODY, "", 400, "invalid_request", "1000"),
        (head("/v1/t?" + "&" * 1000) + b"\r\n" + BODY, "", 400, "invalid_request", "1000"),
        (head("/v1/t?x=y", *MANY) + b"\r\n", "", 431, "headers_too_large", ""),
        (head("//v1/t", "X-Long: " + "a" * 70_000) + b"\r\n", "", 431, "headers_too_large", ""),
        (head(), "head_timeout = 0.3", 408, "request_timeout", "(server.head_timeout)"),
        (head(), "request_timeout = 0.3", 408, "request_timeout", "(server.request_timeout)"),
    ],
    ids=["arguments", "no arguments", "many", "long", "slow head", "slow request"],
)
async def test_an_early_answer_is_that_of_a_handler(
    tmp_path: Path, data: bytes, server: str, status: int, code: str, word: str
) -> None:
    async with serving(tmp_path, server=server) as started:
        answer = await ask(started, data)
        check(answer, status, code)
        assert word in answer.json["message"]


async def test_a_query_of_a_thousand_arguments_is_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for query in (arguments(1000), "&" * 999):
            answer = await ask(server, head(f"/v1/t?{query}") + b"\r\n" + BODY)
            assert answer.status == 200, answer.body


async def test_each_route_is_answered_like_its_handler(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for path, allowed in (("/healthz", "*"), ("/nowhere", "*"), ("http://a/v1/b?x", ORIGIN)):
            answer = await ask(server, head(path, *MANY) + b"\r\n")
            assert answer.headers["access-control-allow-origin"] == allowed
            credentials = answer.headers.get("access-control-allow-credentials")
            assert credentials == ("true" if allowed == ORIGIN else None)


async def test_an_origin_that_is_not_listed_is_not_echoed(tmp_path: Path) -> None:
    config = f'[cors]\norigins = ["{ORIGIN}"]\n'
    async with serving(tmp_path, config_extra=config) as server:
        check(await ask(server, head("/v1/t", *MANY) + b"\r\n"), 431, "headers_too_large")
        for origin in ("https://evil.example.com", f"{ORIGIN}\r\nOrigin: {ORIGIN}", None):
            answer = await ask(server, head("/v1/t", *MANY, origin=origin) + b"\r\n")
            assert answer.status == 431
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["vary"] == "Origin"
