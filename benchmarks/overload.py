# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/overload.py``: how much a server stores when clients send more than it can.

Clients of one write key send batches of 2500 events on more and more connections and ignore
``Retry-After``; a client of another workspace sends 20 single events a second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.overload import (
    HOSTILE_WORKSPACE,
    batch_of_tracks,
    overload,
    peak_memory,
)
from support.server_process import KEY, start_server


def main() -> int:
    """Print a table with one line for each number of connections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--connections", default="4,8,16,50,200", help="numbers, with commas")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    body = batch_of_tracks(2500)
    best = 0.0
    columns = ["connections", "events/s", "of the best", "refused", "other: not 200"]
    columns += ["p50 ms", "p99 ms", "MiB"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for connections in map(int, options.connections.split(",")):
        with (
            tempfile.TemporaryDirectory(prefix="engage-bench-") as folder,
            start_server(
                Path(folder), workers=options.workers, config_extra=HOSTILE_WORKSPACE
            ) as server,
        ):
            result = asyncio.run(
                overload(
                    server.url,
                    KEY,
                    connections=connections,
                    body=body,
                    events=2500,
                    seconds=options.seconds,
                )
            )
            assert server.process is not None
            memory = peak_memory(server.worker) >> 20
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


if __name__ == "__main__":
    sys.exit(main())
