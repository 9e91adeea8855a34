# SPDX-License-Identifier: Apache-2.0
"""A worker hands connections to another. They are listeners of one process here.

Each has its own port, so all connections of a test begin at the first worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from engage.http1.handover import Handover, make_handover
from engage.http1.shares import Shares, make_shares
from support.http_client import RawClient, request
from support.http_echo import Running, on_uvloop, running
from support.waiting import eventually


class _Queue(Handover):
    """Counts what is put into it and taken out.

    Its worker can open no file as often as ``failures`` says.
    """

    puts = takes = failures = 0

    def put(self, descriptor: int) -> bool:
        done = super().put(descriptor)
        self.puts += done
        return done

    def take(self) -> socket.socket:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        connection = super().take()
        self.takes += 1
        return connection


@contextlib.contextmanager
def _queues(count: int) -> Iterator[list[_Queue]]:
    """Yield the same queue, as this number of workers see it."""
    ends = make_handover()
    queues = [_Queue(*(end.fileno() for end in ends)) for _ in range(count)]
    for end in ends:
        end.close()
    try:
        yield queues
    finally:
        for queue in queues:
            queue.close()


class _Pair:
    """Two workers, or one and the memory of another that does not run."""

    def __init__(self, shares: list[Shares], queues: list[_Queue], servers: list[Running]) -> None:
        self.shares = shares
        self.queues = queues
        self.servers = servers

    @property
    def sizes(self) -> list[int]:
        """The connections of each worker."""
        return [len(server.listener.connections) for server in self.servers]


@contextlib.asynccontextmanager
async def _pair(started: int = 2, **bounds: Any) -> AsyncIterator[_Pair]:
    """Yield two workers.

    :param started: how many of them run.
    """
    with make_shares(2) as file, _queues(2) as queues:
        shares = [Shares(file.fileno(), number, queues[number]) for number in range(2)]
        async with contextlib.AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(running(shares[number], **bounds))
                for number in range(started)
            ]
            yield _Pair(shares, queues, servers)


@contextlib.asynccontextmanager
async def _clients(port: int, count: int) -> AsyncIterator[list[RawClient]]:
    """Yield connections that have had an answer."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            client = await stack.enter_async_context(await RawClient.connect(port))
            await client.send(request(b"first"))
            assert (await client.answer()).status == 200
            clients.append(client)
        yield clients


@contextlib.contextmanager
def _many(shares: Shares) -> Iterator[None]:
    """Let a worker seem to have many connections, as one that has not noticed hang-ups does."""
    for _ in range(50):
        shares.opened()
    try:
        yield
    finally:
        for _ in range(50):
            shares.closed()


async def test_connections_are_shared_after_a_count_was_out_of_date() -> None:
    """All 8 connections are accepted while the other worker seems to have many."""
    async with _pair() as pair, contextlib.AsyncExitStack() as stack:
        with _many(pair.shares[1]):
            clients = await stack.enter_async_context(_clients(pair.servers[0].port, 8))
            assert pair.sizes == [8, 0]
        await eventually(lambda: pair.sizes == [4, 4])
        for number, client in enumerate(clients):
            await client.send(request(b"%d" % number))
            assert (await client.answer()).body == b"%d" % number
        assert pair.sizes == [4, 4]
        assert pair.shares[0].least() == pair.shares[1].least() == 4


async def test_busy_connections_move_between_two_requests() -> None:
    async with _pair() as pair, _clients(pair.servers[0].port, 8) as clients:
        stop = asyncio.Event()

        async def use(client: RawClient) -> None:
            number = 0
            while not stop.is_set():
                await client.send(request(b"%d" % number))
                answer = await client.answer()
                assert (answer.status, answer.body) == (200, b"%d" % number)
                assert "connection" not in answer.headers
                number += 1

        using = [asyncio.create_task(use(client)) for client in clients]
        await eventually(lambda: pair.sizes == [4, 4])
        stop.set()
        await asyncio.gather(*using)


