# SPDX-License-Identifier: Apache-2.0
"""Events that are accepted, and what is stored of them; over HTTP on a running server."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server_inprocess import BASIC, serving
from support.server_process import KEY, start_server

TRACK = "/api/public/apps/track"
BATCH = "/api/public/apps/batch"


def nested(depth: int) -> Any:
    """Return objects and lists nested ``depth`` deep."""
    value: Any = {}
    for level in range(depth - 1):
        value = [value] if level % 2 else {"deeper": value}
    return value


#: Values of one property: the JSON that is sent, and the value that must be stored.
VALUES: dict[str, tuple[str, Any]] = {
    "nul": (r'"a\u0000b"', "a\0b"),
    "only-nul": (r'"\u0000"', "\0"),
    "key-with-nul": (r'{"a\u0000b": 1}', {"a\0b": 1}),
    "duplicate-keys": ('{"a": 1, "b": 2, "a": 3}', {"a": 3, "b": 2}),
    "proto": ('{"__proto__": {"polluted": true}}', {"__proto__": {"polluted": True}}),
    "dollar": ('{"$set": {"$where": 1}}', {"$set": {"$where": 1}}),
    "dotted": ('{"a.b": 1, "a": {"b": 2}}', {"a.b": 1, "a": {"b": 2}}),
    "empty-key": ('{"": {"": ""}}', {"": {"": ""}}),
    "constructor": ('{"constructor": {"prototype": 1}}', {"constructor": {"prototype": 1}}),
    "greatest-integer": ("9223372036854775807", 2**63 - 1),
    "least-integer": ("-9223372036854775808", -(2**63)),
    "greatest-double": ("1.7976931348623157e308", 1.7976931348623157e308),
    "least-double": ("5e-324", 5e-324),
    "tenth": ("0.1", 0.1),
    "null": ("null", None),
    "astral": ('"\\ud83d\\ude00 \U0001f600"', "\U0001f600 \U0001f600"),
    "unusual-characters": ('"\u2028\u202e\ufeff\uffff"', "\u2028\u202e\ufeff\uffff"),
    "digits-in-a-string": ('"99999999999999999999999999"', "9" * 26),
    "nested-58": (json.dumps(nested(58)), nested(58)),
}


@pytest.mark.parametrize("name", VALUES)
async def test_a_value_is_stored_exactly(tmp_path: Path, name: str) -> None:
    text, value = VALUES[name]
    body = f'{{"userId":"u","event":"E","messageId":"m","properties":{{"x":{text}}}}}'
    async with serving(tmp_path) as server:
        answer = await server.send(TRACK, body.encode())
        assert (answer.status, answer.json) == (200, {"success": True, "messageId": "m"})
        assert (await server.stored("m"))["properties"] == {"x": value}


async def test_negative_zero_is_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        body = b'{"userId":"u","event":"E","messageId":"m","properties":{"x":-0.0}}'
        assert (await server.send(TRACK, body)).status == 200
        value = (await server.stored("m"))["properties"]["x"]
        assert (value, math.copysign(1, value)) == (0.0, -1.0)


@pytest.mark.parametrize("depth", [63, 64])
async def test_the_deepest_nesting_is_stored(tmp_path: Path, depth: int) -> None:
    """The body is level 1, its ``properties`` level 2."""
    properties = {"deeper": nested(depth - 2)}
    async with serving(tmp_path) as server:
        answer = await server.track(messageId="m", properties=properties)
        assert answer.status == 200
        assert (await server.stored("m"))["properties"] == properties


async def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        body = b'\xef\xbb\xbf{"userId":"u","event":"E","messageId":"m"}'
        assert (await server.send(TRACK, body)).status == 200
        assert (await server.stored("m"))["userId"] == "u"


@pytest.mark.parametrize("field", ["userId", "anonymousId", "messageId"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a\0b", "a\0b"),
        ("\0", "\0"),
        ("i", "i"),
        (" padded ", " padded "),
        ("a:b", "a:b"),
        ("\U0001f600", "\U0001f600"),
    ],
)
async def test_an_id_is_stored_exactly(tmp_path: Path, field: str, given: str, kept: str) -> None:
    async with serving(tmp_path) as server:
        fields: dict[str, Any] = {"userId": "u", "messageId": "m", field: given}
        answer = await server.track(**fields)
        assert answer.status == 200
        stored = await server.stored(answer.json["messageId"])
        assert stored[field] == kept


@pytest.mark.parametrize("length", [1, 512])
@pytest.mark.parametrize("character", ["x", "\U0001f600"])
async def test_ids_of_the_greatest_length_are_stored(
    tmp_path: Path, length: int, character: str
) -> None:
    """The limit counts characters, not bytes."""
    async with serving(tmp_path) as server:
        for field in ("userId", "anonymousId"):
            body = {field: character * length, "event": "E", "messageId": field}
            assert (await server.send(TRACK, body)).status == 200
            assert (await server.stored(field))[field] == character * length


@pytest.mark.parametrize("number", [0, 7, -1, 2**63 - 1, -(2**63)])
async def test_integer_ids_become_strings(tmp_path: Path, number: int) -> None:
    async with serving(tmp_path) as server:
        group = {"userId": number, "groupId": number, "messageId": "g"}
        alias = {"userId": number, "previousId": number, "messageId": "a"}
        assert (await server.send("/v1/group", group)).status == 200
        assert (await server.send("/v1/alias", alias)).status == 200
        assert (await server.track(anonymousId=number, messageId="t")).status == 200
        stored = await server.stored("g")
        assert (stored["userId"], stored["groupId"]) == (str(number), str(number))
        assert (await server.stored("a"))["previousId"] == str(number)
        assert (await server.stored("t"))["anonymousId"] == str(number)


async def test_null_counts_as_absent(tmp_path: Path) -> None:
    """In every optional field."""
    nothing = {
        "userId": None,
        "messageId": None,
        "timestamp": None,
        "originalTimestamp": None,
        "sentAt": None,
        "traits": None,
        "properties": None,
        "context": None,
        "integrations": None,
        "type": None,
    }
    calls: dict[str, dict[str, Any]] = {
        "identify": {},
        "track": {"event": "E"},
        "page": {"name": None, "category": None},
        "screen": {"name": None, "category": None},
        "group": {"groupId": "g"},
    }
    async with serving(tmp_path) as server:
        for operation, fields in calls.items():
            body = {**nothing, "anonymousId": "a", **fields}
            answer = await server.send(f"/v1/{operation}", body)
            assert (operation, answer.status) == (operation, 200)
        assert [event.type for event in await server.events()] == list(calls)


MEMBERS = {
    "one member": lambda data: gzip.compress(data),
    "many members": lambda data: b"".join(
        gzip.compress(data[start : start + 7]) for start in range(0, len(data), 7)
    ),
    "an empty member": lambda data: gzip.compress(b"") + gzip.compress(data) + gzip.compress(b""),
}


@pytest.mark.parametrize("name", MEMBERS)
async def test_a_gzip_body_is_stored(tmp_path: Path, name: str) -> None:
    body = json.dumps({"userId": "u", "event": "E", "messageId": "m"}).encode()
    async with serving(tmp_path) as server:
        for encoding in ("gzip", "GZip"):
            answer = await server.send(
                TRACK, MEMBERS[name](body), headers={"Content-Encoding": encoding}
            )
            assert answer.status == 200
        assert len(await server.events()) == 1


@pytest.mark.parametrize("wbits", [zlib.MAX_WBITS, -zlib.MAX_WBITS])
async def test_a_deflate_body_is_stored(tmp_path: Path, wbits: int) -> None:
    """With the frame of zlib, and raw."""
    compressor = zlib.compressobj(wbits=wbits)
    body = json.dumps({"userId": "u", "event": "E", "messageId": "m"}).encode()
    compressed = compressor.compress(body) + compressor.flush()
    async with serving(tmp_path) as server:
        headers = {"Content-Encoding": "deflate"}
        assert (await server.send(TRACK, compressed, headers=headers)).status == 200
        assert (await server.stored("m"))["userId"] == "u"


async def test_json_under_another_content_type_is_stored(tmp_path: Path) -> None:
    """One SDK sends gzipped JSON with the content type of a form; beacons send text."""
    async with serving(tmp_path) as server:
        for number, content_type in enumerate(
            [
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
                "multipart/form-data",
                "text/plain;charset=UTF-8",
                "nonsense",
            ]
        ):
            body = json.dumps({"userId": "u=1&x=%", "event": "E", "messageId": f"m{number}"})
            headers = {"Content-Type": content_type, "Content-Encoding": "gzip"}
            answer = await server.send(TRACK, gzip.compress(body.encode()), headers=headers)
            assert (content_type, answer.status) == (content_type, 200)
            assert (await server.stored(f"m{number}"))["userId"] == "u=1&x=%"


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2024-02-29T12:00:00Z", "2024-02-29T12:00:00.000Z"),
        ("2024-02-29t12:00:00z", "2024-02-29T12:00:00.000Z"),
        ("2024-02-29T12:00:00.1Z", "2024-02-29T12:00:00.100Z"),
        ("2024-02-29T12:00:00.123Z", "2024-02-29T12:00:00.123Z"),
        ("2024-02-29T12:00:00.123456Z", "2024-02-29T12:00:00.123Z"),
        ("2024-02-29T12:00:00.123456789Z", "2024-02-29T12:00:00.123Z"),
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59.999Z"),
        ("2024-02-29T12:00:00+14:00", "2024-02-28T22:00:00.000Z"),
        ("2024-02-29T12:00:00-05:30", "2024-02-29T17:30:00.000Z"),
        ("2024-02-29T12:00:00+00:00", "2024-02-29T12:00:00.000Z"),
        ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00.000Z"),
    ],
)
async def test_a_time_is_stored_in_utc(tmp_path: Path, text: str, time: str) -> None:
    """``originalTimestamp`` is stored as it was sent."""
    async with serving(tmp_path) as server:
        assert (await server.track(messageId="m", timestamp=text)).status == 200
        stored = await server.stored("m")
        assert (stored["timestamp"], stored["originalTimestamp"]) == (time, text)


async def test_an_event_sent_before_it_happened_is_not_in_the_future(tmp_path: Path) -> None:
    """``sentAt`` is before ``originalTimestamp``: the corrected time would be later than now."""
    async with serving(tmp_path) as server:
        answer = await server.track(
            messageId="m",
            originalTimestamp="2024-01-01T00:00:10.000Z",
            sentAt="2024-01-01T00:00:00.000Z",
        )
        assert answer.status == 200
        stored = await server.stored("m")
        assert stored["timestamp"] == stored["receivedAt"]


async def test_an_empty_batch_is_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        answer = await server.send(BATCH, {"batch": []})
        assert answer.status == 200
        assert answer.json == {"success": True, "accepted": 0, "duplicates": 0, "rejected": []}


async def test_a_full_batch_is_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        items = [
            {"type": "track", "event": "E", "userId": "u", "messageId": f"m{index}"}
            for index in range(2500)
        ]
        answer = await server.send(BATCH, {"batch": items})
        assert (answer.status, answer.json["accepted"]) == (200, 2500)
        assert [e.message_id for e in await server.events()] == [f"m{i}" for i in range(2500)]


async def test_the_largest_event_is_stored(tmp_path: Path) -> None:
    """64 KiB when stored, and one byte less; one byte more is refused."""
    async with serving(tmp_path) as server:

        async def send(message_id: str, filler: int) -> Any:
            return await server.track(messageId=message_id, properties={"x": "y" * filler})

        await send("measure", 0)
        overhead = len((await server.events())[0].body) - len("measure") + 1
        room = 64 * 1024 - overhead
        assert (await send("a", room - 1)).status == 200
        assert (await send("b", room)).status == 200
        refused = await send("c", room + 1)
        assert (refused.status, refused.json["code"]) == (413, "event_too_large")
        assert "limits.event_bytes" in refused.json["message"]
        sizes = [len(event.body) for event in await server.events()]
        assert sizes[1:] == [64 * 1024 - 1, 64 * 1024]


async def test_of_two_items_with_one_id_the_earlier_is_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        items = [
            {"type": "track", "event": event, "userId": "u", "messageId": "m"}
            for event in ("first", "second")
        ]
        answer = await server.send(BATCH, {"batch": items})
        assert (answer.json["accepted"], answer.json["duplicates"]) == (1, 1)
        assert (await server.stored("m"))["event"] == "first"
        # It differs under the same id: it is kept, so that one client cannot silence another.
        assert [letter.reason for letter in await server.dead_letters()] == ["message_id_conflict"]


async def test_one_id_in_parallel_requests_is_stored_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        answers = await asyncio.gather(*(server.track(messageId="m") for _ in range(40)))
        assert {answer.status for answer in answers} == {200}
        assert len(await server.events()) == 1
        assert await server.dead_letters() == []


async def test_one_id_on_two_servers_is_stored_once(tmp_path: Path) -> None:
    """Two servers use one file and get requests at the same time."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    storage = f'[storage]\nbackend = "sqlite"\n[storage.sqlite]\npath = "{tmp_path}/engage.db"\n'
    loop = asyncio.get_running_loop()
    first = await loop.run_in_executor(None, lambda: start_server(one, storage=storage))
    with first:
        second = await loop.run_in_executor(None, lambda: start_server(other, storage=storage))
        with second:
            async with httpx.AsyncClient(auth=(KEY, ""), timeout=60) as client:
                answers = await asyncio.gather(
                    *(
                        client.post(
                            f"{server.url}{TRACK}",
                            json={"userId": "u", "event": "E", "messageId": f"m{number}"},
                        )
                        for number in range(20)
                        for server in (first, second)
                    )
                )
            assert {answer.status_code for answer in answers} == {200}
            stored = await loop.run_in_executor(None, first.export)
            assert sorted(event["messageId"] for event in stored) == sorted(
                f"m{number}" for number in range(20)
            )


