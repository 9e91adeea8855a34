# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/console.py``: how much an open console slows clients down.

Clients send single events at a constant rate, and each latency counts from the moment at which the
request was due. Pairs of measurements: without a tab, then with ten tabs on the page Live.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.console import CONSOLE, console_url, signed_in
from support.server_process import KEY, SQLITE, start_server

#: Connections of the clients.
CONNECTIONS = 32
TABS = 10


async def _send(url: str, rate: int, seconds: float) -> list[float]:
    """Send events at a constant rate, and return the latencies in seconds."""
    parts = urlsplit(url)
    token = base64.b64encode(f"{KEY}:".encode()).decode()
    latencies: list[float] = []
    begin = time.perf_counter() + 0.2

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        for turn in range(int(rate * seconds / CONNECTIONS)):
            due = begin + (turn * CONNECTIONS + number) / rate
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            body = json.dumps(
                {
                    "userId": f"user-{turn % 997}",
                    "event": "Order Completed",
                    "properties": {"number": turn, "note": "x" * 300},
                }
            ).encode()
            writer.write(
                b"POST /v1/track HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                + f"Authorization: Basic {token}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(head.decode())
            latencies.append(time.perf_counter() - due)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(CONNECTIONS)))
    return latencies


def _load(pipe: Connection, url: str, rate: int, seconds: float) -> None:
    pipe.send(asyncio.run(_send(url, rate, seconds)))


def measure(url: str, rate: int, seconds: float) -> list[float]:
    """Send events from another process; return the latencies in milliseconds, sorted."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_load, args=(theirs, url, rate, seconds))
    process.start()
    latencies: list[float] = ours.recv()
    process.join()
    return sorted(one * 1000 for one in latencies)


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile of sorted values."""
    return values[min(int(len(values) * percent / 100), len(values) - 1)]


def _tabs(url: str, cookies: dict[str, str]) -> None:
    """Poll as ten open tabs do, until the process is terminated."""
    import httpx

    # Browsers are on other machines; here they must not compete with the server.
    os.nice(19)

    async def tab(client: httpx.AsyncClient) -> None:
        after = 0
        while True:
            answer = await client.get(f"{url}/live.json", params={"after": after})
            after = answer.json().get("after", after)
            await asyncio.sleep(1)

    async def run() -> None:
        async with httpx.AsyncClient(cookies=cookies) as client:
            await asyncio.gather(*(tab(client) for _ in range(TABS)))

    asyncio.run(run())


def main() -> int:
    """Print a line for each pair, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=1000, help="events per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    ratios: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(
            Path(folder), storage=SQLITE, workers=options.workers, config_extra=CONSOLE
        ) as server,
        signed_in(server) as client,
    ):
        measure(server.url, options.rate, 3)
        print("| pair | p50 ms | p99 ms | p50 with tabs | p99 with tabs | ratio of p99 |")
        print("|---|---|---|---|---|---|")
        for pair in range(options.pairs):
            found: dict[bool, list[float]] = {}
            # The order alternates, so that a drift of the machine does not count for one of them.
            for opened in (False, True) if pair % 2 else (True, False):
                tabs = multiprocessing.Process(
                    target=_tabs, args=(console_url(server), dict(client.cookies))
                )
                with contextlib.ExitStack() as stack:
                    if opened:
                        tabs.start()
                        stack.callback(tabs.terminate)
                        time.sleep(2)
                    found[opened] = measure(server.url, options.rate, options.seconds)
            without, opened_ = found[False], found[True]
            ratios.append(percentile(opened_, 99) / percentile(without, 99))
            print(
                f"| {pair + 1} | {percentile(without, 50):.2f} | {percentile(without, 99):.2f}"
                f" | {percentile(opened_, 50):.2f} | {percentile(opened_, 99):.2f}"
                f" | {ratios[-1]:.3f} |"
            )
    print(f"\nmedian of the ratios of p99: {statistics.median(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
