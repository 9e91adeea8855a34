# SPDX-License-Identifier: Apache-2.0
"""Rate limits and quotas over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.monitoring.history import History
from engage.monitoring.metrics import Metrics
from support.http_errors import check_error
from support.memory_log import MemoryBroker
from support.server_inprocess import BASIC, Serving, Valve, basic, serving

EVENT = {"userId": "u", "event": "E"}
#: Slow enough that nothing flows in during a test.
SLOW = "[limits.rate]\nevents_per_second = 0.001\n"
PROXY = 'trusted_proxies = ["127.0.0.1"]'
STRANGER = {"X-Forwarded-For": "93.184.216.34"}


def batch(count: int) -> dict[str, Any]:
    return {"batch": [{"type": "track", **EVENT} for _ in range(count)]}


def places(body: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return requests that have the key in each of its places."""
    key = "test-write-key-of-acme"
    path = f"/v1/{kind}"
    return [
        {"path": path, "body": body},
        {"path": path, "body": body, "key": f"Bearer {key}"},
        {"path": f"{path}?writeKey={key}", "body": body, "key": None},
        {"path": path, "body": {**body, "writeKey": key}, "key": None},
    ]


async def test_a_key_that_sends_too_fast_gets_429_until_it_may_send_again(tmp_path: Path) -> None:
    metrics = Metrics()
    async with serving(tmp_path, config_extra=f"{SLOW}burst = 3\n", metrics=metrics) as server:
        for _ in range(3):
            assert (await server.track()).status == 200
        await server.track()  # At the bound, a little may have flowed in.
        stored = len(await server.events())
        requests = places(EVENT, "track") + places(batch(2), "batch")
        for request in requests:
            answer = await server.send(**request, headers={"Origin": "https://shop.example.com"})
            check_error(answer, 429, "rate_limited")
            assert "limits.rate.events_per_second" in answer.json["message"]
            assert int(answer.headers["retry-after"]) >= 900
            assert answer.headers["access-control-allow-origin"] == "https://shop.example.com"
            assert "retry-after" in answer.headers["access-control-expose-headers"].lower()
        assert len(await server.events()) == stored
        assert await server.dead_letters() == []
        for entry in metrics.refusals.entries()[: len(requests)]:
            assert (entry["code"], entry["writeKeyId"]) == ("rate_limited", "website")
        # The settings of the key are no event.
        path = "/v1/projects/test-write-key-of-acme/settings"
        assert (await server.send(path, method="GET")).status == 200


async def test_a_batch_that_is_larger_than_the_burst_passes_once(tmp_path: Path) -> None:
    async with serving(tmp_path, config_extra=f"{SLOW}burst = 1\n") as server:
        assert (await server.send("/v1/batch", batch(500))).status == 200
        check_error(await server.send("/v1/batch", batch(1)), 429, "rate_limited")
        check_error(await server.track(), 429, "rate_limited")
        assert len(await server.events()) == 500


async def test_bytes_count_when_they_are_decompressed(tmp_path: Path) -> None:
    limit = "[limits.rate]\nbytes_per_second = 2000\n"
    body = gzip.compress(json.dumps({**EVENT, "properties": {"x": "y" * 60_000}}).encode())
    assert len(body) < 2000
    async with serving(tmp_path, config_extra=limit) as server:
        gzipped = {"Content-Encoding": "gzip"}
        assert (await server.send("/v1/track", body, headers=gzipped)).status == 200
        answer = await server.send("/v1/track", body, headers=gzipped)
        check_error(answer, 429, "rate_limited")
        assert "2000 bytes a second (limits.rate.bytes_per_second)" in answer.json["message"]
        assert 20 <= int(answer.headers["retry-after"]) <= 31


async def test_a_body_that_has_not_arrived_is_not_read(tmp_path: Path) -> None:
    async with serving(tmp_path, config_extra=f"{SLOW}burst = 1\n") as server:
        await server.send("/v1/batch", batch(5))
        async with await server.connect() as client:
            await client.send(
                b"POST /v1/batch HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
                b"Authorization: %s\r\n\r\n{" % BASIC.encode()
            )
            check_error(await client.answer(), 429, "rate_limited")


async def test_invalid_and_duplicate_events_count_too(tmp_path: Path) -> None:
    """They cost the server as much."""
    async with serving(tmp_path, config_extra=f"{SLOW}burst = 4\n") as server:
        for body in ({"userId": "u"}, {**EVENT, "messageId": "m"}, {**EVENT, "messageId": "m"}):
            assert (await server.send("/v1/track", body)).status in (200, 400)
        assert (await server.send("/v1/batch", batch(2))).status == 200
        check_error(await server.track(), 429, "rate_limited")


