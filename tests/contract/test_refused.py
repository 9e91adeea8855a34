# SPDX-License-Identifier: Apache-2.0
"""Bodies that are refused: status, code and shape. Nothing is stored, and the server goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.http_errors import BATCH, TRACK, check_error, event, refused
from support.server_inprocess import serving

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
async def test_a_body_that_is_not_json_is_refused(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as server:
        for path in (TRACK, BATCH):
            answer = await refused(server, path, NOT_JSON[name], 400, "invalid_json")
            # The message does not repeat the body.
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
async def test_a_body_that_is_not_an_event_is_refused(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as server:
        answer = await refused(server, TRACK, NOT_AN_EVENT[name], 400, "invalid_payload")
        assert answer.json["errors"]
        # The request was authenticated, so the body is kept as a dead letter.
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
async def test_a_bad_id_is_refused(tmp_path: Path, name: str) -> None:
    """In every field that is an id."""
    bodies = {
        "userId": ("track", {"userId": "?", "event": "E"}),
        "anonymousId": ("track", {"anonymousId": "?", "userId": "u", "event": "E"}),
        "groupId": ("group", {"groupId": "?", "userId": "u"}),
        "previousId": ("alias", {"previousId": "?", "userId": "u"}),
    }
    async with serving(tmp_path) as server:
        for field, (operation, body) in bodies.items():
            if (field, name) == ("anonymousId", "empty"):
                continue  # SDKs send it; it counts as absent
            raw = json.dumps(body).replace('"?"', BAD_IDS[name]).encode()
            answer = await refused(server, f"/v1/{operation}", raw, 400, "invalid_payload")
            # For an empty id, the message may also be that there is none.
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
async def test_a_missing_required_field_is_refused(
    tmp_path: Path, operation: str, body: Any
) -> None:
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
async def test_a_body_that_is_not_a_batch_is_refused(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as server:
        await refused(server, BATCH, NOT_A_BATCH[name], 400, "invalid_payload")


@pytest.mark.parametrize("item", [5, None, "x", [], {}, {"type": 5}, {"type": "Track"}])
async def test_a_bad_item_is_rejected_alone(tmp_path: Path, item: Any) -> None:
    """Its neighbours are stored; without neighbours the whole batch is refused."""
    good = {"type": "track", "userId": "u", "event": "E", "messageId": "m"}
    async with serving(tmp_path) as server:
        answer = await refused(server, BATCH, {"batch": [item]}, 400, "invalid_payload")
        assert answer.json["errors"][0]["pointer"].startswith("/batch/0")
        answer = await server.send(BATCH, {"batch": [item, good]})
        assert (answer.status, answer.json["accepted"]) == (200, 1)
        rejected = answer.json["rejected"][0]
        assert (rejected["index"], rejected["code"]) == (0, "invalid_payload")
        assert rejected["message"]


async def test_an_answer_details_at_most_20_bad_items(tmp_path: Path) -> None:
    """The others have only code and message."""
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


async def test_too_many_items_are_refused(tmp_path: Path) -> None:
    item = {"type": "track", "userId": "u", "event": "E"}
    async with serving(tmp_path) as server:
        answer = await refused(server, BATCH, {"batch": [item] * 2501}, 413, "batch_too_large")
        assert "limits.batch_events" in answer.json["message"]


async def test_too_many_values_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        body = event("properties", "[" + ",".join(["1"] * 250_001) + "]")
        answer = await refused(server, TRACK, body, 413, "body_too_large")
        assert "limits.json_values" in answer.json["message"]


async def test_an_event_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """Alone, and only with the context of the envelope."""
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


async def test_a_batch_that_is_too_large_when_stored_is_refused(tmp_path: Path) -> None:
    """It is measured with the envelope merged in: a small body must not become a large write."""
    item = {"type": "track", "userId": "u", "event": "E"}
    limits = "[limits]\ndecompressed_bytes = 1000000\n"
    async with serving(tmp_path, config_extra=limits) as server:
        body = {"batch": [item] * 100, "context": {"x": "y" * 30_000}}
        await refused(server, BATCH, body, 413, "batch_too_large")
