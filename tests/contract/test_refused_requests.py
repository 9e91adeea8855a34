# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused for their length, encoding, key or speed: status, code and shape."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from support.http_client import Answer
from support.http_errors import BATCH, TRACK, check_error, event, refused
from support.server_inprocess import BASIC, serving
from support.server_process import KEY


# --------------------------------------------------------------------------- length and encoding
async def test_one_byte_too_many_is_refused(tmp_path: Path) -> None:
    """5 MiB are accepted, one byte more is not, whether it is declared or in chunks."""
    limit = 5 * 1024 * 1024
    small = event("userId", '"u"')
    async with serving(tmp_path) as server:
        assert (await server.send(TRACK, small + b" " * (limit - len(small)))).status == 200
    (tmp_path / "other").mkdir()
    async with serving(tmp_path / "other") as server:
        body = small + b" " * (limit + 1 - len(small))
        answer = await refused(server, TRACK, body, 413, "body_too_large")
        assert "limits.body_bytes" in answer.json["message"]
        async with await server.connect() as client:
            head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n"
            await client.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            check_error(await client.answer(), 413, "body_too_large")
        assert await server.events() == []


GZIP = {"Content-Encoding": "gzip"}
BODY = event("userId", '"u"')


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)[:-1]),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9]),
        ("gzip", gzip.compress(BODY, mtime=0)[:12]),
        ("gzip", gzip.compress(BODY, mtime=0)[:-8] + b"\0" * 8),
        ("gzip", gzip.compress(BODY, mtime=0) + b"x"),
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(BODY, mtime=0)[:5]),
        ("gzip", BODY),
        ("gzip", b""),
        ("gzip", zlib.compress(BODY)),
        ("deflate", zlib.compress(BODY)[:-1]),
        ("deflate", zlib.compress(BODY) + b"x"),
        ("deflate", BODY),
        ("deflate", b""),
    ],
)
async def test_damaged_compression_is_refused(tmp_path: Path, encoding: str, body: bytes) -> None:
    async with serving(tmp_path) as server:
        headers = {"Content-Encoding": encoding}
        await refused(server, TRACK, body, 400, "invalid_encoding", headers=headers)


def bomb(size: int) -> bytes:
    """Return the beginning of a gzip member of that many spaces, made piece by piece."""
    compressor = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    mebibyte = 1024 * 1024
    # After a full flush no data refers to earlier data, so the same bytes can be repeated.
    block = compressor.compress(b" " * mebibyte) + compressor.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + block * (size // mebibyte)


async def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    """1 GiB in 1 MiB is refused after 20 MiB."""
    async with serving(tmp_path) as server:
        body = bomb(1024 * 1024 * 1024)
        inflating = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        assert len(inflating.decompress(body, 32 * 2**20)) == 32 * 2**20
        assert len(body) < 2 * 1024 * 1024
        answer = await refused(server, TRACK, body, 413, "body_too_large", headers=GZIP)
        assert "limits.decompressed_bytes" in answer.json["message"]


@pytest.mark.parametrize(
    "encoding",
    ["br", "zstd", "gzip, gzip", "gzip,deflate", "compress", "gzip;q=1", "*", "identity, br"],
)
async def test_an_unsupported_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    async with serving(tmp_path) as server:
        headers = {"Content-Encoding": encoding}
        await refused(server, TRACK, BODY, 415, "unsupported_encoding", headers=headers)


async def test_a_body_without_a_length_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for path, method in ((TRACK, "POST"), (BATCH, "POST")):
            await refused(server, path, None, 411, "length_required", method=method)


# ------------------------------------------------------------------------------------------ keys
def basic(text: str) -> str:
    """Return the header for these credentials."""
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("key", "code"),
    [
        (None, "missing_write_key"),
        ("", "invalid_write_key"),
        ("Basic", "invalid_write_key"),
        ("Basic ", "invalid_write_key"),
        (f"Bearer {KEY}", "invalid_write_key"),
        (BASIC.replace("Basic", "Digest"), "invalid_write_key"),
        (KEY, "invalid_write_key"),
        ("Basic !!!", "invalid_write_key"),
        ("Basic \xe9", "invalid_write_key"),
        ("Basic /w==", "invalid_write_key"),
        (basic("unknown:"), "invalid_write_key"),
        (basic(f":{KEY}"), "invalid_write_key"),
        (basic(f"{KEY}x:"), "invalid_write_key"),
        (basic(f"{KEY}\0:"), "invalid_write_key"),
        (basic(KEY.upper() + ":"), "invalid_write_key"),
        (f"{BASIC}, {BASIC}", "invalid_write_key"),
    ],
)
async def test_a_wrong_key_is_refused(tmp_path: Path, key: str | None, code: str) -> None:
    async with serving(tmp_path) as server:
        answer = await refused(server, TRACK, BODY, 401, code, key=key)
        assert answer.headers["www-authenticate"].startswith("Basic ")
        # The request is not authenticated, so nothing of it is kept.
        assert await server.dead_letters() == []
        for header in ("Origin", "Sec-Fetch-Mode"):
            answer = await refused(
                server, TRACK, BODY, 401, code, key=key, headers={header: "https://example.com"}
            )
            assert "www-authenticate" not in answer.headers