async def test_a_request_in_progress_is_answered_where_it_began() -> None:
    """Its connection moves afterwards; half of a request is in progress, too."""
    async with _pair() as pair, contextlib.AsyncExitStack() as stack:
        with _many(pair.shares[1]):
            clients = await stack.enter_async_context(_clients(pair.servers[0].port, 4))
            gate = pair.servers[0].settings["gate"] = asyncio.Event()
            await clients[0].send(request(b"half")[:-2])
            for client in clients[1:]:
                await client.send(request(b"whole"))
            connections = pair.servers[0].listener.connections
            await eventually(lambda: all(one.serving for one in connections))
        await eventually(lambda: any(one.moves for one in connections))
        assert pair.sizes == [4, 0]
        gate.set()
        await clients[0].send(b"lf")
        assert [(await one.answer()).body for one in clients] == [b"half", *[b"whole"] * 3]
        await eventually(lambda: pair.sizes == [2, 2])


async def test_no_request_is_lost_or_answered_twice() -> None:
    """Clients that pipeline get all answers in order, while connections move to and fro."""
    async with _pair() as pair, _clients(pair.servers[0].port, 6) as clients:
        stop = asyncio.Event()
        sent = [0] * len(clients)

        async def send(number: int) -> None:
            chance = random.Random(number)
            while not stop.is_set():
                count = chance.choice([1, 1, 1, 2, 5])
                data = b"".join(request(b"%d" % (sent[number] + n)) for n in range(count))
                sent[number] += count
                cut = chance.randrange(len(data))
                await clients[number].send(data[:cut])
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.002)
                await clients[number].send(data[cut:])
                if chance.random() < 0.5:
                    await eventually(lambda: received[number] == sent[number])

        received = [0] * len(clients)

        async def receive(number: int) -> None:
            while not (stop.is_set() and sending.done() and received[number] == sent[number]):
                if received[number] == sent[number]:
                    await asyncio.sleep(0)
                    continue
                answer = await clients[number].answer()
                assert (answer.status, answer.body) == (200, b"%d" % received[number])
                received[number] += 1

        sending = asyncio.gather(*(send(number) for number in range(len(clients))))
        receiving = asyncio.gather(*(receive(number) for number in range(len(clients))))
        for turn in range(8):
            winner = pair.queues[1 - turn % 2]
            enough = winner.takes + 3
            with _many(pair.shares[turn % 2]):
                while winner.takes < enough and not receiving.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        stop.set()
        await asyncio.gather(sending, receiving)
        assert pair.queues[0].takes > 0
        assert pair.queues[1].takes > 0


async def test_a_worker_that_hangs_is_given_connections_once() -> None:
    """It has asked and takes nothing. Those that were put into the queue come back."""
    async with _pair(started=1) as pair, contextlib.AsyncExitStack() as stack:
        clients = await stack.enter_async_context(_clients(pair.servers[0].port, 8))
        pair.shares[1].join()
        pair.shares[1].ask()
        await eventually(lambda: pair.queues[0].takes)
        for _ in range(30):
            for client in clients:
                await client.send(request(b"x"))
                assert (await client.answer()).body == b"x"
            await asyncio.sleep(0.02)
        await eventually(lambda: pair.queues[0].takes == pair.queues[0].puts)
        assert pair.queues[0].puts <= 4
        await eventually(lambda: pair.sizes == [8])


async def test_a_worker_that_has_not_asked_is_given_nothing() -> None:
    async with _pair(started=1) as pair, _clients(pair.servers[0].port, 8) as clients:
        pair.shares[1].join()
        balancer = pair.servers[0].listener._balancer
        assert balancer is not None
        balancer._compare()
        await clients[0].send(request(b"x"))
        assert (await clients[0].answer()).body == b"x"
        assert pair.queues[0].puts == 0


class _Impatient:
    """The gate of a handler: the client sends its next request just before it gets an answer."""

    def __init__(self, client: RawClient, count: int) -> None:
        self._descriptor: int = client.writer.get_extra_info("socket").fileno()
        self._bodies = iter(range(1, count))

    async def wait(self) -> None:
        with contextlib.suppress(StopIteration):
            os.write(self._descriptor, request(b"%d" % next(self._bodies)))


