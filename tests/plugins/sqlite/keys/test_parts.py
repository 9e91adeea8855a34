# SPDX-License-Identifier: Apache-2.0
"""The table of keys has parts for successive events, and old parts are deleted."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from engage.api import Status, StorageUnavailable
from engage.testing.factories import TIME
from engage_plugins.sqlite.engine import Engine
from support.sqlite import expire, find, key, settings
from support.sqlite_keys import (
    are_duplicates,
    backup,
    finish,
    forget,
    merged,
    opened,
    parts_of,
    restore,
    stored,
    table,
    write,
    write_all,
)

pytestmark = pytest.mark.usefixtures("small_merges")


def test_each_part_has_the_keys_of_successive_events(engine: Engine, path: Path) -> None:
    """So a merge changes a few pages only, however many events are stored."""
    write_all(engine, range(2000), 10)
    finish(engine)
    found = parts_of(path)
    assert [one for part in found.values() for one in part] == list(range(1, merged(path) + 1))
    assert all(part == numbers[0] for part, numbers in found.items())
    sizes = [len(numbers) for numbers in found.values()]
    # A merge is not divided, so a part may have fewer than it has room for.
    assert all(max(64, sum(sizes[:n]) // 4) - 40 < size for n, size in enumerate(sizes[:-1]))
    assert all(size <= max(64, sum(sizes[:n]) // 4) for n, size in enumerate(sizes))
    assert 8 < len(sizes) < 20
    forget(engine)
    write_all(engine, range(2000, 2600), 10)
    finish(engine)
    assert are_duplicates(engine, range(0, 2600, 50))
    found = parts_of(path)
    assert [one for part in found.values() for one in part] == list(range(1, merged(path) + 1))


def test_a_key_may_be_in_several_parts(engine: Engine, path: Path) -> None:
    """Its event was deleted and stored again; the newest number counts."""
    for turn in range(4):
        write_all(engine, [0])
        write_all(engine, range(1 + 100 * turn, 101 + 100 * turn))
        finish(engine)
        for _ in range(2):
            assert are_duplicates(engine, [0])
            found = find(engine, "0")
            assert found is not None
            reader = Engine(settings(path))
            reader.open(False, False)
            assert find(reader, "0") == found
            reader.close()
            forget(engine)
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("DELETE FROM events WHERE message_id = '0'")
        assert find(engine, "0") is None
    with contextlib.closing(sqlite3.connect(path)) as db:
        query = "SELECT count(DISTINCT part) FROM event_keys WHERE key = ?"
        assert db.execute(query, (key("0"),)).fetchone()[0] > 1


def test_the_keys_of_deleted_events_are_deleted_later(engine: Engine, path: Path) -> None:
    write_all(engine, range(300))
    finish(engine)
    assert len(table(path)) == merged(path)
    assert expire(engine, TIME + 250, 1000) == 250
    assert len(table(path)) == merged(path)
    write_all(engine, range(300, 330))
    finish(engine)
    # Of the part that has event 251, too, they stay.
    (least,) = {min(table(path).values())}
    assert 251 - 64 * 2 < least <= 251
    assert least in parts_of(path)
    assert are_duplicates(engine, range(250, 330))
    assert write(engine, 249) == [Status.STORED]


def test_a_part_is_deleted_even_if_the_writer_is_replaced_meanwhile(path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(600))
    finish(engine)
    before = parts_of(path)
    assert expire(engine, TIME + 500, 1000) == 500
    write_all(engine, range(600, 640))
    for closes in (True, False):
        assert engine.keys.merge_due_alone()
        engine.work()
        if closes:
            engine.close()
        engine.drop()
        engine = opened(path)
        assert are_duplicates(engine, range(500, 640))
    write_all(engine, range(640, 700))
    finish(engine)
    after = parts_of(path)
    assert min(after) > 100
    assert set(before) - set(after) == {part for part in before if part < min(after)}
    assert are_duplicates(engine, range(500, 700))
    assert write(engine, 3) == [Status.STORED]
    engine.close()


def test_a_part_is_forgotten_when_its_transaction_is_committed(
    engine: Engine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup from before a deletion looks like the store if nothing was committed since."""
    write_all(engine, range(400))
    number = 400
    while not engine.keys.forget_due(5):
        write_all(engine, [number])
        number += 1
    finish(engine)
    assert len(engine.keys.parts) > 2
    backup(path, tmp_path / "same.db")
    assert expire(engine, TIME + 300, 1000) == 300

    def merge_due(*_: Any) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(engine.keys, "merge_due", merge_due)
        with pytest.raises(StorageUnavailable):
            write(engine, *range(5000, 5005))
    restore(path, tmp_path / "same.db")
    assert are_duplicates(engine, range(300))
    assert len(stored(path)) == number


def test_a_part_is_not_begun_twice(path: Path) -> None:
    """A crash in the first merge of a part, and a gap in the numbers as large as a part."""
    engine = opened(path)
    write_all(engine, range(610))
    finish(engine)
    first = merged(path) + 1
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        (key,) = db.execute("SELECT key FROM events WHERE seq = ?", (first,)).fetchone()
        db.execute("INSERT INTO event_keys VALUES (?, ?, ?)", (first, key, first))
        db.execute("UPDATE sqlite_sequence SET seq = seq + 1000 WHERE name = 'events'")
    engine.drop()
    engine = opened(path)
    write_all(engine, range(1000, 1100))
    finish(engine)
    assert len(engine.keys.parts) == len(parts_of(path))
    engine.drop()
    engine = opened(path)
    assert are_duplicates(engine, [*range(610), *range(1000, 1100)])
    engine.close()
