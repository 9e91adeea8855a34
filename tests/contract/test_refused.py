# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused: status, code and shape. Nothing is stored, and the server goes on.

Which bodies are refused is tested without HTTP: ``pipeline/test_decode.py`` (JSON, compression),
``test_schemas.py`` and ``pipeline/test_normalise.py`` (events), ``keys/test_auth.py`` (keys).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

from engage.errors import STATUS
from support.http_client import Answer
from support.http_errors import BATCH, TRACK, check_error, event, refused
from support.server_inprocess import BASIC, Serving, basic, serving
from support.server_process import KEY

RECORDED = Path(__file__).parents[1] / "data" / "http_corpus.json"
GZIP = {"Content-Encoding": "gzip"}
BODY = event("userId", '"u"')
STRICT = {"X-Strict-Mode": "1"}
LARGE_EVENT = {"type": "track", "userId": "u", "event": "E", "properties": {"x": "y" * 65_536}}
HALF_EVENT = {**LARGE_EVENT, "properties": {"x": "y" * 50_000}}


#: Path, body, and the status, the code, and a word of the message.
BAD_BODIES: list[tuple[str, Any, int, str, str]] = [
    (TRACK, b"not json", 400, "invalid_json", ""),
    (BATCH, b'{"batch":[]} x', 400, "invalid_json", ""),
    (TRACK, event("userId", "9" * 40), 400, "invalid_json", "64-bit"),
    (TRACK, event("properties", r'{"\ud800":1,"\udc00":2}'), 400, "invalid_json", "surrogate"),
    (TRACK, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, "invalid_json", "json_depth"),
    (TRACK, event("x", f"[{'1,' * 250_000}1]"), 413, "body_too_large", "limits.json_values"),
    (TRACK, [], 400, "invalid_payload", ""),
    (TRACK, {"userId": "u"}, 400, "invalid_payload", "event: is required"),
    (TRACK, event("userId", "1.0"), 400, "invalid_payload", "userId"),
    (TRACK, event("timestamp", '"2023-02-29T00:00:00Z"'), 400, "invalid_payload", "existing"),
    ("/v1/group", {"userId": "u"}, 400, "invalid_payload", "groupId: is required"),
    ("/v1/alias", {"previousId": "p", "anonymousId": "a"}, 400, "invalid_payload", "userId"),
    (TRACK, LARGE_EVENT, 413, "event_too_large", "limits.event_bytes"),
    (BATCH, {"batch": {}}, 400, "invalid_payload", "batch"),
    (BATCH, {"batch": [], "context": {"x": "y" * 32_768}}, 413, "batch_too_large", ""),
]


async def test_a_bad_body_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for path, body, status, code, word in BAD_BODIES:
            answer = await refused(server, path, body, status, code)
            assert word in answer.json["message"]
            # The message does not repeat the body.
            assert "999999999999999999999999999999" not in answer.json["message"]


async def test_a_batch_without_a_valid_item_is_answered_200(tmp_path: Path) -> None:
    """Some mobile SDKs send a batch that gets a 400 again and again."""
    large = {"batch": [HALF_EVENT], "context": {"x": "y" * 20_000}}
    async with serving(tmp_path) as server:
        for path in ("/api/public/apps/batch", BATCH, "/v1/b", "/v1/import"):
            for body, code, word in (
                ({"batch": [{"type": "Track"}]}, "invalid_payload", "type"),
                ({"batch": [LARGE_EVENT]}, "event_too_large", "limits.event_bytes"),
                # Only with the context of the envelope.
                (large, "event_too_large", "limits.event_bytes"),
            ):
                answer = await server.send(path, body)
                assert (answer.status, answer.json["accepted"]) == (200, 0)
                [item] = answer.json["rejected"]
                assert (item["index"], item["code"]) == (0, code)
                assert word in item["message"]
                await refused(server, path, body, 400, "invalid_payload", headers=STRICT)
            assert (await server.send(path, {"batch": []}, headers=STRICT)).status == 200
        assert len(await server.dead_letters()) == 3


