# SPDX-License-Identifier: Apache-2.0
"""Admission: who is decoded next, who waits, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest

from engage.errors import ApiError
from engage.pipeline import admission as admission_module
from engage.pipeline.admission import PACE_REQUESTS, Admission
from support.pipeline import turns


class Room:
    """Room in the queue, by write key."""

    def __init__(self) -> None:
        self.full: set[str] = set()

    def __call__(self, key: str, small: bool) -> bool:
        return key not in self.full and "all" not in self.full


def make(wait: float = 30.0) -> tuple[Admission, Room]:
    room = Room()
    return Admission(room, wait=wait), room


async def test_a_small_request_with_room_enters_at_once_also_during_a_turn() -> None:
    admission, _ = make()
    with await admission.enter("a", small=False):
        with await admission.enter("b", small=True):
            pass
        with await admission.enter("a", small=True):
            pass


async def test_large_requests_take_turns() -> None:
    admission, _ = make()
    inside = most = 0

    async def request(key: str) -> None:
        nonlocal inside, most
        with await admission.enter(key, small=False):
            inside += 1
            most = max(most, inside)
            await turns()
            inside -= 1

    await asyncio.gather(*(request("a") for _ in range(20)))
    assert most == 1


async def test_turns_go_to_the_keys_in_rotation() -> None:
    admission, _ = make()
    order: list[str] = []

    async def request(key: str) -> None:
        with await admission.enter(key, small=False):
            order.append(key)
            await turns()

    first = asyncio.ensure_future(request("busy"))
    await turns(1)
    busy = [asyncio.ensure_future(request("busy")) for _ in range(10)]
    await turns(1)
    await asyncio.gather(first, *busy, request("quiet"))
    assert "quiet" in order[:3]


async def test_a_request_without_room_waits_for_it() -> None:
    admission, room = make()
    room.full.add("a")
    waiting = asyncio.ensure_future(admission.enter("a", small=True))
    await turns()
    assert not waiting.done()
    with await admission.enter("b", small=True):
        pass
    room.full.clear()
    admission.wake()
    with await waiting:
        pass


async def test_a_request_without_room_is_refused_after_the_wait() -> None:
    admission, room = make(wait=0.01)
    room.full.add("a")
    with pytest.raises(ApiError) as caught:
        await admission.enter("a", small=True)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    room.full.clear()
    with await admission.enter("a", small=True):
        pass


async def test_the_turn_is_passed_on_when_decoding_fails() -> None:
    admission, _ = make()
    with contextlib.suppress(ValueError), await admission.enter("a", small=False):
        raise ValueError
    with await admission.enter("a", small=False):
        pass


async def test_a_cancelled_request_neither_keeps_nor_loses_a_turn() -> None:
    admission, _ = make()
    with await admission.enter("a", small=False):
        gone = asyncio.ensure_future(admission.enter("a", small=False))
        late = asyncio.ensure_future(admission.enter("a", small=False))
        await turns()
        gone.cancel()
        await turns()
    # Let in, and cancelled before it could run.
    late.cancel()
    await turns()
    with await asyncio.wait_for(admission.enter("a", small=False), 5):
        pass
    assert not admission._turns


class Work:
    """Small requests of 8 ms each; a clock of the test counts them, and another task the turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.turn = 0.0, 0
        self.turns: list[tuple[int, str]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(admission_module, "time", clock)

    async def request(self, admission: Admission, key: str) -> None:
        with await admission.enter(key, small=True):
            self.turns.append((self.turn, key))
            self.now += 0.008

    async def run(self, *requests: asyncio.Task[None]) -> Counter[int]:
        """Return how many of the requests had each turn."""
        while not all(one.done() for one in requests):
            await asyncio.sleep(0)
            self.turn += 1
        return Counter(turn for turn, _ in self.turns)


async def test_small_requests_take_a_part_of_a_turn_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20 ms; whatever their number, a few have each later turn, of all keys in rotation."""
    admission, _ = make()
    work = Work(monkeypatch)
    keys = ["busy"] * 30 + ["quiet"]
    requests = [asyncio.create_task(work.request(admission, key)) for key in keys]
    first, *later = (await work.run(*requests)).values()
    assert first == 3
    assert max(later) == PACE_REQUESTS
    assert sum(later) == len(keys) - first
    assert "quiet" in [key for _, key in work.turns[: first + PACE_REQUESTS]]


async def test_a_small_request_that_takes_long_goes_on_in_turn_with_large_ones() -> None:
    admission, _ = make()
    order: list[str] = []

    async def long(name: str) -> None:
        with await admission.enter(name, small=True) as admitted:
            for _ in range(2):
                order.append(name)
                await admitted.pause()

    with await admission.enter("large", small=False):
        waiting = [asyncio.create_task(long(name)) for name in "ab"]
        await turns()
        assert order == ["a", "b"]
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize("small", [True, False])
async def test_a_request_that_leaves_lets_others_in_and_enters_again(small: bool) -> None:
    admission, room = make()
    order: list[str] = []

    async def fetching() -> None:
        with await admission.enter("a", small=small) as admitted:
            admitted.leave()
            await turns(1)
            order.append("fetched")
            await admitted.enter_again(small=not admitted.large)
            order.append("a")

    with await admission.enter("b", small=False):
        waiting = asyncio.create_task(fetching())
        await turns()
    # Its turn ended when it left, so another large one is decoded while it fetches.
    with await admission.enter("c", small=False):
        await turns()
        assert order == (["fetched", "a"] if small else ["fetched"])
    await waiting
    assert order == ["fetched", "a"]
    # It needs room again.
    with await admission.enter("a", small=small) as admitted:
        admitted.leave()
        room.full.add("a")
        again = asyncio.create_task(admitted.enter_again(small=small))
        await turns()
        assert not again.done()
        room.full.clear()
        admission.wake()
        await again
    with await asyncio.wait_for(admission.enter("a", small=False), 5):
        pass


async def test_the_time_of_a_request_counts_only_while_it_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission, _ = make()
    work = Work(monkeypatch)
    with await admission.enter("a", small=True) as admitted:
        admitted.leave()
        work.now += 60
        await admitted.enter_again(small=True)
        admitted.leave()
    entered = asyncio.ensure_future(admission.enter("a", small=True))
    await turns(1)
    assert entered.done()
