# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/mixed.py --minutes 30``: is anything lost, and does the memory grow?

Clients send single events, batches, identify events of many users, and signed webhooks, each at a
constant rate; the disk is slow for a few seconds of each minute. A request without a 2xx is
sent again with the same message id, as SDKs do. At the end, every acknowledged message id must be
in the store once, and no id that was never sent.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import base64
import collections
import contextlib
import dataclasses
import hmac
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import report
import servers
import usage
import uvloop
from ledger import Ledger
from report import Goal
from slow_disk import SlowDisk

from support.console import CONSOLE
from support.http_client import Answer, RawClient, request
from support.server_process import KEY

#: Events of a batch.
BATCH = 100
#: Path and connections of each kind of client, and requests per second of all of them together.
KINDS = {
    "single": ("/v1/track", 16, 400.0),
    "batch": ("/v1/batch", 4, 8.0),
    "identify": ("/v1/identify", 8, 300.0),
    "webhook": ("/api/public/webhooks/standard-webhooks", 4, 100.0),
}
#: Seconds at the end for unanswered requests.
_LAST_SECONDS = 60.0
#: Seconds between two attempts to send a request, where the answer names no other time.
_PAUSE = 0.2
_SECRET = b"the secret of the benchmark's webhooks"
_WEBHOOKS = f"""
[workspaces.webhooks.standard-webhooks]
secret = "whsec_{base64.b64encode(_SECRET).decode()}"
"""


@dataclasses.dataclass
class Figures:
    """The answers to the clients of one kind."""

    #: Seconds until each request was answered with 2xx, including the attempts before.
    latencies: array.array[float] = dataclasses.field(default_factory=lambda: array.array("d"))
    #: Statuses of all answers; 0: the connection failed.
    statuses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    #: Answers that a client must never see.
    wrong: list[str] = dataclasses.field(default_factory=list)

    def latency(self, part: float) -> float:
        """Return the milliseconds in which this part of the requests was answered."""
        ordered = sorted(self.latencies) or [0.0]
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)] * 1000


