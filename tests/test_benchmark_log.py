# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ``make bench-log`` runs, and the requests that it measures are answered."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Where the events go that are measured.
SERVED = ("1 broker", "3 brokers", "SQLite")

pytestmark = [
    pytest.mark.timing,
    pytest.mark.kafka,
    pytest.mark.checkout,
    pytest.mark.timeout(300, func_only=True),
]


def rows(*arguments: str) -> list[list[str]]:
    """Run the benchmark, and return the cells of its tables."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "log.py"), "--tool", "python", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    # Another status: a request failed. Goals do not count: the machine is busy with other tests.
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"(?m)^\| (.*) \|$", done.stdout)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def positive(cell: str) -> bool:
    return float(cell.replace(",", "")) > 0


def test_appending_and_serving_are_measured() -> None:
    found = rows("--only", "serve,append", "--seconds", "0.5", "--cases", "2x1,1x100")
    serve = [row for row in found if len(row) == 9][1:]
    assert [row[:3] for row in serve] == [
        [name, *case] for case in (("2", "1"), ("1", "100")) for name in SERVED
    ]
    assert all(positive(row[4]) for row in serve)
    append = [row for row in found if len(row) == 7][1:]
    assert [row[0] for row in append] == ["3"] * 5 + ["1"] * 5
    assert all(positive(row[3]) for row in append)


def test_loading_and_a_dead_leader_are_measured() -> None:
    found = rows(
        *("--only", "load,failover", "--stores", "sqlite", "--events", "12000"),
        *("--seconds", "1"),
    )
    load = [row for row in found if len(row) == 4][1:]
    assert [row[:2] for row in load] == [["sqlite", "1"], ["sqlite", "2"]]
    (failover,) = [row for row in found if len(row) == 6][1:]
    assert positive(failover[1])