#: A key whose base64 needs padding and has both characters that the URL-safe alphabet changes.
ODD = "k~~?>?key>>>?"


@pytest.mark.parametrize(
    "credential",
    [
        base64.b64encode(f"{ODD}:".encode()).decode(),
        base64.b64encode(f"{ODD}:password".encode()).decode(),
        base64.b64encode(f"{ODD}".encode()).decode(),
        base64.b64encode(f"{ODD}:".encode()).decode().rstrip("="),
        base64.urlsafe_b64encode(f"{ODD}:".encode()).decode(),
        base64.urlsafe_b64encode(f"{ODD}".encode()).decode().rstrip("="),
        ODD,
    ],
)
async def test_the_key_may_be_written_in_several_ways(tmp_path: Path, credential: str) -> None:
    """Unpadded, URL-safe, without a colon, verbatim; the scheme in upper or lower case."""
    keys = f'[[workspaces.write_keys]]\nid = "odd"\nkey = "{ODD}"\n'
    assert "-" in base64.urlsafe_b64encode(f"{ODD}:".encode()).decode()
    async with serving(tmp_path, config_extra=keys) as server:
        for number, scheme in enumerate(("Basic", "basic", "BASIC")):
            answer = await server.send(
                TRACK,
                {"userId": "u", "event": "E", "messageId": f"m{number}"},
                key=f"{scheme} {credential}",
            )
            assert answer.status == 200
            assert (await server.stored(f"m{number}"))["writeKeyId"] == "odd"


