# SPDX-License-Identifier: Apache-2.0
"""What a client sees while the queue of the storage is full."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.http_client import RawClient
from support.http_errors import check_error
from support.server_inprocess import BASIC, Serving, Valve, serving
from support.waiting import eventually

#: A body that takes a turn.
LARGE = json.dumps({"userId": "large", "event": "E", "properties": {"a": "x" * 60_000, "b": 0}})
LARGE_BATCH = json.dumps({"batch": [{"type": "track", **json.loads(LARGE)}] * 40}).encode()


@contextlib.asynccontextmanager
async def full_queue(tmp_path: Path, *, wait: float = 60) -> AsyncIterator[tuple[Serving, Valve]]:
    """A server whose queue is full for the key of the tests until the valve opens.

    :param wait: seconds that a request waits for room.
    """
    valve = Valve("write")
    limits = "[limits]\nqueue_events = 50\nbatch_events = 50\n"
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("engage.pipeline.ingest.QUEUE_WAIT", wait)
        server = await stack.enter_async_context(
            serving(tmp_path, meddle=valve, config_extra=limits)
        )
        valve.gate.clear()
        first = [{"type": "track", "userId": "u", "event": "E"}] * 25
        filling = asyncio.ensure_future(server.send("/v1/batch", {"batch": first}))
        await eventually(lambda: server.app._ingest.waiting == 25)
        try:
            yield server, valve
        finally:
            valve.gate.set()
            assert (await filling).status == 200


async def test_a_small_request_waits_for_room_and_is_refused_in_the_end(tmp_path: Path) -> None:
    async with full_queue(tmp_path, wait=0.5) as (full, _):
        answer = await full.track()
        check_error(answer, 503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_small_request_that_waits_is_stored_once_there_is_room(tmp_path: Path) -> None:
    async with full_queue(tmp_path) as (full, valve):
        waiting = asyncio.ensure_future(full.track(messageId="late"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        valve.gate.set()
        assert (await waiting).status == 200
        assert await full.stored("late")


async def send_large(server: Serving, client: RawClient) -> None:
    """Send a large batch."""
    head = (
        f"POST /v1/batch HTTP/1.1\r\nHost: x\r\nAuthorization: {BASIC}\r\n"
        f"Content-Length: {len(LARGE_BATCH)}\r\n\r\n"
    )
    await client.send(head.encode() + LARGE_BATCH)


async def test_a_large_body_waits_until_there_is_room(tmp_path: Path) -> None:
    async with full_queue(tmp_path) as (full, valve), await full.connect() as client:
        sending = asyncio.ensure_future(send_large(full, client))
        await asyncio.sleep(0.2)
        valve.gate.set()
        answer = await client.answer()
        await sending
        assert answer.status == 200
        assert answer.json["accepted"] == 40


async def test_a_large_body_is_refused_in_the_end_and_the_connection_goes_on(
    tmp_path: Path,
) -> None:
    async with full_queue(tmp_path, wait=0.5) as (full, valve), await full.connect() as client:
        await send_large(full, client)
        check_error(await client.answer(), 503, "overloaded")
        valve.gate.set()
        assert (await full.track(client=client)).status == 200


async def test_a_body_that_never_comes_does_not_keep_its_turn(tmp_path: Path) -> None:
    async with full_queue(tmp_path) as (full, valve), await full.connect() as client:
        head = f"POST /v1/batch HTTP/1.1\r\nHost: x\r\nAuthorization: {BASIC}\r\n"
        await client.send(f"{head}Content-Length: 200000\r\n\r\n".encode() + b"{" * 70_000)
        await asyncio.sleep(0.1)
        valve.gate.set()
        assert (await full.send("/v1/batch", LARGE_BATCH)).status == 200
