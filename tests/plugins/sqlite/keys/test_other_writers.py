# SPDX-License-Identifier: Apache-2.0
"""Other programs write to the file: they restore a backup into it, or take it over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engage.api import Status
from engage.testing.factories import TIME
from engage_plugins.sqlite.engine import Engine
from support.sqlite import expire, settings
from support.sqlite_keys import (
    are_duplicates,
    backup,
    epoch,
    finish,
    merged,
    opened,
    restore,
    stored,
    write,
    write_all,
)

pytestmark = pytest.mark.usefixtures("small_merges")


def test_a_backup_may_be_restored_into_the_live_file(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """What the restored store does not have is new, and what it has is a duplicate."""
    for kept in (10, 35, 130):
        write_all(engine, range(kept - 10, kept))
        copy = tmp_path / f"{kept}.db"
        backup(path, copy)
        write_all(engine, range(1000, 1060))
        restore(path, copy)
        assert are_duplicates(engine, range(kept - 10, kept))
        assert write(engine, 1000, kept - 1, 1059) == [
            Status.STORED,
            Status.DUPLICATE,
            Status.STORED,
        ]
        restore(path, copy)


def test_a_backup_from_before_a_merge_may_be_restored_after_it(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """Both have the same events, but not the same table of keys."""
    write_all(engine, range(45), 45)
    backup(path, tmp_path / "before.db")
    before = merged(path)
    finish(engine)
    assert merged(path) > before
    restore(path, tmp_path / "before.db")
    assert are_duplicates(engine, range(45))
    # In the middle of a merge, too.
    restore(path, tmp_path / "before.db")
    write_all(engine, range(45, 46))
    backup(path, tmp_path / "before.db")
    for _ in range(3):
        engine.work()
    restore(path, tmp_path / "before.db")
    finish(engine)
    engine.drop()
    assert are_duplicates(engine, range(46))


def test_a_copy_may_replace_the_file(engine: Engine, path: Path, tmp_path: Path) -> None:
    write_all(engine, range(30))
    backup(path, tmp_path / "copy.db")
    write_all(engine, range(30, 60))
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", path)
    assert are_duplicates(engine, range(30))
    assert write(engine, 59) == [Status.STORED]
    assert len(stored(path)) == 31


def test_two_writers_take_turns(path: Path) -> None:
    """It is slow, but nothing is stored twice: a lock file may be deleted."""
    first, second = opened(path), opened(path)
    for number in range(200):
        assert write(first, number) == [Status.STORED]
        assert write(second, number) == [Status.DUPLICATE]
        one = (first, second)[number % 3 == 0]
        assert write(one, 1000 + number) == [Status.STORED]
        one.work()
    assert are_duplicates(first, range(200))
    assert are_duplicates(second, range(1000, 1200))
    assert len(stored(path)) == 400
    first.close()
    second.close()


def test_other_changes_do_not_need_the_store_to_be_taken_over(path: Path) -> None:
    """A command beside the server, such as one that adds a write key, costs the server nothing."""
    server, command = opened(path), Engine(settings(path))
    command.open(False, False)
    write_all(server, range(30))
    before = epoch(path)
    command.check()
    expire(command, TIME + 3, 10, force=True)
    assert write(server, 29, 1, 30) == [Status.DUPLICATE, Status.STORED, Status.STORED]
    assert epoch(path) == before
    command.close()
    server.close()
