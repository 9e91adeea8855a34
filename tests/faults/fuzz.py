# SPDX-License-Identifier: Apache-2.0
"""Send millions of requests, valid and not, to a real server.

It fails on a 5xx other than 503, on a complete request without an answer, on memory or descriptors
that are not released, on an error in the log, on a process that died, and on what ``engage verify``
finds. ``--seed`` repeats a run, ``--only`` some of its inputs; the bytes of a failing input are
kept in ``.cache/faults``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from engage.errors import STATUS
from faults import watch
from faults.inputs import CONFIG, Input, Inputs
from faults.program import Report, parser
from support.provider_senders import PUBLIC_URL
from support.server_process import Server, start_server

#: Seconds within which a complete request is answered.
ANSWER_SECONDS = 10.0
#: The part of the run after which memory is compared, and at least these seconds.
WARM_SHARE, WARM_SECONDS = 0.25, 20.0
#: A process may have this much more memory in the end than after the first quarter: two bodies as
#: large as they may be, decoded (14 times ``decompressed_bytes``: see docs/configuration.md), which
#: Python's allocator may keep. A leak of 100 bytes a request would take 72 MiB an hour.
MEMORY_BYTES = 56 * 2**20

SERVER = f"""
public_url = "{PUBLIC_URL}"
request_timeout = 5
head_timeout = 5
idle_timeout = 5
"""
#: Requests without a key are refused by thousands here, which a real server would slow down.
EXTRA = """
[limits]
body_bytes = 1048576
decompressed_bytes = 2097152
event_bytes = 100000
dead_letter_count = 20000
[limits.rate]
unauthenticated_per_second = 0
[cors]
origins = ["https://shop.example.com"]
"""


class NoAnswer(Exception):
    """A complete request was not answered."""


class Fuzzer:
    """Clients of a server."""

    def __init__(self, server: Server, seed: int, report: Report) -> None:
        self._port = server.port
        self._report = report
        self._inputs = Inputs(seed, time.time)
        #: The number of the newest input.
        self.last = -1
        self.requests = 0
        self.kinds: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[int] = collections.Counter()

    async def run(self, connections: int, until: float) -> None:
        """Send inputs over this many connections until a time of the monotonic clock."""

        async def client() -> None:
            connection = _Connection(self._port)
            while time.monotonic() < until:
                self.last += 1
                await self.play(self.last, connection)
            connection.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(client())

    async def play(self, number: int, connection: _Connection) -> None:
        """Send the input of a number, and judge the answers."""
        sent = self._inputs.make(number)
        self.kinds[sent.kind] += 1
        try:
            answers = await connection.play(sent)
        except (NoAnswer, AssertionError, ValueError) as error:
            connection.close()
            self._report.fail(f"input {number}, {sent.kind}: {error!r}", sent.data)
            return
        self.requests += len(answers)
        for status in answers:
            self.statuses[status] += 1
            if status >= 500 and status != 503:
                self._report.fail(f"input {number}, {sent.kind}: {status}", sent.data)


class _Connection:
    """A connection that is used again while it may be."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def play(self, sent: Input) -> list[int]:
        """Send an input, and return the statuses of its answers."""
        used = self._streams is not None
        if self._streams is None or sent.methods is None:
            self.close()
            used = False
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        sending = asyncio.create_task(_send(writer, sent))
        try:
            if sent.methods is None:
                return await self._until_closed(reader)
            answers: list[int] = []
            for method in sent.methods:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        status, closes = await answer(reader, method)
                except (asyncio.IncompleteReadError, ConnectionError) as error:
                    self.close()
                    if used and not answers:
                        # The server has closed an idle connection.
                        return await self.play(sent)
                    raise NoAnswer(f"closed after {len(answers)} answers: {error!r}") from None
                except TimeoutError:
                    self.close()
                    raise NoAnswer(f"none in {ANSWER_SECONDS:.0f} s") from None
                answers.append(status)
                if closes:
                    self.close()
                    break
            return answers
        finally:
            await sending

    async def _until_closed(self, reader: asyncio.StreamReader) -> list[int]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                data = await reader.read(-1)
        except ConnectionError:
            data = b""
        except TimeoutError:
            raise NoAnswer("the connection is neither answered nor closed") from None
        finally:
            self.close()
        return [int(status) for status in re.findall(rb"(?:^|\n|\})HTTP/1\.1 (\d{3}) ", data)]


async def _send(writer: asyncio.StreamWriter, sent: Input) -> None:
    with contextlib.suppress(OSError):
        at = 0
        for pause in (*sent.pauses, len(sent.data)):
            writer.write(sent.data[at:pause])
            await writer.drain()
            at = pause
            if at < len(sent.data):
                await asyncio.sleep(0.05)
        if sent.ends:
            writer.write_eof()


