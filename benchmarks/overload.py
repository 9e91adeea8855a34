# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/overload.py``: how much a server stores when clients send more than it can.

Clients of one write key send large batches on more and more connections and ignore
``Retry-After``; a client of another workspace sends a few single events a second.

``--connections 200 --events 1000 --rate 5`` is the measure of fairness: the single events should
all be answered 200, 99 % of them within 250 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]

import log  # noqa: E402

from support import kafka, mongo  # noqa: E402
from support.overload import (  # noqa: E402
    HOSTILE_WORKSPACE,
    batch_of_tracks,
    overload,
    peak_memory,
)
from support.server_process import KEY, SQLITE, start_server  # noqa: E402


def main() -> int:
    """Print a table with one line for each number of connections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--connections", default="4,8,16,50,200", help="numbers, with commas")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--events", type=int, default=2500, help="of each batch")
    parser.add_argument("--rate", type=float, default=20.0, help="single events a second")
    parser.add_argument("--storage", choices=("sqlite", "mongo", "log"), default="sqlite")
    options = parser.parse_args()
    body = batch_of_tracks(options.events)
    best = 0.0
    columns = ["connections", "events/s", "of the best", "refused", "other: not 200"]
    columns += ["p50 ms", "p99 ms", "MiB"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for connections in map(int, options.connections.split(",")):
        with (
            tempfile.TemporaryDirectory(prefix="engage-bench-") as folder,
            _tables(options.storage) as tables,
            start_server(
                Path(folder),
                workers=options.workers,
                storage=tables,
                config_extra=HOSTILE_WORKSPACE,
            ) as server,
        ):
            result = asyncio.run(
                overload(
                    server.url,
                    KEY,
                    connections=connections,
                    body=body,
                    events=options.events,
                    seconds=options.seconds,
                    other_rate=options.rate,
                )
            )
            assert server.process is not None
            memory = max(peak_memory(pid) for pid in server.workers()) >> 20
        best = max(best, result.goodput)
        refused = sum(count for status, count in result.hostile.items() if status != 200)
        failed = sum(count for status, count in result.other.items() if status != 200)
        print(
            f"| {connections} | {result.goodput:,.0f} | {result.goodput / best:.2f} | {refused} "
            f"| {failed} | {result.latency(0.5) * 1000:.0f} | {result.latency(0.99) * 1000:.0f} "
            f"| {memory} |",
            flush=True,
        )
    return 0


@contextlib.contextmanager
def _tables(storage: str) -> Iterator[str]:
    """Yield the tables of a config with this storage, or with a log before SQLite."""
    if storage == "sqlite":
        yield SQLITE
    elif storage == "mongo":
        url = mongo.shared(mongo.kinds()[0]).url()
        yield f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
    else:
        with kafka.own() as nodes:
            yield SQLITE + log.log_section(nodes)


if __name__ == "__main__":
    sys.exit(main())
