# SPDX-License-Identifier: Apache-2.0
"""The workers of a server share its connections; here they are processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import holder
from support.server_process import Server, start_server
from support.waiting import DEADLINE, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

READY = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"


def _ask(client: socket.socket) -> None:
    """Send a request and read its answer, which must keep the connection open."""
    client.sendall(READY)
    data = b""
    while not data.endswith(b"}"):
        more = client.recv(65536)
        assert more, "the connection was closed"
        data += more
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" not in data.lower()


@contextlib.contextmanager
def _clients(server: Server, count: int) -> Iterator[list[socket.socket]]:
    """Yield connections that have had an answer."""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            address = ("127.0.0.1", server.port)
            client = stack.enter_context(socket.create_connection(address, timeout=DEADLINE))
            _ask(client)
            clients.append(client)
        yield clients


def _sizes(workers: set[int], clients: list[socket.socket]) -> list[int]:
    """Return how many of the connections each worker has, the fewest first."""
    owners = [holder(workers, client.getsockname()[1]) for client in clients]
    return sorted(owners.count(worker) for worker in workers)


def _all_accept(server: Server, count: int) -> set[int]:
    """Return the workers once all of them accept connections."""
    workers: set[int] = wait_for(lambda: len(found := server.workers()) == count and found)

    def shared() -> bool:
        with _clients(server, 4 * count) as clients:
            return _sizes(workers, clients)[0] > 0

    wait_for(shared, what="connections on each worker")
    return workers


def test_a_replaced_worker_gets_its_share(tmp_path: Path) -> None:
    """It has no connections, so it gets the next ones, and the others keep theirs."""
    with start_server(tmp_path, workers=2) as server:
        workers = _all_accept(server, 2)
        with _clients(server, 8) as before:
            died = min(workers)
            os.kill(died, signal.SIGKILL)
            wait_for(lambda: len(server.workers() - workers) == 1)
            [new] = server.workers() - workers
            left = [one for one in before if holder(workers - {died}, one.getsockname()[1])]

            def served() -> bool:
                with _clients(server, 1) as clients:
                    return holder({new}, clients[0].getsockname()[1]) == new

            wait_for(served, what="a connection on the new worker")
            with _clients(server, 8) as clients:
                assert _sizes(server.workers(), [*left, *clients])[0] >= 4
            for client in left:
                _ask(client)
