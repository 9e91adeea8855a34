# SPDX-License-Identifier: Apache-2.0
"""Plans of all steps over some tables, for comparing executors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from engage.api import StorageContext
from engage.store.memory import MemoryTables
from engage.store.tables import (
    Add,
    Delete,
    Get,
    Page,
    Pages,
    Place,
    Put,
    Row,
    Steps,
    Table,
    Under,
)

Change = Get | Under | Add | Put | Delete | Pages

CONTEXT = StorageContext(base_dir=Path(), identifiers={})
#: Without numbers; a value may be None.
PLAIN = Table(
    "plain", {"a": str, "b": int, "n": int, "value": str}, key=2, indexes=(("n",), ("a", "n"))
)
#: With numbers, which are a column.
NUMBERED = Table(
    "numbered", {"a": str, "number": int, "n": int}, key=1, arrival=True, indexes=(("n",),)
)
#: With numbers that are no column, and a register.
REGISTERS = Table(
    "registers",
    {"a": str, "n": int, "least": str, "value": bytes},
    key=1,
    arrival=True,
    register=("n", "-least"),
    indexes=(("n",),),
)
#: All columns are the key.
MARKS = Table("marks", {"a": str, "n": int}, key=2)
#: To which plans add.
SUMS = Table("sums", {"a": str, "n": int, "value": str}, key=1, sums=("n",), indexes=(("n",),))
TABLES = (PLAIN, NUMBERED, REGISTERS, MARKS, SUMS)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "a": st.sampled_from(["", "a", "a\0", "\uffff", "\U00010000"]),
    "b": st.sampled_from([-(2**63), 0, 2**63 - 1]),
    "n": st.integers(0, 2),
    "least": st.sampled_from(["", "a", "b"]),
    "value": st.sampled_from([None, "", "x"]),
    "number": st.none(),
}
BYTES = st.sampled_from([None, b"", b"x" * 20, b"y" * 20])


def values(table: Table, columns: Sequence[str]) -> st.SearchStrategy[Row]:
    """Values of some columns."""
    return st.tuples(*(BYTES if table.types[name] is bytes else VALUES[name] for name in columns))


@st.composite
def all_steps(draw: st.DrawFn, table: Table, *, deletes_pages: bool) -> Change:
    """Any step over a table."""
    key = table.columns[: table.key]
    rows = st.lists(values(table, table.columns), max_size=4)
    keys = st.lists(values(table, key), max_size=4)
    kind = draw(st.sampled_from([Get, Under, Add, Add, Put, Put, Delete, Delete, Pages]))
    if kind is Add:
        return Add(table, draw(rows))
    if kind is Put:
        # Of each key, the last.
        return Put(table, [*{row[: table.key]: row for row in draw(rows)}.values()])
    if kind is Under:
        width = draw(st.integers(1, table.key))
        return Under(table, draw(st.lists(values(table, key[:width]), max_size=4)))
    if kind is Delete and deletes_pages and draw(st.booleans()):
        # A page that looked at enough has other rows.
        return Delete(table, draw(all_pages(table))._replace(most=50))
    return draw(all_pages(table)) if kind is Pages else kind(table, draw(keys))


@st.composite
def all_pages(draw: st.DrawFn, table: Table) -> Pages:
    """A page with any parameters."""
    by = draw(st.sampled_from([(), table.columns[: table.key], *table.indexes]))
    names = [name for name in table.columns if name != "number"]
    equal = {
        name: draw(values(table, [name]))[0]
        for name in draw(st.sets(st.sampled_from(names), max_size=3))
    }
    # What orders rows is never None, and a value that is None can be wanted.
    one_of = {
        name: {draw(values(table, [name]))[0] for _ in range(2)}
        for name in draw(st.sets(st.sampled_from(names), max_size=1))
    }
    step = Pages(
        table,
        draw(st.integers(1, 3)),
        by,
        equal,
        one_of,
        reverse=draw(st.booleans()),
        most=draw(st.sampled_from([1, 2, 3, 50])),
    )
    if step.given < len(step.order) and (name := step.order[step.given]) != "number":
        low, high = (draw(st.none() | values(table, [name]).map(lambda one: one[0])) for _ in "ab")
        step = step._replace(low=low, high=high)
    return step


def examples(table: Table, *, deletes_pages: bool = False) -> st.SearchStrategy[Any]:
    """Plans over a table, each with whether it raises at its end, and pages to read after each."""
    plans = st.tuples(
        st.lists(all_steps(table, deletes_pages=deletes_pages), max_size=6),
        st.sampled_from([False] * 3 + [True]),
    )
    return st.tuples(st.lists(plans, max_size=5), st.lists(all_pages(table), max_size=3))


class ToldError(Exception):
    """What a plan raises."""


def plan(wanted: Sequence[Change], *, fails: bool) -> Steps[list[Any]]:
    """Execute steps; a row that is put keeps its number."""
    answers = []
    for step in wanted:
        if isinstance(step, Put) and step.table is NUMBERED:
            stored = yield Get(NUMBERED, [row[:1] for row in step.rows])
            step = Put(
                NUMBERED, [(*row[:1], *stored.get(row[:1], row)[1:2], row[2]) for row in step.rows]
            )
        answers.append((yield step))
    if fails:
        raise ToldError
    return answers


def one(step: Change) -> Steps[Any]:
    return (yield step)


class Side:
    """One of the executors, and what was seen of it."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        #: The greatest number that was seen.
        self._greatest = 0
        self._before: set[int] = set()

    def execute(self, wanted: Steps[Any]) -> Any:
        return self._executor.execute(wanted, CONTEXT)

    def check_numbers(self) -> None:
        """A number is greater than each that was there before, and is not given again."""
        found: Page = self.execute(one(Pages(NUMBERED, 1000)))
        numbers = {row[1] for row in found.rows}
        new = numbers - self._before
        assert all(number > self._greatest for number in new)
        self._greatest = max([self._greatest, *numbers])
        self._before = numbers

    def follow(self, step: Pages) -> list[Page]:
        """Read all pages from a place on."""
        found: list[Page] = []
        while not found or found[-1].more:
            assert len(found) < 200
            found.append(self.execute(one(step)))
            assert len(found[-1].rows) <= step.limit
            step = step._replace(after=found[-1].place)
        return found


def comparable(table: Table, answer: Any) -> Any:
    """Return an answer without what may differ: places, and numbers, of which some are skipped."""
    if isinstance(answer, Page):
        return comparable(table, answer.rows)
    if isinstance(answer, dict):
        return {key: comparable(table, value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [comparable(table, row) for row in answer]
    if table is NUMBERED and isinstance(answer, tuple):
        assert isinstance(answer[1], int)
        return answer[:1] + answer[2:]
    return answer


def rows_of(table: Table, pages: Sequence[Page]) -> list[Row]:
    return [row for page in pages for row in comparable(table, page)]


def check_the_same(
    executor: Any, example: tuple[list[tuple[list[Change], bool]], list[Pages]]
) -> None:
    """Check that an executor with empty tables returns what the one in memory does."""
    plans, wanted = example
    sides = (Side(MemoryTables()), Side(executor))
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