# ----------------------------------------------------------------------------------------- length
async def check_largest_body(
    folder: Path, body: bytes, limit: int, name: str, key: str | None
) -> None:
    """Check that a body of the limit is accepted, and that one byte more is not."""
    small, large = (body + b" " * (size - len(body)) for size in (limit, limit + 1))
    async with serving(folder) as server:
        answer = await refused(server, TRACK, large, 413, "body_too_large", key=key)
        assert name in answer.json["message"]
        async with await server.connect() as client:
            line = "" if key is None else f"Authorization: {key}\r\n"
            await client.send(f"POST {TRACK} HTTP/1.1\r\nHost: a\r\n{line}".encode())
            await client.send(b"Transfer-Encoding: chunked\r\n\r\n")
            await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large))
            check_error(await client.answer(), 413, "body_too_large")
        if key is None:
            zipped = gzip.compress(large, mtime=0)
            await refused(server, TRACK, zipped, 413, "body_too_large", key=key, headers=GZIP)
        assert await server.events() == []
        assert (await server.send(TRACK, small, key=key)).status == 200


async def test_one_byte_too_many_is_refused(tmp_path: Path) -> None:
    """Declared and in chunks."""
    await check_largest_body(tmp_path, BODY, 5 * 2**20, "limits.body_bytes", BASIC)


async def test_a_body_without_a_key_in_front_is_limited_to_1_mib(tmp_path: Path) -> None:
    """Declared, in chunks, and compressed."""
    body = json.dumps({**json.loads(BODY), "writeKey": KEY}).encode()
    await check_largest_body(tmp_path, body, 2**20, str(2**20), None)


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


# ------------------------------------------------------------------------------------------ keys
BATCHED = b'{"batch":[],"writeKey":%s}'
CONFIG = "/sourceConfig/"


#: The code, the headers ``Authorization``, the query, and the key in the body.
KEYS: list[tuple[str, list[str] | None, str, bytes]] = [
    ("missing_write_key", None, "", b"null"),
    ("missing_write_key", None, "?writeKey=", b'""'),
    ("invalid_write_key", None, "", b"5"),
    ("invalid_write_key", None, "", b'"not a key"'),
    ("invalid_write_key", None, "", b'"unknown"'),
    ("write_key_disabled", None, "", b'"old-key"'),
    ("invalid_write_key", None, "?writeKey=unknown", b"null"),
    ("invalid_write_key", None, "?writeKey=a&writeKey=b", b"null"),
    ("write_key_disabled", None, "?writeKey=old-key", b"null"),
    ("invalid_write_key", [basic("unknown:")], "", b"null"),
    ("write_key_disabled", [basic("old-key:")], "", b"null"),
    ("write_key_disabled", ["Basic old-key"], "", b"null"),
    ("invalid_write_key", [""], "", b"null"),
    ("invalid_write_key", ["Basic"], "", b"null"),
    ("invalid_write_key", ["Basic ***"], "", b"null"),
    ("invalid_write_key", ["Basic /////w=="], "", b"null"),
    ("write_key_disabled", ["Bearer old-key"], "", b"null"),
    ("invalid_write_key", ["Negotiate abc"], "", b"null"),
    ("invalid_write_key", ["old-key"], "", b"null"),
    ("invalid_write_key", [BASIC, BASIC], "", b"null"),
]


