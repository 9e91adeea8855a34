# SPDX-License-Identifier: Apache-2.0
"""The version of the tables: a made-up next version, and stores of earlier checkouts.

``test_newer_version.py`` is about a store that a newer version takes over while it is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from pathlib import Path

import pytest

from engage.api import ENGAGE_VERSION, StorageIncompatible, SubscriptionChange
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import TIME, all_pages, profile_of, store_all
from engage.testing.storage.suppressions import suppression
from engage.testing.storage.visitors import visit
from engage_plugins.sqlite import schema
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.reader import Reader
from engage_plugins.sqlite.store import SqliteStorage
from support.sqlite import WITHOUT_SUPPRESSIONS, WITHOUT_VISITORS, make, settings
from support.sqlite_keys import are_duplicates, opened, write_all

ADD_A_TABLE = "CREATE TABLE added (name TEXT)"


def content(path: Path) -> list[str]:
    """Return everything that a store has."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


NOW = schema.VERSION
NEXT = schema.VERSION + 1


def become_next(monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """Let this process be of a version that adds to the tables."""
    monkeypatch.setattr(schema, "VERSION", NEXT)
    monkeypatch.setattr(schema, "MIGRATIONS", {NEXT: statements})
    monkeypatch.setattr(schema, "ENGAGE_VERSION", "9.0.0")


def made_by(db: sqlite3.Connection) -> object:
    """Return the version of engage that a store names."""
    return db.execute("SELECT value FROM store WHERE name = 'engage'").fetchone()[0]


@pytest.fixture
def present(path: Path) -> Path:
    """A store of this version."""
    engine = opened(path)
    write_all(engine, range(5))
    engine.close()
    return path


def test_a_server_takes_an_earlier_store_over(
    present: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next(monkeypatch, ADD_A_TABLE)
    for _ in range(2):
        engine = opened(present)
        assert are_duplicates(engine, range(5))
        engine.close()
    with contextlib.closing(sqlite3.connect(present)) as db:
        assert schema.version_of(db) == NEXT
        assert db.execute("SELECT * FROM added").fetchall() == []
        assert made_by(db) == "9.0.0"
    # This version can read what the next one writes.
    monkeypatch.undo()
    engine = opened(present)
    assert are_duplicates(engine, range(5))
    engine.close()


def test_the_store_names_the_engage_that_a_newer_store_needs(
    present: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(sqlite3.connect(present)) as db, db:
        assert made_by(db) == ENGAGE_VERSION
        # Checkouts that were before this name wrote none.
        db.execute("DELETE FROM store WHERE name = 'engage'")
    become_next(monkeypatch, ADD_A_TABLE)
    monkeypatch.setattr(schema, "MIN_READER", NEXT)
    opened(present).close()
    monkeypatch.undo()
    for expected in ("use engage 9.0.0 or newer", "use that version of engage or newer"):
        with pytest.raises(StorageIncompatible, match=f"store version {NEXT}, .*: {expected}"):
            opened(present)
        with contextlib.closing(sqlite3.connect(present)) as db, db:
            db.execute("DELETE FROM store WHERE name = 'engage'")


def test_a_command_refuses_an_earlier_store(present: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become_next(monkeypatch, ADD_A_TABLE)
    before = content(present)
    reason = f"earlier version of engage .store version {NOW}; .*`engage serve` once"
    with pytest.raises(StorageIncompatible, match=reason):
        Reader(settings(present)).open()
    with pytest.raises(StorageIncompatible, match=reason):
        Engine(settings(present)).open(False, False)
    assert content(present) == before


def test_a_migration_that_fails_has_no_effect(
    present: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next(monkeypatch, ADD_A_TABLE, "CREATE TABLE events (name TEXT)")
    before = content(present)
    with (
        pytest.raises(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(present, isolation_level=None)) as db,
    ):
        schema.migrate(db)
    assert content(present) == before


# ------------------------------------------------------------------------------- earlier checkouts
def tables(path: Path) -> set[tuple[str, ...]]:
    """Return the columns and the indexes of a store."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        columns = db.execute(
            'SELECT m.name, c.name, c.type, c."notnull", c.pk FROM sqlite_master m '
            "JOIN pragma_table_info(m.name) c WHERE m.type = 'table'"
        ).fetchall()
        return {*columns, *db.execute("SELECT sql FROM sqlite_master WHERE type = 'index'")}


async def brought_up_to_date(
    store: SqliteStorage, tmp_path: Path, path: Path, older: str
) -> SqliteStorage:
    """Close a store, make its tables those of an older one, and open it as a server does.

    A command does not open it, and changes nothing.
    """
    await store.close()
    new = tables(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(older)
    before = content(path)
    again = make(tmp_path)
    with pytest.raises(StorageIncompatible, match="start `engage serve` once"):
        await again.open(create=False)
    assert content(path) == before
    await again.open(create=True)
    assert tables(path) == new
    return again


async def test_a_store_from_before_suppressions_is_brought_up_to_date(
    store: SqliteStorage, tmp_path: Path, path: Path
) -> None:
    first = SubscriptionChange(
        id="1", workspace_id=WORKSPACE, user_id="u", choices={"news": True}, at=TIME, how="api"
    )
    await store.apply(first)
    again = await brought_up_to_date(store, tmp_path, path, WITHOUT_SUPPRESSIONS)
    await again.apply(
        dataclasses.replace(first, id="2", choices={"news": False}, secret="0a1b2c3d")
    )
    records = await all_pages(again.history, WORKSPACE, "u")
    assert [(one.change_id, one.secret, one.address) for one in records] == [
        ("1", "", ""),
        ("2", "0a1b2c3d", ""),
    ]
    await again.suppress([suppression()])
    assert len(await again.suppressions(WORKSPACE, [("email", "a@b.c")])) == 1
    await again.close()


async def test_a_store_from_before_visitors_is_brought_up_to_date(
    store: SqliteStorage, tmp_path: Path, path: Path
) -> None:
    email = {"email": "a@b.c"}
    await store_all(
        store,
        identify("1", "u", 5, traits=email, anonymous_id="v"),
        identify("2", "first", 9, traits=email, received=1),
    )
    choice = {"news": True}
    await store.apply(
        SubscriptionChange(
            id="c", workspace_id=WORKSPACE, user_id="u", choices=choice, at=TIME, how="api"
        )
    )
    again = await brought_up_to_date(store, tmp_path, path, WITHOUT_VISITORS)
    assert await again.state(WORKSPACE, "u") == choice
    found = await again.find_users(WORKSPACE, "email", ["a@b.c"])
    assert dict(found) == {"a@b.c": ["first", "u"]}
    # The link is older than all.
    await store_all(again, visit("3", "v", traits={"a": 1}))
    await store_all(again, event("4", user_id="first", anonymous_id="v", received=-5))
    assert (await profile_of(again, "u")).traits == {**email, "a": 1}
    assert (await profile_of(again, "first")).traits == email
    await again.close()
