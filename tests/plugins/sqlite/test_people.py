# SPDX-License-Identifier: Apache-2.0
"""What reading people and keeping visitors cost, and what the caches of the writer may not hide."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import pytest

from engage.api import MAX_CANDIDATES, Kind
from engage.store import changes, people
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import TIME, all_pages, profile_of, store_all, user, visitor
from engage_plugins.sqlite.connection import FileConnection
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.store import SqliteStorage
from support.rules.visitors import decision, visit
from support.sqlite import engine_of

EMAIL = {"email": "a@b.c"}


def limit_visitors(engine: Engine, most: int) -> None:
    limits = dataclasses.replace(engine.context.profile_limits, visitors=most)
    engine.context = dataclasses.replace(engine.context, profile_limits=limits)


class Statements:
    """Counts the statements that a connection of the store runs."""

    def __init__(self, connection: FileConnection) -> None:
        self.all: list[str] = []
        self.db = connection.connection()
        self.db.set_trace_callback(self.all.append)

    def taken(self, verb: str = "SELECT") -> list[str]:
        """Return the statements with a verb since the last call."""
        found = [one for one in self.all if one.startswith(verb)]
        self.all.clear()
        return found


async def test_a_page_of_people_takes_few_statements(store: SqliteStorage) -> None:
    for number in range(256):
        name = f"u{number}"
        await store_all(
            store,
            identify(name, name, number, anonymous_id=f"v{number}", traits=EMAIL),
            visit(f"v{number}", f"v{number}", traits={"a": 1}),
        )
    await store.visitor(WORKSPACE, "v0")
    statements = Statements(store._reader)
    assert len((await store.scan_users(WORKSPACE, after=None, limit=256)).items) == 256
    # Two look for the window, and each 256 users take one statement of each table, two of profiles
    # and two of links.
    assert len(statements.taken()) <= 10
    assert len((await store.scan_visitors(WORKSPACE, after=None, limit=256)).items) == 256
    assert len(statements.taken()) <= 8
    assert (await profile_of(store, "u0")).traits == {**EMAIL, "a": 1}
    assert len(statements.taken()) <= 8


async def test_a_page_of_users_has_a_maximum_size_with_their_visitors(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(people, "MAX_PAGE_BYTES", 1000)
    for number in range(6):
        name = f"u{number}"
        await store_all(store, identify(name, name, anonymous_id=f"v{number}", traits={"b": 1}))
        await store_all(store, visit(f"v{number}", f"v{number}", traits={"a": "x" * 600}))
    page = await store.scan_users(WORKSPACE, after=None, limit=100)
    assert [one.user_id for one in page.items] == ["u0", "u1"]
    assert len(await all_pages(store.scan_users, WORKSPACE)) == 6
    rows = await store.scan_rows(Kind.VISITOR, after=None, limit=100)
    assert [row[2] for row, _, _ in rows.items] == ["v0", "v1"]
    assert len(await all_pages(store.scan_rows, Kind.VISITOR)) == 6


async def test_indexes_serve_what_is_read_of_people(store: SqliteStorage) -> None:
    await store_all(
        store, identify("1", "u", anonymous_id="v", traits=EMAIL), visit("2", "v", traits=EMAIL)
    )
    await store.visitor(WORKSPACE, "v")
    statements = Statements(store._reader)
    await store.profile(WORKSPACE, "u")
    await store.visitor(WORKSPACE, "v")
    for subject in (user("u"), visitor("v")):
        await store.state(WORKSPACE, subject)
    await store.find_users(WORKSPACE, "email", ["a@b.c"])
    await store.find_visitors(WORKSPACE, "email", ["a@b.c"])
    await store.holders(WORKSPACE, "email", "a@b.c", after=None, limit=9)
    await store.users_beginning(WORKSPACE, "u", limit=9)
    await store.scan_users(None, after=None, limit=9)
    await store.scan_visitors(None, after=None, limit=9)
    await store.expire_visitors(TIME, limit=9)
    assert await store.links_to(WORKSPACE, "v")
    statements.db.set_trace_callback(None)
    for statement in statements.taken():
        # Rows of constants.
        keys = ["SCAN k", "SCAN profiles"] if statement.endswith("LIMIT 1") else ["SCAN k"]
        for *_, plan in statements.db.execute(f"EXPLAIN QUERY PLAN {statement}"):
            assert "TEMP B-TREE" not in plan, statement
            assert not plan.startswith("SCAN") or "CONSTANT ROW" in plan or plan in keys, statement


# ----------------------------------------------------------------------------------------- links
async def test_a_known_link_is_not_looked_up_again(store: SqliteStorage) -> None:
    await store_all(store, event("1", user_id="u", anonymous_id="v", received=5))
    statements = Statements(engine_of(store))
    await store_all(store, event("2", user_id="u", anonymous_id="v", received=6))
    assert not [one for one in statements.all if "links" in one or "profiles" in one]


@pytest.mark.parametrize("received", [4, 5])
async def test_an_earlier_link_is_stored_although_the_link_is_known(
    store: SqliteStorage, received: int
) -> None:
    """Another server's clock may be behind, and a batch is received in one millisecond."""
    await store_all(store, visit("0", "v", traits={"a": 1}), identify("1", "u"), identify("2", "w"))
    await store_all(store, event("m", user_id="w", anonymous_id="v", received=5))
    await store_all(store, event("x", user_id="u", anonymous_id="v", received=5))
    assert (await store.visitor(WORKSPACE, "v")).user_id == "w"
    await store_all(store, event("a", user_id="u", anonymous_id="v", received=received))
    assert (await store.visitor(WORKSPACE, "v")).user_id == "u"


