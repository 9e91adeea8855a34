# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/backup.py``: how long a backup takes under load, and what it costs clients.

Each round makes a backup of an idle store, measures the latencies of single events at a constant
rate, and then makes a backup while these are sent. With ``--command verify``, it runs ``engage
verify`` instead.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import report
import servers
from console import measure, percentile
from fill import make_store

#: Seconds of load that are measured at once.
_SLICE = 3.0


class LogSize(threading.Thread):
    """The largest size of a store's log while a ``with`` block runs, in bytes."""

    def __init__(self, store: Path) -> None:
        super().__init__(daemon=True)
        self._log = store.with_name(store.name + "-wal")
        self._end = threading.Event()
        self.largest = 0

    def run(self) -> None:
        """Look at the file again and again."""
        while not self._end.wait(0.02):
            self.largest = max(self.largest, self._log.stat().st_size)

    def __enter__(self) -> LogSize:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()


def run(name: str, folder: Path, url: str | None, rate: int = 0) -> tuple[float, list[float]]:
    """Run a command, and return how many seconds it took, and the latencies of the load meanwhile.

    :param name: ``backup`` or ``verify``.
    :param url: of the server that gets the load; ``None``: no load.
    """
    target = folder / "backup.db"
    latencies: list[float] = []
    command = [sys.executable, "-m", "engage", name, "--config", str(folder / "engage.toml")]
    if name == "backup":
        command.append(str(target))
    begin = time.perf_counter()
    seconds = 0.0

    def wait() -> None:
        nonlocal seconds
        process.wait()
        seconds = time.perf_counter() - begin

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        waiting = threading.Thread(target=wait)
        waiting.start()
        while url is not None and waiting.is_alive():
            latencies += measure(url, rate, _SLICE)
        waiting.join()
    if process.returncode:
        raise SystemExit(f"engage {name} failed")
    target.unlink(missing_ok=True)
    return seconds, sorted(latencies)


def main() -> int:
    """Print a line for each round, and the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="in the store")
    parser.add_argument("--rate", type=int, default=1000, help="events per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--command", choices=("backup", "verify"), default="backup")
    options = parser.parse_args()
    rows: list[list[str]] = []
    ratios: list[float] = []
    during: list[float] = []
    with tempfile.TemporaryDirectory(prefix="engage-bench-") as made:
        folder = Path(made) / "store"
        make_store(folder, options.events)
        with servers.engage(folder) as server:
            for _ in range(options.rounds):
                idle, _none = run(options.command, folder, None)
                alone = measure(server.url, options.rate, _SLICE)
                with LogSize(folder / "engage.db") as log:
                    loaded, latencies = run(options.command, folder, server.url, options.rate)
                ratios.append(loaded / idle)
                during.append(percentile(latencies, 99))
                cells = (idle, loaded, percentile(alone, 99), during[-1])
                rows.append([*(f"{cell:.1f}" for cell in cells), f"{log.largest >> 20}"])
    report.print_table(
        ["idle s", "under load s", "p99 without ms", "p99 during it ms", "largest log MiB"], rows
    )
    goals = [report.Goal("p99 during it", statistics.median(during), 250, form=".0f", unit="ms")]
    if options.command == "backup":
        goals.append(
            report.Goal("time under load, compared with idle", statistics.median(ratios), 2)
        )
    report.print_goals(goals)
    return 0


if __name__ == "__main__":
    servers.run_main(main)
