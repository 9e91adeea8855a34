# SPDX-License-Identifier: Apache-2.0
"""``make bench`` for MongoDB: engage compared with the driver alone and a hand-written service.

All of them store the same events of 0.6 KB on the same server, which shares the machine with the
load generator. Only the ratios are comparable with other machines. The server is the one that the
tests use (``ENGAGE_TEST_MONGO_URL``, ``mongod``, or FerretDB).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import load  # noqa: E402
import pymongo  # noqa: E402

from engage_plugins.mongo import schema  # noqa: E402
from support import mongo  # noqa: E402
from support.server_process import KEY, start_server  # noqa: E402
from support.venv import venv  # noqa: E402
from support.waiting import wait_for  # noqa: E402

#: Number of connections and of events per request.
CASES = ((1, 1), (32, 1), (256, 1), (8, 100), (32, 100))


def bare(url: str, size: int, seconds: float, *, indexes: bool) -> float:
    """Return the events/s of ``insert_many`` alone on one connection.

    :param size: documents per call.
    :param indexes: whether to create engage's indexes first.
    """
    client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(
        url, w="majority", journal=True
    )
    with client:
        collection = client.get_default_database()["events"]
        if indexes:
            for keys, options in schema.INDEXES[schema.EVENTS]:
                collection.create_index(list(keys.items()), **options)
        count, end, start = 0, time.perf_counter() + seconds, time.perf_counter()
        while time.perf_counter() < end:
            documents = []
            for _ in range(size):
                document = json.loads(f"{load.HEAD}b-{count:012d}{load.TAIL}")
                document["_id"] = f"acme:api:{document['messageId']}"
                document["workspaceId"] = "acme"
                documents.append(document)
                count += 1
            collection.insert_many(documents, ordered=False)
        return count / (time.perf_counter() - start)


@contextlib.contextmanager
def handwritten(url: str) -> Iterator[str]:
    """Run the service of ``handwritten.py`` in one uvicorn process; yield its URL."""
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
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@contextlib.contextmanager
def engage(url: str, workers: int) -> Iterator[str]:
    """Run engage on a MongoDB server; yield its URL."""
    storage = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
    with (
        tempfile.TemporaryDirectory(prefix="engage-bench-") as folder,
        start_server(Path(folder), storage=storage, workers=workers) as server,
    ):
        yield server.url
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


def main() -> int:
    """Measure and print; return 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--workers", type=int, default=1, help="processes of engage")
    parser.add_argument(
        "--tool", choices=("wrk", "oha", "python"), default=load.tool(), help="the load generator"
    )
    parser.add_argument(
        "--kind", default=mongo.kinds()[0], help="the server: ferretdb, java, mongod or url"
    )
    parser.add_argument(
        "--only", help="the cases to measure, as connections x events, such as 32x1,8x100"
    )
    arguments = parser.parse_args()
    cases: tuple[tuple[int, ...], ...] = CASES
    if arguments.only:
        cases = tuple(tuple(map(int, one.split("x"))) for one in arguments.only.split(","))
    print(f"\nMongoDB: {arguments.kind}; load: {arguments.tool}, {arguments.seconds:g} s each\n")
    print("| what | connections | events per request | events/s | p50 ms | p99 ms | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    ceiling: dict[int, float] = {}
    for size in (100, 1000):
        for indexes in (False, True):
            with fresh(arguments.kind) as server:
                rate = bare(server.url(), size, arguments.seconds, indexes=indexes)
            if not indexes:
                ceiling[size] = rate
            name = "insert_many" + (", engage's indexes" if indexes else "")
            ratio = rate / ceiling[size]
            print(f"| {name} | 1 | {size} | {rate:,.0f} | | | {ratio:.2f} |", flush=True)
    bad = 0
    for connections, size in cases:
        first = ceiling.get(size, 0.0)
        for name in ("hand-written", "engage") if size == 1 else ("engage",):
            with fresh(arguments.kind) as server:
                url = server.url()
                running = (
                    handwritten(url) if name == "hand-written" else engage(url, arguments.workers)
                )
                with running as base:
                    prime(base)
                    for warm in (True, False):
                        result = load.run(
                            arguments.tool,
                            base + ("/v1/track" if size == 1 else "/v1/batch"),
                            KEY,
                            connections=connections,
                            size=size,
                            seconds=1 if warm else arguments.seconds,
                            name="w" if warm else "m",
                        )
                        bad += result.bad
            rate = result.requests_per_second * size
            first = first or rate
            print(
                f"| {name} | {connections} | {size} | {rate:,.0f} | {result.p50:.2f}"
                f" | {result.p99:.2f} | {rate / first:.2f} |",
                flush=True,
            )
    print(
        "\nratio: single events are compared with the hand-written service, batches with "
        "insert_many of the same size, and insert_many with engage's indexes with insert_many "
        "without them"
    )
    if bad:
        print(f"\n{bad} requests failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
