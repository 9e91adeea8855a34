# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage`."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from engage.api import CONFLICT, DeadLetter, DeadLetterBudget
from engage.store.facade import Storage
from engage.testing.factories import AWKWARD, TIME, WORKSPACE, all_pages, all_recent, letter
from engage.testing.storage.harness import Bench, on_open, on_store


def _plain(dead_letter: DeadLetter) -> tuple[object, ...]:
    values = dataclasses.asdict(dead_letter)
    values["errors"] = [dict(error) for error in dead_letter.errors]
    values["headers"] = [list(header) for header in dead_letter.headers]
    return tuple(values.items())


async def _ids(store: Storage, workspace: str | None = None) -> list[str]:
    return [one.id for one in await all_pages(store.scan_dead_letters, workspace)]


class DeadLetterTests:
    """``put``, ``scan_dead_letters``, ``recent_dead_letters``, ``remove`` and expiry."""

    @on_store
    async def test_a_dead_letter_is_returned_unchanged(self, bench: Bench) -> None:
        store = await bench.open()
        written = [
            letter("plain"),
            letter("bytes", item=bytes(range(256)) * 100, truncated=True, origin="sendgrid"),
            letter(
                "all",
                write_key_id=None,
                user_id="u\x00:",
                anonymous_id=None,
                message_id=None,
                message="\x00 😀 $a.b",
                errors=[{"pointer": "/a~1b", "message": "\x00"}, {"pointer": "", "message": "x"}],
                headers=[("X-A", "1"), ("X-A", "2"), ("$set", "a.b"), ("", "")],
            ),
            letter("empty", item=b"", errors=[], received_at=0),
        ]
        assert await store.put(written) == 0
        await store.close()
        store = await bench.open()
        letters = await all_pages(store.scan_dead_letters, None, limit=2)
        assert [_plain(one) for one in letters] == [_plain(one) for one in written]

    @on_open
    async def test_what_is_needed_to_replay_a_letter_is_kept(self, store: Any) -> None:
        written = [
            letter("single", operation="track", envelope=b"{}"),
            letter("batch", operation="batch", envelope='{"context":{"\u0000":"\u202e"}}'.encode()),
            letter("earlier", operation=None, envelope=None),
            letter("half", operation="page", envelope=None, origin="sendgrid"),
        ]
        assert await store.keep(written) == [True] * 4
        letters = await all_pages(store.scan_dead_letters, None)
        assert [(one.operation, one.envelope) for one in letters] == [
            (one.operation, one.envelope) for one in written
        ]

    @on_store
    async def test_an_envelope_counts_towards_the_budget(self, bench: Bench) -> None:
        budget = DeadLetterBudget(api_bytes=10_000)
        store = await bench.open(dead_letter_budget=budget)
        large = b'{"context":"%s"}' % (b"x" * 6000)
        assert await store.put([letter("a", envelope=large), letter("b", envelope=large)]) == 1
        assert await store.remove(WORKSPACE, ["a"]) == 1
        assert await store.put([letter("b", envelope=large), letter("c")]) == 0

    @on_open
    async def test_a_dead_letter_is_found_by_its_id(self, store: Any) -> None:
        written = [letter(name, message=f"{number}") for number, name in enumerate(AWKWARD)]
        other = letter("a", workspace_id="other", item=b"other", operation="track", envelope=b"{}")
        assert await store.put([*written, other]) == 0
        for one in (*written, other):
            found = await store.dead_letter(one.workspace_id, one.id)
            assert found is not None
            assert _plain(found) == _plain(one)
        assert await store.dead_letter(WORKSPACE, "nobody") is None
        assert await store.dead_letter("nobody", "a") is None
        assert await store.dead_letter(WORKSPACE, "\ud800") is None
        assert await store.remove(WORKSPACE, ["a"]) == 1
        assert await store.dead_letter(WORKSPACE, "a") is None

    @on_store
    async def test_recent_dead_letters_are_the_scan_in_reverse(self, bench: Bench) -> None:
        store = await bench.open()
        page = await store.recent_dead_letters(None, limit=10)
        if page is None:
            pytest.skip("this storage does not return its newest dead letters")
        assert (list(page.items), page.cursor) == ([], None)
        workspaces = (WORKSPACE, WORKSPACE, "other")
        for number in range(30):
            # Some are received in the same millisecond.
            at = TIME + number // 4
            one = letter(f"{number * 7 % 30}", workspace_id=workspaces[number % 3], received_at=at)
            assert await store.put([one]) == 0
        for workspace in (None, WORKSPACE, "other", "nobody"):
            scanned = await all_pages(store.scan_dead_letters, workspace)
            for limit in (1, 4, 100):
                letters = await all_recent(store.recent_dead_letters, workspace, limit=limit)
                assert [_plain(one) for one in letters] == [_plain(one) for one in scanned[::-1]]
        page = await store.recent_dead_letters(None, limit=5)
        first = [item.id for item in page.items]
        # New letters do not move the pages, and letters that are removed are only left out.
        assert await store.put([letter("new", received_at=TIME + 100)]) == 0
        assert await store.remove(WORKSPACE, [first[1], "0"]) == 2
        await store.close()
        store = await bench.open()
        rest = await all_recent(store.recent_dead_letters, None, limit=3, before=page.cursor)
        expected = [f"{number * 7 % 30}" for number in range(29, -1, -1)]
        assert first == expected[:5]
        assert [one.id for one in rest] == [one for one in expected[5:] if one != "0"]

    @on_open
    async def test_a_dead_letter_is_stored_once(self, store: Any) -> None:
        assert await store.put([letter("a"), letter("a"), letter("b")]) == 0
        assert await store.put([letter("b", received_at=TIME + 9), letter("c")]) == 0
        assert await store.put([letter("a", workspace_id="other")]) == 0
        assert await _ids(store, WORKSPACE) == ["a", "b", "c"]
        assert await _ids(store, "other") == ["a"]
        first = await all_pages(store.scan_dead_letters, WORKSPACE)
        assert {one.received_at for one in first} == {TIME}
        await asyncio.gather(*(store.put([letter("d")]) for _ in range(10)))
        assert await _ids(store, WORKSPACE) == ["a", "b", "c", "d"]

    @on_open
    async def test_similar_ids_of_dead_letters_are_different(self, store: Any) -> None:
        assert await store.put([letter(name) for name in AWKWARD]) == 0
        assert await _ids(store) == list(AWKWARD)
        assert await store.remove(WORKSPACE, ["a\x00", "a:", "nobody"]) == 2
        assert await _ids(store) == [name for name in AWKWARD if name not in ("a\x00", "a:")]

    @on_store
    async def test_a_budget_limits_the_number_of_dead_letters(self, bench: Bench) -> None:
        budget = DeadLetterBudget(api_count=3, webhook_count=2)
        store = await bench.open(dead_letter_budget=budget)
        assert await store.put([letter(str(number)) for number in range(5)]) == 2
        # A dead letter that is stored already is not dropped.
        assert await store.put([letter("1"), letter("9")]) == 1
        # Deliveries have a separate budget, and so has each workspace.
        deliveries = [letter(f"d{number}", origin="sendgrid") for number in range(2)]
        assert await store.put([*deliveries, letter("d2", origin="postmark")]) == 1
        others = [letter(str(number), workspace_id="other") for number in range(4)]
        assert await store.put(others) == 1
        assert await _ids(store, WORKSPACE) == ["0", "1", "2", "d0", "d1"]
        assert await store.remove(WORKSPACE, ["0", "d0"]) == 2
        assert await store.put([letter("n"), letter("m"), letter("dn", origin="x")]) == 1
        assert await _ids(store, WORKSPACE) == ["1", "2", "d1", "n", "dn"]

    @on_store
    async def test_a_budget_limits_the_size_of_dead_letters(self, bench: Bench) -> None:
        budget = DeadLetterBudget(api_bytes=10_000, webhook_bytes=20_000)
        store = await bench.open(dead_letter_budget=budget)
        assert await store.put([letter("a", item=b"x" * 6000)]) == 0
        assert await store.put([letter("b", item=b"x" * 6000)]) == 1
        assert await store.put([letter("c", item=b"x" * 3000)]) == 0
        assert await store.put([letter("d", item=b"x" * 15_000, origin="y")]) == 0
        assert await _ids(store) == ["a", "c", "d"]
        assert await store.expire_dead_letters(TIME + 1, limit=1) == 1
        assert len(await _ids(store)) == 2

    @on_open
    async def test_dead_letters_are_removed_and_expire(self, store: Any) -> None:
        letters = [letter(str(number), received_at=TIME + number) for number in range(10)]
        assert await store.put(letters) == 0
        assert await store.remove("other", ["1"]) == 0
        assert await store.remove(WORKSPACE, ["1", "1", "3"]) == 2
        assert await store.remove(WORKSPACE, []) == 0
        assert await store.expire_dead_letters(TIME + 6, limit=2) == 2
        assert await _ids(store) == ["4", "5", "6", "7", "8", "9"]
        assert await store.expire_dead_letters(TIME + 6, limit=100) == 2
        assert await store.expire_dead_letters(TIME + 6, limit=100) == 0
        assert await _ids(store) == ["6", "7", "8", "9"]

    @on_store
    async def test_refused_items_leave_room_for_conflicts(self, bench: Bench) -> None:
        budget = DeadLetterBudget(api_count=2, conflict_count=2, webhook_count=1)
        store = await bench.open(dead_letter_budget=budget)
        assert await store.keep([letter(str(n)) for n in range(3)]) == [True, True, False]
        conflicts = [letter(f"c{n}", reason=CONFLICT) for n in range(3)]
        assert await store.keep(conflicts) == [True, True, False]
        # A conflict within a delivery uses the budget of deliveries, which clients cannot fill.
        deliveries = [letter(f"d{n}", reason=CONFLICT, origin="sendgrid") for n in range(2)]
        assert await store.keep(deliveries) == [True, False]
        # Removing letters makes room in their budget only.
        assert await store.remove(WORKSPACE, ["c0"]) == 1
        assert await store.keep([letter("3"), conflicts[2], conflicts[0]]) == [False, True, False]
        await store.close()
        store = await bench.open(dead_letter_budget=budget)
        assert await store.keep([*conflicts, letter("4")]) == [False, True, True, False]
        assert await _ids(store) == ["0", "1", "c1", "d0", "c2"]

    @on_store
    async def test_each_letter_is_reported(self, bench: Bench) -> None:
        budget = DeadLetterBudget(conflict_bytes=5000)
        store = await bench.open(dead_letter_budget=budget)
        assert await store.keep([]) == []
        large = letter("large", reason=CONFLICT, item=b"x" * 6000)
        small = letter("small", reason=CONFLICT, item=b"x" * 3000)
        assert await store.keep([large, small, large, small]) == [False, True, False, True]
        assert await store.put([large, small]) == 1
        assert await _ids(store) == ["small"]

    @on_store
    async def test_the_use_of_budgets_is_reported_if_at_all(self, bench: Bench) -> None:
        store = await bench.open()
        letters = [letter("a", item=b"x" * 1000), letter("b", reason=CONFLICT, item=b"x" * 2000)]
        await store.keep([*letters, letter("d", origin="x"), letter("o", workspace_id="other")])
        uses = {(use.workspace_id, use.budget): use for use in await store.budget_use()}
        if uses:
            assert {key: use.count for key, use in uses.items() if use.count} == {
                (WORKSPACE, "api"): 1,
                (WORKSPACE, "conflict"): 1,
                (WORKSPACE, "webhook"): 1,
                ("other", "api"): 1,
            }
            assert uses[WORKSPACE, "conflict"].size == letters[1].size
            await store.close()
            budget = DeadLetterBudget(api_bytes=2 * uses[WORKSPACE, "api"].size)
            store = await bench.open(dead_letter_budget=budget)
            item = letters[0].item
            assert await store.put([letter("e", item=item + b"x"), letter("f", item=item)]) == 1
            assert await _ids(store, WORKSPACE) == ["a", "b", "d", "f"]

    @on_open
    async def test_storing_no_dead_letter_is_allowed(self, store: Any) -> None:
        assert await store.put([]) == 0