async def test_every_answer_about_a_key_has_the_words_that_stop_sdks(tmp_path: Path) -> None:
    """SDKs for Android and iOS send a batch for ever unless they find these words."""
    keys = '[[workspaces.write_keys]]\nid = "old"\nkey = "old-key"\ndisabled = true\n'
    routes = (*(("POST", path) for path in (TRACK, BATCH, "/beacon/v1/batch")), ("GET", CONFIG))
    async with serving(tmp_path, config_extra=keys) as server, await server.connect() as client:
        for code, authorization, query, named in KEYS:
            for method, path in routes:
                if method == "GET" and not authorization and "=" not in query.removesuffix("="):
                    continue  # It has no body that could name a key.
                lines = [f"{method} {path}{query} HTTP/1.1", "Host: localhost"]
                lines += [f"Authorization: {value}" for value in authorization or ()]
                body = BATCHED % named if method == "POST" else b""
                lines += [f"Content-Length: {len(body)}", "", ""]
                await client.send("\r\n".join(lines).encode() + body)
                answer = await client.answer()
                expected = code if method == "POST" else "invalid_write_key"
                check_error(answer, STATUS[expected], expected)
                assert "invalid write key" in answer.json["message"].lower()


def test_every_recorded_answer_about_a_key_has_these_words() -> None:
    """No answer with a code about keys was forgotten above."""
    about = [
        answer
        for group in json.loads(RECORDED.read_text("utf-8")).values()
        for name, case in group.items()
        if name != "stored"
        for answer in case["answers"]
        if re.search(r'"code":"\w*write_key\w*"', answer)
    ]
    assert len(about) > 20
    assert [answer for answer in about if "invalid write key" not in answer.lower()] == []


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


async def test_checks_are_made_in_order(tmp_path: Path) -> None:
    """404, 405, 415, declared length, key, size, decompression, JSON, key in the body, schema."""
    bad_key = basic("unknown:")
    too_long = {"Content-Length": str(2**40)}
    worst: dict[str, Any] = {"key": bad_key, "headers": too_long | {"Content-Encoding": "br"}}
    async with serving(tmp_path) as server:
        for path, body, arguments, status, code in (
            ("/v1/nothing", None, {**worst, "method": "BREW"}, 404, "not_found"),
            (TRACK, None, {**worst, "method": "GET"}, 405, "method_not_allowed"),
            (TRACK, None, worst, 415, "unsupported_encoding"),
            (TRACK, None, {"key": bad_key, "headers": too_long}, 413, "body_too_large"),
            (TRACK, None, {"key": bad_key}, 411, "length_required"),
            (TRACK, b"not json", {"key": bad_key}, 401, "invalid_write_key"),
            (TRACK, b"not gzip", {"headers": GZIP}, 400, "invalid_encoding"),
            # Without a key in front, the body has to be read first.
            (TRACK, b"not gzip", {"key": None, "headers": GZIP}, 400, "invalid_encoding"),
            (TRACK, b"not json", {"key": None}, 400, "invalid_json"),
            (TRACK, b"[]", {"key": None}, 401, "missing_write_key"),
            (TRACK, b"[]", {}, 400, "invalid_payload"),
        ):
            answer = await server.send(path, body, **arguments)
            assert (answer.status, answer.json["code"]) == (status, code)


async def trickle(server: Serving, begin: bytes) -> Answer:
    """Send a byte every 50 ms until the server answers."""
    async with await server.connect() as client:
        await client.send(begin)
        answering = asyncio.create_task(client.answer())
        while not answering.done():
            await client.send(b"x")
            await asyncio.wait({answering}, timeout=0.05)
        assert await client.closed()
        return await answering


async def test_a_slow_sender_is_refused(tmp_path: Path) -> None:
    """With 408, in the head and in the body; with CORS headers where the route is known."""
    head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n".encode()
    head += b"Origin: https://example.com\r\nContent-Length: 1000\r\n"
    async with serving(tmp_path, server="request_timeout = 1\n") as server:
        for answer in await asyncio.gather(
            trickle(server, head + b"X-Slow: "), trickle(server, head + b"\r\n")
        ):
            check_error(answer, 408, "request_timeout")
            assert answer.headers["connection"] == "close"
        assert answer.headers["access-control-allow-origin"] == "https://example.com"
        assert await server.events() == []
        assert (await server.track()).status == 200
