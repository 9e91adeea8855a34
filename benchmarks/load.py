# SPDX-License-Identifier: Apache-2.0
"""The load generator: wrk, oha, or, if neither is installed, a small one in Python."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).parent


def _event() -> tuple[str, str]:
    """Return a track event of 0.6 KB as two parts: before and after its message id."""
    event = {
        "messageId": "@",
        "userId": "97980cfea0067",
        "anonymousId": "507f191e810c19729de860ea",
        "event": "Order Completed",
        "properties": {
            "orderId": "50314b8e9bcf000000000000",
            "total": 27.5,
            "currency": "EUR",
            "coupon": "hasbros",
            "products": [
                {"productId": "507f1f77bcf86cd799439011", "sku": "45790-32", "price": 19},
                {"productId": "505bd76785ebb509fc183733", "sku": "46493-32", "price": 3},
            ],
        },
        "context": {
            "library": {"name": "analytics.js", "version": "2.11.1"},
            "userAgent": "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_9_5) AppleWebKit/537.36",
        },
        "timestamp": "2026-01-05T10:11:12.345Z",
        "type": "track",
    }
    head, _, tail = json.dumps(event, separators=(",", ":")).partition("@")
    return head, tail


HEAD, TAIL = _event()
#: The size of an event with its message id.
EVENT_BYTES = len(HEAD + TAIL) + 15


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one run; latencies are in milliseconds."""

    requests_per_second: float
    p50: float
    p99: float
    #: The number of requests that failed or were answered with another status than 2xx.
    bad: int
    #: The number of requests that were answered.
    requests: int


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """A number of connections, and of events per request."""

    connections: int
    size: int

    @property
    def name(self) -> str:
        """``c32`` for single events, ``c32, batches of 100`` for batches."""
        batches = "" if self.size == 1 else f", batches of {self.size}"
        return f"c{self.connections}{batches}"

    @classmethod
    def parse(cls, text: str) -> list[Case]:
        """Return the cases of a text such as ``32x1,8x100``: connections x events."""
        return [cls(*map(int, case.split("x"))) for case in text.split(",")]

    def run(self, using: str, url: str, key: str, *, seconds: float, name: str) -> Result:
        """Run the case; see :func:`run`.

        :param url: of the server, without a path.
        """
        return run(
            using,
            url + ("/v1/track" if self.size == 1 else "/v1/batch"),
            key,
            connections=self.connections,
            size=self.size,
            seconds=seconds,
            name=name,
        )


#: The cases for which the project has goals.
CASES = (Case(1, 1), Case(32, 1), Case(256, 1), Case(32, 100))


def tool() -> str:
    """Return ``wrk``, ``oha`` or ``python``: the first that is installed."""
    return next((name for name in ("wrk", "oha") if shutil.which(name)), "python")


def run(
    using: str, url: str, key: str, *, connections: int, size: int, seconds: float, name: str
) -> Result:
    """Send requests on all connections, each as soon as the previous one is answered.

    :param using: a load generator; see :func:`tool`.
    :param url: the route to POST to.
    :param key: a write key.
    :param size: events per request; with 1, a single event instead of a batch.
    :param seconds: how long to send.
    :param name: part of the message ids; must be different for each run on the same store.
    """
    token = "Basic " + base64.b64encode(f"{key}:".encode()).decode()
    return {"wrk": _wrk, "oha": _oha, "python": _python}[using](
        url, token, connections=connections, size=size, seconds=seconds, name=name
    )


def _wrk(url: str, token: str, *, connections: int, size: int, seconds: float, name: str) -> Result:
    output = subprocess.run(
        [
            *("wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"),
            *("-s", str(HERE / "wrk.lua"), url, "--", HEAD, TAIL, str(size), name, token),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    found = json.loads(line[7:])
    return Result(
        found["requests"] * 1e6 / found["microseconds"],
        found["p50"] / 1000,
        found["p99"] / 1000,
        found["bad"],
        found["requests"],
    )


def _oha(url: str, token: str, *, connections: int, size: int, seconds: float, name: str) -> Result:
    # oha sends the same body each time, so the server must make the message ids.
    one = (HEAD + TAIL).replace('"messageId":"",', "")
    body = one if size == 1 else '{"batch":[' + ",".join([one] * size) + "]}"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(body)
        file.flush()
        output = subprocess.run(
            [
                *("oha", "--no-tui", "--output-format", "json", "-m", "POST", "-D", file.name),
                *("-c", str(connections), "-z", f"{seconds}s", "-H", f"Authorization: {token}"),
                *("-T", "application/json", url),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found: dict[str, Any] = json.loads(output)
    good = sum(n for status, n in found["statusCodeDistribution"].items() if status[0] == "2")
    total = sum(found["statusCodeDistribution"].values())
    percentiles = found["latencyPercentiles"]
    return Result(
        found["summary"]["requestsPerSec"],
        percentiles["p50"] * 1000,
        percentiles["p99"] * 1000,
        total - good,
        total,
    )


def _python(
    url: str, token: str, *, connections: int, size: int, seconds: float, name: str
) -> Result:
    # In a separate process, so that it does not share its interpreter with other work.
    arguments = json.dumps([url, token, connections, size, seconds, name])
    output = subprocess.run(
        [sys.executable, __file__, arguments], capture_output=True, text=True, check=True
    ).stdout
    return Result(*json.loads(output))


class _Client(asyncio.Protocol):
    """One connection: sends a request, waits for the answer, and sends the next."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._buffer = b""
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._load.request())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        found = head.lower().partition(b"\r\ncontent-length: ")[2]
        length = int(found.split(b"\r\n")[0]) if found else 0
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._load.times.append(time.perf_counter() - self._sent)
        self._load.bad += head[9:10] != b"2"
        if time.perf_counter() < self._load.end:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.left -= 1
        if exc is not None or time.perf_counter() < self._load.end:
            self._load.bad += 1
        if not self._load.left:
            self._load.finished.set()


class _Load:
    def __init__(
        self, url: str, token: str, connections: int, size: int, seconds: float, name: str
    ) -> None:
        self.target = urllib.parse.urlsplit(url)
        self.token, self.size, self.name = token, size, name
        self.left = self.connections = connections
        self.seconds = seconds
        self.count = self.bad = 0
        self.times: list[float] = []
        self.end = 0.0
        self.finished = asyncio.Event()

    def _event(self) -> str:
        self.count += 1
        return f"{HEAD}{self.name}-{self.count:012d}{TAIL}"

    def request(self) -> bytes:
        body = self._event()
        if self.size > 1:
            events = [body, *(self._event() for _ in range(self.size - 1))]
            body = '{"batch":[' + ",".join(events) + "]}"
        return (
            f"POST {self.target.path} HTTP/1.1\r\nHost: {self.target.netloc}\r\n"
            f"Authorization: {self.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    async def run(self) -> Result:
        loop = asyncio.get_running_loop()
        host, port = self.target.hostname, self.target.port
        assert host is not None
        assert port is not None
        started = time.perf_counter()
        self.end = started + self.seconds
        for _ in range(self.connections):
            await loop.create_connection(lambda: _Client(self), host, port)
        await self.finished.wait()
        took = time.perf_counter() - started
        times = sorted(self.times)
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        return Result(len(times) / took, p50 * 1000, p99 * 1000, self.bad, len(times))


async def _main() -> None:
    result = await _Load(*json.loads(sys.argv[1])).run()
    json.dump(dataclasses.astuple(result), sys.stdout)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(_main())
    else:
        uvloop.run(_main())
