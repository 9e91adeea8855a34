# SPDX-License-Identifier: Apache-2.0
"""Group commit: which requests share a call, which wait, and which fail with a failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.errors import ApiError
from engage.pipeline import group_commit
from support.each import each
from support.group_commits import Target
from support.pipeline import turns

pytestmark = pytest.mark.virtual_time


async def started(target: Target, *groups: Sequence[Any]) -> list[asyncio.Task[Sequence[str]]]:
    """Submit requests of one item; all of a group arrive in one turn of the loop."""
    requests = []
    for group in groups:
        requests += [target.submit(item) for item in group]
        await turns()
    return requests


async def test_a_single_request_takes_one_turn_of_the_event_loop() -> None:
    """Each turn is a system call."""
    target = Target()
    request = target.group_commit.submit(["a"], 1)
    await asyncio.sleep(0)
    assert request.result() == ["<a>"]
    assert target.group_commit.queue.items == 0


async def test_requests_that_arrive_together_are_one_call() -> None:
    target = Target()
    results = await asyncio.gather(target.submit("a"), target.submit("b", "c"), target.submit())
    assert list(results) == [["<a>"], ["<b>", "<c>"], []]
    assert target.calls == [["a", "b", "c"]]
    assert target.done == [3]


async def test_requests_that_arrive_during_a_call_share_the_next() -> None:
    target = Target()
    gate = target.hold()
    first = target.submit("a")
    await turns()
    others = [target.submit(name) for name in "bcd"]
    await turns()
    assert target.calls == [["a"]]
    assert target.group_commit.queue.items == 4
    assert not first.done()
    gate.set()
    assert await asyncio.gather(first, *others) == [["<a>"], ["<b>"], ["<c>"], ["<d>"]]
    assert target.calls == [["a"], ["b", "c", "d"]]


async def test_one_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "GROUP_BYTES", 50)
    target = Target(group_weight=3)
    requests = [
        *(target.submit("a", "b"), target.submit("c", "d"), target.submit("e", size=30)),
        target.submit("f", size=30),
        target.submit("g", "h", "i", "j", size=100),  # a single request may be larger
    ]
    await asyncio.gather(*requests)
    assert target.calls == [["a", "b"], ["c", "d", "e"], ["f"], ["g", "h", "i", "j"]]


async def test_weights_count_instead_of_items() -> None:
    target = Target(group_weight=10)
    commit = target.group_commit
    await asyncio.gather(
        commit.submit(["a"], 1, weight=6),
        commit.submit(["b"], 1, weight=4),
        commit.submit(["c"], 1, weight=1),
    )
    assert target.calls == [["a", "b"], ["c"]]


@pytest.mark.parametrize(("weight", "size"), [(1, 1), (0, 100)])
async def test_a_key_has_no_more_than_its_share(weight: int, size: int) -> None:
    target = Target(max_weight=10, max_bytes=1000, share=0.5)
    gate = target.hold()
    submit, queue = target.group_commit.submit, target.group_commit.queue
    requests = [submit(["a"], 4 * size, weight=4 * weight, key="one")]
    assert queue.has_room("one", small=True)
    requests.append(submit(["a"], size, weight=weight, key="one"))
    assert not queue.has_room("one", small=True)
    assert queue.has_room("two", small=True)
    gate.set()
    await asyncio.gather(*requests)
    assert queue.has_room("one", small=True)


@pytest.mark.parametrize("small", [True, False])
async def test_a_heavy_request_leaves_room_for_other_keys(small: bool) -> None:
    """However heavy: it is divided, and written between the requests of the others."""
    target = Target(max_weight=100, share=0.5)
    gate = target.hold()
    submit, queue = target.group_commit.submit, target.group_commit.queue
    requests = [submit(["a"], 1, weight=100_000, key="heavy")]
    for _ in range(24):
        assert queue.has_room("other", small)
        requests.append(submit(["b"], 1, key="other"))
    # Two keys: the equal part of each is 50, and half of that is left in a full queue.
    assert queue.has_room("other", small)
    requests.append(submit(["b"], 1, key="other"))
    assert not queue.has_room("other", small)
    assert queue.has_room("third", small)
    gate.set()
    await asyncio.gather(*requests)


async def test_only_large_requests_are_refused_for_the_bytes_of_other_keys() -> None:
    target = Target(max_bytes=1000, share=0.5)
    gate = target.hold()
    submit, queue = target.group_commit.submit, target.group_commit.queue
    requests = [submit(["a"], 999, key="one"), submit(["a"], 1000, key="two")]
    assert queue.has_room("three", small=False)
    requests.append(submit(["a"], 1, key="two"))
    assert not queue.has_room("three", small=False)
    assert queue.has_room("three", small=True)
    # A third of 1000 is the equal part of each, and half of that is left.
    requests.append(submit(["a"], 166, key="three"))
    assert queue.has_room("three", small=True)
    requests.append(submit(["a"], 1, key="three"))
    assert not queue.has_room("three", small=True)
    gate.set()
    await asyncio.gather(*requests)


async def test_calls_are_smaller_while_the_storage_is_slow() -> None:
    """So a request of another key does not wait long behind a flood."""

    async def sizes(target: Target, small: float, large: float) -> list[int]:
        """Return the sizes of the calls for many requests, if they take so many seconds."""
        target.calls.clear()
        target.before = lambda items: asyncio.sleep(small if len(items) <= 100 else large)
        await asyncio.gather(*(target.submit("a") for _ in range(3200)))
        return [len(call) for call in target.calls]

    target, far = (Target(group_weight=800, max_weight=10_000) for _ in range(2))
    assert await sizes(target, 0.01, 0.04) == [800] * 4
    assert await sizes(target, 0.01, 0.11) == [800, 400, 200] + [100, 200] * 6
    assert await sizes(target, 0.01, 0.04) == [100, 200, 400, 800, 800, 800, 100]
    # On a network that takes long for anything, smaller calls would only store less.
    assert await sizes(far, 2, 2) == [800, 400, 200, 100, 200, 400, 800, 300]


async def test_keys_are_written_in_rotation() -> None:
    target = Target(group_weight=3)
    commit = target.group_commit
    busy = [commit.submit([f"busy {number}"], 1, key="busy") for number in range(6)]
    quiet = commit.submit(["quiet"], 1, key="quiet")
    await asyncio.gather(*busy, quiet)
    assert target.calls[0] == ["busy 0", "quiet", "busy 1"]
    assert [len(call) for call in target.calls] == [3, 3, 1]


async def test_other_keys_come_between_the_parts_of_a_large_request() -> None:
    target = Target()
    submit = target.group_commit.submit
    gates = target.hold_each(4)
    parts = [submit([f"part {number}"], 1, key="large", part=True) for number in range(5)]
    await turns()
    # Nobody else waits, so the parts are one call.
    assert target.calls == [[f"part {number}" for number in range(5)]]
    parts += [submit([f"more {number}"], 1, key="large", part=True) for number in range(3)]
    other = [submit([name], 1, key="other") for name in ("a", "b")]
    gates[0].set()
    await turns()
    assert target.calls[1] == ["more 0", "a", "b"]
    for gate in gates:
        gate.set()
    await asyncio.gather(*parts, *other)
    assert target.calls[2:] == [["more 1", "more 2"]]


async def test_a_cancelled_caller_does_not_cancel_the_call() -> None:
    target = Target()
    gate = target.hold()
    first = target.submit("a")
    await turns()
    second, third = target.submit("b"), target.submit("c")
    await turns()
    first.cancel()
    second.cancel()
    await turns()
    gate.set()
    assert await third == ["<c>"]
    assert target.calls == [["a"], ["b", "c"]]
    assert target.group_commit.queue.items == 0
    assert await target.submit("d") == ["<d>"]


def poison(*names: Any, error: type[Exception] = OverflowError) -> Callable[[Sequence[Any]], None]:
    """Return what makes a call fail with these items, or with any if there are none."""

    def poisoned(items: Sequence[Any]) -> None:
        if not names or not {*names}.isdisjoint(items):
            raise error("a fault of the storage")

    return poisoned


@pytest.mark.parametrize("error", [OverflowError, StorageUnavailable])
async def test_an_item_that_cannot_be_written_fails_alone(error: type[Exception]) -> None:
    """Some storages report a bad item as unavailability."""
    target = Target()
    target.before = poison("poison", error=error)
    names = ["a", "poison", "b", "c"]
    results = await asyncio.gather(*map(target.submit, names), return_exceptions=True)
    assert [type(result) for result in results] == [list, StorageUnavailable, list, list]
    assert target.calls == [names, ["a"], ["poison"], ["b"], ["c"]]
    assert (target.failed, target.recovered) == (2, 0)
    assert await target.submit("d") == ["<d>"]


def refused(item: Any, error: Exception) -> str:
    return f"{item}: {type(error).__name__}"


async def test_a_poisonous_item_of_a_request_is_refused_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others are written, also those of the requests that share its call."""
    target = Target(refuse=refused)
    target.before = poison("3", "60")
    names = list(map(str, range(100)))
    request, other = target.submit(*names), target.submit("a")
    bad = {"3": "3: OverflowError", "60": "60: OverflowError"}
    assert await request == [bad.get(name, f"<{name}>") for name in names]
    assert await other == ["<a>"]
    assert target.calls[1:3] == [names, ["a"]], "it does not wait until the other is divided"
    assert len(target.calls) < 40
    assert sum(target.done) == 99
    assert target.recovered == target.group_commit.queue.items == 0
    # Not one line for each call.
    assert caplog.text.count("unexpected error") == 2


