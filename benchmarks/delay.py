# SPDX-License-Identifier: Apache-2.0
"""Passes connections on to a local server and delays what clients send, as a network would.

The arguments are the server's port and the delay in milliseconds. The port for clients is printed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class _Server(asyncio.Protocol):
    """The server's end of a connection: forwards to the client at once."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


class _Client(asyncio.Protocol):
    """The client's end: forwards to the server after the delay."""

    def __init__(self, port: int, delay: float) -> None:
        self._port = port
        self._delay = delay
        self._server: asyncio.Transport | None = None
        #: What arrived before there was a connection to the server.
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast("asyncio.Transport", transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        self._server, _ = await asyncio.get_running_loop().create_connection(
            lambda: _Server(self._client), "127.0.0.1", self._port
        )
        for data in self._early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        else:
            # All delays are equal, so the order stays the same.
            asyncio.get_running_loop().call_later(self._delay, self._server.write, data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.close()


async def _main(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(port, delay), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), float(sys.argv[2]) / 1000))
