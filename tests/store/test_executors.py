# SPDX-License-Identifier: Apache-2.0
"""The executors in memory and of SQLite return the same for the same plans."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from engage.api import EventFilter, StorageContext
from engage.store import events, memory
from engage.store.events import ERASED_TYPE, EVENTS, HEADS
from engage.store.memory import MemoryTables
from engage.store.tables import (
    Add,
    Delete,
    Get,
    Page,
    Pages,
    Plan,
    Put,
    Steps,
)
from engage_plugins.sqlite import pages as sqlite_pages
from engage_plugins.sqlite import steps
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.keys import event_keys as keys
from engage_plugins.sqlite.keys import merge, parts
from support.executors import (
    CONTEXT,
    NUMBERED,
    PLAIN,
    REGISTERS,
    TABLES,
    Change,
    Side,
    check_the_same,
    examples,
    one,
    plan,
    rows_of,
)
from support.sqlite import settings

SCHEMA = """
CREATE TABLE plain (a TEXT NOT NULL, b INTEGER NOT NULL, n INTEGER NOT NULL, value TEXT,
    PRIMARY KEY (a, b)) WITHOUT ROWID;
CREATE TABLE numbered (number INTEGER PRIMARY KEY AUTOINCREMENT, a TEXT NOT NULL UNIQUE,
    n INTEGER NOT NULL);
CREATE TABLE registers (number INTEGER PRIMARY KEY AUTOINCREMENT, a TEXT NOT NULL UNIQUE,
    n INTEGER NOT NULL, least TEXT NOT NULL, value BLOB);
CREATE TABLE sums (a TEXT NOT NULL PRIMARY KEY, n INTEGER NOT NULL, value TEXT) WITHOUT ROWID;
CREATE TABLE marks (a TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (a, n)) WITHOUT ROWID;
"""


class Sqlite:
    """SQLite's executor over a file."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; {SCHEMA}")

    def execute(self, plan: Steps[Any], context: StorageContext) -> Any:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            result = steps.execute(self.db, plan, context)
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")
        return result

    def empty(self) -> None:
        """Delete everything, except for the numbers that were given."""
        for table in TABLES:
            self.db.execute(f"DELETE FROM {table.name}")


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sqlite]:
    """A file that the examples share; each begins with empty tables."""
    executor = Sqlite(tmp_path_factory.mktemp("store") / "tables.db")
    with contextlib.closing(executor.db):
        yield executor


@hypothesis.settings(max_examples=250, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from(TABLES).flatmap(lambda table: examples(table, deletes_pages=True))
)
def test_the_executors_return_the_same(
    sqlite: Sqlite, example: tuple[list[tuple[list[Change], bool]], list[Pages]]
) -> None:
    sqlite.empty()
    check_the_same(sqlite, example)


def test_a_page_ends_with_the_row_that_makes_it_large(
    sqlite: Sqlite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory, sqlite_pages):
        monkeypatch.setattr(module, "MAX_PAGE_BYTES", 45)
    sqlite.empty()
    rows = [(f"{number}", 0, "", b"x" * 20) for number in range(8)]
    for executor in (MemoryTables(), sqlite):
        side = Side(executor)
        side.execute(one(Add(REGISTERS, rows)))
        assert [len(page.rows) for page in side.follow(Pages(REGISTERS, 7))] == [3, 3, 2]


def test_a_value_that_is_none_can_be_wanted(sqlite: Sqlite) -> None:
    sqlite.empty()
    rows = [("a", 0, 0, None), ("b", 0, 0, ""), ("c", 0, 0, "x")]
    for executor in (MemoryTables(), sqlite):
        side = Side(executor)
        side.execute(one(Put(PLAIN, rows)))
        assert rows_of(PLAIN, side.follow(Pages(PLAIN, 7, equal={"value": None}))) == rows[:1]
        wanted = Pages(PLAIN, 7, one_of={"value": {None, "x"}})
        assert rows_of(PLAIN, side.follow(wanted)) == [rows[0], rows[2]]


def test_a_number_is_not_given_again_after_its_row_was_deleted(sqlite: Sqlite) -> None:
    sqlite.empty()
    for executor in (MemoryTables(), sqlite):
        side = Side(executor)
        for name in "abc":
            side.execute(one(Add(NUMBERED, [(name, None, 0)])))
            side.check_numbers()
            side.execute(one(Delete(NUMBERED, [(name,)])))
            side.check_numbers()


