# SPDX-License-Identifier: Apache-2.0
"""``make bench`` for MongoDB: engage compared with the driver alone and a hand-written service.

All of them store the same events of 0.6 KB on the same server, which shares the machine with the
load generator. Only the ratios are comparable with other machines, and those of the CPU time. The
server is the one that the tests use (``ENGAGE_TEST_MONGO_URL``, ``mongod``, or FerretDB).

With ``--rounds``, everything is measured once in each round, and each ratio is taken within its
round: a few seconds of load by others spoil one round only. The table has the medians.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import load  # noqa: E402
import pymongo  # noqa: E402
import usage  # noqa: E402

from engage_plugins.mongo import schema  # noqa: E402
from support import mongo  # noqa: E402
from support.processes import descendants  # noqa: E402
from support.server_process import KEY, start_server  # noqa: E402
from support.venv import venv  # noqa: E402
from support.waiting import wait_for  # noqa: E402

#: Number of connections and of events per request.
CASES = ((1, 1), (32, 1), (256, 1), (8, 100), (32, 100))

#: The baselines: for each number of events per request.
PEERS = {True: "hand-written", False: "insert_many"}
#: The goals: (connections, events per request, whether the peer has engage's indexes) → ratio.
GOALS = {
    (32, 1, False): 3.0,
    (32, 1, True): 3.0,
    (32, 100, False): 0.5,
    (32, 100, True): 0.6,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. Times are in milliseconds, CPU times in microseconds per event."""

    rate: float
    p50: float
    p99: float
    #: Of the measured program: engage with all its processes, the hand-written service, the driver.
    cpu: float
    #: Of the server that stores the events; 0 if it is not a process of this machine.
    server_cpu: float

    @classmethod
    def median(cls, rows: Sequence[Row]) -> Row:
        """Return the medians of each figure."""
        return cls(*map(statistics.median, zip(*map(dataclasses.astuple, rows), strict=True)))


#: The cases: name, connections, events per request, whether engage's indexes exist.
Case = tuple[str, int, int, bool]


def meter(server: mongo.MongoServer, pid: int) -> usage.Meter:
    """Return a meter of the CPU time of the measured program, and of the server that it stores on.

    :param pid: the measured program; its children are included.
    """

    def find() -> dict[int, str]:
        own = dict.fromkeys({pid, *descendants(pid)}, "measured")
        return own | dict.fromkeys(server.pids, "server")

    return usage.Meter(find)


def settle(server: mongo.MongoServer, pid: int) -> None:
    """Wait until the servers are idle: a part of their work follows their answers."""

    def is_idle() -> bool:
        with meter(server, pid) as used:
            time.sleep(0.5)
        return sum(map(sum, used.seconds.values())) < 0.1

    wait_for(is_idle, what="the work of the warm-up to be done")


def make_indexes(url: str) -> None:
    """Create the indexes that engage has on its events."""
    client: pymongo.MongoClient[Any] = pymongo.MongoClient(url)
    with client:
        collection = client.get_default_database()["events"]
        for keys, options in schema.INDEXES[schema.EVENTS]:
            collection.create_index(list(keys.items()), **options)