async def test_the_connection_of_a_fast_client_moves() -> None:
    """Who takes it reads what the client has sent meanwhile."""
    async with _pair(started=1) as pair, _clients(pair.servers[0].port, 1) as (client,):
        pair.shares[1].join()
        pair.servers[0].settings["gate"] = _Impatient(client, 5)
        (connection,) = pair.servers[0].listener.connections
        with _many(pair.shares[0]):
            connection.moves = True
            await client.send(request(b"0"))
            for number in range(5):
                assert (await client.answer()).body == b"%d" % number
        assert pair.queues[0].puts == 1


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (request(b"x") + b"\r\n", b"", 200),
        (request(b"x", headers={"X-Refuse": "1"})[:-1], b"x", 403),
    ],
    ids=["an empty line after a body", "a body after its answer"],
)
@pytest.mark.parametrize("lead", [0, 50], ids=["stays", "moves"])
async def test_a_client_that_sends_more_before_a_move_is_not_forgotten(
    lead: int, first: bytes, second: bytes, status: int
) -> None:
    """The rest of a request arrives after its answer. The connection moves then, or stays."""
    async with _pair(started=1) as pair, _clients(pair.servers[0].port, 1) as (client,):
        pair.shares[1].join()
        (connection,) = pair.servers[0].listener.connections
        with _many(pair.shares[0]) if lead else contextlib.nullcontext():
            connection.moves = True
            await client.send(first)
            assert (await client.answer()).status == status
            await client.send(second)
            await eventually(lambda: not connection.moves or pair.queues[0].puts)
            await client.send(request(b"y"))
            assert (await client.answer()).body == b"y"
        assert pair.queues[0].puts == bool(lead)


async def test_a_connection_stays_until_its_answers_are_sent() -> None:
    async with _pair(started=1) as pair, _clients(pair.servers[0].port, 1) as (client,):
        pair.shares[1].join()
        (connection,) = pair.servers[0].listener.connections
        body, count = b"x" * 90_000, 0

        def answered() -> bool:
            return len(pair.servers[0].seen) > count

        while not connection._transport.get_write_buffer_size():
            await client.send(request(body))
            count += 1
            await eventually(answered)
        with _many(pair.shares[0]):
            connection.move()
            for _ in range(count):
                assert (await client.answer()).body == body
        assert pair.queues[0].puts == 0


async def test_a_connection_stays_if_the_others_have_as_many() -> None:
    """They may have accepted some since it was chosen."""
    async with _pair(started=1) as pair, _clients(pair.servers[0].port, 1) as (client,):
        pair.shares[1].opened()
        pair.shares[1].join()
        (connection,) = pair.servers[0].listener.connections
        connection.move()
        await eventually(lambda: not connection.moves)
        await client.send(request(b"x"))
        assert (await client.answer()).body == b"x"
        assert pair.queues[0].puts == 0


async def test_a_drain_takes_what_is_in_the_queue() -> None:
    async with _pair(started=1) as pair, _clients(pair.servers[0].port, 8) as clients:
        listener = pair.servers[0].listener
        listener._acceptors[0]._pause()
        pair.shares[1].join()
        pair.shares[1].ask()
        await eventually(lambda: pair.queues[0].puts == 4 and pair.sizes == [4])
        for client in clients:
            await client.send(request(b"x"))
        await listener.stop_accepting()
        assert pair.queues[0].takes == 4
        for client in clients:
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"x")
        assert await listener.drain(30.0)


async def test_a_connection_that_moved_may_be_idle_as_long_as_others() -> None:
    """``server.head_timeout`` is for clients that have sent nothing yet."""
    async with (
        _pair(head_timeout=500.0, idle_timeout=1000.0) as pair,
        _clients(pair.servers[0].port, 2),
    ):
        await eventually(lambda: pair.sizes == [1, 1])
        (connection,) = pair.servers[1].listener.connections
        assert connection.deadline > asyncio.get_running_loop().time() + 800
        capacity = pair.servers[1].listener.shared.capacity
        assert connection not in capacity.expendable, "new ones go first"


async def test_a_client_that_has_sent_no_request_stays() -> None:
    """Elsewhere it would have a seat, and the time of a client that has sent some."""
    async with _pair() as pair, contextlib.AsyncExitStack() as stack:
        first, second = (server.listener for server in pair.servers)
        with _many(pair.shares[1]):
            for number in range(8):
                client = await stack.enter_async_context(
                    await RawClient.connect(pair.servers[0].port)
                )
                await client.send(request(b"half")[: number % 4 * 10])
            await eventually(lambda: len(first.shared.capacity.expendable) == 8)
            await stack.enter_async_context(_clients(pair.servers[0].port, 1))
            assert pair.sizes == [9, 0]
        await eventually(lambda: pair.sizes == [8, 1])
        pair.shares[1].ask()
        assert first._balancer is not None
        first._balancer._compare()
        assert not any(one.moves for one in first.connections)
        assert not second.shared.capacity.expendable


