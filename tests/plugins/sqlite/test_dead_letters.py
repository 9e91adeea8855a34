# SPDX-License-Identifier: Apache-2.0
"""Dead letters: their budgets in a store that an older version made, and odd texts."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from engage.api import CONFLICT, DeadLetterBudget
from engage.testing.factories import WORKSPACE, letter
from support.sqlite import make

BUDGET = DeadLetterBudget(api_count=3, conflict_count=2)


async def test_conflicts_that_counted_as_refused_items_are_counted_apart(tmp_path: Path) -> None:
    store = make(tmp_path, budget=BUDGET)
    await store.open(create=True)
    written = [letter("a"), letter("c", reason=CONFLICT), letter("d", origin="x")]
    assert await store.keep(written) == [True] * 3
    await store.close()
    # As the version before would have left it: both are letters of the API.
    with closing(sqlite3.connect(tmp_path / "engage.db")) as db, db:
        db.execute("DELETE FROM store WHERE name = 'conflicts_apart'")
        db.execute("DELETE FROM letter_totals WHERE api = 2")
        db.execute("UPDATE letter_totals SET count = 2 WHERE api = 1")

    store = make(tmp_path, budget=BUDGET)
    await store.open(create=True)
    try:
        assert await store.remove(WORKSPACE, ["a"]) == 1
        use = {one.budget: one.count for one in await store.budget_use()}
        assert use == {"api": 0, "conflict": 1, "webhook": 1}
        refused = [letter(str(number)) for number in range(4)]
        assert await store.keep(refused) == [True, True, True, False]
        conflicts = [letter(f"c{number}", reason=CONFLICT) for number in range(2)]
        assert await store.keep(conflicts) == [True, False]
        assert await store.expire_dead_letters(10**15, limit=100) == 6
        assert {one.count for one in await store.budget_use()} == {0}
        assert {one.size for one in await store.budget_use()} == {0}
    finally:
        await store.close()


async def test_a_dead_letter_may_be_invalid_unicode(tmp_path: Path) -> None:
    """This may be the reason why the event was refused."""
    store = make(tmp_path)
    await store.open(create=True)
    odd = letter(
        "l",
        user_id="u\ud800",
        message="\udfff",
        errors=[{"pointer": "/\ud800", "message": "x"}],
        headers=[("a", "\ud800")],
    )
    assert await store.put([odd, letter("m")]) == 0
    (first, second) = (await store.scan_dead_letters(None, after=None, limit=9)).items
    assert (first.user_id, first.message, first.headers) == ("u?", "?", [("a", "?")])
    assert second.id == "m"
    await store.close()
