# SPDX-License-Identifier: Apache-2.0
"""The way of one track call stays within its bounds, and architecture.md describes it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

# On a busy machine, timers add calls to every request.
pytestmark = pytest.mark.timing

ROOT = Path(__file__).resolve().parent.parent

#: Requests that are traced at most. The server's timers add calls to some of them.
REQUESTS = 100


def tracer() -> Any:
    """Return ``benchmarks/trace.py``; the standard library also has a module of this name."""
    spec = importlib.util.spec_from_file_location("engage_trace", ROOT / "benchmarks/trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented() -> list[str]:
    """Return the functions in the table of architecture.md, in their order."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    table = text.partition("## The calls of one track request")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")]
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row[3])]


def has_in_order(names: Iterable[str], called: Iterable[str]) -> bool:
    """Return whether the names occur among the calls in this order."""
    rest = iter(called)
    return all(name in rest for name in names)


def test_one_track_call_stays_within_its_bounds_and_is_as_documented() -> None:
    trace = tracer()
    names = documented()
    assert len(names) > 30
    level = trace.levels(ROOT)
    short = as_documented = False
    least = None
    with contextlib.closing(trace.requests(ROOT)) as requests:
        for calls in itertools.islice(requests, REQUESTS):
            way = trace.measure(calls, level)
            least = way if least is None else min(least, way)
            short = short or all(getattr(way, name) <= most for name, most in trace.BOUNDS.items())
            as_documented = as_documented or has_in_order(names, (call.name for call in calls))
            if short and as_documented:
                return
    assert short, f"{least} is more than {trace.BOUNDS}"
    assert as_documented, "the calls differ from the table in docs/architecture.md"
