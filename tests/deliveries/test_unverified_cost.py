# SPDX-License-Identifier: Apache-2.0
"""What a delivery costs: before it is verified, and a large one that is verified.

The rule: a delivery that is not verified takes less than 100 ms of the event loop, whatever its
body, and its body is bounded, compressed and decompressed. Anyone can send one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engage.api import EventFilter
from engage.app import App, build
from engage.config import Limits, load
from engage.deliveries.delivery import Delivery
from engage.errors import ApiError
from engage.pipeline.decode import check_encoding
from engage.server.worker import GC_THRESHOLD
from support.exports import registry
from support.loop_time import check_time, longest_hold
from support.provider_http import deliver, public
from support.provider_senders import PUBLIC_URL, SENDERS, Header, Sender, webhooks_table
from support.providers import request
from support.server_inprocess import serving
from support.server_process import config_text

PROVIDERS = sorted(SENDERS)
#: Seconds of the event loop that a delivery may take before it is verified.
BUDGET = 0.1
#: The bodies that are repeated up to the limit; ``{}`` stands for what is repeated.
BODIES = {
    "escapes": b"%41",
    "broken escapes": b"%z",
    "percent signs": b"%",
    "ends of escapes": b"%4",
    "empty fields": b"&",
    "fields": b"a=b&",
    "equals signs": b"a==",
    "pluses": b"+",
    "escapes in fields": b"%61=%62&",
    "zeros": b"\x00",
    "not UTF-8": b"\xff",
    "a long number": b"1",
    "line breaks": b"\r\n",
}
#: The same as JSON: what comes before, what is repeated, and what comes after.
JSON = {
    "lists": (b"[", b"[],", b"[]]"),
    "objects": (b"[", b"{},", b"{}]"),
    "lists in an object": (b'{"Type":"Notification","a":[', b"[],", b"[]]}"),
    "huge integers": (b"[", b"9" * 60 + b",", b"1]"),
    "huge integers in an object": (b'{"a":[', b"9" * 60 + b",", b"1]}"),
    "thousands of digits": (b"[", b"9" * 4000 + b",", b"1]"),
    "huge floats": (b"[", b"1e999,", b"1]"),
    "halves of pairs": (b"[", b'"\\ud800",', b"1]"),
    "escaped quotes": (b'[{"a":"', b'\\"', b'"}]'),
    "escaped text": (b'{"Message":"', b"\\u00e9", b'"}'),
    "nested lists": (b"[{", b"[", b""),
    "nested objects": (b"", b'{"a":', b""),
    "brackets in the first element": (b'[{"a":[', b"[],", b"[]]}]"),
    "long keys": (b'[{"', b"k", b'":1}]'),
    "quotes": (b"[{", b'"', b""),
    "backslashes": (b'[{"a":"', b"\\", b'"}]'),
}


@functools.lru_cache(maxsize=8)
def bodies(size: int) -> dict[str, bytes]:
    """Return hostile bodies of at most ``size`` bytes, by kind."""
    found = {kind: part * (size // len(part)) for kind, part in BODIES.items()}
    for kind, (before, part, after) in JSON.items():
        found[kind] = before + part * ((size - len(before) - len(after)) // len(part)) + after
    # The most fields that are decoded, each as long as it can be.
    found["long fields"] = (b"a=" + b"%41" * ((size // 1000 - 3) // 3) + b"&") * 999
    found["long fields with equals signs"] = (b"a=" + b"=" * (size // 1000 - 3) + b"&") * 999
    return found


def compressed(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield encodings of a body: the smallest, the slowest, and too large ones."""
    yield "gzip", gzip.compress(body, 1)
    yield "deflate", zlib.compress(body, 1)
    # A raw stream that begins like a zlib header: it is decompressed twice.
    yield "deflate", b"\x78\x9c" + zlib.compress(body, 1)[2:-4] + b"\x00"
    yield "gzip", gzip.compress(b"") * 900 + gzip.compress(body, 1)


@contextlib.asynccontextmanager
async def composed(folder: Path, provider: str) -> AsyncIterator[tuple[App, Sender]]:
    """A server without a socket, with one provider; Segment's takes arrays."""
    sender = SENDERS[provider]
    if provider == "segment":
        sender = dataclasses.replace(sender, options={**sender.options, "allow_batch": True})
    path = folder / "engage.toml"
    table = webhooks_table(providers={provider: sender})
    path.write_text(config_text(server=f'public_url = "{PUBLIC_URL}"\n', workspace=table))
    app = build(load(path), registry())
    await app.open()
    try:
        yield app, sender
    finally:
        await app.close()


