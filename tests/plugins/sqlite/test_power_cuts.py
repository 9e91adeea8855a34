# SPDX-License-Identifier: Apache-2.0
"""No acknowledged event is lost by errors of the disk and a power cut after them.

``pytest tests/plugins/sqlite/test_power_cuts.py --rounds 60`` builds 60 states of all scenes, with
and without a reader; otherwise there are few scenes and five states of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engage.api import Status, StorageError
from engage.testing.factories import ids
from engage_plugins.sqlite.store import SqliteStorage
from support.power_cuts import Scene, sample
from support.recorded_disk import Call, Fault, Recorder, states
from support.sqlite import make

TESTS = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif(sys.platform != "linux", reason="records a disk as Linux treats it"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler (Debian: gcc libc6-dev)"),
]

SYNC, WRITE = "database sync", "database write"
SCENES = {
    "no error": Scene([], 0),
    "sync": Scene([Fault(SYNC)]),
    "three syncs": Scene([Fault(SYNC, times=3)], 3),
    "every tenth sync": Scene([Fault(SYNC, every=10, times=99)], 2),
    "sync of the thread": Scene([Fault(SYNC, "other")]),
    "sync of the writer": Scene([Fault(SYNC, "main")]),
    "write of the thread": Scene([Fault(WRITE, "other", skip=9)]),
    "write of the writer": Scene([Fault(WRITE, "main", skip=3)]),
    "write, then sync": Scene([Fault(WRITE, skip=9), Fault(SYNC, skip=1)], 2),
    "killed at a sync": Scene([Fault(SYNC, kill=1)]),
    "killed after a sync": Scene([Fault(SYNC, kill=6)]),
    "killed at a write": Scene([Fault(WRITE, skip=9, kill=1)]),
    "killed and closed": Scene([Fault(SYNC, kill=1)], restart=False),
    "log": Scene([Fault("log sync", skip=5, every=7, times=3), Fault("log write", skip=99)], 4),
    "sync at the end": Scene([Fault(SYNC)], at_end=True),
    "write at the end": Scene([Fault(WRITE, skip=2)], at_end=True),
}
FEW = ("no error", "sync", "write of the thread", "killed at a sync", "log", "sync at the end")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have all scenes in a long run only."""
    if "scene" not in metafunc.fixturenames:
        return
    cases = []
    for name, scene in SCENES.items():
        for reader in (False, True):
            few = name in FEW and reader == FEW.index(name) % 2
            if few or metafunc.config.getoption("--rounds") > 5:
                label = f"{name}{', reader' * reader}"
                cases.append(pytest.param(scene._replace(reader=reader), id=label))
    metafunc.parametrize("scene", cases)


async def test_no_state_is_damaged_or_misses_an_acknowledged_event(
    tmp_path: Path, pytestconfig: pytest.Config, scene: Scene
) -> None:
    rounds = pytestconfig.getoption("--rounds")
    wrong: list[str] = []
    for start in range(0, rounds, 40):
        wrong += await failures(tmp_path / str(start), scene, min(40, rounds - start))
    assert not wrong, f"{len(wrong)} of {rounds} states"


async def test_a_sync_that_is_left_out_is_found(tmp_path: Path) -> None:
    assert await failures(tmp_path / "0", SCENES["no error"], 20, WITHOUT_SYNC="1")


def recorded(folder: Path, scene: Scene, environment: dict[str, str]) -> list[Call]:
    folder.mkdir()
    recorder = Recorder(folder)
    path = os.pathsep.join(str(TESTS / part) for part in ("support/small_store", ""))
    environment |= {**os.environ, **recorder.environment, "PYTHONPATH": path}
    command = [sys.executable, "-m", "support.power_cuts", str(folder), json.dumps(scene)]
    subprocess.run(command, check=True, env=environment, timeout=280)
    return recorder.calls()


async def failures(folder: Path, scene: Scene, count: int, **environment: str) -> list[str]:
    """Record a scene, and return what is wrong with states of the disk."""
    calls, found = recorded(folder, scene, environment), []
    sent = {name for one in calls if one.call == "a" for name in one.data.decode().split()}
    for where, files, acknowledged in states(calls, count, folder.name):
        store = make(state(folder, files))
        try:
            await store.open(create=True)
            wrong = await judge(store, folder / "state/engage.db", acknowledged, sent)
        except (StorageError, sqlite3.Error) as error:
            wrong = f"damaged: {error}"
        finally:
            with contextlib.suppress(StorageError):
                await store.close()
        found += [f"{folder}: {where}: {wrong}"] * bool(wrong)
    print(f"{len(found)} of {count} states are wrong", *found, sep="\n")
    return found


def state(folder: Path, files: dict[str, bytes]) -> Path:
    shutil.rmtree(folder / "state", ignore_errors=True)
    (folder / "state").mkdir()
    for name, content in files.items():
        (folder / "state" / name).write_bytes(content)
    return folder / "state"


async def judge(store: SqliteStorage, path: Path, acknowledged: set[str], sent: set[str]) -> str:
    """Send all events again, and return what is wrong."""
    there = set(await ids(store, limit=1000))
    if (damage := integrity(path)) != ["ok"]:
        return f"damaged: {damage}"
    if lost := acknowledged - there:
        return f"{len(lost)} of {len(acknowledged)} acknowledged events are lost"
    names = sorted(sent | there)
    for name, outcome in zip(names, await store.write([*map(sample, names)]), strict=True):
        if outcome.status is not (Status.DUPLICATE if name in there else Status.STORED):
            return f"{name} is {outcome.status}, and was there: {name in there}"
    if Counter(await ids(store, limit=1000)) != Counter(names):
        return "not all events are there exactly once"
    damage = integrity(path)
    return "" if damage == ["ok"] else f"damaged at the end: {damage}"


def integrity(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return [str(row[0]) for row in db.execute("PRAGMA integrity_check(3)")]
