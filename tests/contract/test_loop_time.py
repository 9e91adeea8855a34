# SPDX-License-Identifier: Apache-2.0
"""The rule: no request of a client that has proven nothing holds the event loop for 100 ms.

The worst heads that fit into ``limits.header_bytes``, for every kind of route: queries, Basic
headers and other long headers, targets, and bodies in tiny chunks. Bodies are limited elsewhere.

A task that ticks as often as it can measures the longest time between two ticks, in processor time
of the thread: what other processes do on a busy machine does not count.
"""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path

import pytest

from support.http_client import RawClient
from support.loop_time import check_time, longest_hold
from support.server_inprocess import BASIC, Serving, serving
from support.server_process import KEY

#: Seconds.
LIMIT = 0.1
#: Bytes that are left for the content of a worst head.
SPACE = 64_500

TARGETS = (
    *("/v1/track", "/v1/b", "/engage.js", "/docs", "/openapi.json", "/healthz", "/readyz"),
    *("/sourceConfig", f"/v1/projects/{KEY}/settings", "/api/public/webhooks/stripe"),
    *("/v1/subscriptions", "/nowhere"),
)

QUERIES = {
    "1000 arguments": "&".join(f"a{number}=%41%zz" for number in range(1000)),
    "1000 times the same": "&".join(["writeKey=" + "%ff" * 18] * 999),
    "escapes": "writeKey=" + "%41" * (SPACE // 3),
    "escapes that are none": "userId=" + "%zz" * (SPACE // 3),
    "plus signs": "a=" + "+" * SPACE,
    "semicolons": "a;" * (SPACE // 2),
    "equal signs": "=" * SPACE,
}

HEADERS = {
    "Basic, long": "Authorization: Basic " + "Q" * (SPACE // 4 * 4),
    "Basic, padding everywhere": "Authorization: Basic " + "=Q" * (SPACE // 2),
    "Basic, colons": "Authorization: Basic " + base64.b64encode(b":" * (SPACE * 3 // 4)).decode(),
    "Basic, not base64": "Authorization: Basic " + "\u00e9 " * (SPACE // 2),
    "Basic, many": "\r\n".join(["Authorization: Basic " + "QQ==" * 150] * 95),
    "Bearer": "Authorization: Bearer " + "a b" * (SPACE // 3),
    "Cookie": "Cookie: " + "a=b; " * (SPACE // 5),
    "Origin": "Origin: " + "http://" * (SPACE // 7),
    "Accept-Encoding": "Accept-Encoding: " + "gzip;q=0," * (SPACE // 9),
    "If-None-Match": "If-None-Match: " + 'W/"a",' * (SPACE // 6),
    "Content-Encoding": "Content-Encoding: " + "gzip," * (SPACE // 5),
    "Content-Type": "Content-Type: multipart/form-data; boundary=" + "a;" * (SPACE // 2),
    "X-Request-Id": "X-Request-Id: " + "a" * SPACE,
    "Connection": "Connection: " + "a," * (SPACE // 2),
    "X-Forwarded-For": "X-Forwarded-For: " + "1.1.1.1," * (SPACE // 8),
    "requested headers": "Access-Control-Request-Headers: " + "a," * (SPACE // 2),
    "many headers": "\r\n".join(f"X{number}: " + "a" * 600 for number in range(95)),
}

PATHS = {
    "slashes": "/" * SPACE,
    "segments": "/a" * (SPACE // 2),
    "dots": "/" + "%2e%2e/" * (SPACE // 7),
    "a long key": "/v1/projects/" + "%41" * (SPACE // 3) + "/settings",
    "question marks": "http://a/" + "?" * SPACE,
    "a form": "/v1/subscriptions?" + "userId=%u0041&" * (SPACE // 14),
}


async def check(server: Serving, what: str, method: str, data: bytes) -> None:
    """Send a request, and check that its answer is not a crash and that it held the loop briefly.

    The shortest try counts: see :mod:`support.loop_time`.
    """

    async def ask(client: RawClient) -> None:
        await client.send(data)
        answer = await client.answer(method=method)
        assert answer.status != 500, what

    async def hold() -> float:
        async with await server.connect() as client:
            return await longest_hold(ask(client))

    await check_time(hold, LIMIT, what)


def head(method: str, target: str, *lines: str) -> bytes:
    body = b"{}" if method == "POST" else b""
    length = [f"Content-Length: {len(body)}"] if body else []
    text = "\r\n".join([f"{method} {target} HTTP/1.1", "Host: a", *length, *lines, "", ""])
    raw = text.encode("latin-1")
    assert len(raw) <= 65_536
    return raw + body


@pytest.mark.timing
async def test_an_idle_loop_is_not_held(tmp_path: Path) -> None:
    """The measure itself stays far below the limit, or the other tests would prove nothing."""
    async with serving(tmp_path):
        assert min([await longest_hold(asyncio.sleep(0.05)) for _ in range(3)]) < LIMIT / 4

        async def busy() -> None:
            end = time.thread_time() + 2 * LIMIT
            while time.thread_time() < end:
                pass

        assert await longest_hold(busy()) > LIMIT


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.timing
async def test_no_head_holds_the_event_loop(tmp_path: Path, target: str) -> None:
    async with serving(tmp_path) as server:
        for method in ("GET", "POST", "OPTIONS"):
            for name, query in QUERIES.items():
                await check(server, name, method, head(method, f"{target}?{query}"[:SPACE]))
            for name, lines in HEADERS.items():
                await check(server, name, method, head(method, target, lines))


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.timing
async def test_no_target_holds_the_event_loop(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as server:
        for method in ("GET", "POST"):
            await check(server, name, method, head(method, PATHS[name]))


@pytest.mark.parametrize("size", [1, 5, 8, 32])
@pytest.mark.parametrize("key", [BASIC, None], ids=["key", "no key"])
@pytest.mark.timing
async def test_no_chunks_hold_the_event_loop(tmp_path: Path, size: int, key: str | None) -> None:
    """As many chunks as fit into one read of the event loop; the body is not JSON."""
    count = 13_000 if size == 1 else 600_000 // (size + 6)
    chunks = b"%x\r\n%b\r\n" % (size, b"x" * size) * count + b"0\r\n\r\n"
    lines = ["Transfer-Encoding: chunked"] + ([f"Authorization: {key}"] if key else [])
    text = "\r\n".join(["POST /v1/track HTTP/1.1", "Host: a", *lines, "", ""])
    async with serving(tmp_path) as server:
        await check(server, f"chunks of {size}", "POST", text.encode() + chunks)


@pytest.mark.timing
async def test_no_pipeline_holds_the_event_loop(tmp_path: Path) -> None:
    """The loop has a turn between two pipelined requests, and no lines are skipped at length."""
    async with serving(tmp_path) as server:
        lines = b"\r\n" * 128_000 + head("GET", "/healthz")
        await check(server, "empty lines", "GET", lines)
        for target in ("/healthz", "/nowhere", "/engage.js", f"/docs?{QUERIES['1000 arguments']}"):
            one = head("GET", target)

            async def ask(client: RawClient, one: bytes, count: int) -> None:
                sending = asyncio.create_task(client.send(one * count))
                for _ in range(count):
                    assert (await client.answer()).status in (200, 404)
                await sending

            async def hold(one: bytes = one) -> float:
                async with await server.connect() as client:
                    return await longest_hold(ask(client, one, 40_000 // len(one) + 3))

            await check_time(hold, LIMIT, target)