@pytest.mark.parametrize("kind", ["events_per_second = 0.001", "bytes_per_second = 2000"])
async def test_a_body_without_an_event_counts_as_one(tmp_path: Path, kind: str) -> None:
    """Or a client that sends nothing else would have no limit."""
    bodies: list[tuple[str, Any]] = [
        ("/v1/track", b"{" * 3000),
        ("/v1/batch", b"{" * 3000),
        ("/v1/batch", {"batch": "x" * 3000}),
        ("/v1/batch", {"batch": [], "context": {"x": "y" * 3000}}),
        ("/v1/batch", {"batch": [0] * 3000}),
    ]
    keys = "".join(
        f'[[workspaces.write_keys]]\nid = "k{number}"\nkey = "key-{number}"\n'
        for number in range(len(bodies))
    )
    limit = f"[limits.rate]\n{kind}\n"
    async with serving(tmp_path, workspace=keys, config_extra=limit) as server:
        for number, (path, body) in enumerate(bodies):
            key = basic(f"key-{number}:")
            assert (await server.send(path, body, key=key)).status in (200, 400, 413)
            check_error(await server.send(path, body, key=key), 429, "rate_limited")


async def test_a_compressed_body_is_not_decompressed_for_a_key_over_its_limit(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, config_extra=f"{SLOW}burst = 1\n") as server:
        await server.send("/v1/batch", batch(5))
        for path in ("/v1/track", "/v1/batch"):
            gzipped = {"Content-Encoding": "gzip"}
            answer = await server.send(path, b"not compressed", headers=gzipped)
            check_error(answer, 429, "rate_limited")


async def test_each_key_can_have_its_own_rate(tmp_path: Path) -> None:
    keys = """
[[workspaces.write_keys]]
id = "fast"
key = "key-of-fast"
rate = { events_per_second = 0 }

[[workspaces.write_keys]]
id = "slow"
key = "key-of-slow"
rate = { events_per_second = 0.001, burst = 2 }
"""
    async with serving(tmp_path, config_extra=f"{keys}{SLOW}") as server:

        async def passed(key: str) -> int:
            answers = [
                await server.send("/v1/track", EVENT, key=basic(f"{key}:")) for _ in range(10)
            ]
            return [answer.status for answer in answers].count(200)

        assert await passed("key-of-fast") == 10
        assert 2 <= await passed("key-of-slow") <= 3
        assert 1 <= await passed("test-write-key-of-acme") <= 2


# --------------------------------------------------------------------------------------- strangers
async def strange(server: Serving, path: str, **options: Any) -> int:
    answer = await server.send(path, **{"headers": STRANGER, "key": None, **options})
    if answer.status == 429:
        check_error(answer, 429, "rate_limited")
        assert answer.headers["retry-after"].isdecimal()
        assert "www-authenticate" not in answer.headers
    return answer.status


LIMITED = "[limits.rate]\nunauthenticated_per_second = 0.01\n"


#: Requests that are answered 401 or 404.
STRANGE: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/track", {"body": EVENT, "key": basic("unknown:")}, 401),
    ("/v1/track", {"body": EVENT}, 401),
    ("/v1/track", {"body": {**EVENT, "writeKey": "unknown"}}, 401),
    ("/v1/track?writeKey=unknown", {"body": EVENT}, 401),
    ("/nowhere", {"method": "GET"}, 404),
    ("/v1/projects/unknown/settings", {"method": "GET"}, 404),
    ("/api/public/webhooks/unknown", {"body": {}}, 404),
    (
        "/api/public/subscription-management/user-subscriptions",
        {
            "method": "PUT",
            "body": {"workspaceId": "acme", "identifier": "u", "identifierKey": "id",
                     "hash": "0" * 64, "changes": {}},
        },
        401,
    ),
]  # fmt: skip


async def test_refusals_of_one_address_become_429(tmp_path: Path) -> None:
    async with serving(tmp_path, server=PROXY, config_extra=LIMITED) as server:
        for number, (path, options, status) in enumerate(STRANGE):
            mine = {"X-Forwarded-For": f"93.184.{number}.34"}
            seen = [await strange(server, path, **{**options, "headers": mine}) for _ in range(5)]
            assert seen == [status, status, 429, 429, 429], path
            # Others are not concerned, nor a client of the address with a key.
            other = {"X-Forwarded-For": f"93.184.{number}.99"}
            assert await strange(server, path, **{**options, "headers": other}) == status
            assert (await server.send("/v1/track", EVENT, headers=mine)).status == 200
            for file in ("/healthz", "/engage.js"):
                assert await strange(server, file, method="GET", headers=mine) == 200


async def test_only_a_trusted_proxy_names_the_address(tmp_path: Path) -> None:
    """The last address before the trusted proxies counts: clients can write the others."""
    async with serving(tmp_path, server=PROXY, config_extra=LIMITED) as server:
        for _ in range(5):
            await strange(server, "/nowhere", method="GET")
        for header, status in (
            ("93.184.216.34, 198.51.100.1", 404),
            ("1.1.1.1, 93.184.216.34", 429),
            ("::ffff:93.184.216.34", 429),
        ):
            forwarded = {"X-Forwarded-For": header}
            assert await strange(server, "/nowhere", method="GET", headers=forwarded) == status
    async with serving(tmp_path, config_extra=LIMITED) as server:
        # No proxy is trusted: all come from a loopback address, which has no limit.
        seen = [await strange(server, "/nowhere", method="GET") for _ in range(6)]
        assert set(seen) == {404}