async def test_two_authorization_headers_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        headers = {"Authorization": BASIC, "authorization": BASIC}
        await refused(server, TRACK, BODY, 401, "invalid_write_key", key=None, headers=headers)


@pytest.mark.parametrize("place", ["header", "query", "body"])
async def test_a_disabled_key_is_refused(tmp_path: Path, place: str) -> None:
    keys = '[[workspaces.write_keys]]\nid = "old"\nkey = "old-key"\ndisabled = true\n'
    async with serving(tmp_path, config_extra=keys) as server:
        path, key, body = TRACK, None, json.loads(BODY)
        if place == "header":
            key = basic("old-key:")
        elif place == "query":
            path += "?writeKey=old-key"
        else:
            body["writeKey"] = "old-key"
        await refused(server, path, body, 403, "write_key_disabled", key=key)


@pytest.mark.parametrize("value", ["unknown", 5, None, "", [KEY], {"a": KEY}, True])
async def test_a_wrong_key_in_a_body_is_refused(tmp_path: Path, value: Any) -> None:
    code = "missing_write_key" if value in (None, "") else "invalid_write_key"
    async with serving(tmp_path) as server:
        body = {**json.loads(BODY), "writeKey": value}
        await refused(server, TRACK, body, 401, code, key=None)
        batch = {"batch": [json.loads(BODY)], "writeKey": value}
        await refused(server, BATCH, batch, 401, code, key=None)


async def test_a_key_writes_to_its_workspace_only(tmp_path: Path) -> None:
    """The body cannot name another workspace."""
    other = '[[workspaces]]\nid = "other"\nname = "Other"\n'
    other += '[[workspaces.write_keys]]\nid = "website"\nkey = "other-key"\n'
    async with serving(tmp_path, config_extra=other) as server:
        body = {**json.loads(BODY), "workspaceId": "acme"}
        assert (await server.send(TRACK, body, key=basic("other-key:"))).status == 200
        assert (await server.stored("m", workspace="other"))["workspaceId"] == "other"
        assert await server.app.store.find("acme", "api", "m") is None
        assert (await server.send(TRACK, BODY)).status == 200
        assert len(await server.events()) == 2


async def test_two_keys_in_the_query_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        path = f"{TRACK}?writeKey={KEY}&writeKey=other"
        await refused(server, path, BODY, 401, "invalid_write_key", key=None)


async def test_a_body_without_a_key_in_front_is_limited_to_1_mib(tmp_path: Path) -> None:
    """Declared, in chunks, and compressed."""
    body = {**json.loads(BODY), "writeKey": KEY}
    raw = json.dumps(body).encode()
    small, large = (raw + b" " * (size - len(raw)) for size in (2**20, 2**20 + 1))
    (tmp_path / "other").mkdir()
    async with serving(tmp_path / "other") as server:
        assert (await server.send(TRACK, small, key=None)).status == 200
    async with serving(tmp_path) as server:
        answer = await refused(server, TRACK, large, 413, "body_too_large", key=None)
        assert str(2**20) in answer.json["message"]
        await refused(
            server,
            TRACK,
            gzip.compress(large, mtime=0),
            413,
            "body_too_large",
            key=None,
            headers=GZIP,
        )
        async with await server.connect() as client:
            await client.send(f"POST {TRACK} HTTP/1.1\r\nHost: a\r\n".encode())
            await client.send(b"Transfer-Encoding: chunked\r\n\r\n")
            await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large))
            check_error(await client.answer(), 413, "body_too_large")
        assert await server.events() == []
        # With a key it is an ordinary body.
        assert (await server.send(TRACK, large)).status == 200


