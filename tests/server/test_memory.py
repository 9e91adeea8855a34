# SPDX-License-Identifier: Apache-2.0
"""All processes of a server together need at most the memory that docs/configuration.md says."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gzip
import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from engage.config import DEFAULT_LIMITS
from support.overload import (
    HOSTILE_KEY,
    HOSTILE_WORKSPACE,
    batch_of_identifies,
    batch_of_tracks,
    headers_of,
    peak_memory,
)
from support.server_process import KEY, SQLITE, Server, start_server

pytestmark = pytest.mark.long

MIB = 1024 * 1024
#: Of all processes that are not workers.
OTHERS = 512 * MIB
#: Bytes of a body that arrives only in part.
HELD = MIB // 2

LOW = """
[limits]
body_bytes = 1048576
decompressed_bytes = 4194304
json_values = 50000
batch_events = 2500
queue_bytes = 8388608
inflight_bytes = 33554432
webhook_body_bytes = 1048576
"""


def of_a_worker(limits: dict[str, int]) -> int:
    """Return what docs/configuration.md says that a worker needs at most."""

    def limit(name: str) -> int:
        return limits.get(name, int(getattr(DEFAULT_LIMITS, name)))

    return (
        120 * MIB
        + limit("inflight_bytes")
        + limit("queue_bytes") * 5 // 2
        + 14 * limit("decompressed_bytes")
        + 600 * limit("json_values")
    )


def conflicting(size: int, turn: int) -> bytes:
    """Return a batch whose events have the message ids of those of another turn."""
    items = [
        {
            "type": "track",
            "userId": f"user-{turn}",
            "messageId": f"message-{number}",
            "event": "e",
            "properties": {"note": "x" * 60_000},
        }
        for number in range(size // 61_000)
    ]
    return json.dumps({"batch": items}).encode()


async def load(server: Server, decompressed: int, values: int, inflight: int) -> set[int]:
    """Send at once the requests that need most memory; return the statuses of the answers."""
    bodies = [batch_of_tracks(decompressed // 61_000, 60_000)] * 50
    bodies += [batch_of_identifies(values // 520, 500, prefix=f"{n}-") for n in range(8)]
    bodies += [conflicting(decompressed, turn) for turn in range(4)] * 2
    compressed = {body: gzip.compress(body, 6, mtime=0) for body in set(bodies)}
    statuses: collections.Counter[int] = collections.Counter()
    timeout = aiohttp.ClientTimeout(total=900)

    async def post(session: aiohttp.ClientSession, body: bytes, key: str) -> None:
        async with session.post(
            f"{server.url}/v1/batch", data=body, headers=headers_of(key, "gzip")
        ) as answer:
            await answer.read()
            statuses[answer.status] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        holding(server, inflight * 5 // 4 // HELD),
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        for _ in range(2):
            await asyncio.gather(
                *(
                    post(session, compressed[body], (KEY, HOSTILE_KEY)[number % 2])
                    for number, body in enumerate(bodies)
                )
            )
    return set(statuses)


@contextlib.asynccontextmanager
async def holding(server: Server, connections: int) -> AsyncIterator[None]:
    """Keep connections whose requests do not arrive completely."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = (
        f"POST /v1/batch?writeKey={KEY} HTTP/1.1\r\nHost: x\r\nContent-Length: {HELD + 1}\r\n\r\n"
    )
    writers = []
    for _ in range(connections):
        _, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        # The server may close one before it has read this: another connection needs the room.
        writer.write(head.encode() + b"x" * HELD)
        with contextlib.suppress(OSError):
            await writer.drain()
    yield
    for writer in writers:
        writer.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("config", ["", LOW], ids=["default", "low"])
def test_all_processes_together_need_at_most_what_the_documentation_says(
    config: str, workers: int, tmp_path: Path
) -> None:
    limits = tomllib.loads(config).get("limits", {})
    extra = f"{HOSTILE_WORKSPACE}\n[console]\nport = 0\n{config}"
    # The disk may need long for the events of these bodies.
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 800")
    with start_server(
        tmp_path, fork=False, workers=workers, storage=storage, config_extra=extra
    ) as server:
        statuses = asyncio.run(
            load(
                server,
                limits.get("decompressed_bytes", DEFAULT_LIMITS.decompressed_bytes),
                limits.get("json_values", DEFAULT_LIMITS.json_values),
                limits.get("inflight_bytes", DEFAULT_LIMITS.inflight_bytes),
            )
        )
        assert statuses <= {200, 400, 503}
        assert 200 in statuses
        assert server.process is not None
        pids = {server.process.pid, *server.children()}
        assert server.consoles() < pids
        needed = {pid: peak_memory(pid) for pid in pids}
        of_workers = [needed.pop(pid) for pid in server.workers()]
    assert max(of_workers) < of_a_worker(limits) <= 1024 * MIB
    assert sum(needed.values()) < OTHERS