class Clients:
    """The clients of one server.

    :param users: how many users there are.
    :param load: a factor of all rates.
    """

    def __init__(self, port: int, ledger: Ledger, *, users: int, load: float = 1.0) -> None:
        self._port = port
        self._ledger = ledger
        self._users = users
        self.load = load
        self._random = random.Random(1)
        self.figures = {kind: Figures() for kind in KINDS}
        self._stop = float("inf")

    async def identify_all(self) -> None:
        """Identify every user once, so that all profiles exist and all caches are filled."""
        starts = iter(range(0, self._users, BATCH))

        async def client(number: int) -> None:
            connection = _Connection(self._port)
            for start in starts:
                users = range(start, min(start + BATCH, self._users))
                ids = [self._ledger.next(f"first-{number}") for _ in users]
                events = [self._identify(one, user) for one, user in zip(ids, users, strict=True)]
                await self._send("batch", connection, _api("/v1/batch", {"batch": events}), ids)
            connection.close()

        await asyncio.gather(*(client(number) for number in range(4)))
        self.figures["batch"] = Figures()

    async def run(self, seconds: float) -> None:
        """Send requests of all kinds."""
        self._stop = time.monotonic() + seconds
        await asyncio.gather(
            *(
                self._client(kind, number)
                for kind, (_, count, _) in KINDS.items()
                for number in range(count)
            )
        )

    async def _client(self, kind: str, number: int) -> None:
        _, count, rate = KINDS[kind]
        interval = count / (rate * self.load)
        connection = _Connection(self._port)
        due = time.monotonic() + interval * self._random.random()
        while max(due, time.monotonic()) < self._stop:
            await asyncio.sleep(max(due - time.monotonic(), 0))
            # A client that is late sends its next requests at once.
            series = f"{kind}-{number}"
            ids = [self._ledger.next(series) for _ in range(BATCH if kind == "batch" else 1)]
            await self._send(kind, connection, self._request(kind, ids), ids)
            due += interval
        connection.close()

    def _request(self, kind: str, ids: Sequence[str]) -> bytes:
        path = KINDS[kind][0]
        user = self._random.randrange(self._users)
        match kind:
            case "single":
                return _api(path, self._track(ids[0], user))
            case "batch":
                return _api(path, {"batch": [self._track(one, user) for one in ids]})
            case "identify":
                return _api(path, self._identify(ids[0], user))
            case _:
                return _webhook(path, ids[0], user)

    def _track(self, message_id: str, user: int) -> dict[str, object]:
        return {
            "type": "track",
            "messageId": message_id,
            "userId": f"user-{user}",
            "anonymousId": f"visitor-{user}",
            "event": "Order Completed",
            "properties": {"total": self._random.randrange(10_000) / 100, "note": "x" * 300},
        }

    def _identify(self, message_id: str, user: int) -> dict[str, object]:
        return {
            "type": "identify",
            "messageId": message_id,
            "userId": f"user-{user}",
            "anonymousId": f"visitor-{user}",
            "traits": {
                "email": f"user-{user}@example.com",
                "plan": self._random.choice(["free", "team", "enterprise"]),
                "visits": self._random.randrange(1000),
            },
        }

    async def _send(
        self, kind: str, connection: _Connection, data: bytes, ids: Sequence[str]
    ) -> None:
        """Send a request until it is answered with 2xx."""
        figures = self.figures[kind]
        begin = time.monotonic()
        while True:
            answer = await connection.send(data)
            figures.statuses[answer.status if answer else 0] += 1
            if answer is None or answer.status == 503:
                if time.monotonic() > self._stop + _LAST_SECONDS:
                    return
                after = answer.headers.get("retry-after") if answer else None
                await asyncio.sleep(float(after) if after else _PAUSE)
                continue
            if answer.status != 200 or answer.json.get("rejected"):
                figures.wrong.append(f"{kind}: {answer.status} {answer.body[:500]!r}")
            else:
                self._ledger.acknowledge(ids)
                figures.latencies.append(time.monotonic() - begin)
            return


