# SPDX-License-Identifier: Apache-2.0
"""``make bench-large``: measures how the speed changes as the store grows.

It fills stores of several sizes, and measures on each of them, in turns: the cases of ``make
bench``, also while retention deletes events; how long ``serve``, ``check`` and the first line of
``export`` take. Then it sends single events on 32 connections to the largest store for many
minutes, and watches the latency and the memory of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import fill
import report
import run
import servers
import usage
from load import CASES, Case
from report import Goal

from engage.api import EventFilter
from engage.upkeep.retention import FIRST_SECONDS
from support.server_process import KEY

#: The least ratio to the empty store, for single events and for batches.
SINGLES, BATCHES = 0.8, 0.7
#: The case of the goal for the 99th percentile, and the goal in milliseconds.
STEADY = Case(32, 1)
P99 = 25.0
#: The goals for starting, in seconds, and for the first line of an export.
START, EXPORT = 2.0, 1.0
#: Bytes that a filled event needs on the disk, that a second of load may add, and that the logs of
#: SQLite need.
_EVENT_BYTES, _LOAD_BYTES, _LOG_BYTES = 1100, 12_000_000, 1_000_000_000
#: With retention, a third of the filled events stays.
_RETENTION = "[retention]\nevents_days = 1\n"


@dataclasses.dataclass
class Figures:
    """The measurements on the stores of one size."""

    #: (whether retention was on, case) → one sample of each round.
    samples: dict[tuple[bool, Case], list[run.Sample]] = dataclasses.field(default_factory=dict)
    #: Name of a step → seconds in each round.
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    #: Events that retention deleted, in each round.
    expired: list[int] = dataclasses.field(default_factory=list)
    #: How many events were in the store, at several times.
    counts: list[int] = dataclasses.field(default_factory=list)

    def note(self, step: str, seconds: float) -> None:
        """Add the time that a step took in this round."""
        self.seconds.setdefault(step, []).append(seconds)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and how."""

    how: run.Load
    workers: int
    cases: Sequence[Case]


# ---------------------------------------------------------------------------------- one store
def measure(folder: Path, options: Options, figures: Figures, *, retention: bool) -> None:
    """Measure everything on one store, once.

    :param retention: also measure the cases while retention deletes events.
    """
    _note_count(folder, figures)
    with servers.engage(folder, workers=options.workers) as running:
        _measure_cases(running, options, figures, retention=False)
        figures.note("first line of export", first_line(folder / "engage.toml"))
        _note_count(folder, figures)
    if retention:
        _measure_retention(folder, options, figures)
    # At the end, because it removes the store from the page cache.
    _measure_start(folder, options, figures)


def _measure_retention(folder: Path, options: Options, figures: Figures) -> None:
    with servers.engage(folder, workers=options.workers, config_extra=_RETENTION) as running:
        time.sleep(FIRST_SECONDS + 1)
        before, _ = _numbers(folder)
        _measure_cases(running, options, figures, retention=True)
        _note_count(folder, figures)
        figures.expired.append(_numbers(folder)[0] - before)


def _measure_start(folder: Path, options: Options, figures: Figures) -> None:
    """Measure ``check`` and ``serve``, also with a store that is not in the page cache."""
    database = folder / "engage.db"
    for where in ("", ", store not in the page cache"):
        if where:
            usage.drop_cache(database)
        if database.exists():
            figures.note(f"check{where}", _check(folder / "engage.toml"))
        if where:
            usage.drop_cache(database)
        with servers.engage(folder, workers=options.workers) as running:
            figures.note(f"serve{where}", running.started_in)


def _measure_cases(
    running: servers.Running, options: Options, figures: Figures, *, retention: bool
) -> None:
    for case in options.cases:
        sample = options.how.measure(running, case)
        figures.samples.setdefault((retention, case), []).append(sample)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "engage", *arguments]