# ---------------------------------------------------------------------------------- many visitors
async def test_visitors_with_somebodys_address_do_not_hide_users(store: SqliteStorage) -> None:
    """The oldest claims are those of visitors who belong to nobody, and are more than are examined;
    the visitor of a person is found among as many as are examined."""
    await store_all(
        store,
        identify("v", "owner", 1, received=1, anonymous_id="first"),
        visit("first", "first", 1, received=1, traits=EMAIL),
        *(visit(f"f{n}", f"f{n}", received=2, traits=EMAIL) for n in range(MAX_CANDIDATES)),
        *(identify(f"i{n}", f"i{n}", received=10 + n, traits=EMAIL) for n in range(3)),
    )
    users = await store.find_users(WORKSPACE, "email", ["a@b.c"])
    assert dict(users) == {"a@b.c": ["owner", "i0", "i1", "i2"]}
    alone = await store.find_visitors(WORKSPACE, "email", ["a@b.c"])
    assert len(alone["a@b.c"]) == 100
    held = await all_pages(store.holders, WORKSPACE, "email", "a@b.c", limit=300)
    assert len(held) == len(set(held)) == MAX_CANDIDATES + 4


async def test_a_flood_of_candidates_is_examined_in_steps(store: SqliteStorage) -> None:
    """Most of them have another value now by a visitor, so that their own does not win."""
    for number in range(450):
        name = f"u{number:03}"
        await store_all(
            store,
            identify(name, name, received=number, anonymous_id=f"v{name}", traits=EMAIL),
            visit(f"v{name}", f"v{name}", at=1 if number < 300 else -1, traits={"email": "x@b.c"}),
        )
    users = await store.find_users(WORKSPACE, "email", ["a@b.c", "x@b.c"])
    assert list(users["a@b.c"]) == [f"u{n:03}" for n in range(300, 400)]
    assert list(users["x@b.c"]) == [f"u{n:03}" for n in range(100)]


async def test_a_thousand_users_of_a_visitor_and_visitors_of_a_user(store: SqliteStorage) -> None:
    """Each is one more than a user has links."""
    many = range(1001)
    await store_all(store, visit("hub", "hub", traits={"hub": 1, "email": "hub@b.c"}))
    hubs = [identify(f"h{n}", f"h{n}", received=n, anonymous_id="hub") for n in many]
    await store_all(store, *reversed(hubs))
    visits = [visit(f"v{n}", f"v{n}", n, traits={"email": f"v{n}@b.c", "n": n}) for n in many]
    await store_all(store, *visits)
    links = [identify(f"u{n}", "u", received=n, anonymous_id=f"v{n}") for n in many]
    await store_all(store, *links)
    assert store.dropped_changes == 1
    statements = Statements(store._reader)
    users = {one.user_id: one for one in await all_pages(store.scan_users, WORKSPACE, limit=1000)}
    assert len(statements.taken()) < 100
    assert {name for name, one in users.items() if "hub" in one.traits} == {"h0"}
    # The 100 that were linked first are merged, and belong to the user with all others.
    assert users["u"].traits == {"email": "v99@b.c", "n": 99}
    assert users["u"].anonymous_ids == sorted(f"v{n}" for n in range(1000))
    wanted = ["hub@b.c", "v99@b.c", "v100@b.c", "v1000@b.c"]
    found = await store.find_users(WORKSPACE, "email", wanted)
    assert dict(found) == {"hub@b.c": ["h0"], "v99@b.c": ["u"]}
    alone = await store.find_visitors(WORKSPACE, "email", wanted)
    assert dict(alone) == {"v1000@b.c": ["v1000"]}
    # An operator undoes all links but the last.
    undone = [decision(f"d{n}", f"h{n}", "hub", linked=False) for n in many[:-1]]
    await store_all(store, *undone)
    assert (await store.visitor(WORKSPACE, "hub")).user_id == "h1000"


