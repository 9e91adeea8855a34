# SPDX-License-Identifier: Apache-2.0
"""The version of the tables: a made-up version 2, and stores of version 1.

``test_newer_version.py`` is about a store that a newer version takes over while it is open.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from engage.api import ENGAGE_VERSION, StorageIncompatible
from engage_plugins.sqlite import schema
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.reader import Reader
from support.sqlite import settings
from support.sqlite_keys import are_duplicates, opened, write_all

ADD_A_TABLE = "CREATE TABLE added (name TEXT)"


def content(path: Path) -> list[str]:
    """Return everything that a store has."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def become_version_2(monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """Let this process be of a version that adds to the tables."""
    monkeypatch.setattr(schema, "VERSION", 2)
    monkeypatch.setattr(schema, "MIGRATIONS", {2: statements})
    monkeypatch.setattr(schema, "ENGAGE_VERSION", "9.0.0")


def made_by(db: sqlite3.Connection) -> object:
    """Return the version of engage that a store names."""
    return db.execute("SELECT value FROM store WHERE name = 'engage'").fetchone()[0]


@pytest.fixture
def version_1(path: Path) -> Path:
    """A store of version 1."""
    engine = opened(path)
    write_all(engine, range(5))
    engine.close()
    return path


def test_a_server_takes_an_earlier_store_over(
    version_1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_version_2(monkeypatch, ADD_A_TABLE)
    for _ in range(2):
        engine = opened(version_1)
        assert are_duplicates(engine, range(5))
        engine.close()
    with contextlib.closing(sqlite3.connect(version_1)) as db:
        assert schema.version_of(db) == 2
        assert db.execute("SELECT * FROM added").fetchall() == []
        assert made_by(db) == "9.0.0"
    # Version 1 can read what version 2 writes.
    monkeypatch.undo()
    engine = opened(version_1)
    assert are_duplicates(engine, range(5))
    engine.close()


def test_the_store_names_the_engage_that_a_newer_store_needs(
    version_1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(sqlite3.connect(version_1)) as db, db:
        assert made_by(db) == ENGAGE_VERSION
        # Checkouts that were before this name wrote none.
        db.execute("DELETE FROM store WHERE name = 'engage'")
    become_version_2(monkeypatch, ADD_A_TABLE)
    monkeypatch.setattr(schema, "MIN_READER", 2)
    opened(version_1).close()
    monkeypatch.undo()
    for expected in ("use engage 9.0.0 or newer", "use that version of engage or newer"):
        with pytest.raises(StorageIncompatible, match=f"store version 2, .*: {expected}"):
            opened(version_1)
        with contextlib.closing(sqlite3.connect(version_1)) as db, db:
            db.execute("DELETE FROM store WHERE name = 'engage'")


def test_a_command_refuses_an_earlier_store(
    version_1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_version_2(monkeypatch, ADD_A_TABLE)
    before = content(version_1)
    reason = "earlier version of engage .store version 1; .*`engage serve` once"
    with pytest.raises(StorageIncompatible, match=reason):
        Reader(settings(version_1)).open()
    with pytest.raises(StorageIncompatible, match=reason):
        Engine(settings(version_1)).open(False, False)
    assert content(version_1) == before


def test_a_migration_that_fails_has_no_effect(
    version_1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_version_2(monkeypatch, ADD_A_TABLE, "CREATE TABLE events (name TEXT)")
    before = content(version_1)
    with (
        pytest.raises(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(version_1, isolation_level=None)) as db,
    ):
        schema.migrate(db)
    assert content(version_1) == before
