# SPDX-License-Identifier: Apache-2.0
"""What a request submits is appended to the log at once, and waits only for its own partitions."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from engage.api import (
    DeadLetter,
    Event,
    LogRecord,
    Outcome,
    Status,
    StorageUnavailable,
    is_restated,
)
from engage.config import DEFAULT_LIMITS
from engage.errors import ApiError
from engage.log.ingest import LogIngest
from engage.testing.factories import letter
from support.log_loading import items_of
from support.memory_log import MemoryBroker, MemoryLog
from support.memory_store import MemoryStore
from support.pipeline import CountingMetrics, make_event, turns
from support.waiting import eventually

pytestmark = pytest.mark.virtual_time


class Fixture:
    """An ingest on a log in memory."""

    def __init__(
        self,
        broker: MemoryBroker | None = None,
        *,
        timeout: float = 30.0,
        log: MemoryLog | None = None,
        store: Any = None,
        **limits: Any,
    ) -> None:
        self.broker = MemoryBroker() if broker is None else broker
        self.log = MemoryLog(self.broker) if log is None else log
        self.store = MemoryStore() if store is None else store
        self.metrics = CountingMetrics()
        self.failures = 0
        self.ingest = LogIngest(
            self.store,
            limits=dataclasses.replace(DEFAULT_LIMITS, **limits),
            write_timeout=timeout,
            metrics=self.metrics,
            failed=self._failed,
            log=self.log,
        )

    def _failed(self) -> None:
        self.failures += 1

    async def __aenter__(self) -> Fixture:
        await self.log.open(create=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ingest.close()
        await self.log.close()

    def event(self, message_id: str, user: str = "u") -> Event:
        """Make an event of a user."""
        return dataclasses.replace(make_event(message_id), user_id=user)

    def users(self, *partitions: int) -> list[str]:
        """Return a user whose events are in each of these partitions."""
        found = []
        for wanted in partitions:
            users = (f"u-{number}" for number in range(1000))
            found.append(
                next(u for u in users if self.broker.partition_of(b"acme:" + u.encode()) == wanted)
            )
        return found

    @property
    def ids(self) -> list[str]:
        """The message ids in the log."""
        return [one.message_id for one in items_of(self.broker) if isinstance(one, Event)]


async def test_an_event_is_in_the_log_and_not_in_the_store() -> None:
    async with Fixture() as one:
        events = [one.event("a"), one.event("b"), one.event("a")]
        outcomes = await one.ingest.submit(events, "key")
        # The log does not look for duplicates.
        assert [outcome.status for outcome in outcomes] == [Status.STORED] * 3
        assert items_of(one.broker) == events
        assert not one.store.writes
        assert one.metrics.appended == [3]
        assert one.metrics.writes == []


async def test_every_request_is_a_call_at_once() -> None:
    """Nothing waits for the call of another request."""
    async with Fixture() as one:
        one.broker.slow = 0.05
        calls = [one.ingest.submit([one.event(f"{n}")], "key") for n in range(5)]
        await turns()
        assert one.broker.calls["append"] == 5
        assert one.ingest.waiting == 5
        await asyncio.gather(*calls)
        assert one.ingest.waiting == 0


async def test_the_events_of_a_user_keep_their_order() -> None:
    """Those of one request, and those of requests that follow each other, also if calls are
    slow."""
    async with Fixture(MemoryBroker(4)) as one:
        one.broker.slow = 0.001
        users = [f"user-{number}" for number in range(20)]
        calls = []
        for turn in range(10):
            for user in users:
                pair = [one.event(f"{user} {turn} {half}", user) for half in "ab"]
                calls.append(one.ingest.submit(pair, "key"))
            if turn % 3 == 0:
                await asyncio.sleep(0.002)
        await asyncio.gather(*calls)
        for user in users:
            mine = [name for name in one.ids if name.startswith(f"{user} ")]
            assert mine == [f"{user} {turn} {half}" for turn in range(10) for half in "ab"]


async def test_a_partition_without_leader_fails_only_requests_that_touch_it() -> None:
    """And nothing is opened again because of that."""
    async with Fixture(MemoryBroker(3), timeout=2.0) as one:
        one.broker.late = False
        one.broker.leaderless.add(1)
        users = one.users(0, 1, 2)
        calls = [one.ingest.submit([one.event(user, user)], "key") for user in users]
        both = one.ingest.submit([one.event(f"both {user}", user) for user in users[:2]], "key")
        started = time.monotonic()
        ended: list[tuple[str, object]] = []

        async def wait_for(name: str, call: Awaitable[Sequence[Outcome]]) -> None:
            try:
                ended.append((name, (await call)[0].status))
            except StorageUnavailable:
                ended.append((name, StorageUnavailable))

        named = {"0": calls[0], "1": calls[1], "2": calls[2], "both": both}
        await asyncio.gather(*(wait_for(name, call) for name, call in named.items()))
        # The others did not wait for them.
        assert set(ended[:2]) == {("0", Status.STORED), ("2", Status.STORED)}
        assert set(ended[2:]) == {("1", StorageUnavailable), ("both", StorageUnavailable)}
        assert time.monotonic() - started >= 2
        assert one.metrics.log_errors == one.failures == 2
        assert (one.log.opened, one.store.opened, one.store.closed) == (1, 0, 0)
        await turns()
        assert one.ingest.waiting == 0
        one.broker.leaderless.clear()
        again = await one.ingest.submit([one.event("later", users[1])], "key")
        assert again[0].status is Status.STORED
        assert set(one.ids) == {users[0], users[2], f"both {users[0]}", "later"}


@pytest.mark.parametrize("size", [{}, {"queue_events": 10_000}])
async def test_the_limits_are_those_of_the_group_commit(size: dict[str, int]) -> None:
    """On both sides of each bound: in number and in bytes, in total and for a key."""
    bound: dict[str, Any] = {"queue_events": 10, **size}
    if size:
        bound["queue_bytes"] = 10 * (500 + len(make_event("a").body))
    async with Fixture(**bound) as one:
        has_room = one.ingest.admission.has_room
        one.broker.slow = 0.05
        calls = [one.ingest.submit([one.event("a")], "first") for _ in range(4)]
        assert has_room("first")
        calls.append(one.ingest.submit([one.event("a")], "first"))
        assert not has_room("first")
        assert has_room("second")
        calls += [one.ingest.submit([one.event("a")], "second") for _ in range(4)]
        assert has_room("second")
        calls.append(one.ingest.submit([one.event("a")], "second"))
        assert not has_room("second")
        # A key with nothing in the full queue has room for a first request.
        assert has_room("third")
        await asyncio.gather(*calls)
        assert has_room("first")
        assert has_room("second")


async def test_what_waits_is_let_in_when_a_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engage.log.ingest.QUEUE_WAIT", 300.0)
    async with Fixture(queue_events=2) as one:
        one.broker.slow = 0.05
        call = one.ingest.submit([one.event("a")], "key")
        entering = asyncio.create_task(one.ingest.admission.enter("key", small=True))
        await turns()
        assert not entering.done()
        await call
        with await asyncio.wait_for(entering, 60):
            pass


async def test_an_event_that_cannot_be_a_record_is_refused_alone() -> None:
    async with Fixture() as one:
        odd = one.event("odd", "\ud800")
        large = dataclasses.replace(one.event("large"), body=b"x" * (one.log.max_value_bytes + 1))
        outcomes = await one.ingest.submit([one.event("a"), odd, large, one.event("b")], "key")
        assert [outcome.status for outcome in outcomes] == [
            Status.STORED,
            Status.REFUSED,
            Status.REFUSED,
            Status.STORED,
        ]
        assert outcomes[1].reason is not None
        assert "surrogate" in outcomes[1].reason
        assert one.ids == ["a", "b"]
        assert (await one.ingest.submit([odd], "key"))[0].status is Status.REFUSED
        assert one.ingest.waiting == 0


@pytest.mark.parametrize(
    "error", [StorageUnavailable("away"), RuntimeError("a bug"), TimeoutError()]
)
async def test_a_failure_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async with Fixture() as one:

        def fail(name: str) -> None:
            if name == "append":
                raise error

        one.broker.before = fail
        for _ in range(3):
            with pytest.raises(StorageUnavailable):
                await one.ingest.submit([one.event("a")], "key")
        assert one.metrics.log_errors == 3
    [line] = [record for record in caplog.records if record.name == "engage.log.appending"]
    assert "a request could not be appended to the log" in line.getMessage()
    assert (line.exc_info is not None) == isinstance(error, RuntimeError)


async def test_a_wrong_number_of_outcomes_is_not_a_success() -> None:
    class Short(MemoryLog):
        async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
            return (await super().append(records))[1:]

    async with Fixture(log=Short()) as one:
        with pytest.raises(StorageUnavailable):
            await one.ingest.submit([one.event("a"), one.event("b")], "key")


async def test_a_caller_that_goes_away_does_not_end_its_call() -> None:
    async with Fixture() as one:
        one.broker.slow = 0.02

        async def caller() -> None:
            await one.ingest.submit([one.event("a")], "key")

        task = asyncio.create_task(caller())
        await turns()
        task.cancel()
        await asyncio.wait([task])
        await one.ingest.drain()
        assert one.ids == ["a"]


async def test_closing_finishes_what_was_submitted_and_refuses_the_rest() -> None:
    async with Fixture() as one:
        one.broker.slow = 0.02
        call = one.ingest.submit([one.event("a")], "key")
        await one.ingest.close()
        assert call.done()
        with pytest.raises(ApiError) as refused:
            await one.ingest.submit([one.event("b")], "key")
        assert (refused.value.status, refused.value.code) == (503, "shutting_down")
        with pytest.raises(ApiError):
            await one.ingest.keep([letter("x")])


# ------------------------------------------------------------------------------------ dead letters
async def test_a_letter_that_the_log_can_never_take_is_kept_in_the_store() -> None:
    """As that of a delivery of megabytes."""
    async with Fixture() as one:
        one.log.max_value_bytes = 5000
        large = letter("large", item=b"x" * 5000)
        assert await one.ingest.keep([letter("a"), large, letter("b")]) == [True, True, True]
        found = items_of(one.broker)
        assert {item.id for item in found if isinstance(item, DeadLetter)} == {"a", "b"}
        assert list(one.store.letters.values()) == [large]
        assert sum(one.metrics.letters.values()) == 3
        # If the store is away, the caller does not acknowledge it.
        one.store.before_put = _away
        with pytest.raises(StorageUnavailable):
            await one.ingest.keep([large])


def _away() -> None:
    raise StorageUnavailable("away")


async def test_a_letter_that_is_not_durable_is_an_error() -> None:
    async with Fixture(timeout=0.05) as one:
        one.broker.leaderless |= {0, 1, 2}
        with pytest.raises(StorageUnavailable):
            await one.ingest.keep([letter("x")])
        assert one.metrics.log_errors == 1
        one.broker.leaderless.clear()
        await eventually(lambda: one.broker.records)  # late, which does no harm


async def test_an_event_that_is_never_a_conflict_says_so_in_its_record() -> None:
    async with Fixture() as one:
        events = [one.event("a"), one.event("b")]
        await one.ingest.submit(events, "key", restated={"b"})
        assert items_of(one.broker) == events
        assert [is_restated(read.record) for read in one.broker.records] == [False, True]
        await one.ingest.keep([letter("x", message_id="b")])
        [letters] = [
            read for read in one.broker.records if b"letter" in read.record.headers["engage"]
        ]
        assert not is_restated(letters.record)
