# SPDX-License-Identifier: Apache-2.0
"""What is refused: status, code and shape; nothing stored, the connection and the server alive."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.inprocess import BASIC, Serving, serving
from support.raw import Answer
from support.server import KEY

TRACK = "/api/public/apps/track"
BATCH = "/api/public/apps/batch"

ERROR = jsonschema.Draft202012Validator(
    json.loads(resources.files("engage_schemas").joinpath("error.json").read_bytes())
)


def check_error(answer: Answer, status: int, code: str) -> None:
    """The one shape."""
    assert (answer.status, answer.json.get("code")) == (status, code), answer.body
    assert list(ERROR.iter_errors(answer.json)) == []
    assert answer.json["status"] == status
    assert answer.json["requestId"] == answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"].startswith("application/json")
    assert len(answer.json["message"]) < 400


async def refused(
    server: Serving, path: str, body: Any, status: int, code: str, **arguments: Any
) -> Answer:
    """Send it, check the answer, that nothing is stored, and that the connection goes on."""
    async with await server.connect() as client:
        answer = await server.send(path, body, client=client, **arguments)
        check_error(answer, status, code)
        assert await server.events() == []
        if answer.headers.get("connection") != "close":
            assert (await server.send("/healthz", method="GET", client=client)).status == 200
    assert (await server.send("/healthz", method="GET")).status == 200
    return answer


def event(field: str, text: str) -> bytes:
    """:return: a valid track event, but for one field given as JSON text."""
    fields = {"userId": '"u"', "event": '"E"', "messageId": '"m"'} | {field: text}
    return ("{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in fields.items()) + "}").encode()


LONE = r'"\ud800"'
HUGE = "9" * 400

NOT_JSON: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \r\n\t",
    "only a byte order mark": b"\xef\xbb\xbf",
    "words": b"not json",
    "cut off": b'{"userId":"u","event":"E"',
    "two texts": b'{"userId":"u","event":"E"}{"userId":"u","event":"E"}',
    "something after it": b'{"userId":"u","event":"E"} x',
    "two byte order marks": b'\xef\xbb\xbf\xef\xbb\xbf{"userId":"u","event":"E"}',
    "a comment": b'{"userId":"u",/**/"event":"E"}',
    "a trailing comma": b'{"userId":"u","event":"E",}',
    "single quotes": b"{'userId':'u'}",
    "a raw control character": b'{"userId":"u","event":"a\nb"}',
    "NaN": event("properties", '{"x":NaN}'),
    "Infinity": event("properties", '{"x":Infinity}'),
    "-Infinity": event("properties", '{"x":-Infinity}'),
    "1e999": event("properties", '{"x":1e999}'),
    "-1e999": event("properties", '{"x":-1e999}'),
    "2**63": event("properties", f'{{"x":{2**63}}}'),
    "-2**63-1": event("properties", f'{{"x":{-(2**63) - 1}}}'),
    "2**64-1": event("properties", f'{{"x":{2**64 - 1}}}'),
    "2**64": event("properties", f'{{"x":{2**64}}}'),
    "400 digits": event("properties", f'{{"x":{HUGE}}}'),
    "400 digits as an id": event("userId", HUGE),
    "2**63 as an id": event("userId", str(2**63)),
    "100 000 digits": event("properties", f'{{"x":{"9" * 100_000}}}'),
    "a lone surrogate as a value": event("properties", f'{{"x":{LONE}}}'),
    "a lone surrogate as a key": event("properties", f"{{{LONE}:1}}"),
    "a lone surrogate as an id": event("userId", LONE),
    "a lone low surrogate": event("userId", r'"\udc00"'),
    "surrogates the wrong way round": event("userId", r'"\udc00\ud800"'),
    "a surrogate in UTF-8": event("userId", '"?"').replace(b"?", b"\xed\xa0\x80"),
    "not UTF-8": event("userId", '"?"').replace(b"?", b"\xff"),
    "overlong UTF-8": event("userId", '"?"').replace(b"?", b"\xc0\xaf"),
    "UTF-8 cut off": event("userId", '"?"').replace(b"?", b"\xe2\x82"),
    "Latin-1": event("userId", '"?"').replace(b"?", b"\xe9"),
    "UTF-16": event("userId", '"u"').decode().encode("utf-16"),
    "UTF-16 without a mark": event("userId", '"u"').decode().encode("utf-16-le"),
    "UTF-32": event("userId", '"u"').decode().encode("utf-32"),
    "65 deep": event("properties", "[" * 64 + "]" * 64),
    "65 deep, objects": event("properties", '{"a":' * 64 + "1" + "}" * 64),
    "100 000 deep": b"[" * 100_000,
    "100 000 deep, closed": b"[" * 100_000 + b"]" * 100_000,
    "100 000 deep, objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}


@pytest.mark.parametrize("name", NOT_JSON)
async def test_not_json(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as server:
        for path in (TRACK, BATCH):
            answer = await refused(server, path, NOT_JSON[name], 400, "invalid_json")
            # What somebody sent is not repeated at length.
            assert "999999999999999999999999999999" not in answer.json["message"]


NOT_AN_EVENT: dict[str, bytes] = {
    "a list": b"[]",
    "a string": b'"x"',
    "a number": b"1",
    "null": b"null",
    "true": b"true",
    "no id at all": b'{"event":"E"}',
    "both ids null": b'{"event":"E","userId":null,"anonymousId":null}',
    "no event": b'{"userId":"u"}',
    "event null": event("event", "null"),
    "event empty": event("event", '""'),
    "event a number": event("event", "5"),
    "event too long": event("event", json.dumps("x" * 1025)),
    "timestamp a number": event("timestamp", "1700000000"),
    "timestamp a list": event("timestamp", "[]"),
    "timestamp a word": event("timestamp", '"yesterday"'),
    "timestamp empty": event("timestamp", '""'),
    "year 0000": event("timestamp", '"0000-01-01T00:00:00Z"'),
    "30 February": event("timestamp", '"2024-02-30T00:00:00Z"'),
    "29 February of a common year": event("timestamp", '"2023-02-29T00:00:00Z"'),
    "month 13": event("timestamp", '"2024-13-01T00:00:00Z"'),
    "25 o'clock": event("timestamp", '"2024-01-01T25:00:00Z"'),
    "24 o'clock": event("timestamp", '"2024-01-01T24:00:00Z"'),
    "60 minutes": event("timestamp", '"2024-01-01T00:60:00Z"'),
    "61 seconds": event("timestamp", '"2024-01-01T00:00:61Z"'),
    "ten digits of a second": event("timestamp", '"2024-01-01T00:00:00.1234567890Z"'),
    "no zone": event("timestamp", '"2024-01-01T00:00:00"'),
    "only a date": event("timestamp", '"2024-01-01"'),
    "a space for T": event("timestamp", '"2024-01-01 00:00:00Z"'),
    "Arabic digits": event("timestamp", '"٢٠٢٤-01-01T00:00:00Z"'),
    "a newline after it": event("timestamp", r'"2024-01-01T00:00:00Z\n"'),
    "beyond the calendar": event("timestamp", '"9999-12-31T23:59:59-14:00"'),
    "sentAt a word": event("sentAt", '"yesterday"'),
    "sentAt a number": event("sentAt", "5"),
    "originalTimestamp a word": event("originalTimestamp", '"yesterday"'),
    "type of another route": event("type", '"identify"'),
    "type in upper case": event("type", '"Track"'),
    "type a number": event("type", "5"),
    "type a list": event("type", '["track"]'),
    "messageId too long": event("messageId", json.dumps("x" * 257)),
    "messageId a number": event("messageId", "1.5"),
    "properties a list": event("properties", "[]"),
    "traits a number": event("traits", "1"),
    "groupId an object": event("groupId", "{}"),
    "previousId blank": event("previousId", '" "'),
    "properties a string": event("properties", '"x"'),
    "context a list": event("context", "[]"),
    "integrations a string": event("integrations", '"x"'),
}


@pytest.mark.parametrize("name", NOT_AN_EVENT)
async def test_not_an_event(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as server:
        answer = await refused(server, TRACK, NOT_AN_EVENT[name], 400, "invalid_payload")
        assert answer.json["errors"]
        # It is kept as a dead letter: an authenticated request.
        assert [letter.reason for letter in await server.dead_letters()] == ["invalid_payload"]


BAD_IDS = {
    "513 characters": json.dumps("x" * 513),
    "empty": '""',
    "blank": '" \\t\\u00a0"',
    "a float": "1.5",
    "a whole float": "1.0",
    "true": "true",
    "a list": '["u"]',
    "an object": '{"id":"u"}',
}


@pytest.mark.parametrize("name", BAD_IDS)
async def test_bad_ids(tmp_path: Path, name: str) -> None:
    """Every field that is an id."""
    bodies = {
        "userId": ("track", {"userId": "?", "event": "E"}),
        "anonymousId": ("track", {"anonymousId": "?", "userId": "u", "event": "E"}),
        "groupId": ("group", {"groupId": "?", "userId": "u"}),
        "previousId": ("alias", {"previousId": "?", "userId": "u"}),
    }
    async with serving(tmp_path) as server:
        for field, (operation, body) in bodies.items():
            if (field, name) == ("anonymousId", "empty"):
                continue  # as absent, like an empty userId: SDKs send it; the other id is there
            raw = json.dumps(body).replace('"?"', BAD_IDS[name]).encode()
            answer = await refused(server, f"/v1/{operation}", raw, 400, "invalid_payload")
            # An empty id may as well be said to be none at all.
            assert answer.json["errors"][0]["pointer"] in (f"/{field}", "")


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("group", {"userId": "u"}),
        ("group", {"groupId": "g"}),
        ("alias", {"userId": "u"}),
        ("alias", {"previousId": "p"}),
        ("alias", {"previousId": "p", "anonymousId": "a"}),
        ("identify", {"traits": {}}),
        ("identify", {"userId": "u", "traits": 1}),
        ("group", {"userId": "u", "groupId": "g", "traits": []}),
        ("page", {"userId": "u", "name": 5}),
        ("screen", {"userId": "u", "category": []}),
    ],
)
async def test_what_an_operation_needs(tmp_path: Path, operation: str, body: Any) -> None:
    async with serving(tmp_path) as server:
        await refused(server, f"/v1/{operation}", body, 400, "invalid_payload")


NOT_A_BATCH: dict[str, Any] = {
    "missing": {},
    "null": {"batch": None},
    "an object": {"batch": {}},
    "a string": {"batch": "x"},
    "a list": [],
    "context a string": {"batch": [], "context": "x"},
    "integrations a list": {"batch": [], "integrations": []},
}


@pytest.mark.parametrize("name", NOT_A_BATCH)
async def test_not_a_batch(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as server:
        await refused(server, BATCH, NOT_A_BATCH[name], 400, "invalid_payload")


@pytest.mark.parametrize("item", [5, None, "x", [], {}, {"type": 5}, {"type": "Track"}])
async def test_a_bad_item(tmp_path: Path, item: Any) -> None:
    """It costs only itself; alone, it is the whole batch."""
    good = {"type": "track", "userId": "u", "event": "E", "messageId": "m"}
    async with serving(tmp_path) as server:
        answer = await refused(server, BATCH, {"batch": [item]}, 400, "invalid_payload")
        assert answer.json["errors"][0]["pointer"].startswith("/batch/0")
        answer = await server.send(BATCH, {"batch": [item, good]})
        assert (answer.status, answer.json["accepted"]) == (200, 1)
        rejected = answer.json["rejected"][0]
        assert (rejected["index"], rejected["code"]) == (0, "invalid_payload")
        assert rejected["message"]


async def test_many_bad_items(tmp_path: Path) -> None:
    """At most 20 errors in an answer; the rest have code and message only."""
    items = [{"type": "track", "userId": "u", "messageId": f"m{i}"} for i in range(50)]
    good = {"type": "track", "userId": "u", "event": "E", "messageId": "m"}
    async with serving(tmp_path) as server:
        answer = await server.send(BATCH, {"batch": [*items, good]})
        rejected = answer.json["rejected"]
        assert (answer.status, len(rejected)) == (200, 50)
        assert sum("errors" in item for item in rejected) <= 20
        assert all(item["code"] and item["message"] for item in rejected)
        answer = await server.send(BATCH, {"batch": items})
        check_error(answer, 400, "invalid_payload")
        assert len(answer.json["errors"]) == 20


async def test_too_many_items(tmp_path: Path) -> None:
    item = {"type": "track", "userId": "u", "event": "E"}
    async with serving(tmp_path) as server:
        answer = await refused(server, BATCH, {"batch": [item] * 2501}, 413, "batch_too_large")
        assert "limits.batch_events" in answer.json["message"]


async def test_too_many_values(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        body = event("properties", "[" + ",".join(["1"] * 250_001) + "]")
        answer = await refused(server, TRACK, body, 413, "body_too_large")
        assert "limits.json_values" in answer.json["message"]


async def test_events_too_large(tmp_path: Path) -> None:
    """By itself, and only through the envelope's context."""
    large = {"type": "track", "userId": "u", "event": "E", "properties": {"x": "y" * 65_536}}
    async with serving(tmp_path) as server:
        await refused(server, TRACK, large, 413, "event_too_large")
        answer = await refused(server, BATCH, {"batch": [large]}, 400, "invalid_payload")
        item = {**large, "properties": {"x": "y" * 50_000}}
        context = {"x": "y" * 20_000}
        answer = await refused(
            server, BATCH, {"batch": [item], "context": context}, 400, "invalid_payload"
        )
        assert "limits.event_bytes" in answer.json["message"]
        answer = await refused(
            server, BATCH, {"batch": [], "context": {"x": "y" * 32_768}}, 413, "batch_too_large"
        )


