# SPDX-License-Identifier: Apache-2.0
"""What a closed store has saved: the keys in memory, and the filters."""

from __future__ import annotations

from pathlib import Path

import pytest

from engage.api import Status
from engage.testing import event
from engage.testing.factories import TIME
from engage_plugins.sqlite.keys import merge, parts
from engage_plugins.sqlite.keys.saved import read
from support import sqlite
from support.sqlite import expire
from support.sqlite_keys import (
    are_duplicates,
    backup,
    finish,
    merged,
    numbers,
    opened,
    restore,
    table,
    write,
    write_all,
)

pytestmark = pytest.mark.usefixtures("small_merges")


def saved(path: Path) -> Path:
    return path.with_name("engage.db-keys")


def closed(path: Path) -> None:
    """Make a store with a saved filter."""
    engine = opened(path)
    write_all(engine, range(150))
    finish(engine)
    engine.close()


def test_what_is_in_memory_is_saved_when_the_store_is_closed(path: Path) -> None:
    closed(path)
    assert saved(path).stat().st_mode & 0o777 == 0o600
    found = read(str(saved(path)))
    assert found is not None
    (keys, *_) = found[1]
    expected = [key for key, seq in sorted(numbers(path).items(), key=lambda one: one[1])]
    assert keys == b"".join(expected[merged(path) :])
    assert keys
    engine = opened(path)
    assert engine.keys.parts.are_covered
    assert are_duplicates(engine, range(150))
    write_all(engine, range(150, 400))
    engine.drop()
    # Killed: what was saved is older.
    engine = opened(path)
    assert not engine.keys.parts.are_covered
    assert are_duplicates(engine, range(400))
    engine.close()


def test_keys_are_saved_in_the_order_of_their_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the key of a deleted event that was stored again while it was in memory.

    The next writer freezes them in this order, and everything up to the last number of what it
    froze counts as merged.
    """
    monkeypatch.setattr(merge, "BACK_OFF", (3600.0, 3600.0))
    engine = opened(path)
    write_all(engine, range(19), 1)
    write_all(engine, range(19, 24))
    engine.keys.merger.failed()
    write_all(engine, range(24, 39), 15)
    sqlite.write(engine, event("39", at=-1000))
    assert expire(engine, TIME - 500, 1, force=True) == 1
    write_all(engine, range(40, 42))
    assert write(engine, 39) == [Status.STORED]
    engine.close()
    engine = opened(path)
    finish(engine)
    found = table(path)
    assert all(found.get(key) == seq for key, seq in numbers(path).items() if seq <= merged(path))
    engine.drop()
    engine = opened(path)
    assert are_duplicates(engine, [*range(39), 40, 41, 39])
    engine.close()


def test_a_saved_file_does_not_fit_another_content(path: Path, tmp_path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(50))
    backup(path, tmp_path / "before.db")
    write_all(engine, range(50, 150))
    finish(engine)
    engine.close()
    restore(path, tmp_path / "before.db")
    engine = opened(path)
    assert not engine.keys.parts.are_covered
    assert are_duplicates(engine, range(50))
    assert write(engine, 149) == [Status.STORED]
    engine.close()


@pytest.mark.parametrize("what", ["cut", "changed", "empty", "foreign", "folder", "version"])
def test_a_saved_file_that_does_not_fit_is_not_used(
    path: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(path)
    content = saved(path).read_bytes()
    if what == "cut":
        saved(path).write_bytes(content[:-1])
    elif what == "changed":
        saved(path).write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    elif what == "empty":
        saved(path).write_bytes(b"")
    elif what == "foreign":
        (tmp_path / "other").mkdir()
        closed(tmp_path / "other/engage.db")
        saved(tmp_path / "other/engage.db").replace(saved(path))
    elif what == "folder":
        saved(path).unlink()
        saved(path).mkdir()
    else:
        monkeypatch.setattr(parts, "VERSION", "0")
    engine = opened(path)
    assert not engine.keys.parts.are_covered
    assert are_duplicates(engine, range(150))
    engine.close()