async def test_a_poisonous_item_alone_is_refused_when_it_fails_twice() -> None:
    target = Target(refuse=refused)
    failures = iter([OverflowError()])

    def once(items: Sequence[Any]) -> None:
        if error := next(failures, None):
            raise error

    target.before = once
    assert await target.submit("good") == ["<good>"]
    target.before = poison("bad")
    assert await target.submit("bad") == ["bad: OverflowError"]
    assert target.calls == [["good"], ["good"], ["bad"], ["bad"]]


async def test_the_calls_that_look_for_poisonous_items_are_limited() -> None:
    """Every second item: all of 100 are found, and a request of 300 fails."""
    for items in (100, 300):
        target = Target(refuse=refused, max_weight=1000)
        names = list(map(str, range(items)))
        target.before = poison(*names[1::2])
        if items == 300:
            with pytest.raises(StorageUnavailable):
                await target.submit(*names)
        else:
            results = await target.submit(*names)
            assert sum(result.startswith("<") for result in results) == 50
        assert len(target.calls) <= 202  # Of all, of the request alone, and of 200 parts.


async def test_a_storage_that_fails_with_everything_refuses_few() -> None:
    """The clients of the others send them again, until the fault is repaired."""
    target = Target(refuse=refused, max_weight=1000)
    target.before = poison(*range(30))
    for number in range(30):
        if number < 10:
            assert await target.submit(number) == [f"{number}: OverflowError"]
        else:
            with pytest.raises(StorageUnavailable):
                await target.submit(number)
    # It works again.
    assert await target.submit("good") == ["<good>"]
    assert await target.submit(1) == ["1: OverflowError"]