# ------------------------------------------------------------------------------------ precedence
async def test_checks_are_made_in_order(tmp_path: Path) -> None:
    """404, 405, 415, declared length, key, size, decompression, JSON, key in the body, schema."""
    bad_key = basic("unknown:")
    too_long = {"Content-Length": str(2**40)}
    brotli = {"Content-Encoding": "br"}
    async with serving(tmp_path) as server:

        async def status(path: str, body: Any, **arguments: Any) -> tuple[int, str]:
            answer = await server.send(path, body, **arguments)
            return answer.status, answer.json["code"]

        worst: dict[str, Any] = {"key": bad_key, "headers": too_long | brotli}
        assert await status("/v1/nothing", None, **worst, method="BREW") == (404, "not_found")
        assert await status(TRACK, None, **worst, method="GET") == (405, "method_not_allowed")
        assert await status(TRACK, None, **worst) == (415, "unsupported_encoding")
        assert await status(TRACK, None, key=bad_key, headers=too_long) == (413, "body_too_large")
        assert await status(TRACK, None, key=bad_key) == (411, "length_required")
        assert await status(TRACK, b"not json", key=bad_key) == (401, "invalid_write_key")
        assert await status(TRACK, b"not gzip", headers=GZIP) == (400, "invalid_encoding")
        # Without a key in front, the body has to be read first.
        assert await status(TRACK, b"not gzip", key=None, headers=GZIP) == (400, "invalid_encoding")
        assert await status(TRACK, b"not json", key=None) == (400, "invalid_json")
        assert await status(TRACK, b"[]", key=None) == (401, "missing_write_key")
        assert await status(TRACK, b"[]") == (400, "invalid_payload")


async def test_a_refusal_does_not_wait_for_the_body(tmp_path: Path) -> None:
    """The key is wrong: the answer comes before the body."""
    async with serving(tmp_path) as server, await server.connect() as client:
        head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: Basic x\r\n"
        await client.send(head.encode() + b"Content-Length: 100\r\n\r\n")
        check_error(await client.answer(), 401, "invalid_write_key")
        await client.send(b"x" * 100)
        assert (await server.track(client)).status == 200


# ---------------------------------------------------------------------------------- slow and cut
async def test_a_body_shorter_than_its_length_is_not_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        async with await server.connect() as client:
            head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n"
            await client.send(head.encode() + b"Content-Length: 1000\r\n\r\n" + BODY)
            client.half_close()
            check_error(await client.answer(), 400, "invalid_request")
            assert await client.closed()
        assert await server.events() == []


async def test_a_slow_sender_is_refused(tmp_path: Path) -> None:
    """With 408, in the head and in the body; with CORS headers where the route is known."""
    head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n"
    head += "Origin: https://example.com\r\nContent-Length: 1000\r\n"
    async with serving(tmp_path, server="request_timeout = 1\n") as server:

        async def trickle(begin: bytes) -> Answer:
            async with await server.connect() as client:
                await client.send(begin)
                answering = asyncio.create_task(client.answer())
                while not answering.done():
                    await client.send(b"x")
                    await asyncio.wait({answering}, timeout=0.05)
                assert await client.closed()
                return await answering

        for answer in await asyncio.gather(
            trickle(head.encode() + b"X-Slow: "), trickle(head.encode() + b"\r\n")
        ):
            check_error(answer, 408, "request_timeout")
            assert answer.headers["connection"] == "close"
        assert answer.headers["access-control-allow-origin"] == "https://example.com"
        assert await server.events() == []
        assert (await server.track()).status == 200
