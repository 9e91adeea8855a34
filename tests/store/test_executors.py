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

from engage.api import StorageContext
from engage.store import memory
from engage.store.memory import MemoryTables
from engage.store.tables import (
    Add,
    Delete,
    Pages,
    Place,
    Put,
    Steps,
)
from engage_plugins.sqlite import steps
from support.executors import (
    NUMBERED,
    PLAIN,
    REGISTERS,
    TABLES,
    Change,
    Side,
    ToldError,
    comparable,
    examples,
    one,
    plan,
    rows_of,
)

SCHEMA = """
CREATE TABLE plain (a TEXT NOT NULL, b INTEGER NOT NULL, n INTEGER NOT NULL, value TEXT,
    PRIMARY KEY (a, b)) WITHOUT ROWID;
CREATE TABLE numbered (number INTEGER PRIMARY KEY AUTOINCREMENT, a TEXT NOT NULL UNIQUE,
    n INTEGER NOT NULL);
CREATE TABLE registers (number INTEGER PRIMARY KEY AUTOINCREMENT, a TEXT NOT NULL UNIQUE,
    n INTEGER NOT NULL, least TEXT NOT NULL, value BLOB);
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
@hypothesis.given(st.sampled_from(TABLES).flatmap(examples))
def test_the_executors_return_the_same(
    sqlite: Sqlite, example: tuple[list[tuple[list[Change], bool]], list[Pages]]
) -> None:
    plans, wanted = example
    sqlite.empty()
    sides = (Side(MemoryTables()), Side(sqlite))
    kept: list[tuple[Pages, list[Place | None]]] = []
    sides[1].check_numbers()
    for made, fails in plans:
        answers: list[Any] = []
        for side in sides:
            try:
                found = side.execute(plan(made, fails=fails))
                answers.append([*map(comparable, [step.table for step in made], found)])
            except ToldError:
                answers.append("failed")
            side.check_numbers()
        # A page that looked at enough has other rows; see below.
        for step, *found in zip(made, *answers, strict=True) if answers[0] != "failed" else ():
            if not isinstance(step, Pages) or step.most == 50:
                assert found[0] == found[1], step
        assert (answers[0] == "failed") is (answers[1] == "failed") is fails
        for step in wanted:
            chains = [side.follow(step) for side in sides]
            expected, found = (rows_of(step.table, chain) for chain in chains)
            assert found == expected, step
            for side, chain in zip(sides, chains, strict=True):
                for at, page in enumerate(chain):
                    rest = side.follow(step._replace(after=page.place))
                    assert rows_of(step.table, rest) == rows_of(step.table, chain[at + 1 :]), step
            kept.append((step, [chain[-1].place for chain in chains]))
    # The places of the last pages: what is behind them now?
    for step, places in kept:
        chains = [
            side.follow(step._replace(after=place))
            for side, place in zip(sides, places, strict=True)
        ]
        assert rows_of(step.table, chains[0]) == rows_of(step.table, chains[1]), step


def test_a_page_ends_with_the_row_that_makes_it_large(
    sqlite: Sqlite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory, steps):
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
