# SPDX-License-Identifier: Apache-2.0
"""The console of a server process: its address, signing in, requests as a browser sends them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from engage.app import build
from engage.config import Config, load
from engage.console.application import ConsoleServer, make_application
from engage.console.services import Console
from engage.console.sign_in.links import SECONDS, hash_of, link_record, new_token
from engage.store.facade import Storage
from engage.testing.memory_store import Stored
from support.exports import on_store, registry
from support.http_client import listening
from support.memory_store import MemoryStore
from support.server_process import Server, config_text
from support.waiting import DEADLINE, wait_for

#: For ``config_extra`` of :func:`support.server_process.start_server`.
CONSOLE = "[console]\nport = 0\n"


def console_url(server: Server) -> str:
    """Return the URL of a server's console, once it answers; the newest if it was restarted."""

    def found() -> Any:
        urls = [line["url"] for line in server.lines() if line["message"] == "console"]
        return urls[-1] if urls else None

    url: str = wait_for(found, what="the console to listen")
    return url


def make_link(config: Path, *, age: float = 0.0) -> str:
    """Return the token of a new one-time link, as ``engage console-link`` makes it.

    :param age: seconds ago when it was made.
    """
    token = new_token()
    made = round((time.time() - age) * 1000)

    async def put(store: Storage) -> None:
        await store.put_record(link_record(hash_of(token), made), expected_version=0)

    on_store(config, put)
    assert SECONDS == 600
    return token


def browser(url: str, **options: Any) -> httpx.Client:
    """Return a client that sends what a browser on a page of the console sends."""
    headers = {"Origin": url, "Sec-Fetch-Site": "same-origin", **options.pop("headers", {})}
    return httpx.Client(base_url=f"{url}/", headers=headers, timeout=DEADLINE, **options)


@contextlib.contextmanager
def signed_in(
    server: Server, url: str | None = None, *, age: float = 0.0, **options: Any
) -> Iterator[httpx.Client]:
    """Yield a client that is signed in to the console of a server.

    :param age: see :func:`make_link`.
    """
    with browser(url or console_url(server), **options) as client:
        answer = client.post("link", data={"t": make_link(server.config, age=age)})
        assert answer.status_code == 303, answer.text
        yield client


def free_port() -> int:
    """Return a port that is free now, for a console that keeps its port when it is restarted."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


class BrokenStore(MemoryStore):
    """A storage that does not answer while ``error`` is set."""

    error: Exception | None = None

    def contents(self) -> Stored:
        if self.error is not None:
            raise self.error
        return super().contents()


class Clock:
    """The time in seconds since 1970, which a test sets."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class _Registry:
    """The installed plugins, with a storage of the test."""

    def __init__(self, store: Storage) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(registry(), name)

    def make_storage(
        self, config: Config, *, had_store: bool = False, supervised: bool = False
    ) -> Storage:
        """Return the storage of the test."""
        return self._store


@contextlib.asynccontextmanager
async def console_here(
    folder: Path,
    store: Storage,
    *,
    config_extra: str = CONSOLE,
    server: str = "",
    clock: Clock | None = None,
) -> AsyncIterator[tuple[Console, httpx.AsyncClient]]:
    """Serve a console in the event loop of the test, on a storage of the test.

    :return: the console, and a client that sends what a browser sends.
    """
    path = folder / "engage.toml"
    path.write_text(config_text(server=server, config_extra=config_extra))
    plugins: Any = _Registry(store)
    app = build(load(path), plugins)
    await app.open(patient=True)
    sock = listening()
    port = sock.getsockname()[1]
    console = Console(app, plugins, port, clock=clock or time.time)
    await console.open()
    server_ = ConsoleServer(make_application(console))
    server_.add_socket(sock)
    url = f"http://127.0.0.1:{port}"
    headers = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
    try:
        async with httpx.AsyncClient(base_url=f"{url}/", headers=headers, timeout=120) as client:
            yield console, client
    finally:
        server_.stop()
        await server_.close_all_connections()
        await console.close()
        await app.close()


async def sign_in_here(console: Console, client: httpx.AsyncClient) -> None:
    """Sign a client in."""
    token = new_token()
    await console.links.add(hash_of(token))
    answer = await client.post("link", data={"t": token})
    assert answer.status_code == 303, answer.text