async def test_a_storage_that_becomes_unavailable_refuses_nothing() -> None:
    """While a request is divided."""
    target = Target(refuse=refused)

    def down(items: Sequence[Any]) -> None:
        raise OverflowError if len(items) > 1 else StorageUnavailable("no connection")

    target.before = down
    with pytest.raises(StorageUnavailable):
        await target.submit("a", "b")
    assert target.calls == [["a", "b"], ["a", "b"], ["a"], ["b"]]


async def test_the_items_beside_one_that_makes_the_storage_unavailable_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request fails, because it is not known whether the item can be written later."""
    target = Target(refuse=refused)
    names = list(map(str, range(100)))
    target.before = poison("57", error=StorageUnavailable)
    request, other = target.submit(*names), target.submit("a")
    with pytest.raises(StorageUnavailable):
        await request
    assert await other == ["<a>"]
    written = [item for call in target.calls if "57" not in call for item in call]
    assert sorted(written) == sorted({"a", *names} - {"57"})
    assert len(target.calls) < 20
    assert len(caplog.messages) == 2  # Not for each call.
    assert target.group_commit.queue.items == 0


@pytest.mark.parametrize(("requests", "items"), [(1, 20), (4, 20), (50, 1)])
async def test_few_parts_are_tried_while_the_storage_is_down(requests: int, items: int) -> None:
    target = Target(refuse=refused)
    target.before = poison(error=StorageUnavailable)
    results = await asyncio.gather(
        *(target.submit(*range(items)) for _ in range(requests)), return_exceptions=True
    )
    assert {type(result) for result in results} == {StorageUnavailable}
    assert len(target.calls) == 4
    assert target.group_commit.queue.items == 0
    target.before = lambda items: None
    assert await target.submit("a") == ["<a>"]


async def test_a_wrong_number_of_results_is_a_failure() -> None:
    target = Target()
    target.results = lambda items: items[:-1]
    with pytest.raises(StorageUnavailable) as failed:
        await target.submit("a", "b")
    assert isinstance(failed.value.__cause__, TypeError)


async def test_a_call_that_takes_too_long_fails_for_all_and_reopens_the_store() -> None:
    target = Target(timeout=1.0)
    later: list[asyncio.Task[Sequence[str]]] = []

    def hang(items: Sequence[Any]) -> Any:
        later.extend(map(target.submit, "cd"))
        return asyncio.Event().wait()

    target.before = hang
    results = await asyncio.gather(*map(target.submit, "ab"), return_exceptions=True)
    # The requests that arrived since then wait for the same store.
    results += await asyncio.gather(*later, return_exceptions=True)
    assert [type(result) for result in results] == [StorageUnavailable] * 4
    assert target.calls == [["a", "b"]]
    await target.group_commit.drain()
    assert (target.failed, target.recovered) == (1, 1)
    assert target.group_commit.queue.items == 0
    target.before = lambda items: None
    assert await target.submit("e") == ["<e>"]


async def test_a_request_that_waited_too_long_fails_without_a_call() -> None:
    target = Target(timeout=30, group_weight=1)
    target.before = lambda items: asyncio.sleep(20)
    requests = list(map(target.submit, "abc"))
    await asyncio.sleep(15)
    requests.append(target.submit("d"))
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(result) for result in results] == [list, list, StorageUnavailable, list]
    assert target.calls == [["a"], ["b"], ["d"]]
    assert target.recovered == 0


async def test_the_repetitions_after_a_failure_are_part_of_the_time() -> None:
    target = Target(timeout=1.0)

    def broken(items: Sequence[Any]) -> Any:
        if len(items) > 1:
            raise ValueError("poison")
        return asyncio.Event().wait()

    target.before = broken
    results = await asyncio.gather(*map(target.submit, "abc"), return_exceptions=True)
    assert {type(result) for result in results} == {StorageUnavailable}
    assert target.calls == [["a", "b", "c"], ["a"]]
    await target.group_commit.drain()
    assert target.recovered == 1
    assert target.group_commit.queue.items == 0


async def test_a_storage_that_cancels_itself_is_unavailable() -> None:
    target = Target()

    def cancels(items: Sequence[Any]) -> None:
        raise asyncio.CancelledError

    target.before = cancels
    with pytest.raises(StorageUnavailable):
        await target.submit("a")


@pytest.mark.parametrize("calls", [1, 2])
async def test_close_finishes_waiting_requests(calls: int) -> None:
    target = Target(writes=calls)
    gates = target.hold_each(3)
    requests = await started(target, "a", "b", "c")
    closing = asyncio.ensure_future(target.group_commit.close())
    await turns()
    with pytest.raises(ApiError) as caught:
        await target.submit("d")
    assert caught.value.code == "shutting_down"
    for gate in gates[: calls + 1]:
        await turns()
        assert not closing.done()
        gate.set()
    await closing
    assert [request.result() for request in requests] == [["<a>"], ["<b>"], ["<c>"]]


# ---------------------------------------------------------- two calls at the same time
async def test_there_are_as_many_calls_as_the_storage_takes() -> None:
    target = Target(writes=2)
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
    target = Target(writes=2)
    gates = target.hold_each(2)
    requests = await started(target, "abc", "d", "e")
    assert target.calls == [["a", "b", "c"]]
    requests += await started(target, "f")
    assert target.calls == [["a", "b", "c"], ["d", "e", "f"]]
    for gate in gates:
        gate.set()
    await asyncio.gather(*requests)


async def test_the_calls_share_the_maximum_of_one() -> None:
    """So the memory that they need does not grow with their number."""
    target = Target(group_weight=6, writes=2)
    gates = target.hold_each(4)
    requests = await started(target, "abcdefgh")
    assert target.calls == [["a", "b", "c"], ["d", "e", "f"]]
    for gate in gates:
        gate.set()
    await asyncio.gather(*requests)
    assert target.calls[2:] == [["g", "h"]]


async def test_a_call_that_hangs_beside_a_good_one_does_not_reopen_the_store() -> None:
    target = Target(writes=2, timeout=1.0)
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
    target = Target(writes=2, timeout=1.0)
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


@each("calls", [1, 2, 3])
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

    target = Target(writes=calls, max_weight=10_000)
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
    assert target.group_commit.queue.has_room("", small=True)
