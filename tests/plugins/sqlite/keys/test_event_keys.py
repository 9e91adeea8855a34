# SPDX-License-Identifier: Apache-2.0
"""No event is stored twice, and none is taken for a duplicate that is not stored.

The keys of the newest events are in memory and merged into a table. These tests call the engine
itself, with merges after a few events.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engage.api import Status
from engage.store.events import EVENTS
from engage.store.tables import Get, Steps
from engage.testing import event
from engage.testing.factories import TIME
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.steps import Run, execute
from support import sqlite
from support.sqlite import expire, find, key, settings
from support.sqlite_keys import (
    are_duplicates,
    finish,
    forget,
    merged,
    numbers,
    opened,
    stored,
    table,
    write,
    write_all,
)

pytestmark = pytest.mark.usefixtures("small_merges")


@pytest.mark.parametrize("size", [1, 7, 50])
def test_every_event_is_stored_once(engine: Engine, path: Path, size: int) -> None:
    """Whether its key is in memory, on its way, or in the table; with and without filters."""
    write_all(engine, range(200), size)
    assert 0 < merged(path) < 200
    assert engine.keys.parts.are_covered
    for turn in range(3):
        if turn == 1:
            forget(engine)
            assert are_duplicates(engine, [5])
            assert not engine.keys.parts.are_covered
        assert are_duplicates(engine, range(200))
        assert write(engine, 3, 200, 3, 199)[::2] == [Status.DUPLICATE] * 2
        finish(engine)
        assert engine.keys.parts.are_covered
    assert sorted(stored(path), key=int) == [str(number) for number in range(201)]


def test_the_table_has_the_keys_of_the_merged_events(engine: Engine, path: Path) -> None:
    write_all(engine, range(500), 3)
    finish(engine)
    expected = {key: seq for key, seq in numbers(path).items() if seq <= merged(path)}
    assert table(path) == expected
    assert len(expected) >= 480


def test_a_merge_keeps_up_with_the_writes(engine: Engine, path: Path) -> None:
    """A merge of 20 keys, or of 40 when many are stored, ends before the next one is due."""
    for number in range(600):
        write(engine, number)
        assert number + 1 - merged(path) <= 2 * (20 if number < 500 else 40)


def test_after_a_crash_the_newest_keys_are_read_again(path: Path) -> None:
    for end in range(30, 300, 7):
        engine = opened(path)
        write_all(engine, range(max(0, end - 7) if end > 30 else 0, end), 4)
        engine.drop()  # without close: nothing is saved
    engine = opened(path)
    assert are_duplicates(engine, range(end))
    engine.close()


def test_the_body_of_a_duplicate_is_the_stored_one(engine: Engine) -> None:
    write_all(engine, range(100))
    for number in (0, 50, 99):
        (outcome,) = sqlite.write(engine, event(str(number), properties={"new": 1}))
        assert outcome.status is Status.DUPLICATE
        assert outcome.stored is not None
        assert b'"new"' not in outcome.stored


def test_an_event_is_found_wherever_its_key_is(engine: Engine, path: Path) -> None:
    write_all(engine, range(100), 3)
    reader = Engine(settings(path))
    reader.open(False, False)
    for one in (engine, reader):
        for number in range(100):
            found = find(one, str(number))
            assert found is not None
            assert found.message_id == str(number)
        assert find(one, "none") is None
    reader.close()


def test_a_deleted_event_can_be_stored_again_at_every_step(engine: Engine, path: Path) -> None:
    rng = random.Random(5)
    alive: list[int] = []
    for number in range(400):
        write(engine, number)
        alive.append(number)
        if rng.random() < 0.3 and len(alive) > 5:
            count = rng.randrange(1, 5)
            assert expire(engine, TIME + number, count, force=True) == count
            gone, alive = alive[:count], alive[count:]
            again = rng.choice(gone)
            # It is the oldest event now, and the next to be deleted.
            assert write(engine, again) == [Status.STORED]
            assert write(engine, again) == [Status.DUPLICATE]
            alive.insert(0, again)
        if rng.random() < 0.1:
            finish(engine)
        if rng.random() < 0.02:
            engine.drop()
            engine = opened(path)
        assert are_duplicates(engine, rng.sample(alive, min(3, len(alive))))
    assert sorted(map(int, stored(path))) == sorted(alive)
    engine.close()


def one(step: Get) -> Steps[Any]:
    return (yield step)


def test_a_row_with_another_key_is_not_a_duplicate(engine: Engine) -> None:
    write_all(engine, range(10))
    met = Run()
    met.events = {key("2"): 3, key("10"): 3}
    wanted = [("acme", "api", name) for name in ("2", "10")]
    assert execute(engine.connection(), one(Get(EVENTS, wanted)), engine.context, met).keys() == {
        wanted[0]
    }
