# SPDX-License-Identifier: Apache-2.0
"""Transactions that fail while keys are merged: no event is lost or stored twice."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from engage.api import Status, StorageUnavailable
from engage.testing.factories import TIME
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.keys import merge
from support.exactly_once import check_exactly_once
from support.sqlite import expire, file_limit, key
from support.sqlite_keys import (
    are_duplicates,
    merged,
    numbers,
    opened,
    stored,
    table,
    write,
    write_all,
)

pytestmark = pytest.mark.usefixtures("small_merges")


class Failing:
    """A connection of which one statement fails."""

    def __init__(self, db: sqlite3.Connection, prefix: str, *, after: bool) -> None:
        self._db, self._prefix, self._after, self.failures = db, prefix, after, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *arguments: Any) -> Any:
        fails = statement.startswith(self._prefix) and self.failures > 0
        if fails and not self._after:
            self.failures -= 1
            raise sqlite3.OperationalError("failed")
        result = self._db.execute(statement, *arguments)
        if fails:
            self.failures -= 1
            raise sqlite3.OperationalError("failed")
        return result


def fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, prefix: str, *, after: bool) -> Failing:
    """Let the next statement of an engine that begins so fail."""
    failing, connection = Failing(engine.connection(), prefix, after=after), engine.connection
    monkeypatch.setattr(engine, "connection", lambda: failing if failing.failures else connection())
    return failing


class Pause:
    """The time, as the merger sees it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def end(self) -> None:
        """End the pause of the merger."""
        self.now += 3600


@pytest.fixture
def long_pause(monkeypatch: pytest.MonkeyPatch) -> Pause:
    """Merging pauses after a failure until the test ends the pause."""
    pause = Pause()
    monkeypatch.setattr(merge, "monotonic", pause)
    return pause


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("events", [5, 30, 47])
def test_a_commit_that_fails_may_have_succeeded(
    engine: Engine, path: Path, events: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(engine, range(events))
    fail(engine, monkeypatch, "COMMIT", after=after)
    with contextlib.suppress(StorageUnavailable):
        write(engine, 1000, 1001)
    assert ("1000" in stored(path)) in ({True} if after else {False, True})
    expected = Status.DUPLICATE if "1000" in stored(path) else Status.STORED
    assert write(engine, 1000, 0) == [expected, Status.DUPLICATE]
    assert stored(path).count("1000") == 1
    write_all(engine, range(events, events + 50))
    assert are_duplicates(engine, [*range(events + 50), 1000])


def test_a_write_is_made_again_without_the_step_that_failed(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, long_pause: Pause
) -> None:
    write_all(engine, range(20), 20)
    assert engine.keys.merger.waiting
    failing = fail(engine, monkeypatch, "INSERT INTO event_keys", after=False)
    while failing.failures:
        write_all(engine, [int(stored(path)[-1]) + 1])
    assert engine.keys.merger.is_pausing
    assert engine.keys.merge_due(1000) == 0
    long_pause.end()
    write_all(engine, range(200, 300))
    assert merged(path) > 100
    assert set(table(path)) >= {key for key, seq in numbers(path).items() if seq <= merged(path)}
    assert are_duplicates(engine, range(20))


def test_a_write_that_fails_leaves_no_keys(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other events get its numbers."""
    write_all(engine, range(10))
    fail(engine, monkeypatch, "INSERT INTO events", after=True)
    with pytest.raises(StorageUnavailable):
        write(engine, 10, 11)
    assert write(engine, 12, 13) == [Status.STORED] * 2
    names = {key(str(number)): number for number in range(14)}
    found = engine.keys.candidates(engine.connection(), names.keys())
    assert {names[key] for key in found} == {*range(10), 12, 13}
    assert write(engine, 10, 11) == [Status.STORED] * 2


def test_writes_stop_when_merging_fails_for_long(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, long_pause: Pause
) -> None:
    def step(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(merge.Merger, "step", step)
        number = 4 * 20
        write_all(engine, range(number), 1)
        with pytest.raises(StorageUnavailable, match="cannot be moved into the table"):
            write(engine, number)
        engine.check()
        assert expire(engine, TIME + 2, 1, force=True) == 1
    long_pause.end()
    write_all(engine, range(number, 300))
    assert merged(path) > 200
    assert are_duplicates(engine, range(1, 300))


def test_a_full_disk_in_a_merge_loses_nothing(path: Path, long_pause: Pause) -> None:
    engine = opened(path)
    acknowledged: list[int] = []
    for size in range(60_000, 400_000, 20_000):
        with file_limit(size):
            for number in range(len(acknowledged), len(acknowledged) + 40):
                try:
                    write(engine, number)
                except StorageUnavailable:
                    break
                acknowledged.append(number)
                engine.work()
        long_pause.end()
    assert len(acknowledged) > 100
    names = [int(one) for one in stored(path)]
    check_exactly_once(names, acknowledged)
    assert are_duplicates(engine, acknowledged)
    engine.close()
