# SPDX-License-Identifier: Apache-2.0
"""``make bench-log``: measures engage with Kafka as the log in front of its storage.

The brokers, engage and the load generator share the cores of one machine, so the figures are those
of a machine that is much too small for all of them. Each is compared with its goal.

Parts (``--only``):

``serve``
    single events and batches through ``engage serve``: with three brokers, with one, and on SQLite
    without a log
``append``
    ``EventLog.append`` alone in one process
``load``
    ``engage load`` into each store, from a topic that is full
``failover``
    the longest request, and the number of requests that fail, when a leader is killed under load
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]

import httpx  # noqa: E402
import load  # noqa: E402
import pymongo  # noqa: E402
import report  # noqa: E402

from engage.api import Event, EventLog, LogRecord, Status, record_of  # noqa: E402
from support import kafka, mongo  # noqa: E402
from support.kafka import Cluster  # noqa: E402
from support.kafka_log import make_log  # noqa: E402
from support.senders import Senders  # noqa: E402
from support.server_process import KEY, SQLITE, Server, config_text, start_server  # noqa: E402

PARTS: Final = ("serve", "append", "load", "failover")
#: Number of connections and of events per request.
CASES: Final = ((1, 1), (32, 1), (256, 1), (8, 100), (32, 100))
TOPIC: Final = "engage.events"
#: Users whose events are sent; the key of a record is its user.
USERS: Final = 5000
#: Seconds without progress of a loader after which something is wrong.
STUCK: Final = 120
#: The storages that ``engage load`` writes to.
STORES: Final = ("sqlite", "ferretdb")
#: Those that it can write to; ``java`` is mongo-java-server, which keeps everything in memory.
KNOWN_STORES: Final = (*STORES, "java", "mongod")


@dataclasses.dataclass
class Goals:
    """Prints results beside their goals, and counts those that were missed."""

    missed: int = 0

    def judge(self, value: float, goal: float | None, *, most: bool = False) -> str:
        """Return a cell: the goal, and whether it was met.

        :param most: whether the goal is an upper limit.
        """
        if goal is None:
            return ""
        met = value <= goal if most else value >= goal
        self.missed += not met
        return f"{'≤' if most else '≥'} {goal:,.0f}: {'met' if met else 'MISSED'}"


def log_section(nodes: Cluster, **options: str) -> str:
    """Return the config of a log on the nodes."""
    weak = "true" if len(nodes.nodes) < 3 else "false"
    lines = [f"{name} = {value}" for name, value in options.items()]
    return "\n".join(
        [
            *("[log]", *lines, "[log.kafka]"),
            f'servers = "{nodes.servers()}"\nallow_weak_acknowledgement = {weak}\n',
        ]
    )


def brokers(nodes: Cluster) -> str:
    """Return their number in words."""
    return "1 broker" if len(nodes.nodes) == 1 else f"{len(nodes.nodes)} brokers"


# ------------------------------------------------------------------------------------------- serve
@contextlib.contextmanager
def serving(extra: str = "", workers: int = 1) -> Iterator[Server]:
    """Run a server in an empty folder."""
    with (
        tempfile.TemporaryDirectory(prefix="engage-bench-") as folder,
        start_server(Path(folder), storage=SQLITE, config_extra=extra, workers=workers) as server,
    ):
        yield server
        server.stop()


def measure_serve(arguments: argparse.Namespace, goals: Goals) -> int:
    """Measure ``engage serve``; return how many requests failed."""
    print("\n## engage serve\n")
    print(
        "| events go to | connections | events per request | requests/s | events/s | p50 ms"
        " | p99 ms | ratio to SQLite | goal |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    found: dict[tuple[str, int, int], load.Result] = {}
    bad = 0

    def cases(name: str, extra: str) -> None:
        nonlocal bad
        for number in range(arguments.rounds):
            for connections, size in arguments.cases:
                path = "/v1/track" if size == 1 else "/v1/batch"
                with serving(extra, arguments.workers) as server:
                    for warm in (True, False):
                        result = load.run(
                            arguments.tool,
                            server.url + path,
                            KEY,
                            connections=connections,
                            size=size,
                            seconds=1 if warm else arguments.seconds,
                            name=f"{'w' if warm else 'm'}{number}-{uuid.uuid4().hex[:6]}",
                        )
                        bad += result.bad
                best = found.setdefault((name, connections, size), result)
                if result.requests_per_second > best.requests_per_second:
                    found[name, connections, size] = result

    cases("SQLite", "")
    for count in (3, 1):
        with kafka.own(nodes=kafka.NODES[:count]) as nodes:
            cases(brokers(nodes), log_section(nodes))
    for (name, connections, size), result in sorted(
        found.items(), key=lambda one: (one[0][2], one[0][1], one[0][0])
    ):
        rate = result.requests_per_second
        ratio = rate / found["SQLite", connections, size].requests_per_second
        goal = ""
        if name == "3 brokers" and (connections, size) == (1, 1):
            goal = "p50 " + goals.judge(result.p50, 5, most=True)
        elif name == "3 brokers" and (connections, size) == (256, 1):
            goal = "% of SQLite " + goals.judge(100 * ratio, 50)
        print(
            f"| {name} | {connections} | {size} | {rate:,.0f} | {rate * size:,.0f}"
            f" | {result.p50:.2f} | {result.p99:.2f} | {ratio:.2f} | {goal} |",
            flush=True,
        )
    return bad


# ------------------------------------------------------------------------------------------ append
def event(number: int) -> Event:
    """Return an event like those of the load generator, as the pipeline makes it."""
    now = time.time_ns() // 1_000_000
    message_id = f"{number:012d}"
    user = f"user-{number % USERS}"
    body = f"{load.HEAD}{message_id}{load.TAIL}".replace("97980cfea0067", user)
    return Event(
        workspace_id="acme",
        origin="api",
        message_id=message_id,
        type="track",
        user_id=user,
        anonymous_id=None,
        name="Order Completed",
        received_at=now,
        timestamp=now,
        body=body.replace('"anonymousId":"507f191e810c19729de860ea",', "").encode(),
    )


@contextlib.asynccontextmanager
async def opened(nodes: Cluster) -> AsyncIterator[EventLog]:
    """Open the log that ``engage serve`` uses."""
    weak = len(nodes.nodes) < 3
    log = make_log(nodes.servers(), TOPIC, allow_weak_acknowledgement=weak)
    await log.open(create=True)
    await log.check()
    try:
        yield log
    finally:
        await log.close()


async def append_for(
    log: EventLog, records: Sequence[LogRecord], *, size: int, depth: int, seconds: float
) -> tuple[float, list[float]]:
    """Append for some time; return records/s, and the seconds of each call.

    :param size: records of a call.
    :param depth: calls at the same time.
    """
    took: list[float] = []
    end = time.perf_counter() + seconds
    began = time.perf_counter()

    async def append(first: int) -> None:
        place = first
        while time.perf_counter() < end:
            place = (place + size) % (len(records) - size)
            started = time.perf_counter()
            outcomes = await log.append(records[place : place + size])
            took.append(time.perf_counter() - started)
            assert all(outcome.status is Status.STORED for outcome in outcomes)

    await asyncio.gather(*(append(number * size) for number in range(depth)))
    return len(took) * size / (time.perf_counter() - began), sorted(took)


def measure_append(arguments: argparse.Namespace, goals: Goals) -> None:
    """Measure ``EventLog.append``."""
    print("\n## EventLog.append, one process\n")
    print("| brokers | records per call | calls at once | records/s | p50 ms | p99 ms | goal |")
    print("|---|---|---|---|---|---|---|")
    records = [record_of(event(number)) for number in range(20_000)]

    async def measure(nodes: Cluster) -> None:
        async with opened(nodes) as log:
            for size, depth in ((1, 1), (100, 8), (1000, 1), (1000, 4), (4000, 2)):
                # The first calls find the leaders and warm up the brokers.
                await append_for(log, records, size=size, depth=depth, seconds=0.5)
                seconds = arguments.seconds
                rate, took = await append_for(log, records, size=size, depth=depth, seconds=seconds)
                p50, p99 = took[len(took) // 2] * 1000, took[len(took) * 99 // 100] * 1000
                wanted = 80_000 if (len(nodes.nodes), size, depth) == (3, 1000, 4) else None
                print(
                    f"| {len(nodes.nodes)} | {size} | {depth} | {rate:,.0f} | {p50:.1f}"
                    f" | {p99:.1f} | {goals.judge(rate, wanted)} |",
                    flush=True,
                )

    for count in (3, 1):
        with kafka.own(nodes=kafka.NODES[:count]) as nodes:
            _run_loop(functools.partial(measure, nodes))


def _run_loop(work: Callable[[], object]) -> None:
    """Run a coroutine in the event loop that a worker has."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        uvloop.run(work())  # type: ignore[arg-type]
    else:
        asyncio.run(work())  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- load