class _Connection:
    """A connection that is opened when it is needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._client: RawClient | None = None

    async def send(self, data: bytes) -> Answer | None:
        """Send a request and return the answer; ``None`` if the connection fails."""
        try:
            if self._client is None:
                self._client = await RawClient.connect(self._port)
            await self._client.send(data)
            answer = await self._client.answer()
        except (OSError, EOFError, TimeoutError):
            self.close()
            return None
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.writer.close()
            self._client = None


def _api(path: str, body: object) -> bytes:
    token = base64.b64encode(f"{KEY}:".encode()).decode()
    headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
    return request(orjson.dumps(body), target=path, headers=headers)


def _webhook(path: str, message_id: str, user: int) -> bytes:
    body = json.dumps({"type": "invoice.paid", "data": {"userId": f"user-{user}"}}).encode()
    at = str(int(time.time()))
    signed = f"{message_id}.{at}.".encode() + body
    signature = base64.b64encode(hmac.digest(_SECRET, signed, "sha256")).decode()
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": at,
        "webhook-signature": f"v1,{signature}",
        "Content-Type": "application/json",
    }
    return request(body, target=path, headers=headers)


async def _slow_down(disk: SlowDisk, options: argparse.Namespace) -> None:
    """Make the disk slow in the middle of each period, until cancelled."""
    try:
        while True:
            await asyncio.sleep((options.slow_every - options.slow_seconds) / 2)
            disk.set(options.sync, options.write)
            await asyncio.sleep(options.slow_seconds)
            disk.set(0, 0)
            await asyncio.sleep((options.slow_every - options.slow_seconds) / 2)
    finally:
        disk.set(0, 0)


async def _while(background: Callable[[], Awaitable[None]], main: Awaitable[None]) -> None:
    task = asyncio.ensure_future(background())
    try:
        await main
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def exported(config: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the records that ``engage export`` writes."""
    command = [sys.executable, "-m", "engage", "export", kind, "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield from map(orjson.loads, process.stdout)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise AssertionError(f"engage export exited with status {process.returncode}")


def print_figures(clients: Clients, seconds: float) -> None:
    """Print the answers to the clients of each kind.

    :param seconds: how long they sent.
    """
    rows = []
    for kind, figures in clients.figures.items():
        others = {status: count for status, count in figures.statuses.items() if status != 200}
        rows.append(
            [
                kind,
                f"{len(figures.latencies):,}",
                f"{KINDS[kind][2] * clients.load * seconds:,.0f}",
                *(f"{figures.latency(part):.1f}" for part in (0.5, 0.99, 1.0)),
                ", ".join(
                    f"{count} × {status or 'no answer'}" for status, count in sorted(others.items())
                )
                or "none",
            ]
        )
    columns = [
        "kind",
        "requests",
        "planned",
        "p50 ms",
        "p99 ms",
        "longest ms",
        "answers other than 200",
    ]
    report.print_table(columns, rows)


def main() -> int:
    """Send, compare and print; return 1 if an event was lost or an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=2, help="processes of engage")
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--load", type=float, default=1.0, help="a factor of all rates")
    parser.add_argument(
        "--slow-seconds", type=float, default=5.0, help="seconds for which the disk is slow"
    )
    parser.add_argument(
        "--slow-every", type=float, default=60.0, help="seconds from one slow phase to the next"
    )
    parser.add_argument(
        "--sync", type=float, default=0.1, help="seconds that an fsync takes longer on a slow disk"
    )
    parser.add_argument(
        "--write", type=float, default=0.0005, help="the same for each write of a page"
    )
    options = parser.parse_args()
    per_second = ", ".join(
        f"{rate * options.load:g} {kind}" for kind, (_, _, rate) in KINDS.items()
    )
    print(
        f"{options.minutes:g} minutes; requests per second: {per_second}; {options.users:,} users; "
        f"{options.workers} worker(s); {report.machine()}",
        flush=True,
    )
    ledger = Ledger()
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="engage-bench-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(made))
        disk = SlowDisk(folder)
        with servers.engage(
            folder,
            workers=options.workers,
            config_extra=_WEBHOOKS + CONSOLE,
            environment=disk.environment,
        ) as running:
            port = int(running.url.rpartition(":")[2])
            clients = Clients(port, ledger, users=options.users, load=options.load)
            uvloop.run(clients.identify_all())
            seconds = options.minutes * 60
            with usage.MemoryLog(running.roles, every=min(5.0, seconds / 20)) as memory:
                uvloop.run(_while(lambda: _slow_down(disk, options), clients.run(seconds)))
        config = folder / "engage.toml"
        balance = ledger.compare(event["messageId"] for event in exported(config, "events"))
        users = {user["userId"] for user in exported(config, "users")}
    print_figures(clients, seconds)
    print(f"\ncalls that the slow disk delayed: {disk.delayed:,}")
    columns = [field.name for field in dataclasses.fields(balance)]
    report.print_table(columns, [[f"{value:,}" for value in dataclasses.astuple(balance)]])
    growth = memory.growth()
    report.print_growth(growth)
    for name in memory.incomplete:
        print(f"\n{name} started or ended during the benchmark")
    missing = {f"user-{number}" for number in range(options.users)} - users
    goals = [
        Goal("acknowledged events that are not stored", balance.lost, 0, form=".0f"),
        Goal("events that are stored again", balance.repeated, 0, form=".0f"),
        Goal("stored events that were never sent", balance.foreign, 0, form=".0f"),
        Goal("users without a profile", len(missing), 0, form=".0f"),
        *report.growth_goals(growth),
    ]
    report.print_goals(goals)
    wrong = [text for figures in clients.figures.values() for text in figures.wrong]
    for text in wrong[:10]:
        print(f"\n{text}")
    return 0 if balance.good and not missing and not wrong else 1


if __name__ == "__main__":
    servers.run_main(main)
