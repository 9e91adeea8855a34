# SPDX-License-Identifier: Apache-2.0
"""Clients that send more than a server can store, beside one that sends little."""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path

import aiohttp

#: The write key of a workspace whose clients ignore ``Retry-After``.
HOSTILE_KEY = "key-of-the-hostile-workspace"

_TIMEOUT = aiohttp.ClientTimeout(total=60)

#: Further tables of the config, for :func:`support.server_process.start_server`.
HOSTILE_WORKSPACE = f"""
[[workspaces]]
id = "hostile"
name = "Hostile"
[[workspaces.write_keys]]
id = "web"
key = "{HOSTILE_KEY}"
"""


@dataclasses.dataclass
class Result:
    """What clients saw."""

    seconds: float
    #: Statuses of the hostile batches, and how many events those of status 200 had.
    hostile: collections.Counter[int]
    stored: int
    #: Statuses and seconds of the other client's requests.
    other: collections.Counter[int]
    latencies: list[float]

    @property
    def goodput(self) -> float:
        """Events per second that were acknowledged."""
        return self.stored / self.seconds

    def latency(self, part: float) -> float:
        """Return the latency in seconds below which this part of the requests stayed."""
        ordered = sorted(self.latencies)
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


def batch_of_tracks(events: int, size: int = 300) -> bytes:
    """Return a batch without message ids: sent again, its events are new ones."""
    items = [
        {
            "type": "track",
            "userId": f"user-{number}",
            "event": "Order Completed",
            "properties": {"note": "x" * size, "number": number},
        }
        for number in range(events)
    ]
    return json.dumps({"batch": items}).encode()


def batch_of_identifies(events: int, traits: int, prefix: str = "") -> bytes:
    """Return a batch that sets many traits of many users."""
    values = {f"trait-{number}": number for number in range(traits)}
    items = [
        {"type": "identify", "userId": f"{prefix}user-{number}", "traits": values}
        for number in range(events)
    ]
    return json.dumps({"batch": items}).encode()


def headers_of(key: str, encoding: str | None = None) -> dict[str, str]:
    """Return the headers of a request with a write key."""
    headers = {
        "Authorization": "Basic " + base64.b64encode(f"{key}:".encode()).decode(),
        "Content-Type": "application/json",
    }
    return headers if encoding is None else {**headers, "Content-Encoding": encoding}


async def overload(
    url: str,
    other_key: str,
    *,
    connections: int,
    body: bytes,
    events: int,
    seconds: float,
    other_rate: float = 20.0,
) -> Result:
    """Send the same batch on many connections, as fast as answers come.

    The clients that flood have a process of their own, which gets less of the processors than the
    server: on other machines, they would not slow it down, nor the client that measures.

    :param other_key: the write key of a client that sends single events at ``other_rate`` a second.
    :param events: how many events the batch has.
    """
    other: collections.Counter[int] = collections.Counter()
    latencies: list[float] = []
    single = json.dumps({"userId": "u", "event": "e"})
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=context, initializer=os.nice, initargs=(10,)
    ) as executor:
        flood = asyncio.get_running_loop().run_in_executor(
            executor, _flood, url, connections, body, seconds
        )
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            while not flood.done():
                started = time.monotonic()
                async with session.post(
                    f"{url}/v1/track", data=single, headers=headers_of(other_key)
                ) as answer:
                    await answer.read()
                    other[answer.status] += 1
                latencies.append(time.monotonic() - started)
                await asyncio.sleep(1 / other_rate)
        hostile, in_time = await flood
    return Result(seconds, hostile, in_time * events, other, latencies)


def _flood(
    url: str, connections: int, body: bytes, seconds: float
) -> tuple[collections.Counter[int], int]:
    """Send a batch again and again; return the statuses, and how many were 200 in time."""
    statuses: collections.Counter[int] = collections.Counter()
    in_time = 0
    stop = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal in_time
        while time.monotonic() < stop:
            async with session.post(
                f"{url}/v1/batch", data=body, headers=headers_of(HOSTILE_KEY)
            ) as answer:
                await answer.read()
                statuses[answer.status] += 1
                in_time += answer.status == 200 and time.monotonic() < stop

    async def clients() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
            await asyncio.gather(*(client(session) for _ in range(connections)))

    asyncio.run(clients())
    return statuses, in_time


def peak_memory(pid: int) -> int:
    """Return the largest resident size of a process so far, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the process has no resident size")