@contextlib.contextmanager
def storage(kind: str, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the config of an empty storage, and its address if it is a server."""
    if kind == "sqlite":
        yield SQLITE, None
        return
    with mongo.own(folder, kind) as server:
        url = server.url("bench")
        yield f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n', url


def stored_ids(server: Server, url: str | None) -> list[str]:
    """Return the message ids in the store."""
    if url is None:
        return [one["messageId"] for one in server.export()]
    # A page of an export from mongo-java-server takes longer than a call may.
    client: pymongo.MongoClient[dict[str, str]] = pymongo.MongoClient(url)
    with client:
        events = client.get_default_database()["events"].find({}, {"messageId": 1})
        return [one["messageId"] for one in events]


async def fill(nodes: Cluster, events: int) -> None:
    """Append events."""
    async with opened(nodes) as log:
        for first in range(0, events, 4000):
            last = min(first + 4000, events)
            await log.append([record_of(event(number)) for number in range(first, last)])


async def watch(nodes: Cluster, events: int, process: subprocess.Popen[bytes]) -> float:
    """Return how many events/s are committed, from the first ones to the last."""
    began: tuple[float, int] | None = None
    last, last_at = 0, time.perf_counter()
    async with opened(nodes) as log:
        while True:
            assert process.poll() is None, "the loader has ended"
            done = events - (await log.backlog("engage")).records
            now = time.perf_counter()
            if done != last:
                last, last_at = done, now
            assert now - last_at < STUCK, f"nothing was loaded for {STUCK} s, after {done} events"
            if began is None and done:
                began = (now, done)
            if done == events:
                assert began is not None
                # If all of it was one portion, its time is not known.
                return (done - began[1]) / (now - began[0]) if now > began[0] else float("nan")
            await asyncio.sleep(0.05)


def measure_load(arguments: argparse.Namespace, goals: Goals) -> None:
    """Measure ``engage load``."""
    print(f"\n## engage load, {arguments.events:,} events in the log, 3 brokers\n")
    print("| store | processes | events/s | goal |")
    print("|---|---|---|---|")
    for kind in arguments.stores.split(","):
        for loaders in (1, 2):
            with (
                tempfile.TemporaryDirectory(prefix="engage-bench-") as name,
                kafka.own() as nodes,
                storage(kind, Path(name)) as (section, url),
            ):
                path = Path(name) / "engage.toml"
                extra = log_section(nodes, loaders=str(loaders))
                path.write_text(config_text(storage=section, config_extra=extra))

                # A server creates the store.
                with Server(path.parent, path.read_text()).start() as server:
                    server.stop()
                asyncio.run(fill(nodes, arguments.events))
                command = [sys.executable, "-m", "engage", "load", "--config", str(path)]
                with (path.parent / "load.log").open("wb") as output:
                    process = subprocess.Popen(command, stdout=output, stderr=output)
                try:
                    rate = asyncio.run(watch(nodes, arguments.events, process))
                except AssertionError:
                    print((path.parent / "load.log").read_text()[-4000:], file=sys.stderr)
                    raise
                finally:
                    process.terminate()
                    process.wait()
                stored = stored_ids(server, url)
                assert len(stored) == len(set(stored)) == arguments.events, "not exactly once"
            goal = 10_000 if (kind, loaders) == ("sqlite", 1) else None
            print(f"| {kind} | {loaders} | {rate:,.0f} | {goals.judge(rate, goal)} |", flush=True)


# ---------------------------------------------------------------------------------------- failover
class Clients(Senders):
    """Threads that send one event after the other."""

    def __init__(self, url: str, count: int = 6) -> None:
        super().__init__(count)
        self._url = url
        self.answered = 0
        self.failed = 0
        #: The longest time that an answer took, in seconds.
        self.longest = 0.0

    def _send(self, number: int) -> None:
        with httpx.Client(base_url=self._url, auth=(KEY, ""), timeout=60) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                one = {"userId": f"u{turn % 50}", "event": "E", "messageId": f"{number} {turn}"}
                began = time.monotonic()
                status = client.post("/v1/track", json=one).status_code
                self.longest = max(self.longest, time.monotonic() - began)
                self.answered += 1
                self.failed += status != 200


def measure_failover(arguments: argparse.Namespace, goals: Goals) -> None:
    """Measure the pause when a leader is killed."""
    print("\n## kill -9 of a leader under load, broker.session.timeout.ms=3000\n")
    print("| round | requests | longest before s | longest s | failed | goals |")
    print("|---|---|---|---|---|---|")
    for number in range(1, arguments.rounds + 1):
        with kafka.own() as nodes, serving(log_section(nodes), arguments.workers) as server:
            clients = Clients(server.url)
            with clients.running():
                time.sleep(arguments.seconds / 2)
                before, clients.longest = clients.longest, 0.0
                leader = nodes.leaders(TOPIC)[0]
                nodes.kill(leader)
                time.sleep(10 + arguments.seconds / 2)
        judged = (
            goals.judge(clients.longest, 6, most=True)
            + "; failed "
            + goals.judge(clients.failed, 0, most=True)
        )
        print(
            f"| {number} | {clients.answered:,} | {before:.2f} | {clients.longest:.2f}"
            f" | {clients.failed} | {judged} |",
            flush=True,
        )


def main() -> int:
    """Measure and print; return 1 if a request failed that should not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=1, help="the best round of serve is shown")
    parser.add_argument("--workers", type=int, default=1, help="processes of engage serve")
    parser.add_argument("--events", type=int, default=100_000, help="events for engage load")
    parser.add_argument(
        "--stores",
        default=",".join(STORES),
        help=f"the stores for engage load, of {', '.join(KNOWN_STORES)}",
    )
    parser.add_argument("--only", default=",".join(PARTS), help="the parts, such as append,load")
    parser.add_argument("--cases", help="connections x events for serve, such as 32x1,8x100")
    parser.add_argument(
        "--tool", choices=("wrk", "oha", "python"), default=load.tool(), help="the load generator"
    )
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    if unknown := set(arguments.stores.split(",")) - set(KNOWN_STORES):
        parser.error(f"unknown store: {', '.join(sorted(unknown))}")
    arguments.cases = (
        [tuple(map(int, case.split("x"))) for case in arguments.cases.split(",")]
        if arguments.cases
        else CASES
    )
    print(f"load: {arguments.tool}, {arguments.seconds:g} s each; {report.machine()}")
    print(f"busy before: load average {os.getloadavg()[0]:.1f}; record: ", end="")
    print(f"{record_of(event(0)).size} bytes, of which the event has {len(event(0).body)}")
    goals = Goals()
    bad = 0
    if "serve" in parts:
        bad = measure_serve(arguments, goals)
    if "append" in parts:
        measure_append(arguments, goals)
    if "load" in parts:
        measure_load(arguments, goals)
    if "failover" in parts:
        measure_failover(arguments, goals)
    if bad:
        print(f"\n{bad} requests failed")
    if goals.missed:
        print(f"\n{goals.missed} goals missed on this machine")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
