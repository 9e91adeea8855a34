# SPDX-License-Identifier: Apache-2.0
"""Events that are accepted, and what is stored of them; over HTTP on a running server."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server_inprocess import serving
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
    # The body is level 1, its properties level 2.
    "deepest": (json.dumps(nested(62)), nested(62)),
    "negative-zero": ("-0.0", -0.0),
}


async def test_values_are_stored_exactly(tmp_path: Path) -> None:
    texts = ",".join(f"{json.dumps(name)}:{text}" for name, (text, _) in VALUES.items())
    body = f'\ufeff{{"userId":"u","event":"E","messageId":"m","properties":{{{texts}}}}}'
    async with serving(tmp_path) as server:
        answer = await server.send(TRACK, body.encode())
        assert (answer.status, answer.json) == (200, {"success": True, "messageId": "m"})
        stored = (await server.stored("m"))["properties"]
        assert stored == {name: value for name, (_, value) in VALUES.items()}
        assert math.copysign(1, stored["negative-zero"]) == -1


@pytest.mark.parametrize("field", ["userId", "anonymousId", "messageId"])
async def test_an_id_is_stored_exactly(tmp_path: Path, field: str) -> None:
    """Its limit counts characters, not bytes."""
    longest = 256 if field == "messageId" else 512
    async with serving(tmp_path) as server:
        for number, given in enumerate(
            ["a\0b", "\0", "i", " padded ", "a:b", "\U0001f600" * longest, "x" * longest]
        ):
            fields: dict[str, Any] = {"userId": "u", "messageId": f"m{number}", field: given}
            answer = await server.track(**fields)
            assert answer.status == 200
            assert (await server.stored(answer.json["messageId"]))[field] == given


async def test_integer_ids_become_strings(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for number in (0, 7, -1, 2**63 - 1, -(2**63)):
            for operation in ("track", "group", "alias"):
                ids = dict.fromkeys(("userId", "anonymousId", "groupId", "previousId"), number)
                name = f"{operation} {number}"
                body = {**ids, "messageId": name, "event": "E"}
                assert (await server.send(f"/v1/{operation}", body)).status == 200
                stored = await server.stored(name)
                assert {stored[field] for field in ids} == {str(number)}


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
    """64 KiB when stored; one byte more is refused."""
    async with serving(tmp_path) as server:
        await server.track(messageId="m", properties={"x": ""})
        room = 64 * 1024 - len((await server.events())[0].body)
        for message_id, filler, status in (("a", room, 200), ("b", room + 1, 413)):
            answer = await server.track(messageId=message_id, properties={"x": "y" * filler})
            assert answer.status == status
        assert "limits.event_bytes" in answer.json["message"]
        assert len((await server.events())[1].body) == 64 * 1024


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


async def test_every_path_of_an_event_is_accepted(tmp_path: Path) -> None:
    """The main path, and the aliases that unmodified SDKs use."""
    async with serving(tmp_path) as server:
        for operation, fields in OPERATIONS.items():
            for path in (
                f"/api/public/apps/{operation}",
                f"/v1/{operation}",
                f"/v1/{operation[0]}",
            ):
                answer = await server.send(path, {"userId": "u", "messageId": path, **fields})
                assert (answer.status, answer.json["messageId"]) == (200, path)
                assert (await server.stored(path))["type"] == operation


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


@pytest.mark.parametrize("path", [BATCH, "/v1/import"])
async def test_times_of_all_forms_are_stored_as_rfc_3339(tmp_path: Path, path: str) -> None:
    """In one batch with a wrong one, whose dead letter has it as it was sent."""
    times: dict[str, Any] = {
        "2026-01-02T03:04:05Z": "2026-01-02 03:04:05",
        "2026-01-02T00:00:00Z": "2026-01-02",
        "2026-01-02T03:04:05.000Z": 1_767_323_045,
        "2026-01-02T03:04:05.678Z": 1_767_323_045_678,
        "2026-01-02T03:04:05+00:00": "2026-01-02T03:04:05+00:00",
        "": 10**14,
    }
    common = {"type": "track", "event": "E", "userId": "u"}
    items = [{**common, "messageId": f"m{text}", "timestamp": times[text]} for text in times]
    async with serving(tmp_path) as server:
        for accepted, duplicates in ((5, 0), (0, 5)):
            answer = await server.send(path, {"batch": items})
            assert (answer.json["accepted"], answer.json["duplicates"]) == (accepted, duplicates)
            [rejected] = answer.json["rejected"]
            assert "a date, or seconds or milliseconds" in rejected["message"]
        for text in [text for text in times if text]:
            assert (await server.stored(f"m{text}"))["originalTimestamp"] == text
            answer = await server.send(TRACK, items[list(times).index(text)])
            assert answer.status == 200
        [letter] = await server.dead_letters()
        assert json.loads(letter.item)["timestamp"] == 10**14


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
