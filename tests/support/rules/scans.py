# SPDX-License-Identifier: Apache-2.0
"""The promises of every storage about reading in order, and about expiring."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engage.api import Event, EventFilter, Status
from engage.store.facade import Storage
from engage.testing.factories import (
    TIME,
    WORKSPACE,
    all_pages,
    all_recent,
    canonical,
    event,
    identify,
    ids,
    store_all,
)
from engage.testing.storage.harness import Bench, on_open, on_store


def _mixed(count: int) -> list[Event]:
    """Return events that differ in everything that a filter has. Some are received together."""
    return [
        event(
            f"{number:03}",
            type=("track", "page", "identify")[number % 3],
            event=("Clicked", "Bought", "a\x00", "A")[number % 4],
            user_id=f"u{number % 5}",
            workspace=("acme", "other")[number % 2],
            origin=("api", "sendgrid", "Api")[number // 2 % 3],
            received=number // 4,
        )
        for number in range(count)
    ]


#: Filters of :func:`_mixed`, with the fields that the first version of the interface had.
_FILTERS: list[dict[str, Any]] = [
    {},
    {"workspace_id": "acme"},
    {"type": "page"},
    {"user_id": "u3"},
    {"since": TIME + 17},
    {"workspace_id": "other", "type": "track", "user_id": "u1", "since": TIME + 5},
    {"workspace_id": "nobody"},
    {"since": TIME + 120},
    {"user_id": "u"},
]
#: Filters with newer fields.
_NEWER_FILTERS: list[dict[str, Any]] = [
    {"name": "Bought"},
    {"name": "a\x00"},
    {"name": "a"},
    {"name": ""},
    {"origin": "sendgrid"},
    {"origin": "api", "name": "A"},
    {"until": TIME + 17},
    {"until": TIME},
    {"until": TIME + 10**9},
    {"since": TIME + 3, "until": TIME + 9, "workspace_id": "acme"},
    {"since": TIME + 9, "until": TIME + 3},
    {"since": TIME + 3, "until": TIME + 4, "type": "page", "origin": "sendgrid", "user_id": "u0"},
]


#: Names of events, with what the languages of databases take for more than a character.
_TEXTS: list[str] = [
    *("Order", "ordeR%", "ord_er", "Ordér", "ORDÉR+", "заказ", "a\0b", "A\0c", "(x", "x\ny", "a.b"),
]


async def _with_recent(bench: Bench) -> Storage:
    """Return an opened storage, or skip the test if it cannot return its newest events."""
    store = await bench.open()
    if await store.recent(EventFilter(), limit=1) is None:
        pytest.skip("this storage does not return its newest events")
    return store


class ScanTests:
    """``scan``, ``recent`` and ``expire``."""

    @on_open
    async def test_a_scan_returns_events_in_order_of_arrival(self, store: Storage) -> None:
        names = [f"{number * 7919 % 1000:03}" for number in range(200)]
        for start in range(0, 200, 25):
            # Only the arrival is in order, neither ids nor times.
            part = names[start : start + 25]
            await store_all(store, *(event(name, at=int(name), received=start) for name in part))
        for limit in (1, 7, 25, 200, 1000):
            assert await ids(store, limit=limit) == names

    @on_store
    async def test_a_cursor_continues_a_scan_after_reopening(self, bench: Bench) -> None:
        store = await bench.open()
        await store_all(store, *(event(str(number)) for number in range(10)))
        page = await store.scan(EventFilter(), after=None, limit=4)
        assert [one.message_id for one in page.items] == ["0", "1", "2", "3"]
        assert isinstance(page.cursor, str)
        await store.close()
        store = await bench.open()
        await store_all(store, event("10"))
        rest = await all_pages(store.scan, EventFilter(), limit=4, after=page.cursor)
        assert [one.message_id for one in rest] == [str(number) for number in range(4, 11)]

    @on_open
    async def test_filters_select_events(self, store: Storage) -> None:
        batch = _mixed(120)
        await store_all(store, *batch)
        for fields in _FILTERS:
            wanted = [one.message_id for one in batch if EventFilter(**fields).matches(one)]
            for limit in (3, 500):
                assert await ids(store, limit=limit, **fields) == wanted

    @on_open
    async def test_newer_filters_lose_no_event(self, store: Storage) -> None:
        """A storage may ignore a newer field: then the core leaves out events that are not
        wanted."""
        batch = _mixed(120)
        await store_all(store, *batch)
        for fields in _NEWER_FILTERS:
            wanted = EventFilter(**fields)
            for limit in (3, 500):
                events = await all_pages(store.scan, wanted, limit=limit)
                assert [one.message_id for one in events if wanted.matches(one)] == [
                    one.message_id for one in batch if wanted.matches(one)
                ]

    @on_open
    async def test_a_scan_of_an_empty_store_returns_nothing(self, store: Storage) -> None:
        page = await store.scan(EventFilter(), after=None, limit=10)
        assert list(page.items) == []
        assert page.cursor is None

    @on_store
    async def test_a_scan_misses_nothing_during_concurrent_writes(self, bench: Bench) -> None:
        """A scan returns the events that were acknowledged before it began, once, while others
        write."""
        stores = [await bench.open() for _ in range(3)]
        acknowledged: list[str] = []
        done = False

        async def write(store: Storage, name: str) -> None:
            for number in range(40):
                batch = [f"{name}-{number}-{one}" for one in range(1 + number % 5)]
                await store_all(store, *(event(one) for one in batch))
                acknowledged.extend(batch)

        async def read() -> None:
            store = await bench.open()
            while not done:
                before = set(acknowledged)
                found = await ids(store, limit=17)
                assert len(found) == len(set(found))
                assert before <= set(found)
                # The events of one writer come in the order in which it wrote them.
                for name in "012":
                    mine = [one for one in found if one.startswith(f"{name}-")]
                    assert mine == sorted(mine, key=lambda one: [int(n) for n in one.split("-")])
                await asyncio.sleep(0)

        reader = asyncio.ensure_future(read())
        try:
            await asyncio.gather(*(write(store, str(n)) for n, store in enumerate(stores)))
        finally:
            done = True
            await reader
        assert sorted(await ids(stores[0])) == sorted(acknowledged)

    # ------------------------------------------------------------------- the newest events
    @on_store
    async def test_recent_events_are_the_scan_in_reverse(self, bench: Bench) -> None:
        """Also of events that were received in the same millisecond."""
        store = await _with_recent(bench)
        page = await store.recent(EventFilter(), limit=10)
        assert page is not None
        assert (list(page.items), page.cursor) == ([], None)
        names = [f"{number * 7919 % 1000:03}" for number in range(120)]
        for start in range(0, 120, 20):
            part = names[start : start + 20]
            await store_all(
                store, *(event(name, at=int(name), received=start // 40) for name in part)
            )
        scanned = [canonical(one) for one in await all_pages(store.scan, EventFilter())]
        for limit in (1, 7, 20, 1000):
            events = await all_recent(store.recent, EventFilter(), limit=limit)
            assert [canonical(one) for one in events] == scanned[::-1]
        assert sorted(one[0][2] for one in scanned) == sorted(names)

    @on_store
    async def test_filters_select_recent_events(self, bench: Bench) -> None:
        store = await _with_recent(bench)
        batch = _mixed(120)
        for start in range(0, 120, 4):
            await store_all(store, *batch[start : start + 4])
        for fields in (*_FILTERS, *_NEWER_FILTERS):
            wanted = EventFilter(**fields)
            expected = [one.message_id for one in reversed(batch) if wanted.matches(one)]
            for limit in (3, 500):
                events = await all_recent(store.recent, wanted, limit=limit)
                assert [one.message_id for one in events] == expected

    @on_store
    async def test_the_beginning_of_a_text_finds_recent_events(self, bench: Bench) -> None:
        """In whatever capitals. A storage may return more events, also all."""
        store = await _with_recent(bench)
        batch = [
            event(f"m{number}", user_id=text[::-1], event=text)
            for number, text in enumerate(_TEXTS)
        ]
        batch.append(event("ORDER-1", type="page", anonymous_id="Order-visitor"))
        await store_all(store, *batch)
        every = ("message_id", "user_id", "anonymous_id", "name")
        texts = [*_TEXTS, *map(str.upper, _TEXTS), "o", "%", "_", ".", "заk", "x" * 20_000]
        filters: list[list[tuple[Sequence[str], str]]] = [[(every, text)] for text in texts]
        filters.append([(("name",), "o"), (("user_id", "anonymous_id"), "R")])
        for begins in filters:
            wanted = EventFilter(workspace_id=WORKSPACE, begins=begins)
            expected = [one.message_id for one in reversed(batch) if wanted.matches(one)]
            events = await all_recent(store.recent, wanted, limit=3)
            assert [one.message_id for one in events if wanted.matches(one)] == expected

    @on_store
    async def test_another_filter_continues_at_a_cursor_of_recent_events(
        self, bench: Bench
    ) -> None:
        store = await _with_recent(bench)
        await store_all(store, *(event(str(number), at=number) for number in range(10)))
        page = await store.recent(EventFilter(workspace_id=WORKSPACE, type="track"), limit=4)
        assert page is not None
        rest = await all_recent(store.recent, EventFilter(), limit=4, before=page.cursor)
        assert [one.message_id for one in rest] == ["5", "4", "3", "2", "1", "0"]

    @on_store
    async def test_a_cursor_of_recent_events_survives(self, bench: Bench) -> None:
        """New events do not move the pages, and events that expire are only left out."""
        store = await _with_recent(bench)
        for number in range(10):
            await store_all(store, event(str(number), at=number))
        page = await store.recent(EventFilter(), limit=4)
        assert page is not None
        assert [one.message_id for one in page.items] == ["9", "8", "7", "6"]
        assert isinstance(page.cursor, str)
        await store.close()
        store = await bench.open()
        await store_all(store, event("10", at=10), event("11", at=11))
        expected = ["5", "4", "3", "2", "1", "0"]
        if bench.subject.can("expire"):
            assert await store.expire(TIME + 2, limit=100) == 2
            expected = expected[:4]
        rest = await all_recent(store.recent, EventFilter(), limit=4, before=page.cursor)
        assert [one.message_id for one in rest] == expected

    @on_store
    async def test_recent_events_are_read_while_others_write(self, bench: Bench) -> None:
        """Each event once, and every one that was acknowledged before the first page."""
        store = await _with_recent(bench)
        stores = [await bench.open() for _ in range(2)]
        acknowledged: list[str] = []

        async def write(store: Storage, name: str) -> None:
            for number in range(40):
                batch = [f"{name}-{number}-{one}" for one in range(1 + number % 5)]
                # Many of them are received in one millisecond.
                await store_all(store, *(event(one, at=number // 8) for one in batch))
                acknowledged.extend(batch)

        writing = [asyncio.ensure_future(write(one, str(n))) for n, one in enumerate(stores)]
        try:
            while not all(one.done() for one in writing):
                before = set(acknowledged)
                found = [
                    one.message_id for one in await all_recent(store.recent, EventFilter(), limit=7)
                ]
                assert len(found) == len(set(found))
                assert before <= set(found)
                await asyncio.sleep(0)
        finally:
            await asyncio.gather(*writing)
        found = [one.message_id for one in await all_recent(store.recent, EventFilter(), limit=7)]
        assert sorted(found) == sorted(acknowledged)

    # ---------------------------------------------------------------------------- expiry
    @on_store
    async def test_the_oldest_events_expire_first(self, bench: Bench) -> None:
        bench.require("expire")
        store = await bench.open()
        for number in (5, 3, 9, 1, 7):
            await store_all(store, identify(str(number), "u", number))
        assert await store.expire(TIME + 7, limit=2) == 2
        assert sorted(await ids(store)) == ["5", "7", "9"]
        assert await store.expire(TIME + 7, limit=100) == 1
        assert await store.expire(TIME + 7, limit=100) == 0
        assert sorted(await ids(store)) == ["7", "9"]
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.created_at == TIME + 1
        # The message id can be used again.
        (outcome,) = await store.write([event("1", at=10)])
        assert outcome.status is Status.STORED
        assert sorted(await ids(store)) == ["1", "7", "9"]

    @on_store
    async def test_expiring_all_events_must_be_forced(self, bench: Bench) -> None:
        """Otherwise a clock that jumped ahead would delete everything."""
        bench.require("expire")
        store = await bench.open()
        await store_all(store, *(event(str(number), at=number) for number in range(5)))
        assert await store.expire(TIME + 5, limit=100) == 0
        assert len(await ids(store)) == 5
        assert await store.expire(TIME + 4, limit=100) == 4
        assert await store.expire(TIME + 5, limit=100, force=True) == 1
        assert await ids(store) == []
        assert await store.expire(TIME + 5, limit=100, force=True) == 0

    @on_store
    async def test_a_cursor_survives_the_expiry_of_its_event(self, bench: Bench) -> None:
        bench.require("expire")
        store = await bench.open()
        await store_all(store, *(event(str(number), at=number) for number in range(6)))
        page = await store.scan(EventFilter(), after=None, limit=3)
        assert await store.expire(TIME + 5, limit=100) == 5
        await store_all(store, event("6", at=6))
        rest = await all_pages(store.scan, EventFilter(), after=page.cursor)
        assert [one.message_id for one in rest] == ["5", "6"]
