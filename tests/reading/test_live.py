# SPDX-License-Identifier: Apache-2.0
"""The ring of the newest rows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable

import orjson
import pytest

from engage.api import DeadLetter, Event, Record
from engage.console.data.reader import Reader
from engage.monitoring.sampler import Refusal, Refusals
from engage.reading.live import (
    INTERVAL,
    PAGE,
    PATIENCE,
    RING,
    Live,
    RowFilter,
    row_of_event,
    row_of_letter,
    summary,
)
from support.memory_store import MemoryStore

pytestmark = pytest.mark.virtual_time

ACME = RowFilter(workspace_id="acme")
OTHER = RowFilter(workspace_id="other")


def event(number: int, *, at: int | None = None, workspace: str = "acme", **fields: str) -> Event:
    """Make an event that was received a millisecond after the one before."""
    given = {"type": "track", "event": "Order", "properties": {"n": number}, **fields}
    return Event(
        workspace_id=workspace,
        origin="api",
        message_id=f"m{number}",
        type=str(given["type"]),
        user_id="ann",
        anonymous_id=None,
        name=str(given["event"]),
        received_at=1_000_000 + number if at is None else at,
        timestamp=1_000_000 + number,
        body=orjson.dumps({**given, "writeKeyId": "website"}),
    )


def letter(number: int, item: bytes = b'{"type":"track"}') -> DeadLetter:
    return DeadLetter(
        id=f"{number:064x}",
        workspace_id="acme",
        origin="api",
        write_key_id="website",
        user_id="ann",
        anonymous_id=None,
        message_id=None,
        reason="invalid_payload",
        message="the event is invalid",
        errors=[{"pointer": "/event", "message": "is required"}],
        item=item,
        truncated=False,
        headers=(),
        received_at=1_000_000 + number,
    )


@contextlib.asynccontextmanager
async def ring() -> AsyncIterator[tuple[Live, MemoryStore]]:
    """Make a ring for a store."""
    store = MemoryStore()
    live = Live(store, Reader(5.0), clock=asyncio.get_running_loop().time)
    yield live, store
    await live.close()


async def until(live: Live, condition: Callable[[], bool], workspace: str = "acme") -> None:
    """Look at a workspace until a condition is true."""
    async with asyncio.timeout(120):
        while not condition():
            await live.look(workspace)
            await asyncio.sleep(0.1)


async def polled(live: Live, times: int, workspace: str = "acme") -> None:
    """Look until the store was read so many times more."""
    first = live.polls
    await until(live, lambda: live.polls >= first + times, workspace)


async def arrived(live: Live, count: int) -> None:
    """Look until there are so many rows."""
    await until(live, lambda: len(live.rows(ACME)) >= count)


async def test_stored_and_rejected_stand_beside_each_other_newest_first() -> None:
    async with ring() as (live, store):
        await store.write([event(1), event(3), event(4, workspace="other")])
        await store.put([letter(2)])
        await live.look("acme")
        rows = live.rows(ACME)
        assert [(row.status, row.at) for row in rows] == [
            ("stored", 1_000_003),
            ("rejected", 1_000_002),
            ("stored", 1_000_001),
        ]
        assert rows[1].preview == "the event is invalid", "the words of the answer"
        assert rows[0].preview == "n 3"
        await live.look("other")
        assert [row.id for row in live.rows(OTHER)] == ["m4"]


async def test_new_rows_come_once_and_have_greater_numbers() -> None:
    async with ring() as (live, store):
        await store.write([event(1)])
        await live.look("acme")
        after = live.last
        await store.write([event(2)])
        await arrived(live, 2)
        await polled(live, 3)
        assert [row.id for row in live.rows(ACME, after)] == ["m2"]
        assert live.rows(ACME, live.last) == []
        assert len(live.rows(ACME)) == 2


async def test_an_event_that_is_stored_late_appears() -> None:
    """Another host, or a clock behind: its time is before that of rows that were read already."""
    async with ring() as (live, store):
        await store.write([event(10)])
        await live.look("acme")
        after = live.last
        await store.write([event(5)])
        await arrived(live, 2)
        assert [row.id for row in live.rows(ACME, after)] == ["m5"]
        assert [row.id for row in live.rows(ACME)] == ["m10", "m5"]


async def test_a_gap_is_known() -> None:
    async with ring() as (live, store):
        await store.write([event(0)])
        await live.look("acme")
        after = live.last
        await store.write([event(number) for number in range(1, 701)])
        await arrived(live, 2)
        rows = live.rows(ACME, after)
        assert (len(rows), live.has_gap("acme", after)) == (PAGE, True)
        assert rows[0].id == "m700"
        # They do not appear later.
        await polled(live, 3)
        assert len(live.rows(ACME, after)) == PAGE
        assert not live.has_gap("acme", live.last)


async def test_a_flooded_workspace_hides_nothing_of_a_quiet_one() -> None:
    """Neither its events nor its dead letters, also if nobody looked at it before the flood."""
    async with ring() as (live, store):
        await live.look("other")
        numbers = itertools.count()
        for watched in (False, True):
            before = live.rows(ACME)
            gap = live.last
            await store.write([event(next(numbers))])
            await store.put([letter(next(numbers))])
            flood = [next(numbers) for _ in range(3 * PAGE)]
            await store.write([event(number, workspace="other") for number in flood])
            await store.put(
                [dataclasses.replace(letter(number), workspace_id="other") for number in flood]
            )
            await arrived(live, len(before) + 2)
            rows = live.rows(ACME)
            assert [row.status for row in rows] == ["rejected", "stored"] * (1 + watched)
            assert not live.has_gap("acme", gap)
            await live.look("other")
            if watched:
                await until(live, lambda gap=gap: live.has_gap("other", gap), "other")  # type: ignore[misc]
        # No row comes twice.
        await polled(live, 3)
        assert len(live.rows(ACME)) == 4


async def test_a_workspace_that_nobody_looks_at_is_read_when_someone_does() -> None:
    async with ring() as (live, store):
        await live.look("acme")
        await polled(live, round(PATIENCE / INTERVAL) + 2, "other")
        await store.write([event(1)])
        for number in range(3):
            await store.write([event(10 + number, workspace="other")])
            await polled(live, 2, "other")
        assert live.rows(ACME) == []
        await live.look("acme")
        assert [row.id for row in live.rows(ACME)] == ["m1"]


async def test_the_ring_is_bounded() -> None:
    async with ring() as (live, store):
        await live.look("acme")
        for burst in range(4):
            await store.write([event(burst * PAGE + number) for number in range(PAGE)])
            await polled(live, 2)
        assert len(live.rows(ACME)) == RING
        assert live.last == 4 * PAGE


async def test_ten_tabs_cost_what_one_costs_and_without_tabs_nothing_is_read() -> None:
    async with ring() as (live, _):
        await asyncio.gather(*(live.look("acme") for _ in range(10)))
        first = live.polls
        for _ in range(10):
            await asyncio.sleep(INTERVAL / 2)
            await asyncio.gather(*(live.look("acme") for _ in range(10)))
        assert 4 <= live.polls - first <= 6
        await asyncio.sleep(2 * PATIENCE)
        polls = live.polls
        await asyncio.sleep(100 * INTERVAL)
        assert live.polls == polls
        await live.look("acme")
        assert live.polls == polls + 1


async def test_a_store_that_does_not_answer_keeps_the_rows() -> None:
    async with ring() as (live, store):
        await store.write([event(1)])
        await live.look("acme")
        await store.close()
        await until(live, lambda: live.error is not None)
        assert len(live.rows(ACME)) == 1
        await store.open(create=False)
        await until(live, lambda: live.error is None)
        assert len(live.rows(ACME)) == 1


async def test_refused_requests_are_read_when_they_change() -> None:
    async with ring() as (live, store):
        refusals = Refusals()
        refusal = Refusal(reason="invalid_write_key", status=401, route="track", key="2e42…")
        refusals.add(refusal, 4)
        refusals.add(refusal, 5)
        body = orjson.dumps({"rows": refusals.entries()})
        await store.put_record(Record(kind="refused", workspace_id="", id="p1", body=body, at=5))
        await live.look("acme")
        (refused,) = live.refused("acme")
        assert (refused.count, refused.status, refused.code) == (2, 401, "invalid_write_key")


async def test_filters() -> None:
    async with ring() as (live, store):
        await store.write([event(1), event(2, event="Refund")])
        await live.look("acme")
        assert [row.id for row in live.rows(RowFilter(workspace_id="acme", name="Refund"))] == [
            "m2"
        ]
        assert live.rows(RowFilter(workspace_id="acme", status="rejected")) == []
        assert len(live.rows(RowFilter(workspace_id="acme", key="website", user="ann"))) == 2


def test_a_row_shows_hostile_text_harmlessly_and_in_bounds() -> None:
    row = row_of_event(event(1, event="\u202egnp.exe" + "x" * 65_536))
    assert row.name.startswith("\\u202egnp.exe")
    assert len(row.name) <= 200
    for item in (
        *(b"\xff\xfe", b"[" * 1000, b"12", b'{"type":5,"event":["x"]}', b'{"event":"a\\u0000"}'),
    ):
        made = row_of_letter(letter(1, item))
        assert "\x00" not in made.name
    assert summary({"a": "x" * 10_000}).startswith("a xxx")
    assert len(summary({str(n): "v" * 50 for n in range(1000)})) <= 140
    assert summary("not an object") == ""
    assert summary({"path": "/", "referrer": "", "n": 0, "no": None}) == "path / · n 0 · no null"


async def test_rows_of_one_time_have_the_order_in_which_they_were_stored() -> None:
    async with ring() as (live, store):
        await live.look("acme")
        await store.write([event(number, at=1_000_000) for number in range(300)])
        await arrived(live, 2)
        assert [row.id for row in live.rows(ACME)] == [f"m{n}" for n in range(299, 99, -1)]