def bare(server: mongo.MongoServer, url: str, size: int, seconds: float) -> Row:
    """Measure ``insert_many`` alone on one connection.

    :param size: documents per call.
    """
    times = []
    client: pymongo.MongoClient[Any] = pymongo.MongoClient(url, w="majority", journal=True)
    with client:
        collection = client.get_default_database()["events"]
        count = 0
        start = time.perf_counter()
        end = start + seconds
        with meter(server, os.getpid()) as used:
            while (began := time.perf_counter()) < end:
                documents = []
                for _ in range(size):
                    document = json.loads(f"{load.HEAD}b-{count:012d}{load.TAIL}")
                    document["_id"] = f"acme:api:{document['messageId']}"
                    document["workspaceId"] = "acme"
                    documents.append(document)
                    count += 1
                collection.insert_many(documents, ordered=False)
                times.append(time.perf_counter() - began)
            took = time.perf_counter() - start
    times.sort()
    return Row(
        rate=count / took,
        p50=times[len(times) // 2] * 1000,
        p99=times[len(times) * 99 // 100] * 1000,
        **_cpu(used, count),
    )


def _cpu(used: usage.Meter, events: int) -> dict[str, float]:
    found = {role: sum(each) for role, each in used.per(events).items()}
    return {"cpu": found.get("measured", 0.0), "server_cpu": found.get("server", 0.0)}


@contextlib.contextmanager
def handwritten(url: str) -> Iterator[tuple[str, int]]:
    """Run the service of ``handwritten.py`` in one uvicorn process; yield its URL and its id."""
    python = str(venv(HERE / "handwritten.txt"))
    port = mongo.free_port()
    command = [
        *(python, "-m", "uvicorn", "--app-dir", str(HERE), "handwritten:app"),
        *("--port", str(port), "--log-level", "warning", "--no-access-log"),
    ]

    def up() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    with subprocess.Popen(command, env={"MONGO_URL": url}) as process:
        try:
            wait_for(up, what="the hand-written service")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def engage(url: str, workers: int) -> Iterator[tuple[str, int]]:
    """Run engage on a MongoDB server; yield its URL and the id of its main process."""
    storage = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
    with (
        tempfile.TemporaryDirectory(prefix="engage-bench-") as folder,
        start_server(Path(folder), storage=storage, workers=workers) as server,
    ):
        assert server.process is not None
        yield server.url, server.process.pid
        server.stop()


def prime(base: str) -> None:
    """Send one event, so that the visitor of all events is known when the measurement begins.

    FerretDB scans the whole collection for each document that it updates. Without this event, the
    benchmark would measure the updates for hundreds of first events.
    """
    body = f"{load.HEAD}first{load.TAIL}".encode()
    token = base64.b64encode(f"{KEY}:".encode()).decode()
    headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/track", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
    time.sleep(2)


@contextlib.contextmanager
def delayed(url: str, port: int, milliseconds: float) -> Iterator[str]:
    """Yield the URL under which the server answers later: see ``delay.py``.

    :param port: the server's.
    """
    if not milliseconds:
        yield url
        return
    command = [sys.executable, str(HERE / "delay.py"), str(port), str(milliseconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            near = process.stdout.readline().strip()
            direct = "&directConnection=true" if "?" in url else "?directConnection=true"
            yield url.replace(f":{port}/", f":{near}/") + direct
        finally:
            process.kill()


@contextlib.contextmanager
def fresh(kind: str) -> Iterator[mongo.MongoServer]:
    """Start a server for one measurement, without data of previous ones."""
    if kind == "url":
        yield mongo.shared(kind)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="engage-bench-mongo-") as folder,
            mongo.own(Path(folder), kind) as server,
        ):
            yield server


def measure(
    case: Case, kind: str, seconds: float, *, using: str, workers: int, delay: float = 0
) -> tuple[Row, int]:
    """Measure one case on a new server.

    :param delay: milliseconds by which each command reaches the server later.
    :return: the row, and how many requests failed.
    """
    name, connections, size, indexes = case
    with fresh(kind) as server, contextlib.ExitStack() as stack:
        url = stack.enter_context(delayed(server.url(), server.port, delay))
        if indexes:
            make_indexes(url)
        if name == "insert_many":
            return bare(server, url, size, seconds), 0
        running = engage(url, workers) if name == "engage" else handwritten(url)
        base, pid = stack.enter_context(running)
        prime(base)
        bad = 0
        for warm in (True, False):
            with meter(server, pid) as used:
                result = load.run(
                    using,
                    base + ("/v1/track" if size == 1 else "/v1/batch"),
                    KEY,
                    connections=connections,
                    size=size,
                    seconds=1 if warm else seconds,
                    name="w" if warm else "m",
                )
            bad += result.bad
            if warm:
                settle(server, pid)
        rate = result.requests_per_second * size
        return Row(rate, result.p50, result.p99, **_cpu(used, result.requests * size)), bad


def all_cases(wanted: Iterable[tuple[int, ...]]) -> list[Case]:
    """Return the cases of one round, those of engage after the baselines they are compared
    with."""
    cases: list[Case] = []
    for connections, size in wanted:
        peer = PEERS[size == 1]
        for indexes in (False, True):
            case = (peer, connections if size == 1 else 1, size, indexes)
            if case not in cases:
                cases.append(case)
        cases.append(("engage", connections, size, True))
    return cases


def main() -> int:
    """Measure and print; return 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each case")
    parser.add_argument("--workers", type=int, default=1, help="processes of engage")
    parser.add_argument(
        "--tool", choices=("wrk", "oha", "python"), default=load.tool(), help="the load generator"
    )
    parser.add_argument(
        "--kind", default=mongo.kinds()[0], help="the server: ferretdb, java, mongod or url"
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=0.0,
        help="milliseconds by which each command reaches a local server later, as over a network",
    )
    parser.add_argument(
        "--only", help="the cases to measure, as connections x events, such as 32x1,8x100"
    )
    arguments = parser.parse_args()
    wanted: tuple[tuple[int, ...], ...] = CASES
    if arguments.only:
        wanted = tuple(tuple(map(int, one.split("x"))) for one in arguments.only.split(","))
    print(
        f"\nMongoDB: {arguments.kind}; load: {arguments.tool}, {arguments.seconds:g} s each, "
        f"medians of {arguments.rounds}; engage: {arguments.workers} worker(s); "
        f"delay: {arguments.delay:g} ms\n"
    )
    cases = all_cases(wanted)
    rows: dict[Case, list[Row]] = {case: [] for case in cases}
    bad = 0
    for _ in range(arguments.rounds):
        for case in cases:
            row, failed = measure(
                case,
                arguments.kind,
                arguments.seconds,
                using=arguments.tool,
                workers=arguments.workers,
                delay=arguments.delay,
            )
            rows[case].append(row)
            bad += failed
    _print_rows(rows)
    _print_ratios(rows)
    if bad:
        print(f"\n{bad} requests failed")
    return 1 if bad else 0


def _print_rows(rows: Mapping[Case, Sequence[Row]]) -> None:
    print(
        "| what | indexes | connections | events per request | events/s | p50 ms | p99 ms "
        "| CPU µs per event | server's CPU µs per event |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, connections, size, indexes), measured in rows.items():
        row = Row.median(measured)
        print(
            f"| {name} | {'engage' if indexes else '_id'} | {connections} | {size} "
            f"| {row.rate:,.0f} | {row.p50:.2f} | {row.p99:.2f} | {row.cpu:.0f} "
            f"| {row.server_cpu:.0f} |"
        )


def _print_ratios(rows: Mapping[Case, Sequence[Row]]) -> None:
    print("\n| engage, compared with | indexes | connections | ratio | least, greatest | goal |")
    print("|---|---|---|---|---|---|")
    for (name, connections, size, indexes), peer in rows.items():
        if name == "engage":
            continue
        for (other, sending, length, _), measured in rows.items():
            if other != "engage" or length != size or (size == 1 and sending != connections):
                continue
            ratios = [ours.rate / one.rate for ours, one in zip(measured, peer, strict=True)]
            goal = GOALS.get((sending, size, indexes))
            print(
                f"| {name}, {size} event(s) | {'engage' if indexes else '_id'} | {sending} "
                f"| {statistics.median(ratios):.2f} | {min(ratios):.2f}, {max(ratios):.2f} "
                f"| {'-' if goal is None else f'{goal:g}'} |"
            )


if __name__ == "__main__":
    sys.exit(main())
