# SPDX-License-Identifier: Apache-2.0
"""The promises of every :class:`~engage.store.tables.Executor`: see :mod:`engage.store.tables`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections import Counter
from typing import Any, Final

import pytest

from engage.api import EventFilter, Kind, Record, Status, StorageUnavailable, Subject
from engage.store.counts import COUNTS, SERIES
from engage.store.erasures import ERASURE, put
from engage.store.events import EVENTS
from engage.store.keys import fingerprint, hash_of
from engage.store.profiles import CHOICES
from engage.store.records import RECORDS, VERSIONS
from engage.store.suppressions import SUPPRESSIONS
from engage.store.tables import (
    Add,
    Delete,
    Executor,
    Get,
    Page,
    Pages,
    Put,
    Recall,
    Remember,
    Row,
    Steps,
    Under,
    plan,
)

from ..factories import AWKWARD, TIME, WORKSPACE, all_pages, change, identify, letter
from ..harness import Call, eventually, must_fail
from ..processes import print_line
from .harness import Bench, on_open, on_store
from .processes import children_of, lines_of

#: The code of a child process. Its plans are known before another process can send one.
_CHILD = "from engage.testing.storage import processes, steps; processes.child(steps.count_up)"
#: Texts that are ordered by code points, not by bytes of UTF-16, and compared by nothing else.
_TEXTS: Final = sorted(
    {*AWKWARD, "", "\x01", "\x00\x00", "\u200f", "\U00010000", "\U0010ffff" * 512}
)
#: The least and the greatest integers, and what lies around zero.
_INTEGERS: Final = (-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1)

_TABLES: Final = {
    x.name: x for x in (RECORDS, VERSIONS, SUPPRESSIONS, COUNTS, SERIES, CHOICES, EVENTS)
}
_STEPS: Final[dict[str, type]] = {kind.__name__: kind for kind in (Get, Under, Add, Put, Delete)}
#: The fields of :class:`Pages` behind the table.
_Fields = tuple[
    int, list[str], dict[str, Any], dict[str, list[Any]], Any, Any, Row | None, bool, int
]  # fmt: skip


@plan(repeatable=False)
def do(calls: list[tuple[str, str, list[Row]]], error: str) -> Steps[list[Any]]:
    """Execute steps (its name, that of its table, rows or keys) and return what each returns.

    :param error: raised at the end; empty: none.
    """
    answers: list[Any] = []
    for name, table, rows in calls:
        answer: Any = yield _STEPS[name](_TABLES[table], rows)
        if name == "Under":
            answer = {prefix: sorted(answer[prefix]) for prefix in answer}
        answers.append(sorted(answer.items()) if isinstance(answer, dict) else answer)
    if error:
        raise ValueError(error)
    return answers


@plan()
def read_page(table: str, fields: _Fields) -> Steps[tuple[list[Row], Row | None, bool]]:
    """Execute one :class:`Pages`."""
    page = yield Pages(_TABLES[table], *fields)  # type: ignore[arg-type]
    return [*page.rows], page.place, page.more


@plan(repeatable=False)
def increment(name: str) -> Steps[int]:
    """Add one to a number that is read first."""
    number = (yield from number_of(name)) + 1
    yield Put(RECORDS, [_record("n", name, number=number)])
    return number


@plan()
def delete_records(kind: str, before: int, limit: int) -> Steps[int]:
    """Delete the oldest records."""
    oldest = Pages(RECORDS, limit, by=("kind", "at"), equal={"kind": kind}, high=before)
    deleted: int = yield Delete(RECORDS, oldest)
    return deleted


@plan(repeatable=False)
def remember(number: int, error: str) -> Steps[dict[str, int]]:
    """Remember a number, or forget for 0, and return what was remembered before."""
    numbers = dict((yield Recall("numbers")))
    yield Remember("numbers", {"n": number} if number else None)
    if error:
        raise ValueError(error)
    return numbers


@plan()
def number_of(name: str) -> Steps[int]:
    """Return how often a number was incremented."""
    stored = yield Get(RECORDS, [("n", "acme", name)])
    return sum(row[-1] for row in stored.values())


def _calls(*steps: Any) -> list[tuple[str, str, list[Row]]]:
    return [(type(step).__name__, step.table.name, [*step[1]]) for step in steps]


async def run(store: Executor, *steps: Any, error: str = "") -> list[Any]:
    """Execute steps in one plan. What they return has tuples for dictionaries and lists."""
    return [*_frozen(await store.run(do, _calls(*steps), error))]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


async def pages(store: Executor, step: Pages) -> list[Page]:
    """Read all pages from a place on; the last one has no more."""
    parts: list[Page] = []
    while not parts or parts[-1].more:
        assert len(parts) < 100, "reading does not end"
        fields: Any = step[1:]
        made = await store.read(read_page, step.table.name, fields)
        parts.append(Page(*_frozen(made)))
        step = step._replace(after=parts[-1].place)
        assert len(parts[-1].rows) <= step.limit
    return parts


async def rows_of(store: Executor, step: Pages) -> list[Row]:
    """Read all rows from a place on."""
    return [row for page in await pages(store, step) for row in page.rows]


def _record(kind: str, name: str, at: int = 0, *, body: bytes = b"{}", number: int = 1) -> Row:
    return (kind, "acme", name, body, at, number)


def _suppression(address: str, at: int, lifted: int, how: str) -> Row:
    return ("acme", "email", address, "", "bounce", at, lifted, how, "s")


class StepTests:
    """Steps, plans that fail or run at the same time, and processes that end."""

    @on_open
    async def test_rows_are_found_by_keys_and_prefixes(self, store: Executor) -> None:
        rows = [_record(kind, name) for kind in ("a", "aa", "b") for name in ("z", "y")]
        missing = ("a", "acme", "x")
        got, under, deleted, left = (
            await run(
                store,
                Put(RECORDS, rows),
                Get(RECORDS, [rows[0][:3], missing, rows[5][:3]]),
                Under(RECORDS, [("b", "acme"), ("a", "acme"), ("none", "acme")]),
                Delete(RECORDS, [rows[0][:3], missing, rows[1][:3]]),
                Get(RECORDS, [row[:3] for row in rows]),
            )
        )[1:]
        assert got == tuple((row[:3], row) for row in (rows[0], rows[5]))
        assert under == (
            (("a", "acme"), (rows[1], rows[0])),
            (("b", "acme"), (rows[5], rows[4])),
            (("none", "acme"), ()),
        )
        assert deleted == 2
        assert [row for _, row in left] == [rows[3], rows[2], rows[5], rows[4]]
        assert (await run(store, Get(RECORDS, []), Delete(RECORDS, []), Put(RECORDS, [])))[1] == 0

    @on_open
    async def test_of_two_rows_with_one_key_the_first_is_added(self, store: Executor) -> None:
        first, second = _record("a", "x", body=b"1"), _record("a", "x", body=b"2")
        other, third = _record("a", "y", body=b"3"), _record("a", "y", body=b"4")
        stored, again, left = await run(
            store,
            Add(RECORDS, [first, second]),
            Add(RECORDS, [third, second, other]),
            Under(RECORDS, [("a",)]),
        )
        assert (stored, again) == ((), ((first[:3], first),))
        assert left == ((("a",), (first, third)),)

    @on_open
    async def test_a_row_is_replaced_and_a_register_keeps_what_wins(self, store: Executor) -> None:
        old, new = _record("a", "x", 5), _record("a", "x", 3, body=b"new")
        await run(store, Put(RECORDS, [old]), Put(RECORDS, [new]))
        assert await run(store, Get(RECORDS, [old[:3]])) == [((new[:3], new),)]
        rows = [(1, 0, "a"), (2, 1, "b"), (2, 0, "wins"), (0, 0, "c"), (2, 0, "too late")]
        for number, order in enumerate(itertools.permutations(rows[:4])):
            for row in (*order, rows[4]):
                await run(store, Put(SUPPRESSIONS, [_suppression(str(number), *row)]))
            key = _suppression(str(number), 0, 0, "")[:5]
            ((_, kept),) = (await run(store, Get(SUPPRESSIONS, [key])))[0]
            assert kept == _suppression(str(number), *rows[2])

    @on_open
    async def test_pages_are_in_every_order_and_within_bounds(self, store: Executor) -> None:
        rows = [_record("ab"[n % 2], f"{n:02}", n // 4, number=n % 3) for n in range(20)]
        await run(store, Put(RECORDS, random.Random(1).sample(rows, 20)))
        by_time, kind = ("kind", "at"), {"kind": "a"}
        # A page, its order, and which rows it wants.
        cases: list[tuple[dict[str, Any], Any, Any]] = [
            ({}, lambda row: row[:3], lambda row: True),
            ({"equal": kind}, lambda row: row[:3], lambda row: row[0] == "a"),
            ({"by": by_time}, lambda row: (row[0], row[4], row), lambda row: True),
            (
                {"by": by_time, "equal": kind, "low": 1, "high": 3},
                lambda row: (row[4], row),
                lambda row: row[0] == "a" and 1 <= row[4] < 3,
            ),
            (
                {"equal": {"at": 2}, "one_of": {"version": [0, 2]}},
                lambda row: row[:3],
                lambda row: row[4] == 2 and row[5] != 1,
            ),
            (
                {"by": by_time, "one_of": {("kind", "id"): ["a"]}, "below": {"at": 2}},
                lambda row: (row[0], row[-2], row),
                lambda row: row[0] == "a" and row[-2] < 2,
            ),
            ({"equal": {"body": b"none"}}, lambda row: row, lambda row: False),
            ({"one_of": {"version": []}}, lambda row: row, lambda row: False),
            ({"equal": dict(zip(RECORDS.columns, rows[0], strict=True))}, len, rows[0].__eq__),
        ]
        for (fields, key, is_wanted), reverse, most in itertools.product(
            cases, (False, True), (1, 4, 1000)
        ):
            expected = sorted(filter(is_wanted, rows), key=key, reverse=reverse)
            step = Pages(RECORDS, 3, reverse=reverse, most=most, **fields)
            parts = await pages(store, step)
            assert [row for page in parts for row in page.rows] == expected
            for number, page in enumerate(parts):
                assert page.place is not None
                rest = [row for later in parts[number + 1 :] for row in later.rows]
                assert await rows_of(store, step._replace(after=page.place)) == rest

    @on_open
    async def test_the_rows_of_a_page_are_deleted(self, store: Executor) -> None:
        rows, other = [_record("a", f"{-at}", at) for at in range(5)], _record("b", "x")
        await run(store, Put(RECORDS, [*rows, other]))
        for deleted in (2, 2, 0):
            assert await store.run(delete_records, "a", len(rows) - 1, 2) == deleted
        assert await rows_of(store, Pages(RECORDS, 1)) == [rows[-1], other]

    @on_open
    async def test_only_what_is_durable_is_remembered(self, store: Executor) -> None:
        """If anything: an executor may forget."""
        assert await store.run(remember, 1, "") == {}
        with pytest.raises(Exception, match="told to fail"):
            await store.run(remember, 2, "told to fail")
        assert await store.run(remember, 2, "") in ({}, {"n": 1})
        assert await store.run(remember, 0, "") in ({}, {"n": 2})
        assert await store.run(remember, 1, "") == {}

    @on_store
    async def test_no_row_appears_behind_a_place(self, bench: Bench) -> None:
        """In order of arrival, whatever the place: of an empty page, or of the last one."""
        bench.require("transactions")
        store = await bench.open()
        step = Pages(SERIES, 2)
        assert await pages(store, step) == [((), None, False)]
        chance, places, added = random.Random(3), list[tuple[Any, int]]([(None, 0)]), 0
        for _ in range(12):
            names = [f"{chance.random()}" for _ in range(chance.randrange(3))]
            await run(store, Add(SERIES, [(name, "w", "[]", None) for name in names]))
            added += len(names)
            for equal in ({}, {"labels": "none"}):
                again = step._replace(after=places[-1][0], equal=equal)
                places += [((await pages(store, again))[-1].place, added)]
        everything = await rows_of(store, step)
        assert len(everything) == added
        for place, seen in places:
            assert await rows_of(store, step._replace(after=place)) == everything[seen:]
        # A page that looked at enough, and found nothing, ends there.
        parts = await pages(store, Pages(SERIES, 5, equal={"name": everything[-1][0]}, most=3))
        assert [len(page.rows) for page in parts[:3]] == [0, 0, 0]
        assert all(page.more and page.place is not None for page in parts[:3])

    @on_open
    async def test_a_plan_that_raises_has_no_effect(self, store: Executor) -> None:
        kept, key = _record("a", "kept"), ("a", "acme", "new")
        await run(store, Put(RECORDS, [kept]))
        steps = (
            Delete(RECORDS, [kept[:3]]),
            Put(RECORDS, [_record("a", "new")]),
            Put(SUPPRESSIONS, [_suppression("a", 1, 0, "h")]),
            Put(RECORDS, [_record("a", "new", body=b"2")]),
        )
        for _ in range(2):
            with pytest.raises(Exception, match="told to fail") as raised:
                await run(store, *steps, error="told to fail")
            assert not isinstance(raised.value, StorageUnavailable)
            assert await rows_of(store, Pages(RECORDS, 9)) == [kept]
            assert await rows_of(store, Pages(SUPPRESSIONS, 9)) == []
        await run(store, *steps)
        assert (await run(store, Get(RECORDS, [key, kept[:3]])))[0][0][1][3] == b"2"
        assert len(await rows_of(store, Pages(SUPPRESSIONS, 9))) == 1

    @on_store
    async def test_a_plan_that_raises_costs_no_other(self, bench: Bench) -> None:
        stores = [await bench.open() for _ in range(2)]
        answers = await asyncio.gather(
            *(
                run(
                    stores[n % 2],
                    Put(RECORDS, [_record("a", f"{n:02}")]),
                    error="" if n % 3 else "fails",
                )
                for n in range(30)
            ),
            return_exceptions=True,
        )
        assert [isinstance(x, Exception) for x in answers] == [n % 3 == 0 for n in range(30)]
        names = [row[2] for row in await rows_of(stores[0], Pages(RECORDS, 30))]
        assert names == [f"{n:02}" for n in range(30) if n % 3]

    @on_store
    async def test_plans_that_change_one_row_run_one_after_the_other(self, bench: Bench) -> None:
        bench.require("atomic-updates")
        stores = [await bench.open() for _ in range(3)]

        async def count(store: Executor) -> list[int]:
            return [await store.run(increment, "n") for _ in range(50)]

        results = await asyncio.gather(*(count(stores[n % 3]) for n in range(4)))
        assert sorted(itertools.chain(*results)) == [*range(1, 201)]
        assert await stores[0].read(number_of, "n") == 200

    @on_store
    async def test_no_reader_sees_half_of_a_plan(self, bench: Bench) -> None:
        bench.require("transactions")
        writer, reader = [await bench.open() for _ in range(2)]
        sides = [("left",), ("right",)]

        async def write() -> None:
            for number in range(150):
                await run(writer, *(Put(VERSIONS, [(*side, number)]) for side in sides))
                await asyncio.sleep(0)

        writing, seen = asyncio.ensure_future(write()), set()
        while not writing.done():
            calls = _calls(*(Get(VERSIONS, [side]) for side in sides))
            left, right = _frozen(await reader.read(do, calls, ""))
            assert [row[1] for _, row in left] == [row[1] for _, row in right]
            seen.add(left)
            await asyncio.sleep(0)
        await writing
        assert len(seen) > 1

    @on_store
    async def test_nothing_of_before_comes_after_an_erasure(self, bench: Bench) -> None:
        """While events, a letter and a choice of the person are on their way."""
        key = "0123456789abcdef" * 2
        stores = [await bench.open(erasures_key=key) for _ in range(2)]
        if not stores[0].isolated:
            pytest.skip("the storage does not say that its plans are isolated")

        async def stored_of(user: str) -> list[Any]:
            events = await all_pages(stores[0].scan, EventFilter(user_id=user))
            letters = await all_pages(stores[0].scan_dead_letters, WORKSPACE)
            chosen = await stores[0].state(WORKSPACE, Subject(Kind.USER, user))
            return [*events, *(letter for letter in letters if letter.user_id == user), *chosen]

        def sent(user: str, name: str, store: Any) -> list[Any]:
            received = letter(f"{user}-{name}", user_id=user)
            group: Any = {name: False}
            choice = change(f"{user}-{name}", user_id=user, **group)
            events = [store.write([identify(f"{user}-{name}-{n}", user)]) for n in range(9)]
            return [*events, store.keep([received]), store.apply(choice)]

        for turn in range(20):
            user = f"u{turn}"
            calls = [*sent(user, "a", stores[0]), *sent(user, "b", stores[1])]
            writing = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(turn / 2000)
            id_, body = f"user:{hash_of(key, WORKSPACE, user)}", b"{}"
            erasure = Record(kind=ERASURE, workspace_id=WORKSPACE, id=id_, body=body, at=TIME + 1)
            assert await stores[turn % 2].run(put, [erasure], False) == fingerprint(key)
            before = await stored_of(user)
            # Also those of a process that was stopped.
            await asyncio.gather(*writing, *sent(user, "c", stores[0]))
            assert await stored_of(user) == before
            late = dataclasses.replace(identify(f"{user}-late", user), received_at=TIME + 1)
            assert [x.status for x in await stores[0].write([late])] == [Status.STORED]
        # The clock was ahead.
        id_, at = f"user:{hash_of(key, WORKSPACE, 'u')}", time.time_ns() // 1_000_000 + 3_600_000
        erasure = Record(kind=ERASURE, workspace_id=WORKSPACE, id=id_, body=b"{}", at=at)
        await stores[0].run(put, [erasure], False)
        assert [x.status for x in await stores[0].write([identify("u", "u")])] == [Status.STORED]

    @on_store
    async def test_texts_come_back_as_they_were_given(self, bench: Bench) -> None:
        """And in the order of their code points, by their keys and by their bounds."""
        bench.require("code-point-order")
        store = await bench.open()
        rows = [_record("k", text, body=text.encode()) for text in _TEXTS]
        shuffled = random.Random(4).sample(rows, len(rows))
        assert await run(store, Add(RECORDS, shuffled)) == [()]
        assert await rows_of(store, Pages(RECORDS, 7)) == rows
        given = {"kind": "k", "workspace": "acme"}
        for text, row in zip(_TEXTS, rows, strict=True):
            assert (await run(store, Get(RECORDS, [row[:3]]))) == [((row[:3], row),)]
            matches = await rows_of(store, Pages(RECORDS, 9, equal=given, low=text))
            assert matches == [row for row in rows if row[2] >= text]

    @on_store
    async def test_integers_come_back_as_they_were_given(self, bench: Bench) -> None:
        bench.require("transactions")
        store = await bench.open()
        counts = [(60, at, at, "p", at) for at in _INTEGERS]
        await run(store, Put(COUNTS, [*reversed(counts)]))
        assert await rows_of(store, Pages(COUNTS, 4)) == counts
        stored = await rows_of(store, Pages(COUNTS, 4, equal={"step": 60}, low=-1, high=2**63 - 1))
        assert stored == counts[1:-1]

    @on_open
    async def test_a_put_adds_to_sums(self, store: Executor) -> None:
        for number in (1, 2, 5):
            await run(store, Put(VERSIONS, [("k", number), ("other", 1)]))
        (answer,) = await run(store, Get(VERSIONS, [("k",)]))
        assert answer == ((("k",), ("k", 8)),)

    @on_store
    async def test_a_row_that_is_replaced_keeps_its_place(self, bench: Bench) -> None:
        bench.require("transactions")
        store = await bench.open()
        rows = [("acme", 0, "u", group, 1, 1, "c") for group in "zay"]
        await run(store, Put(CHOICES, rows))
        await run(store, Put(CHOICES, [(*rows[0][:-1], "d")]))
        stored = await rows_of(store, Pages(CHOICES, 2))
        assert [(row[3], row[-1]) for row in stored] == [("z", "d"), ("a", "c"), ("y", "c")]

    @on_store
    async def test_a_number_of_a_followed_table_is_never_given_again(self, bench: Bench) -> None:
        bench.require("transactions")
        places: list[Any] = []
        for name in "abc":
            store = await bench.open()
            row = ("acme", "api", name, "track", None, "v", "E", 1, 1, b"{}")
            await run(store, Add(EVENTS, [row]))
            places.append((await pages(store, Pages(EVENTS, 9)))[-1].place)
            await run(store, Delete(EVENTS, [row[:3]]))
            await store.close()
        assert places == sorted({*places})

    @on_store
    async def test_a_value_that_cannot_be_stored_has_no_effect(self, bench: Bench) -> None:
        """Nobody sees anything of the plan, and what others write afterwards is seen."""
        bench.require("transactions")
        stores = [await bench.open() for _ in range(2)]
        for value in (2**64, -(2**80)):
            bad = _record("k", "bad", value)
            try:
                await run(stores[0], Put(RECORDS, [_record("k", "good"), bad]))
            except Exception:
                continue
            pytest.skip("this storage can store any integer")
        for store in stores:
            assert await rows_of(store, Pages(RECORDS, 9, equal={"kind": "k"})) == []
        await run(stores[1], Put(RECORDS, [_record("k", "good")]))
        for store in stores:
            assert len(await rows_of(store, Pages(RECORDS, 9, equal={"kind": "k"}))) == 1

    @on_store
    async def test_numbers_ascend_after_the_store_is_opened_again(self, bench: Bench) -> None:
        bench.require("transactions")
        numbers: list[int] = []
        for turn in range(3):
            store = await bench.open()
            # A row that is there, and a plan that fails, take no number from another row.
            names = ("same", f"{9 - turn}", f"a{turn}")
            rows = [(name, "w", "[]", None) for name in names]
            with pytest.raises(Exception, match="fails"):
                await run(store, Add(SERIES, rows), error="fails")
            await run(store, Add(SERIES, rows))
            new = [row[3] for row in await rows_of(store, Pages(SERIES, 4))]
            assert new[: len(numbers)] == numbers
            numbers = new
            await store.close()
        assert len(numbers) == 7
        assert numbers == sorted({*numbers})

    @on_store
    async def test_a_plan_has_no_effect_while_the_store_is_broken(self, bench: Bench) -> None:
        store = await bench.open(write_timeout=5)
        calls: list[Call] = [
            lambda: store.run(increment, "n"),
            lambda: store.read(number_of, "n"),
        ]
        await eventually(calls[0], StorageUnavailable)
        before = await store.read(number_of, "n")
        async with bench.broken(), asyncio.timeout(10):
            await asyncio.gather(*map(must_fail, calls * 2))
        assert await eventually(calls[1], StorageUnavailable) == before
        assert await eventually(calls[0], StorageUnavailable) == before + 1

    @on_store
    async def test_plans_of_several_processes_run_one_after_the_other(self, bench: Bench) -> None:
        bench.require("several-processes")
        bench.require("atomic-updates")
        store = await bench.open()
        jobs = [{"name": "n", "tasks": 3, "count": 40}] * 2
        async with children_of(bench, *jobs, code=_CHILD) as children:
            reports = await asyncio.gather(*(lines_of(child) for child in children))
        assert sum(lines.count("n did") for lines in reports) == 240
        assert await store.read(number_of, "n") == 240

    @on_store
    async def test_a_killed_process_loses_no_plan_and_repeats_none(self, bench: Bench) -> None:
        """Its plans are not run again, nor are those of others that had no answer from it."""
        bench.require("durable")
        await (await bench.open()).close()
        job = {"name": "killed", "tasks": 2, "count": 10**6}
        other = {"name": "other", "tasks": 12, "count": 40}
        others = [other] if bench.subject.can("several-processes") else []
        did, tried = Counter[str](), Counter[str]()
        for turn in range(3):
            async with children_of(bench, job, code=_CHILD) as (killed,):
                assert killed.stdout is not None
                lines = [await killed.stdout.readline() for _ in range(20 + 9 * turn)]
                async with children_of(bench, *others, code=_CHILD) as more:
                    for child in more:
                        # Its plans run in the first process, if one process runs those of all.
                        lines += [await child.stdout.readline()]  # type: ignore[union-attr]
                    killed.kill()
                    lines += (await killed.stdout.read()).splitlines(keepends=True)
                    for child in more:
                        lines += [f"{line}\n".encode() for line in await lines_of(child)]
            seen = Counter(lines)
            # Each task of the killed process may have had a plan whose answer it did not get.
            tried["killed"] += 2
            store = await bench.open()
            for name in ("killed", "other"):
                did[name] += seen[f"{name} did\n".encode()]
                tried[name] += seen[f"{name} did\n".encode()] + seen[f"{name} failed\n".encode()]
                assert did[name] <= await store.read(number_of, name) <= tried[name]
            await store.close()


async def count_up(store: Executor, job: dict[str, Any]) -> None:
    """Do the job of a child process: run plans, and print what became of each."""

    async def work() -> None:
        for _ in range(job["count"]):
            try:
                await store.run(increment, job["name"])
            except StorageUnavailable:
                print_line(f"{job['name']} failed")
            else:
                print_line(f"{job['name']} did")

    await asyncio.gather(*(work() for _ in range(job["tasks"])))
