# SPDX-License-Identifier: Apache-2.0
"""``make bench``: measures how fast engage is on this machine, compared with plain Tornado.

All servers answer the same requests of the same load generator (see ``load.py``). Everything runs
on one machine and shares its cores. Only the ratios are comparable with other machines: each is
the rate divided by that of plain Tornado on 32 connections in the same round. CPU time is that of
the server's processes per request, and for batches per event.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import load
import servers
import usage
from load import CASES, Case
from report import CPU_COLUMNS, Goal, cpu_cells, machine, medians, print_goals, print_table

from support.server_process import KEY, SQLITE

#: The case of plain Tornado with which all rates are compared.
BASE = Case(32, 1)

#: Number of workers for which there are goals.
WORKERS = 2
#: Case → the rate as a ratio to plain Tornado.
RATIOS = {Case(1, 1): 0.30, Case(32, 1): 1.7, Case(256, 1): 2.4, Case(32, 100): 0.068}
#: Case → role → microseconds of CPU time of all processes of the role, per request or event.
CPU: Mapping[Case, Mapping[str, float]] = {
    Case(256, 1): {"worker": 80, "writer": 20},
    Case(32, 100): {"worker": 17, "writer": 17},
    Case(1, 1): {"all": 400},
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement."""

    result: load.Result
    #: Role → microseconds of CPU time of each process, per request or event.
    cpu: Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Row:
    """The medians of a case on one server."""

    rate: float
    p50: float
    p99: float
    ratio: float
    cpu: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, samples: Sequence[Sample], bases: Sequence[float]) -> Row:
        """Return the medians.

        :param samples: one of each round.
        :param bases: the rate of plain Tornado in each round.
        """
        rates = [sample.result.requests_per_second for sample in samples]
        return cls(
            statistics.median(rates),
            statistics.median(sample.result.p50 for sample in samples),
            statistics.median(sample.result.p99 for sample in samples),
            statistics.median(rate / base for rate, base in zip(rates, bases, strict=True)),
            medians([sample.cpu for sample in samples]),
        )

    def cells(self, name: str, case: Case) -> list[str]:
        """Return the cells of a table."""
        return [
            *(name, str(case.connections), str(case.size)),
            *(f"{self.rate:,.0f}", f"{self.rate * case.size:,.0f}"),
            *(f"{self.p50:.2f}", f"{self.p99:.2f}", f"{self.ratio:.3f}"),
            *cpu_cells(self.cpu),
        ]


@dataclasses.dataclass(frozen=True)
class Load:
    """How to measure."""

    #: A load generator; see :func:`load.tool`.
    tool: str
    #: Seconds of one measurement.
    seconds: float

    def measure(self, running: servers.Running, case: Case) -> Sample:
        """Measure a case on a server that runs, after a second of the same load."""
        # The store may have the events of an earlier measurement.
        name = secrets.token_hex(4)
        case.run(self.tool, running.url, KEY, seconds=min(1.0, self.seconds), name=f"w{name}")
        with usage.Meter(running.roles) as meter:
            result = case.run(self.tool, running.url, KEY, seconds=self.seconds, name=name)
        return Sample(result, meter.per(result.requests * case.size))


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 1) -> None:
    """Add the arguments that the benchmarks of one server share.

    :param rounds: the default number of rounds.
    """
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="measurements of each case; the medians are shown",
    )
    parser.add_argument(
        "--tool", choices=("wrk", "oha", "python"), default=load.tool(), help="the load generator"
    )


def print_head(arguments: argparse.Namespace, *what: str) -> None:
    """Print a description of the figures.

    :param arguments: those of :func:`add_arguments`.
    """
    measured = f"{arguments.tool}, {arguments.seconds:g} s each, medians of {arguments.rounds}"
    size = f"events of {load.EVENT_BYTES} bytes"
    print("; ".join([f"load: {measured}", size, *what, machine()]), flush=True)
    if arguments.tool == "python":
        print(
            "install wrk for comparable figures: the load generator in Python needs more CPU time"
        )


def goals(rows: Mapping[tuple[int, Case], Row]) -> list[Goal]:
    """Return the goals for the measurements with two workers.

    :param rows: (workers, case) → medians.
    """
    found = []
    for case, ratio in RATIOS.items():
        if row := rows.get((WORKERS, case)):
            name = f"{case.name}: ratio to Tornado"
            found.append(Goal(name, row.ratio, ratio, at_least=True, form=".3f"))
    for case, wanted in CPU.items():
        if row := rows.get((WORKERS, case)):
            for role, most in wanted.items():
                chosen = row.cpu if role == "all" else {role: row.cpu.get(role, [])}
                used = sum(value for values in chosen.values() for value in values)
                who = "all processes" if role == "all" else f"{role}s together"
                per = "request" if case.size == 1 else "event"
                name = f"{case.name}: CPU per {per}, {who}"
                found.append(Goal(name, used, most, form=".0f", unit="µs"))
    return found


def main() -> int:
    """Measure and print; return 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--workers", default="1,2", help="processes of engage, such as 1,2")
    parser.add_argument(
        "--storage", type=Path, help="a TOML file with [storage] and its options; default: SQLite"
    )
    parser.add_argument(
        "--only", help="the cases to measure, as connections x events, such as 32x1,8x100"
    )
    arguments = parser.parse_args()
    storage = arguments.storage.read_text() if arguments.storage else SQLITE
    cases = Case.parse(arguments.only) if arguments.only else CASES
    counts = [int(count) for count in arguments.workers.split(",")]
    print_head(arguments, storage.split()[3])
    bases: list[Sample] = []
    samples: dict[tuple[int, Case], list[Sample]] = {}
    how = Load(arguments.tool, arguments.seconds)
    for _ in range(arguments.rounds):
        # Every case once per round: load by others affects all cases of a round.
        with servers.tornado() as running:
            bases.append(how.measure(running, BASE))
        for case in cases:
            for workers in counts:
                with servers.engage(workers=workers, storage=storage) as running:
                    sample = how.measure(running, case)
                samples.setdefault((workers, case), []).append(sample)
    base_rates = [sample.result.requests_per_second for sample in bases]
    rows = {what: Row.of(found, base_rates) for what, found in samples.items()}
    columns = ["server", "connections", "events per request", "requests/s", "events/s"]
    print_table(
        [*columns, "p50 ms", "p99 ms", "ratio to Tornado", *CPU_COLUMNS],
        [
            Row.of(bases, base_rates).cells("Tornado 204", BASE),
            *(
                row.cells(f"engage, {workers} worker{'s' if workers > 1 else ''}", case)
                for (workers, case), row in rows.items()
            ),
        ],
    )
    if storage == SQLITE:
        print_goals(goals(rows))
    bad = sum(sample.result.bad for found in (bases, *samples.values()) for sample in found)
    if bad:
        print(f"\n{bad} requests failed")
    return 1 if bad else 0


if __name__ == "__main__":
    servers.run_main(main)
