# SPDX-License-Identifier: Apache-2.0
"""Which connection gives way to another, and whose request is answered next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engage.console import connections as connections_module
from engage.console.connections import GRACE_SECONDS, STRANGERS_AT_ONCE, Connection, Connections

#: An address that operators and strangers share, and two that they do not.
HERE, ONE, OTHER = "127.0.0.1", "192.0.2.1", "198.51.100.1"


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stream:
    """Stands for the stream of a connection, which is the key to it."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Room:
    """The connections of a console that has room for four."""

    def __init__(self) -> None:
        self.clock = Seconds()
        self.connections = Connections(HERE.__eq__, self.clock)
        self.streams: list[Any] = []

    def open(self, address: str, *, known: bool = False) -> Connection:
        """Add a connection, a second after the last one."""
        self.clock.now += 1
        stream: Any = Stream()
        self.connections.add(stream, address)
        self.streams.append(stream)
        one = self.connections.of(stream)
        one.trusted = known
        return one

    def ask(self, connection: Connection) -> asyncio.Task[bool]:
        """Let the request of a connection arrive."""
        self.connections.arrived(connection)
        return asyncio.create_task(self.connections.wait_for_turn(connection))

    @property
    def closed(self) -> list[int]:
        return [number for number, stream in enumerate(self.streams) if stream.closed]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setattr(connections_module, "MAX_CONNECTIONS", 4)
    return Room()


def test_the_oldest_connection_without_a_request_gives_way(room: Room) -> None:
    for _ in range(4):
        assert room.connections.make_room(HERE)
        room.open(HERE)
    room.clock.now += 9
    for number in range(4):
        assert room.connections.make_room(HERE)
        assert room.closed == list(range(number + 1))
        room.open(HERE)


def test_a_newcomer_has_time_to_send_its_request(room: Room) -> None:
    for _ in range(4):
        room.open(HERE)
    room.clock.now = 1 + GRACE_SECONDS - 0.01
    assert room.connections.make_room(HERE) is None
    room.clock.now = 1 + GRACE_SECONDS
    assert room.connections.make_room(HERE) is True
    assert room.closed == [0]


async def test_a_connection_whose_request_is_being_answered_stays(room: Room) -> None:
    asked = [room.open(HERE, known=number > 1) for number in range(4)]
    assert await asyncio.gather(*map(room.ask, asked)) == [True] * 4
    room.clock.now += 99
    assert room.connections.make_room(HERE) is None
    assert room.closed == []
    room.connections.answered(asked[2])
    assert room.connections.make_room(HERE) is None, "it has time for another request"
    room.clock.now += GRACE_SECONDS
    assert room.connections.make_room(HERE) is True
    assert room.closed == [2]


async def test_a_request_that_waits_for_its_turn_is_refused_with_an_answer(room: Room) -> None:
    asked = [room.ask(room.open(HERE)) for _ in range(4)]
    await asyncio.sleep(0)
    room.clock.now += 9
    assert room.connections.make_room(HERE) is True
    assert [await one for one in asked[:3]] == [True, True, False]
    assert not asked[3].done()
    assert room.closed == []
    asked[3].cancel()


def test_people_who_are_signed_in_give_way_last(room: Room) -> None:
    for known in (True, True, False, False):
        room.open(HERE, known=known)
    room.clock.now += 9
    for gone in ([2], [2, 3], [0, 2, 3]):
        assert room.connections.make_room(HERE) is True
        assert room.closed == gone
        room.open(HERE, known=True)
        room.clock.now += 9


def test_the_network_with_the_most_connections_is_refused(room: Room) -> None:
    for address in (ONE, ONE, ONE, HERE):
        room.open(address)
    room.clock.now += 9
    assert room.connections.make_room(ONE) is False
    assert room.connections.make_room("::ffff:192.0.2.1") is False
    assert room.closed == []
    assert room.connections.make_room(OTHER) is True
    assert room.closed == [0]
    room.open(OTHER)
    room.clock.now += 9
    # Where operators and strangers share an address, no newcomer is refused.
    assert room.connections.make_room(HERE) is True
    assert room.closed == [0, 1]


async def test_requests_of_strangers_take_turns(room: Room) -> None:
    strangers = [room.open(HERE) for _ in range(4)]
    asked = [room.ask(stranger) for stranger in strangers]
    known = room.open(HERE, known=True)
    assert await room.ask(known), "it does not wait"
    await asyncio.sleep(0)
    assert [one.done() for one in asked] == [True] * STRANGERS_AT_ONCE + [False] * 2
    room.connections.answered(strangers[0])
    assert await asked[2]
    assert not asked[3].done()
    room.connections.remove(strangers[3].stream)
    assert not await asked[3], "its client is gone"


async def test_the_console_waits_for_the_requests_in_flight(room: Room) -> None:
    await room.connections.finished()
    one = room.open(HERE)
    assert await room.ask(one)
    waiting = asyncio.create_task(room.connections.finished())
    await asyncio.sleep(0)
    assert not waiting.done()
    room.connections.answered(one)
    await waiting