@pytest.mark.parametrize("busy", [2, 7])
async def test_a_worker_without_connections_gets_one_of_many_equal_workers(busy: int) -> None:
    """Each of the others has less than one connection more than its share."""
    with make_shares(busy + 1) as file, _queues(2) as queues:
        others = [Shares(file.fileno(), number) for number in range(2, busy + 1)]
        for shares in others:
            shares.join()
            for _ in range(busy):
                shares.opened()
        async with (
            running(Shares(file.fileno(), 0, queues[0])) as first,
            _clients(first.port, busy),
            running(Shares(file.fileno(), 1, queues[1])) as second,
        ):
            await eventually(lambda: len(second.listener.connections) == 1)
            assert len(first.listener.connections) == busy - 1


async def test_nothing_moves_if_one_worker_has_one_connection_more() -> None:
    async with _pair() as pair, contextlib.AsyncExitStack() as stack:
        with _many(pair.shares[1]):
            await stack.enter_async_context(_clients(pair.servers[0].port, 1))
        assert pair.shares[0].surplus() == 0.5
        pair.shares[1].ask()
        balancer = pair.servers[0].listener._balancer
        assert balancer is not None
        balancer._compare()
        assert not any(one.moves for one in pair.servers[0].listener.connections)
        assert pair.shares[0].answer(), "nobody has answered"


async def test_without_a_file_descriptor_a_moving_connection_waits() -> None:
    """It is not closed, unlike a new one."""
    async with _pair(started=1) as pair, _clients(pair.servers[0].port, 8) as clients:
        pair.queues[0].failures = 3
        pair.shares[1].join()
        pair.shares[1].ask()
        await eventually(lambda: pair.queues[0].takes)
        assert pair.queues[0].failures == 0
        for client in clients:
            await client.send(request(b"x"))
            assert (await client.answer()).body == b"x"


@contextlib.contextmanager
def _no_free_file() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_worker_that_can_open_no_file_does_not_ask() -> None:
    with make_shares(2) as file:
        workers = [Shares(file.fileno(), number) for number in range(2)]
    for _ in range(4):
        workers[0].opened()
    for worker in workers:
        worker.join()
    with _no_free_file():
        workers[1].ask()
    assert not workers[0].answer()
    workers[1].ask()
    assert workers[0].answer()


def test_what_is_in_the_queue_survives() -> None:
    """Neither a lack of file descriptors nor the end of a worker closes a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs, _queues(2) as queues:
        assert queues[0].put(theirs.fileno())
        theirs.close()
        queues[0].close()
        with _no_free_file(), pytest.raises(OSError, match="Too many open files"):
            queues[1].take()
        with queues[1].take() as taken:
            assert not taken.get_inheritable()
            taken.sendall(b"x")
            assert ours.recv(1) == b"x"
        with pytest.raises(BlockingIOError):
            queues[1].take()


def test_a_full_queue_takes_no_more() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _queues(1) as (queue,):
        count = next(n for n in range(100_000) if not queue.put(theirs.fileno()))
        assert count
        for _ in range(count):
            queue.take().close()
        assert queue.put(theirs.fileno())
        queue.close()
        assert not queue.put(theirs.fileno())


def test_a_worker_far_behind_its_share_asks() -> None:
    with make_shares(4) as file:
        workers = [Shares(file.fileno(), number) for number in range(4)]
    for worker, count in zip(workers, (20, 12, 10, 9), strict=True):
        for _ in range(count):
            worker.opened()
    for worker in workers[:3]:
        worker.join()
        worker.ask()
    assert [worker.surplus() for worker in workers] == [6, -2, -4, 0]
    assert workers[0].answer(), "the third has less than three quarters of its share"
    assert not workers[1].answer(), "each request is answered once"
    workers[2].ask()
    workers[0].leave(2)
    assert not workers[0].answer(), "the third has died"
    assert workers[0].surplus() == 4


@pytest.mark.parametrize(
    "test",
    [
        test_connections_are_shared_after_a_count_was_out_of_date,
        test_busy_connections_move_between_two_requests,
        test_a_request_in_progress_is_answered_where_it_began,
        test_no_request_is_lost_or_answered_twice,
        test_the_connection_of_a_fast_client_moves,
        test_a_connection_stays_until_its_answers_are_sent,
        test_a_worker_that_hangs_is_given_connections_once,
        test_a_drain_takes_what_is_in_the_queue,
    ],
)
def test_handing_over_works_with_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    on_uvloop(test())
