# SPDX-License-Identifier: Apache-2.0
"""A few Bloom filters cover all parts of the table of keys, and are built in steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engage.testing.factories import TIME
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.keys import parts
from support.sqlite import expire, key
from support.sqlite_keys import (
    are_duplicates,
    backup,
    finish,
    opened,
    restore,
    stored,
    table,
    write_all,
)

pytestmark = pytest.mark.usefixtures("small_merges")


def filters(engine: Engine) -> list[list[int]]:
    """Return the parts that each filter covers."""
    described, blooms = engine.keys.parts.dump()
    assert len(described["filters"]) == len(blooms)
    return [parts for parts, _ in described["filters"]]


def uncovered(engine: Engine) -> int:
    """Return how many parts no filter covers."""
    return len(engine.keys.parts) - sum(map(len, filters(engine)))


def test_a_few_filters_cover_all_parts(path: Path) -> None:
    engine = opened(path)
    most = 0
    for start in range(0, 3000, 10):
        write_all(engine, range(start, start + 10), 10)
        for _ in range(8):
            engine.work()
        most = max(most, len(filters(engine)))
        assert engine.keys.parts.are_covered
        if start % 250 == 0:
            assert are_duplicates(engine, range(0, start, 50))
    assert most == 5
    for _ in range(2):
        finish(engine)
        assert len(engine.keys.parts) > 8
        assert len(filters(engine)) < 5
        # Nearly all new events are recognised without a look-up.
        keys = {key(str(number)) for number in range(3000)}
        known = {key for _, key in engine.keys.parts.that_may_contain(keys)}
        assert known >= set(table(path))
        others = {key(f"other {number}") for number in range(3000)}
        assert len(engine.keys.parts.that_may_contain(others)) < 200
        engine.close()
        engine = opened(path)
    engine.close()


def test_a_part_is_covered_as_soon_as_it_is_read(path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(1000))
    finish(engine)
    engine.drop()
    engine = opened(path)
    left = len(engine.keys.parts)
    assert uncovered(engine) == left
    seen = set()
    reopened = False
    while not engine.keys.parts.are_covered:
        engine.keys.build_filter(engine.connection())
        seen.add(uncovered(engine))
        assert are_duplicates(engine, range(0, 1000, 100))
        if len(seen) == 4 and not reopened:
            reopened = True
            # What is built is saved, and building goes on with the rest.
            engine.close()
            engine = opened(path)
            assert uncovered(engine) in seen
    assert seen == set(range(left + 1))
    engine.close()


def test_the_filter_is_built_while_keys_are_merged(path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(300))
    engine.drop()
    engine = opened(path)
    assert not engine.keys.parts.are_covered
    number = 300
    while not engine.keys.parts.are_covered:
        write_all(engine, [number])
        number += 1
        engine.work()
    assert number > 310
    assert are_duplicates(engine, range(number))
    engine.close()


def test_the_first_steps_of_a_filter_are_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use its memory for the first time."""
    monkeypatch.setattr(parts, "BUILD_KEYS", 100)
    monkeypatch.setattr(parts, "_LEAST_CAPACITY", 500)
    engine = opened(path)
    write_all(engine, range(450))
    finish(engine)
    expected = len(table(path))
    engine.drop()
    engine = opened(path)
    db, reading = engine.connection(), list[str]()
    db.set_trace_callback(reading.append)
    while not engine.keys.parts.are_covered:
        engine.keys.build_filter(db)
    steps = [int(limit[1]) for one in reading if (limit := re.search(r" LIMIT (\d+)$", one))]
    assert steps[:10] == [11] * 10
    assert set(steps[10:]) == {100}
    assert sum(steps) >= expected > 300
    assert are_duplicates(engine, range(450))
    engine.close()


def test_the_filter_follows_retention(engine: Engine, path: Path) -> None:
    """Its size depends on the number of events that are stored, not of those that ever were."""
    for start in range(0, 3000, 100):
        write_all(engine, range(start, start + 100))
        expire(engine, TIME + start, 1000, force=True)
        finish(engine)
        assert len(engine.keys.parts) < 6
    assert len(table(path)) < 400
    assert are_duplicates(engine, range(2900, 3000))


def test_a_filter_is_built_from_the_content_that_is_known(path: Path, tmp_path: Path) -> None:
    """Not from another content that is in the file for a moment."""
    engine = opened(path)
    write_all(engine, range(30))
    finish(engine)
    backup(path, tmp_path / "other.db")
    write_all(engine, range(30, 300))
    finish(engine)
    engine.drop()
    engine = opened(path)
    backup(path, tmp_path / "same.db")
    restore(path, tmp_path / "other.db")
    assert not engine.work()
    restore(path, tmp_path / "same.db")
    finish(engine)
    assert engine.keys.parts.are_covered
    assert are_duplicates(engine, range(300))
    assert len(stored(path)) == 300
    engine.close()
