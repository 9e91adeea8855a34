# SPDX-License-Identifier: Apache-2.0
"""The console of a server process: its address, signing in, requests as a browser sends them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from engage.api import EventStore, RecordStore
from engage.config import load
from engage.console.links import SECONDS, hash_of, link_record, new_token
from support.exports import registry
from support.server_process import Server
from support.waiting import DEADLINE, wait_for

Result = TypeVar("Result")

#: For ``config_extra`` of :func:`support.server_process.start_server`.
CONSOLE = "[console]\nport = 0\n"


def console_url(server: Server) -> str:
    """Return the URL of a server's console, once it answers; the newest if it was restarted."""

    def found() -> Any:
        urls = [line["url"] for line in server.lines() if line["message"] == "console"]
        return urls[-1] if urls else None

    url: str = wait_for(found, what="the console to listen")
    return url


def on_store(config: Path, work: Callable[[EventStore], Awaitable[Result]]) -> Result:
    """Open the store of a config file, in this process, and do something with it."""

    async def run() -> Result:
        store = registry().make_storage(load(config))
        await store.open(create=False)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def make_link(config: Path, *, age: float = 0.0) -> str:
    """Return the token of a new one-time link, as ``engage console-link`` makes it.

    :param age: seconds ago when it was made.
    """
    token = new_token()
    made = round((time.time() - age) * 1000)

    async def put(store: EventStore) -> None:
        assert isinstance(store, RecordStore)
        await store.put_record(link_record(hash_of(token), made), expected_version=0)

    on_store(config, put)
    assert SECONDS == 600
    return token


def browser(url: str, **options: Any) -> httpx.Client:
    """Return a client that sends what a browser on a page of the console sends."""
    headers = {"Origin": url, "Sec-Fetch-Site": "same-origin", **options.pop("headers", {})}
    return httpx.Client(base_url=f"{url}/", headers=headers, timeout=DEADLINE, **options)


@contextlib.contextmanager
def signed_in(server: Server, url: str | None = None, **options: Any) -> Iterator[httpx.Client]:
    """Yield a client that is signed in to the console of a server."""
    with browser(url or console_url(server), **options) as client:
        answer = client.post("link", data={"t": make_link(server.config)})
        assert answer.status_code == 303, answer.text
        yield client


def free_port() -> int:
    """Return a port that is free now, for a console that keeps its port when it is restarted."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
