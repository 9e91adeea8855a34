# SPDX-License-Identifier: Apache-2.0
"""Raw requests of all kinds are answered, logged and counted exactly as they were before.

After a change that is meant to change an answer: ``ENGAGE_RECORD=1 python -m pytest
tests/contract/test_corpus.py``, then read the difference of the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.http_corpus import GROUPS
from support.http_playing import play

GOLDEN = Path(__file__).parents[1] / "data" / "http_corpus.json"


def _text(recorded: dict[str, dict[str, object]]) -> str:
    """Return the content of the file: a line for each request."""
    groups = []
    for group, cases in recorded.items():
        lines = [f"{json.dumps(case)}: {json.dumps(cases[case])}" for case in cases]
        groups.append(f"{json.dumps(group)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(groups) + "\n}\n"


@pytest.mark.parametrize("name", GROUPS)
async def test_requests_are_answered_as_before(tmp_path: Path, name: str) -> None:
    happened = json.loads(json.dumps(await play(tmp_path, GROUPS[name])))
    recorded = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}
    if os.environ.get("ENGAGE_RECORD"):
        recorded[name] = happened
        GOLDEN.write_text(_text(recorded), "utf-8")
    assert list(happened) == list(recorded[name])
    for case, outcome in happened.items():
        assert {case: outcome} == {case: recorded[name][case]}
