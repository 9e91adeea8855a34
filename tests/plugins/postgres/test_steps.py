# SPDX-License-Identifier: Apache-2.0
"""The executor on PostgreSQL returns for the same plans what the one in memory does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from engage.api import StorageContext
from engage.store.memory import MemoryTables
from engage.store.tables import Add, Pages, Steps, execute_waiting
from support import postgres
from support.executors import REGISTERS, TABLES, Change, Side, check_the_same, examples, one

pytestmark = pytest.mark.long


class Executor:
    """Executes steps in a transaction of one connection."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._db = self._runner.run(self._connected())

    async def _connected(self) -> Any:
        import asyncpg

        from engage_plugins.postgres.tables import definitions

        db = await asyncpg.connect(postgres.shared().url())
        await db.execute("CREATE SCHEMA steps")
        await db.execute(f"SET search_path = steps; {definitions(TABLES)}")
        return db

    def execute(self, plan: Steps[Any], context: StorageContext) -> Any:
        return self._runner.run(self._execute(plan, context))

    async def _execute(self, plan: Steps[Any], context: StorageContext) -> Any:
        from engage_plugins.postgres.steps import Run

        async with self._db.transaction():
            return await execute_waiting(plan, Run(self._db).execute, context)

    def empty(self) -> None:
        """Delete everything, except for the numbers that were given."""
        names = ", ".join(table.name for table in TABLES)
        self._runner.run(self._db.execute(f"TRUNCATE {names}"))

    def close(self) -> None:
        self._runner.run(self._db.execute("DROP SCHEMA steps CASCADE"))
        self._runner.run(self._db.close())
        self._runner.close()


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """Tables that the examples share; each begins with empty ones."""
    made = Executor()
    yield made
    made.close()


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from(TABLES).flatmap(lambda table: examples(table, deletes_pages=True))
)
def test_the_executors_return_the_same(
    executor: Executor, example: tuple[list[tuple[list[Change], bool]], list[Pages]]
) -> None:
    executor.empty()
    check_the_same(executor, example)


def test_a_page_ends_with_the_row_that_makes_it_large(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engage.store import memory
    from engage_plugins.postgres import pages

    for module in (memory, pages):
        monkeypatch.setattr(module, "MAX_PAGE_BYTES", 45)
    executor.empty()
    rows = [(f"{number}", 0, "", b"x" * 20) for number in range(8)]
    for side in map(Side, (MemoryTables(), executor)):
        side.execute(one(Add(REGISTERS, rows)))
        assert [len(page.rows) for page in side.follow(Pages(REGISTERS, 7))] == [3, 3, 2]