# ----------------------------------------------------------------------------------------- events
_TEXTS = st.sampled_from(["", "a", "A\0", "ab%", "é"])
_MAYBE = st.none() | _TEXTS
_TIMES = st.integers(0, 6)
_KEYS = st.tuples(st.just("acme"), st.sampled_from(["api", "x"]), _TEXTS)
_ROWS = st.builds(
    lambda key, kind, user, visitor, name, at, body: (*key, kind, user, visitor, name, at, 1, body),
    *(_KEYS, st.sampled_from(["track", "page", "identify"]), _MAYBE, _MAYBE, _MAYBE, _TIMES),
    st.sampled_from([b"{}", b'{"traits":{"a":1}}', b"["]),
)
_FILTERS = st.builds(
    EventFilter,
    **dict.fromkeys(("workspace_id", "type"), st.sampled_from([None, "acme", "track"])),
    **dict.fromkeys(("since", "until"), st.none() | _TIMES),
    **dict.fromkeys(("user_id", "name"), _MAYBE),
    begins=st.lists(st.tuples(st.just(("message_id", "name")), _TEXTS), max_size=1),
    ids=st.none() | st.lists(_TEXTS, max_size=2),
)


def each_step(*wanted: Change) -> Steps[list[Any]]:
    return plan(wanted, fails=False)


def without_keys(answer: Any) -> Any:
    """Return an answer without the keys of erased events in their rows."""
    if isinstance(answer, dict):
        return {key: without_keys(value) for key, value in answer.items()}
    if isinstance(answer, Page):
        return without_keys(answer.rows)
    if isinstance(answer, list):
        return [*map(without_keys, answer)]
    if isinstance(answer, tuple) and answer[3:4] == (ERASED_TYPE,):
        return answer[3:]
    return answer


#: A plan with its arguments.
_PLANS = st.one_of(
    st.tuples(st.just(events.write), st.tuples(st.lists(_ROWS, max_size=6))),
    st.tuples(st.just(events.find), _KEYS),
    st.tuples(st.just(events.expire), st.tuples(_TIMES, st.integers(1, 3), st.booleans())),
    st.tuples(
        st.just(events.erase),
        st.sets(_KEYS, max_size=3).map(lambda found: ([*found], [b"mark"] * len(found))),
    ),
    st.tuples(
        st.just(events.scan),
        st.tuples(_FILTERS, st.none(), st.integers(1, 4), st.booleans()),
    ),
    st.tuples(
        st.just(Plan(each_step)),
        st.lists(
            st.one_of(
                st.lists(_KEYS, max_size=3).map(lambda found: Get(EVENTS, found)),
                st.lists(_ROWS, max_size=3).map(lambda found: Add(EVENTS, found)),
                st.lists(_ROWS, max_size=2, unique_by=lambda row: row[:3]).map(
                    lambda found: Put(EVENTS, found)
                ),
                st.lists(_KEYS, max_size=2).map(lambda found: Delete(HEADS, found)),
                st.booleans().map(lambda reverse: Pages(EVENTS, 9, reverse=reverse)),
            ),
            max_size=5,
        ).map(tuple),
    ),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The writer of a store whose keys are merged after a few events."""
    engine = Engine(settings(tmp_path_factory.mktemp("engine") / "engage.db"))
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(engine):
        patch.setattr(keys, "MERGE_KEYS", 20)
        patch.setattr(merge, "LEAST_KEYS", 3)
        patch.setattr(parts, "_LEAST_CAPACITY", 64)
        patch.setattr(events, "MAX_ROWS", 3)
        engine.open(create=True, serving=True)
        yield engine


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(st.lists(_PLANS, max_size=12))
def test_the_executors_keep_the_same_events(
    engine: Engine, wanted: list[tuple[Plan[..., Any], tuple[Any, ...]]]
) -> None:
    tables = MemoryTables()
    engine.run(events.expire, (9, 1000, True))
    for made, arguments in wanted:

        def both(*arguments: Any, made: Plan[..., Any] = made) -> tuple[Any, Any]:
            return tables.execute(made(*arguments), CONTEXT), engine.run(made, arguments)

        expected, found = both(*arguments)
        if made is events.scan:
            # Their pages may end at other places.
            for page, side in ((expected, 0), (found, 1)):
                assert len(page.items) <= arguments[2]
                while page.cursor is not None:
                    after = (arguments[0], page.cursor, *arguments[2:])
                    page = both(*after)[side]
                    (expected, found)[side].items.extend(page.items)
            assert found.items == expected.items, arguments
        else:
            assert without_keys(found) == without_keys(expected), (made.name, arguments)
    engine.work()