def _check(config: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(
        _command("check", "--config", str(config)), check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin


def first_line(config: Path) -> float:
    """Return the seconds until ``engage export`` writes the first event of the last hour."""
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    command = _command("export", "events", "--config", str(config), "--since", since.isoformat())
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            took = time.perf_counter() - begin
        finally:
            process.kill()
    assert line, "no event was received in the last hour"
    return took


def _numbers(folder: Path) -> tuple[int, int]:
    """Return the numbers of the oldest and of the newest event.

    Events are numbered in the order in which they were stored, and the oldest are deleted first.
    """
    return asyncio.run(_cursors(folder / "engage.toml"))


async def _cursors(config: Path) -> tuple[int, int]:
    store = fill.open_config(config)
    await store.open(create=False)
    try:
        first = await store.scan(EventFilter(), after=None, limit=1)
        last = await store.recent(EventFilter(), limit=1)
        assert last is not None
        return int(first.cursor or 0), int(last.cursor or 0)
    finally:
        await store.close()


def _note_count(folder: Path, figures: Figures) -> None:
    first, last = _numbers(folder)
    figures.counts.append(last - first + 1 if last else 0)


# --------------------------------------------------------------------------------- all stores
@contextlib.contextmanager
def stores(sizes: Sequence[int], keep: Path | None, minutes: float) -> Iterator[dict[int, Path]]:
    """Fill a store of each size, and delete them at the end.

    :param minutes: of load, for which there must be room.
    :param keep: where the stores are kept; those that are there already are used again.
    :return: number of events → the store's folder.
    """
    with contextlib.ExitStack() as stack:
        if keep is None:
            made = tempfile.TemporaryDirectory(prefix="engage-bench-", ignore_cleanup_errors=True)
            base = Path(stack.enter_context(made))
        else:
            base = keep
        # The empty store is a new one, also in each round.
        empty = base / f"0-{secrets.token_hex(4)}"
        stack.callback(shutil.rmtree, empty, ignore_errors=True)
        found = {size: base / f"{size}" if size else empty for size in sizes}
        new = sum(size for size, folder in found.items() if not folder.exists())
        _require_space(base, new * _EVENT_BYTES + round(minutes * 60) * _LOAD_BYTES + _LOG_BYTES)
        for size, folder in found.items():
            if not folder.exists():
                fill.make_store(folder, size)
        yield found


def _require_space(base: Path, needed: int) -> None:
    """Exit if this number of bytes is not free."""
    base.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base).free
    if free < needed:
        raise SystemExit(
            f"{base}: {needed / 1e9:.0f} GB are needed and {free / 1e9:.0f} GB are free; choose "
            "another disk with --folder, or fewer events with --events"
        )


def print_cases(figures: Mapping[int, Figures], cases: Sequence[Case]) -> list[Goal]:
    """Print the rates and the CPU time, and return the goals."""
    rows, goals = [], []
    empty = next(iter(figures.values()))
    for case in cases:
        samples = empty.samples[False, case]
        # The rates of the same round are compared.
        bases = [sample.result.requests_per_second for sample in samples]
        for size, found in figures.items():
            for retention in (False, True):
                if (retention, case) not in found.samples:
                    continue
                row = run.Row.of(found.samples[retention, case], bases)
                name = f"{size:,}" + (", retention" if retention else "")
                rows.append(row.cells(name, case))
                if found is not empty:
                    wanted = SINGLES if case.size == 1 else BATCHES
                    what = f"{case.name} on {name}: ratio to the first store"
                    goals.append(Goal(what, row.ratio, wanted, at_least=True))
                if case == STEADY:
                    what = f"{case.name} on {name}: 99th percentile"
                    goals.append(Goal(what, row.p99, P99, form=".1f", unit="ms"))
    columns = ["events in the store", "connections", "events per request", "requests/s"]
    columns += ["events/s", "p50 ms", "p99 ms", "ratio to the first store", *report.CPU_COLUMNS]
    report.print_table(columns, rows)
    return goals


def print_seconds(figures: Mapping[int, Figures]) -> list[Goal]:
    """Print how long steps took, and how many events were deleted; return the goals."""
    rows, goals = [], []
    for size, found in figures.items():
        for step, seconds in found.seconds.items():
            median = statistics.median(seconds)
            rows.append([f"{size:,}", step, f"{median:.2f} s"])
            wanted = EXPORT if "export" in step else START
            goals.append(Goal(f"{step}, {size:,} events", median, wanted, unit="s"))
        if found.expired:
            count = f"{statistics.median(found.expired):,.0f}"
            rows.append([f"{size:,}", "events deleted by retention during its cases", count])
        counts = f"{min(found.counts):,} to {max(found.counts):,}"
        rows.append([f"{size:,}", "events in the store, with those of the load", counts])
    report.print_table(["events in the store", "step", "median"], rows)
    return goals


def steady(folder: Path, options: Options, minutes: float) -> tuple[list[Goal], int]:
    """Send single events for many minutes; print the latency and the memory.

    :return: the goals, and how many requests failed.
    """
    print(f"\nsingle events on {STEADY.connections} connections for {minutes:g} minutes:")
    rows: list[list[str]] = []
    worst, bad = 0.0, 0
    with (
        servers.engage(folder, workers=options.workers) as running,
        usage.MemoryLog(running.roles, every=min(5.0, minutes * 3)) as memory,
    ):
        end = time.monotonic() + minutes * 60
        while (left := end - time.monotonic()) >= 1:
            result = STEADY.run(
                options.how.tool,
                running.url,
                KEY,
                seconds=min(60.0, left),
                name=secrets.token_hex(4),
            )
            worst, bad = max(worst, result.p99), bad + result.bad
            rate = f"{result.requests_per_second:,.0f}"
            rows.append([f"{len(rows) + 1}", rate, f"{result.p50:.2f}", f"{result.p99:.2f}"])
    report.print_table(["minute", "requests/s", "p50 ms", "p99 ms"], rows)
    growth = memory.growth()
    report.print_growth(growth)
    for name in memory.incomplete:
        print(f"\n{name} started or ended during the benchmark")
    goals = [Goal("99th percentile, worst minute", worst, P99, form=".1f", unit="ms")]
    return [*goals, *report.growth_goals(growth)], bad


def main() -> int:
    """Measure and print; return 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--events", default="0,5000000,20000000", help="numbers of events in the stores"
    )
    run.add_arguments(parser)
    parser.add_argument("--workers", type=int, default=2, help="processes of engage")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="minutes of load for the memory; 0: none"
    )
    parser.add_argument(
        "--retention",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to also measure with retention; this takes 30 s more for each store",
    )
    parser.add_argument("--folder", type=Path, help="where to keep the stores, and to find them")
    parser.add_argument(
        "--only", help="the cases to measure, as connections x events, such as 32x1,8x100"
    )
    arguments = parser.parse_args()
    options = Options(
        how=run.Load(arguments.tool, arguments.seconds),
        workers=arguments.workers,
        cases=Case.parse(arguments.only) if arguments.only else CASES,
    )
    sizes = sorted({int(size) for size in arguments.events.split(",")})
    run.print_head(arguments, f"{options.workers} worker(s)")
    figures = {size: Figures() for size in sizes}
    with stores(sizes, arguments.folder, arguments.minutes) as folders:
        for _ in range(arguments.rounds):
            for size in sizes:
                if not size:
                    shutil.rmtree(folders[size])
                    fill.make_store(folders[size], size)
                # In an empty store, nothing is old enough to be deleted.
                retention = arguments.retention and size > 0
                measure(folders[size], options, figures[size], retention=retention)
        goals = [*print_cases(figures, options.cases), *print_seconds(figures)]
        bad = 0
        if arguments.minutes:
            found, bad = steady(folders[sizes[-1]], options, arguments.minutes)
            goals += found
    report.print_goals(goals)
    bad += sum(
        sample.result.bad
        for found in figures.values()
        for samples in found.samples.values()
        for sample in samples
    )
    if bad:
        print(f"\n{bad} requests failed")
    return 1 if bad else 0


if __name__ == "__main__":
    servers.run_main(main)
