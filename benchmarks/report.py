# SPDX-License-Identifier: Apache-2.0
"""The output of the benchmarks: tables, goals, and the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import usage


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure and its goal."""

    name: str
    measured: float
    wanted: float
    #: Whether more is better.
    at_least: bool = False
    #: A format specification.
    form: str = ".2f"
    unit: str = ""

    @property
    def reached(self) -> bool:
        """Whether the figure is as good as it should be."""
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted

    def row(self) -> list[str]:
        """Return the cells of a table."""
        unit = f" {self.unit}" if self.unit else ""
        return [
            self.name,
            f"{'≥' if self.at_least else '≤'} {self.wanted:g}{unit}",
            f"{self.measured:{self.form}}{unit}",
            "reached" if self.reached else "**not reached**",
        ]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(end="", flush=True)


def print_goals(goals: Sequence[Goal]) -> None:
    """Print goals beside the measurements."""
    if goals:
        print_table(["goal", "wanted", "measured", ""], [goal.row() for goal in goals])


def print_growth(growths: Sequence[usage.Growth]) -> None:
    """Print the memory of processes, and how it grew."""
    print_table(
        ["process", "RSS MiB, start", "RSS MiB, end", "growth", "PSS MiB, start", "PSS MiB, end"],
        [
            [
                one.name,
                f"{one.start.rss / 2**20:.1f}",
                f"{one.end.rss / 2**20:.1f}",
                f"{one.percent:+.1f} %",
                f"{one.start.pss / 2**20:.1f}",
                f"{one.end.pss / 2**20:.1f}",
            ]
            for one in growths
        ],
    )


def growth_goals(growths: Sequence[usage.Growth]) -> list[Goal]:
    """Return the goals for the memory of processes under load."""
    return [
        Goal(f"growth of the {one.name.split()[0]}'s memory", one.percent, 5, form=".1f", unit="%")
        for one in growths
    ]


def machine() -> str:
    """Return the processor, the number of cores, the system, and the load before the benchmark."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()}, Python"
        f" {platform.python_version()}; load average before: {os.getloadavg()[0]:.2f}"
    )


def medians(samples: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the median of each process of each role over several measurements."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {
        name: [
            statistics.median(value for value in values if value is not None)
            for values in itertools.zip_longest(*(sample.get(name, ()) for sample in samples))
        ]
        for name in names
    }


def cpu_cells(cpu: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the cells of :data:`CPU_COLUMNS`: microseconds of each process, and their sum."""
    rest = [value for role in cpu for value in cpu[role] if role not in ("worker", "writer")]
    everything = sum(value for values in cpu.values() for value in values)
    cells = [" + ".join(f"{value:.0f}" for value in cpu.get(role, ())) for role in _NAMED]
    return [*cells, f"{sum(rest):.1f}", f"{everything:.0f}"]


_NAMED = ("worker", "writer")
#: The columns of :func:`cpu_cells`.
CPU_COLUMNS = ("CPU µs: each worker", "each SQLite writer", "supervisor, console, others", "all")
