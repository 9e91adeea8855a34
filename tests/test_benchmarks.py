# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of ``make bench`` run, and the requests that they measure are answered."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_benchmark_prints_a_table() -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "run.py"), "--seconds", "1"),
            *("--only", "2x1,1x100", "--tool", "python"),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    # Another status: a request failed.
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"(?m)^\| (Tornado 204|engage) \| (\d+) \| (\d+) \| ([\d,]+) ", done.stdout)
    assert [row[:3] for row in rows] == [
        ("Tornado 204", "2", "1"),
        ("engage", "2", "1"),
        ("Tornado 204", "1", "100"),
        ("engage", "1", "100"),
    ]
    assert all(int(row[3].replace(",", "")) > 0 for row in rows)
