# SPDX-License-Identifier: Apache-2.0
"""Pages of what is stored: each call examines a bounded part, most of them by an index."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engage.api import EventFilter, Page
from engage.store import counts, events, pages
from engage.testing.factories import (
    TIME,
    WORKSPACE,
    all_pages,
    all_recent,
    change,
    count,
    event,
    ids,
    letter,
    record,
    store_all,
    sums,
    user,
)
from engage_plugins.sqlite import pages as sqlite_pages
from engage_plugins.sqlite.connection import FileConnection
from engage_plugins.sqlite.store import SqliteStorage
from support.sqlite import engine_of


def names(page: Page[Any]) -> list[str]:
    """Return the message ids of a page of events."""
    return [one.message_id for one in page.items]


async def store_rare(store: SqliteStorage) -> None:
    """Store 60 events, of which those named 3 and 47 are of a rare user."""
    users = ["rare" if number in (3, 47) else "usual" for number in range(60)]
    await store_all(store, *(event(str(n), user_id=one) for n, one in enumerate(users)))


# ---------------------------------------------------------------------------------------- recent
async def test_a_page_of_recent_events_reads_a_bounded_part(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_ROWS", 10)
    await store_rare(store)
    wanted = EventFilter(user_id="rare")
    pages = [await store.recent(wanted, limit=100)]
    while pages[-1].cursor is not None:
        pages.append(await store.recent(wanted, before=pages[-1].cursor, limit=100))
    assert [names(page) for page in pages] == [[], ["47"], [], [], [], ["3"]]


async def test_a_page_of_recent_letters_reads_a_bounded_part(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_ROWS", 10)
    workspaces = ["rare" if number == 3 else "usual" for number in range(30)]
    await store.put([letter(str(n), workspace_id=one) for n, one in enumerate(workspaces)])
    page = await store.recent_dead_letters("rare", limit=100)
    assert (list(page.items), page.cursor is None) == ([], False)
    page = await store.scan_dead_letters("rare", after="[3]", limit=100)
    assert [item.id for item in page.items] == ["3"]
    page = await store.scan_dead_letters("rare", after=page.cursor, limit=100)
    assert (list(page.items), page.cursor) == ([], "[23]")
    for pages_of, function in (
        (all_recent, store.recent_dead_letters),
        (all_pages, store.scan_dead_letters),
    ):
        assert [one.id for one in await pages_of(function, "rare")] == ["3"]
    monkeypatch.setattr(sqlite_pages, "MAX_PAGE_BYTES", 100)
    page = await store.recent_dead_letters(None, limit=100)
    assert len(page.items) < 30
    assert len(await all_recent(store.recent_dead_letters, None)) == 30


async def test_a_page_of_recent_events_has_a_maximum_size(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_pages, "MAX_PAGE_BYTES", 10_000)
    text = {"text": "x" * 4000}
    await store_all(store, *(event(str(n), properties=text) for n in range(9)))
    assert names(await store.recent(EventFilter(), limit=100)) == ["8", "7", "6"]
    assert len(await all_recent(store.recent, EventFilter())) == 9


async def test_a_range_of_time_is_read_without_what_is_before_and_after_it(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_ROWS", 10)
    await store_all(store, *(event(f"{n:03}", at=n) for n in range(200)))
    wanted = EventFilter(since=TIME + 95, until=TIME + 101)
    page = await store.recent(wanted, limit=100)
    assert names(page) == ["100", "099", "098", "097", "096", "095"]
    assert page.cursor is None
    for empty in (
        EventFilter(since=TIME + 500),
        EventFilter(until=TIME),
        EventFilter(since=TIME + 9, until=TIME + 9),
    ):
        page = await store.recent(empty, limit=100)
        assert (list(page.items), page.cursor) == ([], None)


@pytest.mark.parametrize("most", [50, 51])
async def test_a_scan_begins_at_the_first_event_of_a_time(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """If looking for it would take long, it begins at the first event of all."""
    monkeypatch.setattr(events, "MAX_ROWS", 10)
    monkeypatch.setattr(sqlite_pages, "_MAX_COUNTED", most)
    await store_all(store, *(event(f"{n:03}", at=n) for n in range(200)))
    wanted = EventFilter(since=TIME + 150)
    page = await store.scan(wanted, after=None, limit=100)
    assert bool(page.items) is (most > 50)
    found = await all_pages(store.scan, wanted)
    assert [one.message_id for one in found] == [f"{n:03}" for n in range(150, 200)]


@pytest.mark.parametrize("near", [5, 200_000])
async def test_a_range_of_time_is_complete_after_a_clock_was_set(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch, near: int
) -> None:
    """Events are stored in another order than they were received in."""
    monkeypatch.setattr(events, "MAX_ROWS", 10)
    monkeypatch.setattr(sqlite_pages, "_MAX_NEAR", near)
    # The clock was an hour ahead, was set back, and has not caught up.
    times = [n + (3_600_000 if 40 <= n < 60 else 0) for n in range(100)]
    await store_all(store, *(event(f"{n:03}", at=at) for n, at in enumerate(times)))
    for until in (0, 20, 70, 101, 3_600_050, 3_700_000):
        found = await all_recent(store.recent, EventFilter(until=TIME + until))
        assert [one.message_id for one in found] == [
            f"{n:03}" for n in range(99, -1, -1) if times[n] < until
        ]


# ------------------------------------------------------------------------- records and counters
async def test_a_page_of_sums_does_not_split_a_counter(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "MAX_ROWS", 10)
    written = [
        count(1, minute=minute, process=process, labels=(label,))
        for minute in range(5)
        for process in "pqrs"
        for label in "abc"
    ]
    # More registers of one counter than a page examines.
    written += [count(2, minute=2, process=f"{n}", labels=("many",)) for n in range(25)]
    await store.put_counts(written)
    for limit in (1, 2, 100):
        found = await sums(store, limit=limit)
        assert [one.processes for one in found] == [4] * 9 + [25] + [4] * 6
        assert sum(one.total for one in found) == 60 + 50
    page = await store.counts(60, since=0, until=TIME * 2, names=["none"], limit=100)
    assert (list(page.items), page.cursor) == ([], None)
    assert await sums(store, names=["none"]) == []
    assert len(await all_pages(store.scan_counts)) == len(written)


async def test_a_page_of_records_reads_a_bounded_part(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        workspace = "rare" if number == 13 else "usual"
        body = b'{"x":"%s"}' % (b"x" * 1000)
        await store.put_record(record(f"{number:02}", workspace, body=body))
    monkeypatch.setattr(pages, "MAX_ROWS", 10)
    page = await store.list_records(None, "usual", limit=100)
    assert len(page.items) == 9
    assert page.cursor is not None
    for wanted, total in (("rare", 1), ("usual", 29), (None, 30)):
        assert len(await all_pages(store.list_records, None, wanted)) == total
    monkeypatch.setattr(sqlite_pages, "MAX_PAGE_BYTES", 5000)
    page = await store.list_records("key", limit=100)
    assert len(page.items) == 5
    assert len(await all_pages(store.list_records, "key")) == 30


async def test_a_page_of_the_history_reads_a_bounded_part(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [
        change(
            str(number),
            user_id="rare" if number in (3, 47) else f"u{number}",
            workspace="other" if number == 3 else WORKSPACE,
            at=number,
            a=number != 47,
        )
        for number in range(60)
    ]
    await store.apply_all(changes)
    monkeypatch.setattr(pages, "MAX_ROWS", 10)
    for workspace, found in (("other", [3]), (WORKSPACE, [n for n in range(60) if n != 3])):
        page = await store.history(workspace, None, after=None, limit=100)
        assert len(page.items) == len([n for n in found if n < 10])
        read = functools.partial(store.history, workspace, None)
        assert [one.at - TIME for one in await all_pages(read)] == found
    recent = functools.partial(store.history, None, None, since=TIME + 55)
    assert (await recent(after=None, limit=100)).items == []
    assert len(await all_pages(recent)) == 5
    # Only the rows of the subject are read, however many there are of others.
    page = await store.history(WORKSPACE, user("rare"), after=None, limit=100)
    assert ([item.at - TIME for item in page.items], page.cursor) == ([47], None)
    page = await store.scan_subscriptions("other", after=None, limit=100)
    assert (len(page.items), page.cursor is None) == (1, False)


async def test_a_wrong_cursor_is_an_error(store: SqliteStorage) -> None:
    calls: tuple[Callable[[str], Awaitable[object]], ...] = (
        lambda cursor: store.recent(EventFilter(), before=cursor, limit=1),
        lambda cursor: store.list_records(None, after=cursor, limit=1),
        lambda cursor: store.counts(60, since=0, until=1, after=cursor, limit=1),
        lambda cursor: store.scan_counts(after=cursor, limit=1),
        lambda cursor: store.history(WORKSPACE, user("u"), after=cursor, limit=1),
    )
    letters: tuple[Callable[[str], Awaitable[object]], ...] = (
        lambda cursor: store.recent_dead_letters(None, before=cursor, limit=1),
        lambda cursor: store.scan_dead_letters(None, after=cursor, limit=1),
    )
    for cursor in ("", "x", "-1", "[]", "[1]", '["a","b",1]', "{}", "null", "\x00", "[1,2,3]"):
        # The place of a letter is one number.
        for call in (*calls, *(() if cursor == "[1]" else letters)):
            with pytest.raises(ValueError, match=r"."):
                await call(cursor)
    for call in letters:
        with pytest.raises(ValueError, match="cursor"):
            await call(f"[{1 << 63}]")


# ---------------------------------------------------------------------------------------- plans
class Traced:
    """The statements that a connection of the store runs."""

    def __init__(self, connection: FileConnection) -> None:
        self.statements: list[str] = []
        self.db = connection.connection()
        self.db.set_trace_callback(self.statements.append)

    def plans(self) -> list[str]:
        """Return how SQLite runs each statement, and stop tracing."""
        self.db.set_trace_callback(None)
        return [
            row[3]
            for statement in self.statements
            if statement.startswith(("SELECT", "DELETE", "UPDATE"))
            for row in self.db.execute(f"EXPLAIN QUERY PLAN {statement}")
        ]


async def test_indexes_serve_what_the_console_reads(store: SqliteStorage) -> None:
    await store_all(store, *(event(str(n), at=n) for n in range(9)))
    await store.put([letter("a")])
    await store.put_record(record("a"))
    await store.put_counts([count(1)])
    await store.apply_all([change(str(n), a=bool(n % 2)) for n in range(5)])
    await store.get_record("key", "acme", "a")
    reading, writing = Traced(store._reader), Traced(engine_of(store))
    cursor = (await store.recent(EventFilter(user_id="u", name="x"), limit=3)).cursor
    await store.recent(EventFilter(since=TIME, until=TIME + 5), before=cursor, limit=3)
    await store.recent_dead_letters("acme", before="[1]", limit=3)
    await store.scan_dead_letters("acme", after="[1]", limit=3)
    await store.dead_letter("acme", "a")
    await store.get_record("key", "acme", "a")
    await store.records_version("key")
    for reverse in (False, True):
        place = '["key","acme","a"]'
        await store.list_records("key", after=place, limit=3, reverse=reverse)
        await store.list_records("key", "acme", after=place, limit=3, reverse=reverse)
        await store.list_records(None, after=place, limit=3, reverse=reverse)
    await store.counts(60, since=0, until=TIME, names=["events"], after="[1,1]", limit=3)
    await store.scan_counts(after='[1,1,1,""]', limit=3)
    for workspace, whose, place in (
        (None, None, "[1]"),
        (WORKSPACE, None, "[1]"),
        (WORKSPACE, user("u"), '["acme",0,"u",1]'),
    ):
        for since in (0, TIME):
            await store.history(workspace, whose, since=since, after=place, limit=3)
        await store.scan_subscriptions(workspace, after="[1]", limit=3)
    await store.state(WORKSPACE, user("u"))
    await store.apply_all([change(str(n), a=True) for n in (4, 5, 6)])
    await store.erase_choices(WORKSPACE, user("u"), "x")
    await store.expire_records("key", TIME, limit=3)
    await store.expire_counts(60, TIME, limit=3)
    await store.delete_record("key", "acme", "a")
    await store.remove("acme", ["a"])
    await store.expire_dead_letters(TIME, limit=3)
    for plan in (*reading.plans(), *writing.plans()):
        # Only rows of the same time are sorted.
        assert "TEMP B-TREE" not in plan.replace("TEMP B-TREE FOR RIGHT PART", "")
        # These have few rows, and what is between brackets has a limit.
        few = ("SCAN k", "count_series", "sqlite_sequence", "CONSTANT ROW", "(")
        assert not plan.startswith("SCAN") or any(one in plan for one in few), plan


async def test_counters_are_written_in_one_transaction(store: SqliteStorage) -> None:
    await store.put_counts([count(1)])
    traced = Traced(engine_of(store))
    await store.put_counts([count(n, labels=(f"{n}",)) for n in range(45)])
    assert sum(statement == "COMMIT" for statement in traced.statements) == 1
    traced.statements.clear()
    # Five seconds later, the counters have their numbers: few statements write all of them.
    await store.put_counts([count(n + 1, labels=(f"{n}",)) for n in range(45)])
    assert len(traced.statements) < 15


async def test_changes_of_many_users_take_few_statements(store: SqliteStorage) -> None:
    await store.check()
    traced = Traced(engine_of(store))
    for at in range(2):
        changes = [change(f"{n} {at}", user_id=f"u{n}", a=not at, b=True) for n in range(100)]
        traced.statements.clear()
        await store.apply_all(changes)
        # Where there are choices, the changes of each without effect are looked up.
        assert len(traced.statements) < 40 + 100 * at
        traced.statements.clear()
        await store.apply_all(changes)
        assert len(traced.statements) < 20


@pytest.mark.timing
async def test_a_day_of_minutes_is_read_in_a_moment(store: SqliteStorage) -> None:
    """Of four processes with nine counters; it takes 0.08 s on two shared cores."""
    await store.put_counts(
        [
            count(1, minute=minute, process=process, labels=(label,))
            for minute in range(1440)
            for process in "pqrs"
            for label in "abcdefghi"
        ]
    )
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        found = await sums(store, limit=100_000)
        taken.append(time.perf_counter() - start)
        assert len(found) == 1440 * 9
    assert min(taken) < 0.5


# -------------------------------------------------------------------------------------- scanning
async def test_a_page_of_a_filtered_scan_reads_a_bounded_part(
    store: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_ROWS", 10)
    await store_rare(store)
    page = await store.scan(EventFilter(user_id="rare"), after="5", limit=100)
    assert list(page.items) == []
    assert page.cursor == "15"
    assert await ids(store, user_id="rare") == ["3", "47"]


async def test_a_wrong_cursor_of_a_scan_is_an_error(store: SqliteStorage) -> None:
    for cursor in ("", "x", "-1", "1.5", "9" * 30, "\x00", "٣"):
        with pytest.raises(ValueError, match="cursor"):
            await store.scan(EventFilter(), after=cursor, limit=1)
