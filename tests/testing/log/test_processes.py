# SPDX-License-Identifier: Apache-2.0
"""The suite for logs finds flaws that only several processes show; the log is that of the docs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.testing import LogConformance

EXAMPLE = Path(__file__).resolve().parents[2] / "example_log"

GOOD = """
import engage_tape
engage_register_log = engage_tape.engage_register_log
"""

#: Python's hash of bytes is different in each process.
HASHES_DIFFERENTLY = """
import types
import engage_tape
engage_tape.zlib = types.SimpleNamespace(crc32=hash)
engage_register_log = engage_tape.engage_register_log
"""

ANSWERS_EARLY = """
import asyncio
import engage_tape
from engage import api

class Early(engage_tape.TapeLog):
    later = set()

    async def append(self, records):
        self.later.add(asyncio.ensure_future(self.write(records)))
        await asyncio.sleep(0.001)
        return [api.Outcome(api.Status.STORED)] * len(records)

    async def write(self, records):
        await asyncio.sleep(0.1)
        await super().append(records)

def engage_register_log(register):
    register("early", Early, {})
"""

ONE_PARTITION = "test_all_processes_append_a_key_to_one_partition"
KILLED = "test_a_killed_process_loses_no_acknowledged_record"


class Suite(LogConformance):
    """The suite on a module that a test writes."""

    plugin = "flawed_tape"

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"path": str(tmp_path / "events.tape")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "name", "flawed"),
    [
        (GOOD, ONE_PARTITION, False),
        (GOOD, KILLED, False),
        (HASHES_DIFFERENTLY, ONE_PARTITION, True),
        (ANSWERS_EARLY, KILLED, True),
    ],
    ids=["one partition", "killed", "hashes differently", "answers early"],
)
def test_the_suite_finds_a_flaw_of_several_processes(
    source: str, name: str, flawed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "flawed_tape.py").write_text(source)
    for path in (EXAMPLE, modules):
        monkeypatch.syspath_prepend(path)
    for module in ("flawed_tape", "engage_tape"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    test = getattr(Suite(), name)
    try:
        if flawed:
            with pytest.raises(AssertionError):
                test(tmp_path)
        else:
            test(tmp_path)
    finally:
        for module in ("flawed_tape", "engage_tape"):
            sys.modules.pop(module, None)
