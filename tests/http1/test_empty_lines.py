# SPDX-License-Identifier: Apache-2.0
"""Empty lines between requests: they are no requests, and the server holds nothing for them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from engage.http1.connection import Connection
from support.http_client import RawClient, request
from support.http_echo import running
from support.waiting import eventually


@pytest.mark.parametrize("before", [b"", request(b"x")], ids=["at first", "after a request"])
async def test_half_of_an_empty_line_begins_no_request(before: bytes) -> None:
    """A drain does not wait for the rest, the connection is closed in silence."""
    async with running() as server, contextlib.AsyncExitStack() as stack:
        listener = server.listener
        for end in (None, "half close", Connection.expired, Connection.give_way):
            client = await stack.enter_async_context(await RawClient.connect(server.port))
            await client.send(before)
            assert not before or (await client.answer()).body == b"x"
            await client.send(b"\r")
            (connection,) = await eventually(lambda: listener.connections)
            await eventually(lambda: connection.held)  # noqa: B023 (called here)
            if isinstance(end, str):
                client.half_close()
            elif end is None:
                assert connection.idle
                await client.send(b"\n" + request(b"y"))
                assert (await client.answer()).body == b"y"
                connection.abort()
            else:
                end(connection)
            assert await client.closed(reset=True)
            await eventually(lambda: not listener.connections)


async def test_empty_lines_that_waited_are_not_held() -> None:
    """They are discarded after the answer."""
    async with running() as server, await RawClient.connect(server.port) as client:
        gate = server.settings["gate"] = asyncio.Event()
        await client.send(request(b"x"))
        (connection,) = await eventually(lambda: server.listener.connections)
        await eventually(lambda: connection.serving)
        before = connection.held
        await client.send(b"\r\n" * 1000)
        await eventually(lambda: connection.held == before + 2000)
        gate.set()
        assert (await client.answer()).body == b"x"
        await eventually(lambda: connection.idle)
        assert connection.held == server.listener.shared.capacity.held == 0