async def test_deleted_visitors_leave_nothing(store: SqliteStorage, tmp_path: Path) -> None:
    await store_all(
        store,
        visit("1", "v", 1, traits={**EMAIL, "a": 1}),
        visit("2", "v", 2, traits={"email": "x@b.c"}),
        event("3", type="group", anonymous_id="v", groupId="g"),
        visit("4", "w", 2),
    )
    # Between looking for old visitors and deleting them, one is changed and one gets an owner.
    old, _ = await store.read(people.old_visitors, TIME + 9, None, 9)
    assert len(old) == 2
    await store_all(store, identify("5", "u", anonymous_id="w"))
    await store_all(store, visit("6", "v", 9))
    assert await store.run(people.delete_visitors, old, TIME + 9) == 0
    assert await store.expire_visitors(TIME + 10, limit=9) == 1
    await store.close()
    with sqlite3.connect(tmp_path / "engage.db") as read:
        for table in ("traits", "memberships", "identifiers", "claims"):
            assert read.execute(f"SELECT * FROM {table}").fetchall() == []
        assert read.execute("SELECT * FROM visitor_totals").fetchall() == [(WORKSPACE, 1)]


async def test_the_number_of_visitors_is_exact(store: SqliteStorage) -> None:
    engine = engine_of(store)
    limit_visitors(engine, 2)
    await store_all(store, *(visit(f"{n}", f"v{n}", traits=EMAIL) for n in range(4)))
    assert store.dropped_changes == 2
    held = await all_pages(store.holders, WORKSPACE, "email", "a@b.c")
    assert sorted(held) == [visitor("v0"), visitor("v1")]
    assert await store.expire_visitors(TIME + 1, limit=1) == 1
    group = event("g", type="group", anonymous_id="new", groupId="g", traits={"a": 1})
    await store_all(store, group, visit("5", "v5"))
    assert store.dropped_changes == 2
    left = {one.anonymous_id for one in await all_pages(store.scan_visitors, WORKSPACE)}
    assert left == {"new", "v5"}
    assert (await all_pages(store.scan_groups, WORKSPACE))[0].traits == {"a": 1}
    (total,) = engine.connection().execute("SELECT count FROM visitor_totals").fetchone()
    assert total == 2
    # A lower limit deletes nobody: a new one replaces one.
    limit_visitors(engine, 1)
    await store_all(store, visit("6", "v6"))
    assert len(await all_pages(store.scan_visitors, WORKSPACE)) == 2


async def test_a_bounded_number_of_visitors_is_examined(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a write. The next one continues, and then finds those that it passed."""
    monkeypatch.setattr(changes, "_EXAMINED", 2)
    monkeypatch.setattr(changes, "_SEARCHES", 2)
    limit_visitors(engine_of(store), 9)

    async def left() -> set[str]:
        return {one.anonymous_id for one in await all_pages(store.scan_visitors, WORKSPACE)}

    stay = [f"s{number}" for number in range(6)]
    await store_all(store, identify("u", "u"))
    for number, name in enumerate(stay):
        email = {"email": f"{name}@b.c"} if number in (1, 2) else {}
        await store_all(store, visit(name, name, received=number, traits=email))
    for number in (0, 3, 4, 5):
        await store_all(store, identify(f"l{number}", "u", anonymous_id=f"s{number}"))
    for name in "abc":
        await store_all(store, visit(name, name, received=9))
    # Four are examined for those without an identifier, and then four for those with one.
    await store_all(store, visit("d", "d", received=10))
    assert await left() == {*stay, *"abcd"} - {"s1"}
    await store_all(store, visit("e", "e", received=11))
    assert await left() == {*stay, *"bcde"} - {"s1"}
    await store_all(store, *(visit(name, name, received=12) for name in "fghi"))
    assert len(await left()) == 9
    assert "s2" in await left()


async def test_many_visitors_give_way_with_few_statements(store: SqliteStorage) -> None:
    limit_visitors(engine_of(store), 2000)
    everyone = [visit(f"a{n}", f"a{n}", received=n, traits=EMAIL) for n in range(2000)]
    for start in range(0, 2000, 500):
        await store.write(everyone[start : start + 500])
    statements = Statements(engine_of(store))
    await store.write([visit(f"b{n}", f"b{n}", received=3000 + n) for n in range(1000)])
    looks = [statement for statement in statements.taken() if "LIMIT 1001" in statement]
    # Three pages without one that has no identifier, and one with as many as are needed.
    assert len(looks) == 4
    for one in {*looks}:
        for *_, plan in statements.db.execute(f"EXPLAIN QUERY PLAN {one}"):
            assert "TEMP B-TREE" not in plan
            assert not plan.startswith("SCAN"), plan
    left = {one.anonymous_id for one in await all_pages(store.scan_visitors, WORKSPACE)}
    assert left == {*(f"a{n}" for n in range(1000, 2000)), *(f"b{n}" for n in range(1000))}
    assert store.dropped_changes == 0


async def test_nothing_is_searched_while_there_is_room(store: SqliteStorage) -> None:
    limit_visitors(engine_of(store), 2)
    await store_all(store, visit("1", "a"))
    statements = Statements(engine_of(store))
    await store_all(store, visit("2", "b"))
    await store_all(store, visit("3", "b", traits={"a": 1}))
    assert not [statement for statement in statements.taken() if "FROM profiles WHERE" in statement]
    await store_all(store, visit("4", "c"))
    assert [statement for statement in statements.taken() if "FROM profiles WHERE" in statement]
