# SPDX-License-Identifier: Apache-2.0
"""Group commit for a storage that takes two calls at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.pipeline import group_commit
from support.group_commits import Target
from support.pipeline import turns


async def started(target: Target, *groups: Sequence[Any]) -> list[asyncio.Task[Sequence[str]]]:
    """Submit requests of one item; all of a group arrive in one turn of the loop."""
    requests = []
    for group in groups:
        requests += [target.submit(item) for item in group]
        await turns()
    return requests


async def test_a_call_begins_beside_another() -> None:
    target = Target(calls=2)
    gates = target.hold_each(2)
    first, second = await started(target, "a", "b")
    assert target.calls == [["a"], ["b"]]
    gates[1].set()
    assert await second == ["<b>"]
    assert not first.done()
    gates[0].set()
    assert await first == ["<a>"]


async def test_there_are_as_many_calls_as_the_storage_takes() -> None:
    target = Target(calls=2)
    gates = target.hold_each(3)
    requests = await started(target, "a", "b", "c", "d")
    assert target.calls == [["a"], ["b"]]
    assert target.group_commit.queue.items == 4
    assert target.group_commit.queue.waiting == 2
    gates[0].set()
    await turns()
    assert target.calls == [["a"], ["b"], ["c", "d"]]
    gates[1].set()
    gates[2].set()
    assert await asyncio.gather(*requests) == [["<a>"], ["<b>"], ["<c>"], ["<d>"]]
    assert target.group_commit.queue.items == 0


async def test_a_call_beside_another_is_as_large_as_that() -> None:
    """Many small calls would cost more than the wait that they save."""
    target = Target(calls=2)
    gates = target.hold_each(2)
    requests = await started(target, "abc", "d", "e")
    assert target.calls == [["a", "b", "c"]]
    requests += await started(target, "f")
    assert target.calls == [["a", "b", "c"], ["d", "e", "f"]]
    for gate in gates:
        gate.set()
    await asyncio.gather(*requests)


async def test_what_was_too_little_is_written_after_the_other_call() -> None:
    target = Target(calls=2)
    gates = target.hold_each(2)
    requests = await started(target, "abc", "d")
    gates[0].set()
    await asyncio.gather(*requests[:3])
    await turns()
    assert target.calls == [["a", "b", "c"], ["d"]]
    gates[1].set()
    assert await requests[3] == ["<d>"]


async def test_the_calls_share_the_maximum_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the memory that they need does not grow with their number."""
    monkeypatch.setattr(group_commit, "GROUP_WEIGHT", 6)
    target = Target(calls=2)
    gates = target.hold_each(4)
    requests = await started(target, "abcdefgh")
    assert target.calls == [["a", "b", "c"], ["d", "e", "f"]]
    for gate in gates:
        gate.set()
    await asyncio.gather(*requests)
    assert target.calls[2:] == [["g", "h"]]


async def test_both_calls_count_as_used_room() -> None:
    target = Target(calls=2, max_weight=2)
    gates = target.hold_each(2)
    requests = await started(target, "a")
    assert target.group_commit.queue.has_room("")
    requests += await started(target, "b")
    assert not target.group_commit.queue.has_room("")
    gates[0].set()
    await turns()
    assert target.group_commit.queue.has_room("")
    gates[1].set()
    await asyncio.gather(*requests)


async def test_a_poisonous_request_fails_no_request_of_the_other_call() -> None:
    target = Target(calls=2)
    gate = asyncio.Event()

    def poisoned(items: Sequence[Any]) -> Any:
        if "poison" in items:
            raise OverflowError("a fault of the storage")
        return gate.wait() if "a" in items else None

    target.before = poisoned
    first, *others = await started(target, "a", ["b", "poison", "c"])
    results = await asyncio.gather(*others, return_exceptions=True)
    assert [type(result) for result in results] == [list, StorageUnavailable, list]
    assert target.calls == [["a"], ["b", "poison", "c"], ["b"], ["poison"], ["c"]]
    gate.set()
    assert await first == ["<a>"]


async def test_a_call_that_hangs_beside_a_good_one_does_not_reopen_the_store() -> None:
    target = Target(calls=2, timeout=1.0)
    target.hold()
    (hanging,) = await started(target, "a")
    target.before = lambda items: None
    (good,) = await started(target, "b")
    assert await good == ["<b>"]
    with pytest.raises(StorageUnavailable):
        await hanging
    await target.group_commit.drain()
    assert target.recovered == 0


async def test_two_calls_that_hang_reopen_the_store_once() -> None:
    target = Target(calls=2, timeout=1.0)
    target.hold()
    target.recovery = asyncio.Event()
    results = await asyncio.gather(*await started(target, "a", "b"), return_exceptions=True)
    assert [type(result) for result in results] == [StorageUnavailable] * 2
    # Nothing is written while the store is opened again.
    with pytest.raises(StorageUnavailable):
        await target.submit("c")
    assert target.calls == [["a"], ["b"]]
    target.recovery.set()
    await target.group_commit.drain()
    assert target.recovered == 1
    target.before = lambda items: None
    assert await target.submit("d") == ["<d>"]
    assert target.group_commit.queue.items == 0


async def test_requests_of_a_store_that_is_opened_again_are_not_tried_one_by_one() -> None:
    target = Target(calls=2, timeout=1.0)

    async def fails() -> None:
        await target.recovery_began.wait()
        raise StorageUnavailable("the storage is not open")

    target.before = lambda items: asyncio.Event().wait() if "a" in items else fails()
    target.recovery = asyncio.Event()
    (hanging,) = await started(target, "a")
    others = await started(target, "bc")
    results = await asyncio.gather(hanging, *others, return_exceptions=True)
    assert {type(result) for result in results} == {StorageUnavailable}
    target.recovery.set()
    await target.group_commit.drain()
    assert target.calls == [["a"], ["b", "c"]]


async def test_close_waits_for_both_calls() -> None:
    target = Target(calls=2)
    gates = target.hold_each(3)
    requests = await started(target, "a", "b", "c")
    closing = asyncio.ensure_future(target.group_commit.close())
    for gate in gates:
        await turns()
        assert not closing.done()
        gate.set()
    await closing
    assert [request.result() for request in requests] == [["<a>"], ["<b>"], ["<c>"]]


@pytest.mark.parametrize("calls", [1, 2, 3])
async def test_every_request_gets_its_results(calls: int) -> None:
    """In whatever order the calls end, and whichever of them fail."""
    chance = random.Random(calls)
    running = most = 0

    async def slow(items: Sequence[Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(chance.choice((0, 0, 0.001, 0.003)))
            if chance.random() < 0.1:
                raise StorageUnavailable("by chance")
        finally:
            running -= 1

    target = Target(calls=calls, max_weight=10_000)
    target.before = slow

    async def send(name: str) -> int:
        good = 0
        for number in range(60):
            items = [f"{name}-{number}-{one}" for one in range(chance.randrange(1, 5))]
            try:
                results = await target.submit(*items)
            except StorageUnavailable:
                continue
            assert results == [f"<{item}>" for item in items]
            good += 1
        return good

    good = await asyncio.gather(*(send(str(number)) for number in range(20)))
    assert min(good) > 20
    assert min(calls, 2) <= most <= calls
    await target.group_commit.drain()
    assert target.group_commit.queue.items == target.group_commit.queue.waiting == 0
    assert target.group_commit.queue.has_room("")
