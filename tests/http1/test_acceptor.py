# SPDX-License-Identifier: Apache-2.0
"""Workers that listen on one socket share its connections. They are loops of one process here."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from engage.http1.acceptor import Acceptor
from engage.http1.shares import Shares, make_shares
from support.http_client import RawClient, listening, request
from support.http_echo import on_uvloop, running
from support.waiting import eventually


class _Worker:
    """An acceptor with its connections."""

    def __init__(self, sock: socket.socket, shares: Shares | None) -> None:
        self.shares = shares
        self.transports: list[asyncio.BaseTransport] = []
        self.acceptor = Acceptor(sock, self._protocol, shares)

    def _protocol(self) -> asyncio.Protocol:
        worker = self

        class _Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport
                worker.transports.append(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                worker.transports.remove(self.transport)
                if worker.shares is not None:
                    worker.shares.closed()

        return _Accepted()


@contextlib.asynccontextmanager
async def _workers(count: int) -> AsyncIterator[tuple[list[_Worker], int]]:
    """Yield workers that accept on one port, and the port."""
    sock = listening()
    sock.listen(1000)
    with make_shares(count) as file:
        workers = [
            _Worker(socket.socket(fileno=os.dup(sock.fileno())), Shares(file.fileno(), number))
            for number in range(count)
        ]
    for worker in workers:
        await worker.acceptor.start()
    try:
        yield workers, sock.getsockname()[1]
    finally:
        sock.close()
        for worker in workers:
            worker.acceptor.close()
            for transport in worker.transports:
                transport.abort()  # type: ignore[attr-defined]
        await eventually(lambda: not any(worker.transports for worker in workers))


@contextlib.contextmanager
def _clients(port: int, count: int) -> Any:
    """Open connections at once."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        yield


def _sizes(workers: list[_Worker]) -> list[int]:
    return [len(worker.transports) for worker in workers]


@pytest.mark.parametrize(("number", "count", "trials"), [(2, 8, 20), (4, 32, 20), (4, 256, 4)])
async def test_connections_are_shared(number: int, count: int, trials: int) -> None:
    """No worker has more than 1.5 times its share, in each of many trials."""
    async with _workers(number) as (workers, port):
        for _ in range(trials):
            with _clients(port, count):
                await eventually(lambda: sum(_sizes(workers)) == count)
                assert max(_sizes(workers)) <= 1.5 * count / number
            await eventually(lambda: not sum(_sizes(workers)))


async def test_an_idle_worker_is_filled_up_first() -> None:
    """A worker that was replaced has no connections; it gets the next ones."""
    async with _workers(2) as (workers, port):
        workers[1].acceptor.pause()
        assert workers[1].shares is not None
        workers[1].shares.leave()
        with _clients(port, 20):
            await eventually(lambda: _sizes(workers) == [20, 0])
            await workers[1].acceptor.start()
            with _clients(port, 20):
                await eventually(lambda: sum(_sizes(workers)) == 40)
                assert _sizes(workers)[1] >= 16


async def test_a_worker_that_hangs_leaves_its_share() -> None:
    """It counts as present, but accepts nothing. The other accepts all, after a short time."""
    async with _workers(2) as (workers, port):
        workers[1].acceptor.pause()
        with _clients(port, 200):
            await eventually(lambda: _sizes(workers) == [200, 0])


async def test_a_worker_that_is_gone_leaves_its_share() -> None:
    async with _workers(2) as (workers, port):
        workers[1].acceptor.close()
        with _clients(port, 50):
            await eventually(lambda: _sizes(workers) == [50, 0])


async def test_a_client_that_hung_up_does_not_count() -> None:
    """Clients often disconnect together and connect again, while their last requests still run.

    A worker whose requests take longer would otherwise seem to have more connections than the
    others, which would then accept nearly all new ones.
    """
    with make_shares(2) as file:
        shares, other = (Shares(file.fileno(), number) for number in range(2))
    async with running(shares=shares) as server:
        gate = server.settings["gate"] = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(await RawClient.connect(server.port))
                for _ in range(4)
            ]
            for client in clients:
                await client.send(request(b"x"))
            await eventually(lambda: all(one.serving for one in server.listener.connections))
            assert other.least() == len(server.listener.connections) == 4
            clients[0].half_close()
            clients[1].writer.close()
            clients[2].writer.transport.abort()
            await eventually(lambda: other.least() == 1)
            assert len(server.listener.connections) >= 2, "requests of these clients still run"
            gate.set()
            assert (await clients[0].answer()).status == 200
            assert (await clients[3].answer()).status == 200
            await eventually(lambda: len(server.listener.connections) == 1)
            assert other.least() == 1, "each is counted once"
        await eventually(lambda: other.least() == 0)


async def test_connections_that_wait_are_accepted_before_the_socket_closes() -> None:
    async with _workers(2) as (workers, port):
        for worker in workers:
            worker.acceptor.pause()
        with _clients(port, 10):
            await asyncio.sleep(0.05)
            await workers[0].acceptor.stop()
            assert _sizes(workers) == [10, 0]


class _Failing(socket.socket):
    """A listening socket of which the first attempts to accept fail."""

    def __init__(self, *errors: int) -> None:
        sock = listening()
        sock.listen()
        super().__init__(fileno=sock.detach())
        self.setblocking(False)
        self.errors = list(errors)
        self.calls = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.calls += 1
        if self.errors:
            raise OSError(self.errors.pop(0), "failed")
        return super().accept()


@contextlib.asynccontextmanager
async def _accepting(sock: _Failing) -> AsyncIterator[tuple[_Worker, int]]:
    """Yield a worker that accepts on a socket, and the port."""
    worker = _Worker(sock, None)
    await worker.acceptor.start()
    try:
        yield worker, sock.getsockname()[1]
    finally:
        worker.acceptor.close()
        for transport in worker.transports:
            transport.abort()  # type: ignore[attr-defined]
        await eventually(lambda: not worker.transports)


async def test_a_client_that_is_gone_does_not_stop_the_others() -> None:
    sock = _Failing(errno.ECONNABORTED, errno.EPERM)
    async with _accepting(sock) as (worker, port):
        with _clients(port, 1):
            await eventually(lambda: len(worker.transports) == 1)
    assert not sock.errors


async def test_without_a_file_descriptor_a_connection_is_closed() -> None:
    """Its client does not wait in vain, and the loop does not spin."""
    sock = _Failing(errno.EMFILE)
    async with _accepting(sock) as (worker, port):
        async with await RawClient.connect(port) as client:
            assert await client.closed()
        assert sock.calls <= 4
        assert not worker.transports
        with _clients(port, 1):
            await eventually(lambda: len(worker.transports) == 1)


async def test_without_a_spare_descriptor_accepting_waits() -> None:
    real, sock = os.open, _Failing(errno.ENFILE, errno.ENFILE)

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path == os.devnull:
            raise OSError(errno.ENFILE, "Too many open files")
        return real(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        async with _accepting(sock) as (worker, port):
            with _clients(port, 1):
                await eventually(lambda: len(worker.transports) == 1)
            assert sock.calls <= 4


@pytest.mark.parametrize(
    "test",
    [
        lambda: test_connections_are_shared(2, 32, 20),
        test_a_client_that_hung_up_does_not_count,
        test_a_worker_that_hangs_leaves_its_share,
        test_connections_that_wait_are_accepted_before_the_socket_closes,
        test_without_a_file_descriptor_a_connection_is_closed,
        test_without_a_spare_descriptor_accepting_waits,
    ],
)
def test_accepting_works_with_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    on_uvloop(test())
