# SPDX-License-Identifier: Apache-2.0
"""A power cut, also one after errors of the disk, breaks no promise about a store.

``pytest tests/plugins/sqlite/test_power_cuts.py --rounds 60`` builds 60 states of all scenes, with
and without a reader; otherwise there are few scenes and five states of each. Small limits make all
stores merge their keys and copy their log often: see ``support/small_store``.
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
from engage_plugins.sqlite import backup
from engage_plugins.sqlite.store import SqliteStorage
from support.power_cuts import BACKUP, Scene, is_old, sample
from support.recorded_disk import Call, Fault, Promised, Recorder, states
from support.sqlite import make

TESTS = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(0),
    pytest.mark.skipif(sys.platform != "linux", reason="records a disk as Linux treats it"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler (Debian: gcc libc6-dev)"),
]

SYNC, WRITE, LOG = "database sync", "database write", "log sync"
SCENES = {
    "no error": Scene([], 0),
    "sync": Scene([Fault(SYNC)]),
    "three syncs": Scene([Fault(SYNC, times=3)], 3),
    "every tenth sync": Scene([Fault(SYNC, every=10, times=99)], 2),
    "sync of the thread": Scene([Fault(SYNC, "other")]),
    "sync of the rest": Scene([Fault(SYNC, skip=1)]),
    "write of the thread": Scene([Fault(WRITE, "other", skip=9)]),
    "late write": Scene([Fault(WRITE, skip=110)]),
    "write, then sync": Scene([Fault(WRITE, skip=9), Fault(SYNC, skip=1)], 2),
    "killed at a sync": Scene([Fault(SYNC, kill=1)]),
    "killed after a sync": Scene([Fault(SYNC, kill=6)]),
    "killed at a write": Scene([Fault(WRITE, skip=9, kill=1)]),
    "killed and closed": Scene([Fault(SYNC, kill=1)], restart=False),
    "log": Scene([Fault(LOG, skip=5, every=7, times=3), Fault("log write", skip=99)], 4),
    "sync at the end": Scene([Fault(SYNC)], at_end=True),
    "write at the end": Scene([Fault(WRITE, skip=2)], at_end=True),
    "retention": Scene([], 0, work="retention"),
    "retention, sync": Scene([Fault(SYNC)], work="retention"),
    "retention, killed": Scene([Fault(LOG, kill=1)], work="retention"),
    "backup": Scene([], 0, work="backup"),
    "backup, sync": Scene([Fault(SYNC)], work="backup"),
    "migration": Scene([], 0, work="migration", events=12),
    "migration, log": Scene([Fault(LOG)], work="migration", events=12),
    "migration, killed": Scene([Fault(LOG, kill=1)], work="migration", events=12),
}
FEW = (
    *("no error", "sync", "write of the thread", "killed at a sync", "log", "sync at the end"),
    *("retention", "backup", "migration"),
)


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


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        ("no error", "store without syncs"),
        ("backup", "backup without syncs"),
        ("migration", "migration in parts"),
    ],
)
async def test_a_flaw_is_found(tmp_path: Path, name: str, flaw: str) -> None:
    assert await failures(tmp_path / "0", SCENES[name], 24, FLAW=flaw)


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
    sent = {name for call in calls if call.call == "a" for name in call.data.decode().split()}
    for where, files, promised in states(calls, count, folder.name):
        store = make(state(folder, files))
        try:
            wrong = judge_backups(folder / "state", promised)
            await store.open(create=True)
            path, expires = folder / "state/engage.db", scene.work == "retention"
            wrong = wrong or await judge(store, path, promised, sent, expires)
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


def judge_backups(folder: Path, promised: Promised) -> str:
    """Return what is wrong with the backups."""
    files = [path for path in folder.glob(f"{BACKUP}*") if path.suffix != backup.UNFINISHED]
    if lost := promised.backups.keys() - {one.name for one in files}:
        return f"lost backups: {lost}"
    for file in files:
        found = backup.read(file)
        if (damage := integrity(file)) != ["ok"]:
            return f"damaged backup: {damage}"
        with contextlib.closing(sqlite3.connect(file)) as db:
            there = {name for (name,) in db.execute("SELECT message_id FROM events")}
        if len(there) != found.events or promised.backups.get(file.name, set()) - there:
            return f"{file.name} misses events"
    return ""


async def judge(
    store: SqliteStorage, path: Path, promised: Promised, sent: set[str], expires: bool
) -> str:
    """Send all events again, and return what is wrong."""
    there = set(await ids(store, limit=1000))
    if (damage := integrity(path)) != ["ok"]:
        return f"damaged: {damage}"
    if back := promised.expired & there:
        return f"{len(back)} of {len(promised.expired)} expired events are there again"
    lost = promised.acknowledged - there
    if expires:
        lost = {name for name in lost if not is_old(name)}
    if lost:
        return f"{len(lost)} of {len(promised.acknowledged)} acknowledged events are lost"
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
