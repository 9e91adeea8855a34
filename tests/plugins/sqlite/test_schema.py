# SPDX-License-Identifier: Apache-2.0
"""The version of the tables: a made-up next version, and stores of earlier checkouts.

``test_newer_version.py`` is about a store that a newer version takes over while it is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from engage.api import ENGAGE_VERSION, Kind, StorageIncompatible, Subject, SubscriptionChange
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import (
    TIME,
    all_pages,
    profile_of,
    store_all,
    suppression,
    unproven,
    user,
    visitor,
)
from engage_plugins.sqlite import schema
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.reader import Reader
from engage_plugins.sqlite.store import SqliteStorage
from support.rules.visitors import visit
from support.sqlite import ONE_NAMESPACE, WITHOUT_SUPPRESSIONS, WITHOUT_VISITORS, make, settings
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
    present: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engage.storage.sqlite")
    before = schema.VERSION
    become_next(monkeypatch, ADD_A_TABLE)
    for _ in range(2):
        engine = opened(present)
        assert are_duplicates(engine, range(5))
        engine.close()
    assert caplog.messages == [f"{present}: store version {before} is now {NEXT}"]
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
        schema.migrate(db, str(present))
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
        id="1",
        workspace_id=WORKSPACE,
        subject=Subject(Kind.USER, "u"),
        choices={"news": True},
        at=TIME,
        how="api",
    )
    await store.apply(first)
    again = await brought_up_to_date(store, tmp_path, path, WITHOUT_SUPPRESSIONS)
    await again.apply(
        dataclasses.replace(first, id="2", choices={"news": False}, secret="0a1b2c3d")
    )
    records = await all_pages(again.history, WORKSPACE, user("u"))
    assert [(record.change_id, record.secret, record.address) for record in records] == [
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
            id="c",
            workspace_id=WORKSPACE,
            subject=Subject(Kind.USER, "u"),
            choices=choice,
            at=TIME,
            how="api",
        )
    )
    again = await brought_up_to_date(store, tmp_path, path, WITHOUT_VISITORS)
    assert await again.state(WORKSPACE, Subject(Kind.USER, "u")) == choice
    users = await again.find_users(WORKSPACE, "email", ["a@b.c"])
    assert dict(users) == {"a@b.c": ["first", "u"]}
    # The link is older than all.
    await store_all(again, visit("3", "v", traits={"a": 1}))
    await store_all(again, event("4", user_id="first", anonymous_id="v", received=-5))
    assert (await profile_of(again, "u")).traits == {**email, "a": 1}
    assert (await profile_of(again, "first")).traits == email
    await again.close()


async def test_what_clients_set_in_the_place_of_engage_goes(
    store: SqliteStorage, tmp_path: Path, path: Path
) -> None:
    """Earlier versions stored any trait."""
    await store_all(store, identify("1", "u", traits={"email": "a@b.c", "a": 1}))
    await store_all(store, identify("2", "other", traits={"a": 1}))
    counts = "SELECT name, traits, trait_bytes FROM profiles ORDER BY id"
    with contextlib.closing(sqlite3.connect(path)) as db:
        before = db.execute(counts).fetchall()
    forged = """
        INSERT INTO traits SELECT id, 'engage:trusted:email', 5, 'm', 'api', 9, '"a@b.c"'
            FROM profiles WHERE name = 'u';
        INSERT INTO traits SELECT id, 'engage:trusted', 5, 'm', 'api', 4, 'true'
            FROM profiles WHERE name = 'u';
        UPDATE profiles SET traits = traits + 2, trait_bytes = trait_bytes + 13 WHERE name = 'u';
    """
    again = await brought_up_to_date(store, tmp_path, path, forged + ONE_NAMESPACE)
    assert await again.certain(WORKSPACE, "u") == {"email": None}
    await again.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute(counts).fetchall() == before


async def test_choices_of_an_earlier_version_are_given_to_users_and_visitors(path: Path) -> None:
    """As "Choices from earlier versions" in docs/events.md says."""
    store = make(path.parent)
    await store.open(create=True)
    await store_all(
        store,
        identify("1", "ann", anonymous_id="a-1"),
        visit("2", "a-1", traits={"email": "a@b.c"}),
        visit("3", "alone"),
        event("4", anonymous_id="seen"),
        event("5", user_id="ghost", anonymous_id="linked"),
        event("6", user_id="tracked"),
        identify("7", "both"),
        event("8", anonymous_id="both"),
        event("9", user_id="same", anonymous_id="same"),
        identify("10", "bob", anonymous_id="b-1"),
        event("11", user_id="bob", anonymous_id="b-2"),
    )

    async def choose(name: str, at: int, **choices: bool) -> None:
        made = f"{name} {at}"
        await store.apply(
            SubscriptionChange(
                id=made,
                workspace_id=WORKSPACE,
                subject=user(name),
                choices=choices,
                at=TIME + at,
                how="page",
            )
        )

    names = ("ann", "a-1", "alone", "seen", "linked", "tracked", "both", "same", "unknown")
    for at, name in enumerate(names):
        await choose(name, at, off=False, on=True)
    idle = SubscriptionChange(
        id="idle",
        workspace_id=WORKSPACE,
        subject=user("alone"),
        choices={"on": True},
        at=TIME,
        how="page",
        dated=True,
    )
    await store.apply(idle)
    await choose("bob", 20, early=True, late=True, off=False)
    await choose("b-1", 10, early=False)
    await choose("b-1", 30, late=False, off=False, on=True)
    await choose("b-2", 31, late=False)
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(f"BEGIN; {ONE_NAMESPACE} COMMIT;")
    with pytest.raises(StorageIncompatible, match=r"no longer count for their users: 2$"):
        await make(path.parent).open(create=False)
    for _ in range(2):
        await store.open(create=True)
        found = {
            (state.subject, state.group_id): (state.subscribed, state.updated_at - TIME)
            for state in await all_pages(store.scan_subscriptions, None)
        }
        assert await unproven(store) == []
        history = await all_pages(store.history, None, None)
        await store.close()
    expected: dict[Any, Any] = {}
    for at, name in enumerate(names):
        whose = visitor(name) if name in ("a-1", "alone", "seen", "linked") else user(name)
        expected |= {(whose, "off"): (False, at), (whose, "on"): (True, at)}
        if name in ("both", "same", "unknown"):
            expected[visitor(name), "off"] = (False, at)
    # Of ann, the unsubscription of her visitor; of ghost, nothing: no user has this id.
    expected[user("ann"), "off"] = (False, 0)
    expected |= {
        (user("bob"), "early"): (True, 20),
        (user("bob"), "late"): (False, 31),
        (user("bob"), "off"): (False, 20),
        (visitor("b-1"), "early"): (False, 10),
        (visitor("b-1"), "late"): (False, 30),
        (visitor("b-1"), "off"): (False, 30),
        (visitor("b-1"), "on"): (True, 30),
        (visitor("b-2"), "late"): (False, 31),
    }
    assert found == expected
    upgraded = [(one.subject, one.group_id, one.before) for one in history if one.how == "upgrade"]
    assert sorted(upgraded[:3]) == [
        (visitor(name), "off", None) for name in ("both", "same", "unknown")
    ]
    assert upgraded[3:] == [(user("bob"), "late", True)]
    # What a choice had made of a visitor's id is gone, and a change that is repeated is known.
    await store.open(create=True)
    users = {one.user_id for one in await all_pages(store.scan_users, None)}
    assert users == {"ann", "bob", "both", "same", "tracked", "unknown"}
    again = SubscriptionChange(
        id="alone 2",
        workspace_id=WORKSPACE,
        subject=visitor("alone"),
        choices={"on": False},
        at=TIME,
        how="page",
    )
    assert await store.apply(again) == {"off": False, "on": True}
    # So is one that had no effect: it does not undo a later one.
    await store.apply(dataclasses.replace(again, id="later", at=TIME + 40))
    repeated = dataclasses.replace(idle, subject=visitor("alone"), dated=False)
    assert await store.apply(repeated) == {"off": False, "on": False}
    assert [problem async for problem in store.problems() if not isinstance(problem, int)] == []
    await store.close()