async def check_cost(
    app: App,
    provider: str,
    headers: list[Header],
    body: bytes,
    *,
    encoding: str = "",
    query: str = "",
    what: object = "",
) -> None:
    """Check that a refused delivery takes less processor time than :data:`BUDGET`."""
    target = f"/api/public/webhooks/{provider}{query}"
    pairs = [(name, value.decode("latin-1")) for name, value in headers]

    async def send() -> None:
        destination = app.deliveries.destination(provider, target, pairs)
        delivery = Delivery(
            target=target,
            headers=pairs,
            body=body,
            encoding=check_encoding(encoding),
            arrived_at=time.time(),
        )
        await app.deliveries.receive(destination, delivery)

    async def measure() -> float:
        begin = time.thread_time()
        with pytest.raises(ApiError) as refused:
            await send()
        taken = time.thread_time() - begin
        assert refused.value.status in (400, 401, 413), refused.value
        return taken

    await check_time(measure, BUDGET, what)


def limit_of(app: App, provider: str) -> int:
    """Return the largest body of a provider's deliveries in bytes."""
    return app.deliveries.body_limits[provider].bytes


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.timing
async def test_the_worst_body_takes_less_than_100_ms_of_the_loop(
    provider: str, tmp_path: Path
) -> None:
    """A delivery that is not verified takes less than 100 ms of the event loop."""
    async with composed(tmp_path, provider) as (app, sender):
        headers, _ = sender.deliver(f"/api/public/webhooks/{provider}", time.time())
        headers = headers if sender.signs else []
        for kind, body in bodies(limit_of(app, provider)).items():
            await check_cost(app, provider, headers, body, what=kind)
        assert not await dead_letters_and_events(app)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.timing
async def test_the_worst_compressed_body_takes_less_than_100_ms(
    provider: str, tmp_path: Path
) -> None:
    async with composed(tmp_path, provider) as (app, sender):
        headers, _ = sender.deliver(f"/api/public/webhooks/{provider}", time.time())
        headers = headers if sender.signs else []
        limit = limit_of(app, provider)
        for kind in ("escapes", "lists", "brackets in the first element", "equals signs"):
            for size in (limit, 4 * Limits().body_bytes):
                for encoding, body in compressed(bodies(size)[kind]):
                    what = (kind, size, encoding)
                    await check_cost(app, provider, headers, body, encoding=encoding, what=what)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.timing
