# SPDX-License-Identifier: Apache-2.0
"""Ingest writes events and dead letters, and opens a store again that does not answer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from engage.api import CONFLICT, DeadLetter, Event, Status, StorageUnavailable
from engage.config import DEFAULT_LIMITS
from engage.errors import ApiError
from engage.pipeline.ingest import Ingest
from engage.store.facade import Storage
from engage.testing.factories import letter
from support.each import each
from support.memory_store import MemoryStore
from support.pipeline import CountingMetrics, make_event, turns
from support.waiting import eventually

pytestmark = pytest.mark.virtual_time


def make(store: Storage, metrics: CountingMetrics, timeout: float = 30.0, **limits: Any) -> Ingest:
    return Ingest(
        store,
        limits=dataclasses.replace(DEFAULT_LIMITS, **limits),
        write_timeout=timeout,
        metrics=metrics,
    )


async def test_a_dead_letter_with_which_the_storage_fails_is_dropped_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, metrics = MemoryStore(), CountingMetrics()
    ingest = make(store, metrics)
    letters = [letter(f"l{number}") for number in range(20)]
    keep = store.keep

    async def failing(kept: Sequence[DeadLetter]) -> Sequence[bool]:
        if letters[5] in kept:
            raise OverflowError("too large")
        return await keep(kept)

    monkeypatch.setattr(store, "keep", failing)
    assert list(await ingest.keep(letters)) == [one is not letters[5] for one in letters]
    assert len(store.letters) == 19


async def test_observers_get_newly_stored_events() -> None:
    store, heard = MemoryStore(), list[str]()
    store.refuse["c"] = "no"

    def stored(events: Sequence[Event]) -> None:
        assert all(event.identity in store.events for event in events)
        heard.extend(event.message_id for event in events)

    ingest = Ingest(
        store, limits=DEFAULT_LIMITS, write_timeout=30, metrics=CountingMetrics(), stored=stored
    )
    await ingest.submit([make_event("a"), make_event("b"), make_event("a"), make_event("c")], "key")
    await ingest.submit([make_event("a")], "key")
    assert heard == ["a", "b"]


async def test_the_queue_has_room_below_its_limits() -> None:
    store = MemoryStore()
    gate = asyncio.Event()
    store.before = lambda events: gate.wait()
    bounds = {"queue_events": 4, "queue_bytes": 4000}
    ingest = make(store, CountingMetrics(), **bounds)
    has_room = ingest.admission.has_room
    first = [ingest.submit([make_event("a")], "key")]
    assert has_room("key")
    first.append(ingest.submit([make_event("b")], "key"))
    await turns()
    assert ingest.waiting == 2
    with pytest.raises(ApiError) as caught:
        await ingest.admission.enter("key", small=True)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert caught.value.retry_after is not None
    with await ingest.admission.enter("another key", small=True):
        second = ingest.submit([make_event("c", body=b"x" * 2000)], "another key")
    assert not has_room("another key")
    gate.set()
    await asyncio.gather(*first, second)
    with await ingest.admission.enter("key", small=True):
        pass


@each(
    "weight, size, writes",
    [
        *((500, 10, [["a", "b", "other"]]), (501, 10, [["a", "other"], ["b"]])),
        *((1, 2**19 - 500, [["a", "b", "other"]]), (1, 2**19 - 499, [["a", "other"], ["b"]])),
        (100_000, 10, [["a"], ["other"], ["b"]]),
    ],
)
async def test_events_of_other_keys_come_between_the_parts_of_a_request(
    weight: int, size: int, writes: list[list[str]]
) -> None:
    """On both sides of the limits of a part: in weight and in bytes."""
    store = MemoryStore()
    gate = asyncio.Event()
    store.before = lambda events: gate.wait()
    ingest = make(store, CountingMetrics())
    requests = [ingest.submit([make_event("blocks")], "third key")]
    await turns()
    heavy = [
        dataclasses.replace(make_event(name, body=b"x" * size), weight=weight) for name in "ab"
    ]
    requests.append(ingest.submit(heavy, "key"))
    with await ingest.admission.enter("another key", small=True):
        requests.append(ingest.submit([make_event("other")], "another key"))
    gate.set()
    await asyncio.gather(*requests)
    assert store.writes[1:] == writes


async def test_dead_letters_of_a_request_are_kept_in_parts() -> None:
    """Between two parts, the store can write events."""
    store = MemoryStore()
    ingest = make(store, CountingMetrics())
    calls: list[int] = []
    keep = store.keep

    async def counted(letters: Sequence[DeadLetter]) -> Sequence[bool]:
        calls.append(len(letters))
        return await keep(letters)

    store.keep = counted  # type: ignore[method-assign]
    kept = await ingest.keep([letter(str(number)) for number in range(2500)])
    assert list(kept) == [True] * 2500
    assert [name for _, name in store.letters] == [str(number) for number in range(2500)]
    assert calls == [500] * 5  # A letter weighs as much as four events.


async def test_one_failed_write_of_several_fails_the_request() -> None:
    store = MemoryStore()
    ingest = make(store, CountingMetrics())
    events = [dataclasses.replace(make_event(str(number)), weight=3000) for number in range(3)]

    def fail(written: Sequence[Event]) -> None:
        if written[0].message_id == "1":
            raise StorageUnavailable("no")

    store.before = fail
    with pytest.raises(StorageUnavailable):
        await ingest.submit(events, "key")
    assert [event.message_id for event in store.events.values()] == ["0", "2"]


class Broken(MemoryStore):
    """A store that, once closed, cannot be opened until ``usable`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.usable = asyncio.Event()

    async def open(self, *, create: bool) -> None:
        await super().open(create=create)
        if not self.usable.is_set():
            raise StorageUnavailable("still down")
        self.before = None

    async def close(self) -> None:
        await super().close()
        self.before = _not_open
        raise RuntimeError("closing fails too")


def _not_open(events: Sequence[Event]) -> None:
    raise StorageUnavailable("it is not open")


async def test_opening_a_store_is_tried_until_it_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without any request, too: a load balancer sends none to a server that is not ready."""
    store = Broken()
    store.before = lambda events: asyncio.Event().wait()
    metrics = CountingMetrics()
    ingest = make(store, metrics, timeout=1.0)
    with pytest.raises(StorageUnavailable):
        await ingest.submit([make_event("a")], "key")
    assert metrics.errors == 1
    # No request waits for it meanwhile.
    with pytest.raises(StorageUnavailable):
        await ingest.submit([make_event("a")], "key")
    await eventually(lambda: store.opened > 3)
    store.usable.set()
    await eventually(lambda: store.before is None)
    assert (await ingest.submit([make_event("a")], "key"))[0].status is Status.STORED
    opened = store.opened
    await ingest.close()
    assert (store.closed, store.opened) == (1, opened)
    assert [
        record.message for record in caplog.records if record.name == "engage.pipeline.ingest"
    ] == ["the storage cannot be opened; retrying: still down", "the storage is open"]


@pytest.mark.parametrize("creates", [True, False])
async def test_only_a_server_creates_a_store_when_it_opens_it_again(creates: bool) -> None:
    created: list[bool] = []

    class Opens(MemoryStore):
        async def open(self, *, create: bool) -> None:
            created.append(create)
            self.before = None

    store = Opens()
    store.before = lambda events: asyncio.Event().wait()
    ingest = make(store, CountingMetrics(), timeout=0.1)
    ingest.creates = creates
    with pytest.raises(StorageUnavailable):
        await ingest.submit([make_event("a")], "key")
    await eventually(lambda: bool(created))
    assert created == [creates]
    await ingest.close()


async def test_a_request_while_the_store_is_opened_fails_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(MemoryStore):
        opening = asyncio.Event()

        async def open(self, *, create: bool) -> None:
            self.opening.set()
            await asyncio.Event().wait()

    store = Slow()
    store.before = lambda events: asyncio.Event().wait()
    ingest = make(store, CountingMetrics(), timeout=0.2)
    with pytest.raises(StorageUnavailable):
        await ingest.submit([make_event("a")], "key")
    await store.opening.wait()
    for name in "bc":
        with pytest.raises(StorageUnavailable):
            await asyncio.wait_for(ingest.submit([make_event(name)], "key"), 30)
    assert store.writes == [["a"]]
    reason = "the storage cannot be opened; retrying: no answer within 0.2 s"
    await eventually(lambda: reason in caplog.messages)


async def test_a_dead_letter_is_put_once_and_counted() -> None:
    store, metrics = MemoryStore(), CountingMetrics()
    ingest = make(store, metrics)
    await ingest.keep([])
    await asyncio.gather(ingest.keep([letter("1"), letter("2")]), ingest.keep([letter("1")]))
    assert len(store.letters) == 2
    assert metrics.letters["invalid_payload"] == 3


async def test_dead_letters_that_are_dropped_are_counted() -> None:
    store, metrics = MemoryStore(), CountingMetrics()
    store.full = {"api"}
    conflict = letter("3", reason=CONFLICT)
    kept = await make(store, metrics).keep([letter("1"), conflict, letter("2")])
    assert list(kept) == [False, True, False]
    assert metrics.lost == {"dead_letter": 2}
    assert metrics.letters == {CONFLICT: 1}


async def test_a_full_budget_is_logged_once_in_ten_minutes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("engage.monitoring.sampler.time.monotonic", lambda: now)

    def lines() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "engage.pipeline.ingest"]

    store = MemoryStore()
    store.full = {"api", "conflict"}
    ingest = make(store, CountingMetrics())
    for number in range(5):
        await ingest.keep([letter(str(number)), letter(f"c{number}", reason=CONFLICT)])
    assert len(lines()) == 2
    assert "the api budget is full (limits.dead_letter_count, limits." in lines()[0]
    assert "the conflict budget is full (limits.dead_letter_count, limits." in lines()[1]
    now += 599
    await ingest.keep([letter("x")])
    assert len(lines()) == 2
    now += 1
    await ingest.keep([letter("y")])
    assert lines()[2].endswith("; 5 more since the last line")


async def test_close_refuses_requests_and_leaves_the_store_open() -> None:
    store = MemoryStore()
    ingest = make(store, CountingMetrics())
    request = asyncio.ensure_future(ingest.submit([make_event("a")], "key"))
    await turns(1)
    await ingest.close()
    assert (await request)[0].status is Status.STORED
    with pytest.raises(ApiError) as caught:
        await ingest.submit([make_event("b")], "key")
    assert caught.value.code == "shutting_down"
    with pytest.raises(ApiError) as caught:
        await ingest.keep([letter("1")])
    assert caught.value.code == "shutting_down"
    assert store.closed == 0


@pytest.mark.parametrize("recovering", [False, True])
async def test_a_store_that_does_not_answer_is_not_opened_again_at_the_end(
    recovering: bool,
) -> None:
    """A stop takes as long as the write that runs, not also as long as the attempts to open it."""

    class Hanging(MemoryStore):
        async def write(self, events: Sequence[Event]) -> Any:
            await asyncio.Event().wait()

        async def open(self, *, create: bool) -> None:
            self.opened += 1
            await asyncio.Event().wait()

    store = Hanging()
    ingest = make(store, CountingMetrics(), timeout=1.0)
    waiting = ingest.submit([make_event("a")], "key")
    if recovering:
        await eventually(lambda: store.opened)
        await ingest.close()
    else:
        await ingest.close()
        assert (store.opened, store.closed) == (0, 0)
    with pytest.raises(StorageUnavailable):
        await waiting