@pytest.mark.parametrize("place", ["query", "body", "item body"])
async def test_the_key_may_be_in_the_query_or_in_the_body(tmp_path: Path, place: str) -> None:
    """Beacons have it in the query. It is never stored."""
    event = {"type": "track", "userId": "u", "event": "E", "messageId": "m"}
    async with serving(tmp_path) as server:
        if place == "query":
            answer = await server.send(
                f"/beacon/v1/batch?writeKey={KEY}", {"batch": [event]}, key=None
            )
        elif place == "body":
            answer = await server.send("/v1/b", {"batch": [event], "writeKey": KEY}, key=None)
        else:
            answer = await server.send("/v1/t", {**event, "writeKey": KEY}, key=None)
        assert answer.status == 200
        assert KEY not in json.dumps(await server.stored("m"))


async def test_the_first_key_that_is_found_counts(tmp_path: Path) -> None:
    """The order is header, query, body."""
    keys = '[[workspaces.write_keys]]\nid = "second"\nkey = "second-key"\n'
    body = {"userId": "u", "event": "E", "writeKey": "unknown"}
    async with serving(tmp_path, config_extra=keys) as server:
        path = f"{TRACK}?writeKey=second-key"
        assert (await server.send(path, {**body, "messageId": "1"})).status == 200
        assert (await server.send(path, {**body, "messageId": "2"}, key=None)).status == 200
        assert (await server.send(TRACK, {**body, "messageId": "3"}, key=None)).status == 401
        assert (await server.stored("1"))["writeKeyId"] == "website"
        assert (await server.stored("2"))["writeKeyId"] == "second"


