# SPDX-License-Identifier: Apache-2.0
"""``make bench``: measures how fast engage is on this machine, compared with plain Tornado.

Both answer the same requests of the same load generator (see ``load.py``). Everything runs on one
machine and shares its cores. Only the ratios are comparable with other machines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import load  # noqa: E402

from support.server_process import KEY, SQLITE, start_server  # noqa: E402

#: Number of connections and of events per request.
CASES = ((1, 1), (32, 1), (256, 1), (8, 100), (32, 100))


@contextlib.contextmanager
def _tornado() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "bare.py")], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


@contextlib.contextmanager
def _engage(storage: str, workers: int) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="engage-bench-") as folder,
        start_server(Path(folder), storage=storage, workers=workers) as server,
    ):
        yield server.url
        server.stop()


def _machine() -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    )


def main() -> int:
    """Measure and print; return 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="number of measurements of each case; the best one is shown",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of engage")
    parser.add_argument(
        "--storage", type=Path, help="a TOML file with [storage] and its options; default: SQLite"
    )
    parser.add_argument(
        "--tool", choices=("wrk", "oha", "python"), default=load.tool(), help="the load generator"
    )
    parser.add_argument(
        "--only", help="the cases to measure, as connections x events, such as 32x1,8x100"
    )
    arguments = parser.parse_args()
    storage = arguments.storage.read_text() if arguments.storage else SQLITE
    cases = (
        [tuple(map(int, case.split("x"))) for case in arguments.only.split(",")]
        if arguments.only
        else CASES
    )
    print(
        f"load: {arguments.tool}, {arguments.seconds:g} s each, the best of {arguments.rounds};"
        f" {_machine()}"
    )
    print(
        f"engage: {arguments.workers} worker(s), {storage.split()[3]}; events of {_size()} bytes\n"
    )
    print(
        "| server | connections | events per request | requests/s | events/s | p50 ms | p99 ms "
        "| ratio to Tornado |"
    )
    print("|---|---|---|---|---|---|---|---|")
    bad = 0
    bare: dict[tuple[int, ...], float] = {}
    best: dict[tuple[str, int, int], load.Result] = {}
    for number in range(arguments.rounds):
        # Every case once per round: a few seconds of load by others spoil only one round of a case.
        for connections, size in cases:
            for name in ("Tornado 204", "engage"):
                server = _tornado() if name != "engage" else _engage(storage, arguments.workers)
                path = "/v1/track" if size == 1 else "/v1/batch"
                with server as url:
                    for warm in (True, False):
                        result = load.run(
                            arguments.tool,
                            url + path,
                            KEY,
                            connections=connections,
                            size=size,
                            seconds=1 if warm else arguments.seconds,
                            name="w" if warm else f"m{number}",
                        )
                        bad += result.bad
                found = best.setdefault((name, connections, size), result)
                if result.requests_per_second > found.requests_per_second:
                    best[name, connections, size] = result
    for (name, connections, size), result in sorted(
        best.items(), key=lambda item: (item[0][2], item[0][1], item[0][0] == "engage")
    ):
        rate = result.requests_per_second
        ratio = rate / bare.setdefault((connections, size), rate)
        print(
            f"| {name} | {connections} | {size} | {rate:,.0f} | {rate * size:,.0f}"
            f" | {result.p50:.2f} | {result.p99:.2f} | {ratio:.2f} |",
            flush=True,
        )
    if bad:
        print(f"\n{bad} requests failed")
    return 1 if bad else 0


def _size() -> int:
    return len(load.HEAD + load.TAIL) + 15


if __name__ == "__main__":
    sys.exit(main())