async def answer(reader: asyncio.StreamReader, method: str) -> tuple[int, bool]:
    """Read an answer, and return its status and whether the server closes the connection."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), head[:200]
        status = int(head[9:12])
        if status >= 200:
            break
    lower = head.lower()
    if method != "HEAD" and status not in (204, 304):
        start = lower.index(b"\r\ncontent-length: ") + 18
        body = await reader.readexactly(int(lower[start : lower.index(b"\r\n", start)]))
        if status >= 400 and b"application/json" in lower:
            assert b'"code"' in body, body[:200]
    return status, b"\r\nconnection: close\r\n" in lower


async def fuzz(server: Server, report: Report, seed: int, seconds: float, clients: int) -> None:
    """Fuzz a server, and report what is wrong."""
    watch.copy_a_log(server)
    fuzzer = Fuzzer(server, seed, report)
    log = watch.LogReader(server)
    warm = max(WARM_SECONDS, seconds * WARM_SHARE)
    began = time.monotonic()
    end = began + seconds

    async def read_log() -> int:
        """Return how many lines were reported."""
        said = found = first = 0
        while time.monotonic() < end:
            await asyncio.sleep(1)
            log.read()
            for line in log.wrong[found:]:
                report.fail(f"in the log, one of the inputs {first}-{fuzzer.last}: {line}")
            found, first = len(log.wrong), max(0, fuzzer.last - clients)
            if report.seconds > (said + 1) * 60:
                said += 1
                report.say(f"{fuzzer.requests} requests; {watch.describe(watch.usage(server))}")
        return found

    reading = asyncio.create_task(read_log())
    await fuzzer.run(clients, began + min(warm, seconds / 2))
    before = watch.quiet(server)
    report.say(f"{fuzzer.requests} requests; {watch.describe(before)}")
    await fuzzer.run(clients, end)
    after = watch.quiet(server, {pid: use.descriptors for pid, use in before.items()})
    log.read()
    report.say(f"{fuzzer.requests} requests; {watch.describe(after)}")
    for pid, use in before.items():
        watch.judge(report, use, after.get(pid), MEMORY_BYTES)
    for line in log.wrong[await reading :]:
        report.fail(f"in the log: {line}")
    rate = fuzzer.requests / seconds
    report.say(f"{fuzzer.requests} requests in {seconds:.0f} s, {rate * 3600:,.0f} an hour")
    say_coverage(report, fuzzer, log)
    watch.verify(server, report)


def say_coverage(report: Report, fuzzer: Fuzzer, log: watch.LogReader) -> None:
    """Print which operations were answered with which status, and what never happened."""
    report.say("inputs: " + _counts(fuzzer.kinds))
    report.say("answers: " + _counts(fuzzer.statuses))
    routes: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for (route, status, _), count in log.requests.items():
        routes[route][status] += count
    for route, statuses in sorted(routes.items()):
        report.say(f"  {route}: {_counts(statuses)}")
    codes = {code for *_, code in log.requests}
    report.say("codes of errors that never came: " + ", ".join(sorted(STATUS.keys() - codes)))


def _counts(counts: collections.Counter[Any]) -> str:
    return ", ".join(f"{name} × {counts[name]}" for name in sorted(counts))


async def repeat(server: Server, seed: int, numbers: range) -> None:
    """Send some inputs, one after another, and print them with the answers."""
    for number in numbers:
        sent = Inputs(seed, time.time).make(number)
        print(number, sent.data[:2000])
        print(await _Connection(server.port).play(sent), flush=True)


def main() -> None:
    """Run the program."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=3600)
    arguments.add_argument("--connections", type=int, default=24)
    arguments.add_argument("--only", help="send these inputs (8, 8-16) and print the answers")
    given = arguments.parse_args()
    report = Report("fuzz", given.seed)
    with tempfile.TemporaryDirectory(prefix="engage-fuzz-") as folder:
        extra = CONFIG + EXTRA
        with start_server(Path(folder), workers=2, server=SERVER, config_extra=extra) as server:
            if given.only is None:
                asyncio.run(fuzz(server, report, given.seed, given.seconds, given.connections))
            else:
                first, _, last = given.only.partition("-")
                asyncio.run(repeat(server, given.seed, range(int(first), int(last or first) + 1)))
                print(server.log())
            if server.stop() != 0:
                report.fail(f"the server ended badly: {server.log()[-2000:]}")
    report.finish()


if __name__ == "__main__":
    main()