async def test_the_preferences_page_tells_the_same_of_a_wrong_link(tmp_path: Path) -> None:
    """The 429 of an address is not that of a user who has subscribed too many times."""
    path = f"/api/public/subscription-management/page?w=acme&i=u&ik=id&h={'0' * 64}"
    async with serving(tmp_path, server=PROXY, config_extra=LIMITED) as server:
        found = [
            await server.send(path, method="GET", key=None, headers=STRANGER) for _ in range(4)
        ]
        assert [answer.status for answer in found] == [401, 401, 429, 429]
        assert all(b"This link is not valid" in answer.body for answer in found)
        assert found[-1].headers["retry-after"].isdecimal()


async def test_unknown_keys_are_not_looked_for_while_the_bucket_is_empty(tmp_path: Path) -> None:
    reads = Valve("records_version")
    async with serving(tmp_path, server=PROXY, config_extra=LIMITED, meddle=reads) as server:
        sent = {"body": EVENT, "key": basic("unknown:")}
        while await strange(server, "/v1/track", **sent) != 429:
            pass
        # A request that looks into the store would wait for this.
        reads.gate.clear()
        async with asyncio.timeout(60):
            for _ in range(5):
                assert await strange(server, "/v1/track", **sent) == 429
                body = {**EVENT, "writeKey": "unknown"}
                assert await strange(server, "/v1/track", body=body) == 429
                for path in ("/v1/projects/unknown/settings", "/sourceConfig/?writeKey=unknown"):
                    assert await strange(server, path, method="GET") == 429
        reads.gate.set()


# ------------------------------------------------------------------------------------------- quota
async def test_a_quota_counts_what_is_stored_and_answers_429(tmp_path: Path) -> None:
    metrics = Metrics()
    history = History(metrics)
    quota = "[limits.quota]\nevents_per_day = 10\n"
    async with serving(tmp_path, config_extra=quota, metrics=metrics) as server:
        quotas = server.app.quotas
        assert quotas is not None

        async def looked() -> None:
            history.turn(server.app.clock())
            await quotas.look(history, logs=False)

        same = {"type": "track", "messageId": "same", **EVENT}
        body = {"batch": [*batch(8)["batch"], same, {"type": "track"}]}
        assert (await server.send("/v1/batch", body)).status == 200
        # A duplicate and an invalid event do not count.
        assert (await server.send("/v1/track", {**EVENT, "messageId": "same"})).status == 200
        await looked()
        assert (await server.track()).status == 200
        await looked()
        for request in places(EVENT, "track") + places(batch(1), "batch"):
            answer = await server.send(**request)
            check_error(answer, 429, "quota_exceeded")
            assert "has used up 10 events a day (limits.quota." in answer.json["message"]
            assert 0 < int(answer.headers["retry-after"]) <= 86400
        letters = len(await server.dead_letters())
        assert letters == 1  # that of the invalid event
        assert len(await server.events()) == 10


async def test_a_quota_counts_what_is_in_the_log_also_while_the_store_is_down(
    tmp_path: Path,
) -> None:
    """The log does not find duplicates, so they count."""
    metrics = Metrics()
    history = History(metrics)
    quota = "[limits.quota]\nevents_per_day = 10\n"
    down = Valve("counts", "put_counts")
    down.error = StorageUnavailable("down")
    async with serving(
        tmp_path, config_extra=quota, metrics=metrics, broker=MemoryBroker(), meddle=down
    ) as server:
        quotas = server.app.quotas
        assert quotas is not None
        same = {**EVENT, "messageId": "same"}
        for _ in range(2):
            assert (await server.send("/v1/track", same)).status == 200
        history.turn(server.app.clock())
        await quotas.look(history, logs=False)
        assert (await server.send("/v1/batch", batch(8))).status == 200
        await quotas.look(history, logs=False)
        check_error(await server.track(), 429, "quota_exceeded")


async def test_a_replay_has_no_limit(tmp_path: Path) -> None:
    limits = f"{SLOW}[limits.quota]\nevents_per_day = 1\n"
    metrics = Metrics()
    history = History(metrics)
    async with serving(tmp_path, config_extra=limits, metrics=metrics) as server:
        body = {"batch": [{"type": "track", **EVENT}, {"type": "track", "userId": "u"}]}
        assert (await server.send("/v1/batch", body)).json["accepted"] == 1
        check_error(await server.track(), 429, "rate_limited")
        quotas = server.app.quotas
        assert quotas is not None
        history.turn(server.app.clock())
        await quotas.look(history, logs=False)
        check_error(await server.track(), 429, "quota_exceeded")
        (letter,) = await server.dead_letters()
        replayed = await server.app.replays.replay(
            letter, json.dumps({"type": "track", **EVENT}).encode()
        )
        assert replayed.outcome == "stored", replayed
