# SPDX-License-Identifier: Apache-2.0
"""Keys with origins and operations, and server keys, over HTTP."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engage.monitoring.metrics import Metrics
from support.http_client import Answer
from support.http_errors import check_error
from support.memory_log import MemoryBroker
from support.server_inprocess import BASIC, Serving, basic, serving
from support.server_process import KEY, start_server

SHOP = "https://shop.example.com"
SECRET = "5e" * 16
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
KEYS = f"""
[[workspaces.write_keys]]
id = "shop"
key = "key-of-shop"
origins = ["{SHOP}", "https://admin.example.com:8443"]

[[workspaces.write_keys]]
id = "counter"
key = "key-of-counter"
operations = ["track", "page"]

[[workspaces.write_keys]]
id = "backend"
sha256 = "{DIGEST}"
kind = "server"
"""
EVENT = {"userId": "u", "event": "E"}
BATCH = {"batch": [{"type": "track", **EVENT}]}


def places(key: str) -> list[dict[str, Any]]:
    """Return requests with one event that have a key in each of its places."""
    return [
        {"path": "/v1/track", "body": EVENT, "key": basic(f"{key}:")},
        {"path": "/v1/batch", "body": BATCH, "key": f"Bearer {key}"},
        {"path": f"/v1/track?writeKey={key}", "body": EVENT, "key": None},
        {"path": f"/beacon/v1/batch?writeKey={key}", "body": BATCH, "key": None},
        {"path": "/v1/track", "body": {**EVENT, "writeKey": key}, "key": None},
        {"path": "/v1/batch", "body": {**BATCH, "writeKey": key}, "key": None},
    ]


async def all_refused(server: Serving, answers: list[Answer], code: str) -> None:
    for answer in answers:
        check_error(answer, 403, code)
        assert "www-authenticate" not in answer.headers
    assert await server.events() == []
    assert await server.dead_letters() == []


@pytest.mark.parametrize("origin", ["https://other.example.com", "null", None])
async def test_only_pages_of_its_origins_may_use_a_key(tmp_path: Path, origin: str | None) -> None:
    metrics = Metrics()
    headers = {} if origin is None else {"Origin": origin}
    async with serving(tmp_path, config_extra=KEYS, metrics=metrics) as server:
        requests = places("key-of-shop")
        answers = [await server.send(**one, headers=headers) for one in requests]
        await all_refused(server, answers, "origin_not_allowed")
        if origin is not None:
            # A page can read why.
            assert {answer.headers["access-control-allow-origin"] for answer in answers} == {origin}
        # It is known whose key it was, also if the key was in the body.
        for entry in metrics.refusals.entries():
            assert (entry["code"], entry["writeKeyId"]) == ("origin_not_allowed", "shop")
            assert entry["workspace"] == "acme"
        for request in requests:
            assert (await server.send(**request, headers={"Origin": SHOP})).status == 200
        assert len(await server.events()) == len(requests)


async def test_two_origins_in_one_request_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, config_extra=KEYS) as server, await server.connect() as client:
        head = (
            f"POST /v1/track HTTP/1.1\r\nHost: x\r\nOrigin: {SHOP}\r\nOrigin: null\r\n"
            f"Authorization: {basic('key-of-shop:')}\r\nContent-Length: 2\r\n\r\n"
        )
        await client.send(f"{head}{{}}".encode())
        await all_refused(server, [await client.answer()], "origin_not_allowed")


async def test_a_preflight_and_settings_need_no_origin_of_the_key(tmp_path: Path) -> None:
    """A preflight has no key, and a page of the server's own origin sends no ``Origin``."""
    async with serving(tmp_path, config_extra=KEYS) as server:
        asked = {
            "Origin": "https://other.example.com",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        for path in ("/v1/track", "/beacon/v1/batch?writeKey=key-of-shop"):
            answer = await server.send(path, method="OPTIONS", key=None, headers=asked)
            assert answer.status == 204
            assert answer.headers["access-control-allow-origin"] == asked["Origin"]
        for path in ("/v1/projects/key-of-shop/settings", "/sourceConfig?writeKey=key-of-shop"):
            assert (await server.send(path, method="GET", key=None)).status == 200


async def test_a_key_may_send_only_its_operations(tmp_path: Path) -> None:
    async with serving(tmp_path, config_extra=KEYS) as server:
        answers = []
        for path in ("/v1/identify", "/api/public/apps/group", "/v1/a"):
            body = {"userId": "u", "groupId": "g", "previousId": "p"}
            header = basic("key-of-counter:")
            answers.append(await server.send(path, body, key=header))
            # The path decides, and not the type that the body names.
            answers.append(await server.send(path, {**body, "type": "track"}, key=header))
            answers.append(await server.send(path, b"{", key=header))
            body["writeKey"] = "key-of-counter"
            answers.append(await server.send(path, body, key=None))
        await all_refused(server, answers, "operation_not_allowed")
        for path, body in (("/v1/track", EVENT), ("/v1/page", {"userId": "u"})):
            assert (await server.send(path, body, key=basic("key-of-counter:"))).status == 200


async def test_in_a_batch_each_event_of_another_operation_is_rejected(tmp_path: Path) -> None:
    metrics = Metrics()
    async with serving(tmp_path, config_extra=KEYS, metrics=metrics) as server:
        sent = places("key-of-counter")[5]  # The key is known only when the body is decoded.
        items = [
            {"type": "identify", "userId": "u", "messageId": "m-0", "traits": {"plan": "pro"}},
            {"type": "track", **EVENT},
            {"type": "alias", "previousId": "p"},
            {"type": "track", "userId": "u"},
        ]
        answer = await server.send(**{**sent, "body": {**sent["body"], "batch": items}})
        assert (answer.status, answer.json["accepted"]) == (200, 1)
        assert [(one["index"], one["code"]) for one in answer.json["rejected"]] == [
            (0, "operation_not_allowed"),
            (2, "operation_not_allowed"),
            (3, "invalid_payload"),
        ]
        assert [event.type for event in await server.events()] == ["track"]
        (letter,) = await server.dead_letters()
        assert letter.reason == "invalid_payload"
        # No letter shows it, so the list of refused requests does.
        (entry,) = metrics.refusals.entries()
        assert (entry["code"], entry["writeKeyId"]) == ("operation_not_allowed", "counter")
        strict = {**sent, "body": {**sent["body"], "batch": items[:2]}}
        check_error(
            await server.send(**strict, headers={"X-Strict-Mode": "1"}), 400, "invalid_payload"
        )


async def test_a_server_key_is_accepted_in_the_header_and_the_body(tmp_path: Path) -> None:
    async with serving(tmp_path, config_extra=KEYS) as server:
        accepted = [await server.send(**places(SECRET)[place]) for place in (0, 1, 4, 5)]
        assert {answer.status for answer in accepted} == {200}
        events = [event.document() for event in await server.events()]
        assert {event["writeKeyId"] for event in events} == {"backend"}
        assert SECRET not in str(events)


async def test_a_server_key_is_refused_in_the_query_and_with_an_origin(tmp_path: Path) -> None:
    metrics = Metrics()
    async with serving(tmp_path, config_extra=KEYS, metrics=metrics) as server:
        requests = places(SECRET)
        answers = [await server.send(**requests[place]) for place in (2, 3)]
        # Also if the header has it as well, or another key.
        others = [basic(f"{key}:") for key in (SECRET, KEY, "unknown")]
        answers += [await server.send(**{**requests[2], "key": key}) for key in others]
        for origin in (SHOP, "null"):
            answers += [await server.send(**one, headers={"Origin": origin}) for one in requests]
        await all_refused(server, answers, "server_key_exposed")
        entries = metrics.refusals.entries()
        assert {(entry["writeKeyId"], entry["key"]) for entry in entries} == {("backend", "")}
        assert not any(SECRET[:8] in str(entry) for entry in entries)


async def test_the_settings_routes_do_not_know_a_server_key(tmp_path: Path) -> None:
    async with serving(tmp_path, config_extra=KEYS) as server:
        path = f"/v1/projects/{SECRET}/settings"
        check_error(await server.send(path, method="GET", key=None), 404, "not_found")
        for path, key in (
            ("/sourceConfig", basic(f"{SECRET}:")),
            (f"/sourceConfig/?writeKey={SECRET}", None),
        ):
            answer = await server.send(path, method="GET", key=key)
            check_error(answer, 401, "invalid_write_key")
            assert SECRET.encode() not in answer.body


async def test_the_rules_are_the_same_in_front_of_a_log(tmp_path: Path) -> None:
    async with serving(tmp_path, config_extra=KEYS, broker=MemoryBroker()) as server:
        assert (await server.send(**places("key-of-shop")[0])).status == 403
        assert (await server.send(**places(SECRET)[2])).status == 403
        assert (await server.send(**places(SECRET)[0])).status == 200
        assert (await server.send(**places(KEY)[0])).status == 200


def test_the_log_never_has_a_server_key(tmp_path: Path) -> None:
    """Wherever the key is sent, and as whatever it is mistaken."""
    keys = (SECRET, SECRET.upper(), SECRET[:-1], f"{SECRET}x")
    with start_server(tmp_path, workers=2, config_extra=KEYS) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:

            def send(key: str) -> None:
                for origin in ({}, {"Origin": SHOP}) if key == SECRET else ({},):
                    for place in places(key):
                        headers = {
                            **origin,
                            **({"Authorization": place["key"]} if place["key"] else {}),
                        }
                        client.post(place["path"], json=place["body"], headers=headers)
                client.get(f"/v1/projects/{key}/settings")
                client.get(f"/sourceConfig?writeKey={key}")
                client.get(f"/{key}", headers={"Authorization": f"Digest {key}"})
                client.post("/v1/track", content=b"{", headers={"Authorization": basic(f"{key}:")})

            # At once: a request with an unknown key waits for up to a second.
            with ThreadPoolExecutor() as threads:
                list(threads.map(send, keys))
        assert server.stop() == 0
        assert "server_key_exposed" in server.log()
        for key in keys:
            for text in (key, basic(f"{key}:")[6:46]):
                assert text not in server.log()
        letters = server.export("dead-letters")
        assert [letter["writeKeyId"] for letter in letters] == []


async def test_a_key_without_rules_is_accepted_from_everywhere(tmp_path: Path) -> None:
    """As before: also from a sandboxed frame."""
    async with serving(tmp_path, config_extra=KEYS) as server:
        for headers in ({}, {"Origin": "null"}, {"Origin": SHOP}):
            assert (await server.send("/v1/track", EVENT, key=BASIC, headers=headers)).status == 200


@pytest.mark.parametrize("operation", ["identify", "batch"])
async def test_a_replay_obeys_no_rule_of_the_key(tmp_path: Path, operation: str) -> None:
    """Only those of the workspace, also if the key is gone."""
    key = '\n[[workspaces.write_keys]]\nid = "late"\nkey = "key-of-late"\n'
    broken = {"type": "identify", "userId": "u", "timestamp": "never"}
    body = broken if operation == "identify" else {"batch": [broken]}
    async with serving(tmp_path, config_extra=key) as server:
        await server.send(f"/v1/{operation}", body, key=basic("key-of-late:"))
        assert len(await server.dead_letters()) == 1
    text = b'{"type": "identify", "userId": "u", "messageId": "m", "traits": {"plan": 1, "a": 1}}'
    rules = f'operations = ["track"]\norigins = ["{SHOP}"]\ndisabled = true\n'
    for extra in (key + rules, ""):
        workspace = 'protected_traits = ["plan"]'
        async with serving(tmp_path, workspace=workspace, config_extra=extra) as server:
            [letter] = await server.dead_letters()
            explained = await server.app.replays.check(letter, text)
            assert explained.event is not None, explained
            assert explained.event.document()["traits"] == {"a": 1}
    async with serving(tmp_path, config_extra=key + rules) as server:
        replayed = await server.app.replays.replay(letter, text)
        assert replayed.outcome == "stored", replayed