async def test_the_worst_head_takes_less_than_100_ms(provider: str, tmp_path: Path) -> None:
    """The query and the header of the proof may have as many bytes as a head may have."""
    room = Limits().header_bytes - 500
    async with composed(tmp_path, provider) as (app, sender):
        headers, _ = sender.deliver(f"/api/public/webhooks/{provider}", time.time())
        for part in ("%z", "%41", "&", "a&", "a=b&", "workspaceId=acme&", "%"):
            query = "?" + (part * room)[:room]
            forged = [(name, b"AAAA") for name, _ in headers]
            await check_cost(app, provider, forged, b"{}", query=query, what=f"query {part}")
        for value in (b"v1=,", b"t=1,", b"v1,AA== ", b"A", b"=", b" ", b",", b"k="):
            forged = [(name, (value * room)[:room]) for name, _ in headers[-1:]]
            what = f"header {value!r}"
            await check_cost(app, provider, [*headers[:-1], *forged], b"{}", what=what)
        many = [("a", b"")] * (room // 5) + (headers if sender.signs else [])
        await check_cost(app, provider, many, b"{}", what="many headers")


async def dead_letters_and_events(app: App) -> list[object]:
    """Return everything that is stored."""
    events = await app.store.scan(EventFilter(), after=None, limit=10)
    letters = await app.store.scan_dead_letters(None, after=None, limit=10)
    return [*events.items, *letters.items]


# ---- the limits, from both sides
async def test_a_body_may_be_as_large_as_the_limit(tmp_path: Path) -> None:
    """``limits.webhook_body_bytes`` bounds the body before and after it is decompressed."""
    table = webhooks_table(providers={"rudderstack": SENDERS["rudderstack"]})
    headers = {"x-secret": SENDERS["rudderstack"].options["value"]}
    url = f"{PUBLIC_URL}/api/public/webhooks/rudderstack"
    body = b'{"type":"track","event":"x","userId":"u","messageId":"m"}'
    limits = "[limits]\nwebhook_body_bytes = 2000\n"
    async with serving(
        tmp_path, server=public() + "\n", workspace=table, config_extra=limits
    ) as server:
        for size, status in ((2000, 200), (2001, 413)):
            padded = body + b" " * (size - len(body))
            answer = await deliver(server, request(padded, headers, url=url))
            assert answer.status == status, answer
            zipped = request(
                gzip.compress(padded), {**headers, "Content-Encoding": "gzip"}, url=url
            )
            answer = await deliver(server, zipped)
            assert answer.status == status, answer
            if status == 413:
                assert "limits.webhook_body_bytes" in answer.json["message"]
        # A larger body is refused by its head.
        async with await server.connect() as client:
            head = "POST /api/public/webhooks/rudderstack HTTP/1.1\r\nHost: a\r\n"
            await client.send((head + "Content-Length: 2001\r\n\r\n").encode())
            assert (await client.answer()).status == 413
        async with await server.connect() as client:
            chunk = b"7d1\r\n" + b"x" * 2001 + b"\r\n0\r\n\r\n"
            await client.send((head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunk)
            assert (await client.answer()).status == 413


@pytest.mark.parametrize(("provider", "size"), [("twilio", 65536), ("amazon-ses", 1048576)])
async def test_a_provider_can_have_a_lower_limit(provider: str, size: int, tmp_path: Path) -> None:
    async with composed(tmp_path, provider) as (app, _):
        assert limit_of(app, provider) == size
    table = webhooks_table(providers={provider: SENDERS[provider]})
    async with serving(tmp_path, server=public() + "\n", workspace=table) as server:
        url = f"{PUBLIC_URL}/api/public/webhooks/{provider}"
        answers = [await deliver(server, request(b"x" * n, url=url)) for n in (size, size + 1)]
        assert [answer.status for answer in answers] == [401, 413]
        assert provider in answers[1].json["message"]


@pytest.mark.timing
async def test_other_requests_are_answered_while_forged_deliveries_arrive(tmp_path: Path) -> None:
    """Forged deliveries take turns, so another client's request waits for one of them at most."""
    table = webhooks_table(providers={"mailchimp": SENDERS["mailchimp"]})
    body = gzip.compress(bodies(Limits().webhook_body_bytes)["equals signs"], 1)
    url = f"{PUBLIC_URL}/api/public/webhooks/mailchimp"
    headers = {"Content-Encoding": "gzip", "X-Mandrill-Signature": "AAAA"}
    async with serving(tmp_path, server=public() + "\n", workspace=table) as server:
        forged = request(body, headers, url=url)
        flood = [asyncio.create_task(deliver(server, forged)) for _ in range(20)]
        waited = []
        async with await server.connect() as client:
            while not all(task.done() for task in flood):
                begin = time.monotonic()
                assert (await server.track(client)).status == 200
                waited.append(time.monotonic() - begin)
        assert {task.result().status for task in flood} <= {401, 503}
        assert len(waited) > 3


# ---- deliveries that are verified
@pytest.fixture
def _collecting_as_a_worker() -> Iterator[None]:
    """Let the garbage collector look at as little as in a worker.

    Otherwise it would look again and again at everything that the test run has loaded.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("_collecting_as_a_worker")
@pytest.mark.timing
async def test_a_verified_delivery_of_thousands_of_events_lets_the_loop_turn(
    tmp_path: Path,
) -> None:
    """It is translated in a thread: 40,000 events would take 0.3 s of the event loop."""
    target = "/api/public/webhooks/mixpanel"
    event = json.loads(SENDERS["mixpanel"].payload)[0]
    events = [
        {**event, "properties": {**event["properties"], "$insert_id": f"id-{number}"}}
        for number in range(40_000)
    ]

    async with composed(tmp_path, "mixpanel") as (app, sender):
        headers, body = sender.deliver(target, time.time(), payload=json.dumps(events).encode())
        pairs = [(name, value.decode("latin-1")) for name, value in headers]

        async def receive() -> None:
            delivery = Delivery(target=target, headers=pairs, body=body, arrived_at=time.time())
            destination = app.deliveries.destination("mixpanel", target, pairs)
            reply = await app.deliveries.receive(destination, delivery)
            assert json.loads(reply.body)["accepted"] == len(events)

        await check_time(lambda: longest_hold(receive()), 0.15)