async def test_a_batch_too_large_as_stored(tmp_path: Path) -> None:
    """Measured with the envelope merged in: a small body must not become a large write."""
    item = {"type": "track", "userId": "u", "event": "E"}
    limits = "[limits]\ndecompressed_bytes = 1000000\n"
    async with serving(tmp_path, config_extra=limits) as server:
        body = {"batch": [item] * 100, "context": {"x": "y" * 30_000}}
        await refused(server, BATCH, body, 413, "batch_too_large")


# --------------------------------------------------------------------------- length and encoding
async def test_a_byte_too_many(tmp_path: Path) -> None:
    """5 MiB are taken, one byte more is not; declared or in chunks."""
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
async def test_bad_compression(tmp_path: Path, encoding: str, body: bytes) -> None:
    async with serving(tmp_path) as server:
        headers = {"Content-Encoding": encoding}
        await refused(server, TRACK, body, 400, "invalid_encoding", headers=headers)


def bomb(size: int) -> bytes:
    """:return: the beginning of a gzip member of so many spaces, made without holding them."""
    compressor = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    mebibyte = 1024 * 1024
    # After a full flush nothing refers to what was before: the same bytes again are the same again.
    block = compressor.compress(b" " * mebibyte) + compressor.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + block * (size // mebibyte)


async def test_a_bomb(tmp_path: Path) -> None:
    """1 GiB in 1 MiB: refused once 20 MiB of it are there."""
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
async def test_unsupported_encodings(tmp_path: Path, encoding: str) -> None:
    async with serving(tmp_path) as server:
        headers = {"Content-Encoding": encoding}
        await refused(server, TRACK, BODY, 415, "unsupported_encoding", headers=headers)


async def test_no_length(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for path, method in ((TRACK, "POST"), (BATCH, "POST")):
            await refused(server, path, None, 411, "length_required", method=method)


# ------------------------------------------------------------------------------------------ keys
def basic(text: str) -> str:
    """:return: the header for these credentials."""
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
async def test_bad_keys(tmp_path: Path, key: str | None, code: str) -> None:
    async with serving(tmp_path) as server:
        answer = await refused(server, TRACK, BODY, 401, code, key=key)
        assert answer.headers["www-authenticate"].startswith("Basic ")
        # Nobody's request: nothing is kept of it.
        assert await server.dead_letters() == []
        for header in ("Origin", "Sec-Fetch-Mode"):
            answer = await refused(
                server, TRACK, BODY, 401, code, key=key, headers={header: "https://example.com"}
            )
            assert "www-authenticate" not in answer.headers


async def test_two_authorization_headers(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        headers = {"Authorization": BASIC, "authorization": BASIC}
        await refused(server, TRACK, BODY, 401, "invalid_write_key", key=None, headers=headers)


@pytest.mark.parametrize("place", ["header", "query", "body"])
async def test_a_disabled_key(tmp_path: Path, place: str) -> None:
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
async def test_bad_keys_in_a_body(tmp_path: Path, value: Any) -> None:
    code = "missing_write_key" if value in (None, "") else "invalid_write_key"
    async with serving(tmp_path) as server:
        body = {**json.loads(BODY), "writeKey": value}
        await refused(server, TRACK, body, 401, code, key=None)
        batch = {"batch": [json.loads(BODY)], "writeKey": value}
        await refused(server, BATCH, batch, 401, code, key=None)


async def test_a_key_of_another_workspace(tmp_path: Path) -> None:
    """It writes to its own, whatever the body says; neither sees the other's."""
    other = '[[workspaces]]\nid = "other"\nname = "Other"\n'
    other += '[[workspaces.write_keys]]\nid = "website"\nkey = "other-key"\n'
    async with serving(tmp_path, config_extra=other) as server:
        body = {**json.loads(BODY), "workspaceId": "acme"}
        assert (await server.send(TRACK, body, key=basic("other-key:"))).status == 200
        assert (await server.stored("m", workspace="other"))["workspaceId"] == "other"
        assert await server.app.store.find("acme", "api", "m") is None
        assert (await server.send(TRACK, BODY)).status == 200
        assert len(await server.events()) == 2


async def test_two_keys_in_the_query(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        path = f"{TRACK}?writeKey={KEY}&writeKey=other"
        await refused(server, path, BODY, 401, "invalid_write_key", key=None)


async def test_a_keyless_body_is_smaller(tmp_path: Path) -> None:
    """1 MiB, whether it is declared, comes in chunks, or is compressed."""
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
        # With a key it is just a body.
        assert (await server.send(TRACK, large)).status == 200


# ------------------------------------------------------------------------------------ precedence
async def test_precedence(tmp_path: Path) -> None:
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
        # Without a key: the body has to be read first.
        assert await status(TRACK, b"not gzip", key=None, headers=GZIP) == (400, "invalid_encoding")
        assert await status(TRACK, b"not json", key=None) == (400, "invalid_json")
        assert await status(TRACK, b"[]", key=None) == (401, "missing_write_key")
        assert await status(TRACK, b"[]") == (400, "invalid_payload")


async def test_a_refusal_does_not_wait_for_the_body(tmp_path: Path) -> None:
    """The key is wrong: the answer is there before the body is."""
    async with serving(tmp_path) as server, await server.connect() as client:
        head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: Basic x\r\n"
        await client.send(head.encode() + b"Content-Length: 100\r\n\r\n")
        check_error(await client.answer(), 401, "invalid_write_key")
        await client.send(b"x" * 100)
        assert (await server.track(client)).status == 200


# ---------------------------------------------------------------------------------- slow and cut
async def test_a_body_shorter_than_its_length(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        async with await server.connect() as client:
            head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n"
            await client.send(head.encode() + b"Content-Length: 1000\r\n\r\n" + BODY)
            client.half_close()
            check_error(await client.answer(), 400, "invalid_request")
            assert await client.closed()
        assert await server.events() == []


async def test_a_sender_of_one_byte_at_a_time(tmp_path: Path) -> None:
    """408, in the head and in the body; with CORS where the route is known."""
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


@pytest.mark.parametrize(
    "head",
    [
        f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nX: " + "x" * 100 * 1024 + "\r\n\r\n",
        f"POST {TRACK}?" + "x" * 100 * 1024 + " HTTP/1.1\r\nHost: a\r\n\r\n",
        f"POST {TRACK} HTTP/1.1\r\nHost: a\r\n" + "X: y\r\n" * 20_000 + "\r\n",
    ],
)
async def test_heads_of_100_kib(tmp_path: Path, head: str) -> None:
    async with serving(tmp_path) as server, await server.connect() as client:
        await client.send(head.encode())
        check_error(await client.answer(), 431, "headers_too_large")
        assert await client.closed()
        assert (await server.track()).status == 200


HEAD = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n".encode()
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
        HEAD + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY,
        HEAD + LENGTH + CHUNKED + b"\r\n0\r\n\r\n",
        HEAD + CHUNKED + LENGTH + b"\r\n0\r\n\r\n",
        HEAD + CHUNKED + b"\r\nzz\r\n" + BODY + b"\r\n0\r\n\r\n",
        HEAD + CHUNKED + b"\r\n%x\r\n" % len(BODY) + BODY + b"XX0\r\n\r\n",
        HEAD + LENGTH.replace(b":", b" :") + b"\r\n" + BODY,
        HEAD + b"X: y\n" + LENGTH + b"\r\n" + BODY,
        (HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
        HEAD + b"X: y\r\n folded\r\n" + LENGTH + b"\r\n" + BODY,
    ],
)
async def test_what_could_be_read_in_two_ways(tmp_path: Path, data: bytes) -> None:
    """400 and close; what follows on the connection is not read."""
    async with serving(tmp_path) as server, await server.connect() as client:
        await client.send(data + HEAD + LENGTH + b"\r\n" + BODY)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await client.closed()
        assert await server.events() == []
        assert (await server.track()).status == 200