OPERATIONS: dict[str, dict[str, Any]] = {
    "identify": {"traits": {"a": 1}},
    "track": {"event": "E"},
    "page": {"name": "N"},
    "screen": {"name": "N"},
    "group": {"groupId": "g"},
    "alias": {"previousId": "p"},
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_every_path_of_an_event_is_accepted(tmp_path: Path, operation: str) -> None:
    """The main path, and the aliases that unmodified SDKs use."""
    async with serving(tmp_path) as server:
        paths = [f"/api/public/apps/{operation}", f"/v1/{operation}", f"/v1/{operation[0]}"]
        for number, path in enumerate(paths):
            body = {"userId": "u", "messageId": f"m{number}", **OPERATIONS[operation]}
            answer = await server.send(path, body)
            assert (answer.status, answer.json["messageId"]) == (200, f"m{number}")
            assert (await server.stored(f"m{number}"))["type"] == operation


async def test_every_path_of_batches_accepts_every_type(tmp_path: Path) -> None:
    items = [
        {"type": operation, "userId": "u", "messageId": operation, **fields}
        for operation, fields in OPERATIONS.items()
    ]
    async with serving(tmp_path) as server:
        for path in (
            *("/api/public/apps/batch", "/v1/batch", "/v1/b", "/beacon/v1/batch"),
            *("/v1/import", "/v1/import/"),
        ):
            assert (await server.send(path, {"batch": items})).status == 200
        assert [event.type for event in await server.events()] == list(OPERATIONS)


@pytest.mark.parametrize("path", ["//api/public/apps/track", "///v1/track?writeKey=x"])
async def test_a_path_that_begins_with_two_slashes_is_accepted(tmp_path: Path, path: str) -> None:
    """Some SDKs append their path to a host setting that ends with a slash."""
    async with serving(tmp_path) as server:
        assert (await server.send(path, {"userId": "u", "event": "E"})).status == 200
        assert (await server.send("//v1//track", {"userId": "u", "event": "E"})).status == 404


async def test_the_server_sets_a_missing_message_id(tmp_path: Path) -> None:
    """A new one, or one made of ``Idempotency-Key``: the same for the same key."""
    async with serving(tmp_path) as server:
        body = {"userId": "u", "event": "E"}
        first = (await server.send(TRACK, {**body, "messageId": ""})).json["messageId"]
        second = (await server.send(TRACK, body)).json["messageId"]
        assert first != second
        headers = {"Idempotency-Key": "order-1"}
        batch = {"batch": [{"type": "track", **body}, {"type": "track", **body}]}
        for expected in (2, 0):
            answer = await server.send(BATCH, batch, headers=headers)
            assert answer.json["accepted"] == expected
        assert len(await server.events()) == 4


async def test_strict_mode_stores_all_or_nothing(tmp_path: Path) -> None:
    """With one invalid item nothing is stored, not even a dead letter."""
    good = {"type": "track", "userId": "u", "event": "E", "messageId": "m"}
    bad = {**good, "event": 5, "messageId": "n"}
    async with serving(tmp_path) as server:
        answer = await server.send(BATCH, {"batch": [good, bad]}, headers={"X-Strict-Mode": "1"})
        assert (answer.status, answer.json["code"]) == (400, "invalid_payload")
        assert answer.json["errors"][0]["pointer"] == "/batch/1/event"
        assert await server.events() == []
        assert await server.dead_letters() == []
        answer = await server.send(BATCH, {"batch": [good, bad]})
        assert answer.status == 200
        assert [item["index"] for item in answer.json["rejected"]] == [1]
        assert [letter.message_id for letter in await server.dead_letters()] == ["n"]


async def test_the_envelope_applies_to_each_item(tmp_path: Path) -> None:
    """Its context and integrations are defaults for each item; a bad ``sentAt`` is ignored."""
    item = {"type": "track", "userId": "u", "event": "E", "messageId": "m", "context": {"b": 2}}
    async with serving(tmp_path) as server:
        answer = await server.send(
            BATCH,
            {
                "batch": [item],
                "context": {"a": 1, "b": 1},
                "integrations": {"All": False},
                "sentAt": "yesterday",
            },
        )
        assert answer.status == 200
        stored = await server.stored("m")
        assert stored["context"] == {"a": 1, "b": 2}
        assert stored["integrations"] == {"All": False}


async def test_a_client_cannot_set_fields_of_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        forged: dict[str, Any] = {
            "workspaceId": "other",
            "writeKeyId": "other",
            "source": "webhook:stripe",
            "receivedAt": "2000-01-01T00:00:00Z",
        }
        assert (await server.track(messageId="m", **forged)).status == 200
        stored = await server.stored("m")
        assert (stored["workspaceId"], stored["writeKeyId"]) == ("acme", "website")
        assert stored["source"] == "api"
        assert stored["receivedAt"] > "2020"


async def test_requests_of_several_kinds_share_a_connection(tmp_path: Path) -> None:
    """Chunked, with ``Expect: 100-continue``, and pipelined."""
    event = json.dumps({"userId": "u", "event": "E", "messageId": "m"}).encode()
    head = f"POST {TRACK} HTTP/1.1\r\nHost: a\r\nAuthorization: {BASIC}\r\n".encode()
    async with serving(tmp_path) as server, await server.connect() as client:
        await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for byte in event:
            await client.send(b"1;x=y\r\n%c\r\n" % byte)
        await client.send(b"0\r\nX-Trailer: x\r\n\r\n")
        assert (await client.answer()).json == {"success": True, "messageId": "m"}
        await client.send(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(event))
        assert (await client.answer()).status == 100
        await client.send(event)
        assert (await client.answer()).status == 200
        one = head + b"Content-Length: %d\r\n\r\n" % len(event) + event
        await client.send(one * 50 + b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        for _ in range(50):
            assert (await client.answer()).json["messageId"] == "m"
        assert (await client.answer()).json == {"success": True}
        assert len(await server.events()) == 1


async def test_a_repeat_is_a_success(tmp_path: Path) -> None:
    """The answer is the same as the first time."""
    async with serving(tmp_path) as server:
        answers = [await server.track(messageId="m") for _ in range(3)]
        assert {answer.status for answer in answers} == {200}
        assert {answer.body for answer in answers} == {b'{"success":true,"messageId":"m"}'}
