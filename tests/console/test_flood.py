# SPDX-License-Identifier: Apache-2.0
"""Strangers who open many connections do not keep out somebody who has a link that works."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from engage.console.connections import MAX_CONNECTIONS
from engage.console.sign_in.links import new_token
from support.console import CONSOLE, console_url, make_link
from support.server_process import start_server
from support.waiting import DEADLINE, eventually

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the console is a child process")

#: The request of a stranger → how many send it; ``None``: they send only the beginning of one. They
#: alone are more than the console has room for.
STRANGERS: dict[str | None, int] = {None: 300, "/link?t={}": 50, "/login": 50}
#: Seconds until a page opens on a slow machine.
SECONDS = 20.0


async def stranger(port: int, host: str, path: str | None, begun: list[str | None]) -> None:
    """Open one connection after the other, and send a request; ``None``: only its beginning."""
    while True:
        token = new_token()
        request = f"GET {(path or '/login').format(token)} HTTP/1.1\r\nHost: {host}\r\n"
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                writer.write(f"{request}\r\n".encode() if path else request.encode())
                begun.append(path)
                await reader.read()


async def test_a_link_opens_at_the_first_try_during_a_flood(tmp_path: Path) -> None:
    with start_server(tmp_path, config_extra=CONSOLE) as server:
        url = console_url(server)
        found = urlsplit(url)
        assert found.port is not None
        begun: list[str | None] = []
        flood = [
            asyncio.create_task(stranger(found.port, found.netloc, kind, begun))
            for kind, count in STRANGERS.items()
            for _ in range(count)
        ]
        try:
            await eventually(lambda: begun.count(None) > MAX_CONNECTIONS)
            token = await asyncio.to_thread(make_link, server.config)
            headers = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=SECONDS) as client:
                async with asyncio.timeout(SECONDS):
                    answer = await client.get("/link", params={"t": token})
                assert answer.status_code == 200
                assert token in answer.text
                async with asyncio.timeout(SECONDS):
                    assert (await client.post("/link", data={"t": token})).status_code == 303
                async with asyncio.timeout(SECONDS):
                    assert (await client.get("/audit")).status_code == 200
        finally:
            for one in flood:
                one.cancel()
            await asyncio.wait(flood, timeout=DEADLINE)
