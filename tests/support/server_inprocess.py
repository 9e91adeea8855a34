# SPDX-License-Identifier: Apache-2.0
"""The whole server in the event loop of the test, on a real socket, with a real SQLite store."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from engage.api import (
    DeadLetter,
    Event,
    EventFilter,
    EventLog,
    StorageUnavailable,
)
from engage.app import App, build
from engage.config import Config, load
from engage.keys import table as keys
from engage.monitoring.metrics import Metrics
from engage.store.facade import Storage
from engage.testing.harness import eventually as working
from support.exports import registry
from support.http_client import Answer, RawClient, listening
from support.memory_log import MemoryBroker, MemoryLog
from support.server_process import KEY, SQLITE, config_text
from support.waiting import DEADLINE, eventually


def basic(text: str) -> str:
    """Return the header for these credentials."""
    return "Basic " + base64.b64encode(text.encode()).decode()


#: The usual header.
BASIC = basic(f"{KEY}:")


class Serving:
    """A running server, which listens on :attr:`port`."""

    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self.port = port

    async def connect(self) -> RawClient:
        """Open a connection."""
        return await RawClient.connect(self.port)

    async def send(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        key: str | None = BASIC,
        client: RawClient | None = None,
    ) -> Answer:
        """Send a request and read its answer.

        :param body: bytes are sent unchanged, ``None`` is no body, anything else is sent as JSON.
        :param key: the header ``Authorization``, if any.
        :param client: a connection to use instead of a new one.
        """
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
        content = b""
        if body is not None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            lines.append(f"Content-Length: {len(content)}")
        if key is not None:
            lines.append(f"Authorization: {key}")
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        data = "\r\n".join([*lines, "", ""]).encode("latin-1") + content
        if client is not None:
            await client.send(data)
            return await client.answer(method=method)
        async with await self.connect() as client:
            await client.send(data)
            return await client.answer(method=method)

    async def track(self, client: RawClient | None = None, **fields: Any) -> Answer:
        """Send a small valid event."""
        return await self.send("/v1/track", {"userId": "u", "event": "E", **fields}, client=client)

    async def events(self) -> list[Event]:
        """Return the stored events in order of arrival."""
        page = await self.app.store.scan(EventFilter(), after=None, limit=10_000)
        return list(page.items)

    async def stored(self, message_id: str, workspace: str = "acme") -> dict[str, Any]:
        """Return a stored event."""
        event = await self.app.store.find(workspace, "api", message_id)
        assert event is not None, f"{message_id!r} is not stored"
        return event.document()

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters."""
        page = await self.app.store.scan_dead_letters(None, after=None, limit=10_000)
        return list(page.items)


class Meddling:
    """The installed plugins, with a storage whose methods a test can make fail or wait.

    :param broker: what the log of the config is connected to, if it has one.
    """

    def __init__(
        self, meddle: Callable[[Storage], None], broker: MemoryBroker | None = None
    ) -> None:
        self._meddle = meddle
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(registry(), name)

    def make_storage(
        self, config: Config, *, had_store: bool = False, supervised: bool = False
    ) -> Storage:
        """See :meth:`engage.registry.Registry.make_storage`."""
        store = registry().make_storage(config, had_store=had_store, supervised=supervised)
        self._meddle(store)
        return store

    def make_log(self, config: Config) -> EventLog | None:
        """See :meth:`engage.registry.Registry.make_log`."""
        if config.log is None:
            return None
        return MemoryLog(self._broker, write_timeout=config.storage.write_timeout)


class Valve:
    """Makes methods of a storage fail or wait; it is open at first."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods
        #: Raised by every call while it is set.
        self.error: Exception | None = None
        #: Every call waits for it.
        self.gate = asyncio.Event()
        self.gate.set()

    def __call__(self, store: Storage) -> None:
        """Wrap the methods of a storage."""
        for name in self.methods:
            setattr(store, name, self._wrap(getattr(store, name)))

    def _wrap(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return await method(*args, **kwargs)

        return wrapped


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    server: str = "",
    workspace: str = "",
    config_extra: str = "",
    metrics: Metrics | None = None,
    meddle: Callable[[Storage], None] | None = None,
    works: bool = True,
    broker: MemoryBroker | None = None,
    log: str = "",
    storage: str = "",
    refresh_gap: float = 0.02,
) -> AsyncIterator[Serving]:
    """Serve until the block ends. The texts are those of ``start_server``.

    :param meddle: called with the storage before it is used.
    :param works: whether the storage works at first; then it is waited for.
    :param broker: put a log in front of the storage that is connected to this broker.
    :param log: further lines of ``[log]``, and ``storage`` of ``[storage]``.
    :param refresh_gap: seconds between two reads of the write keys in the store that unknown keys
        cause; few, so that a test with many wrong keys does not take long.
    """
    path = folder / "engage.toml"
    if broker is not None:
        config_extra = f'{config_extra}\n[log]\nbackend = "memory"\n{log}\n'
    tables = SQLITE.replace("[storage]", f"[storage]\n{storage}")
    path.write_text(
        config_text(server=server, workspace=workspace, config_extra=config_extra, storage=tables)
    )
    plugins: Any = registry()
    if meddle is not None or broker is not None:
        plugins = Meddling(meddle or (lambda store: None), broker)
    app = build(load(path), plugins, metrics)
    with mock.patch.object(keys, "GAP_SECONDS", refresh_gap):
        await app.open()
        try:
            if works:
                # Every request would get a 503 if a busy disk delayed the first read of the keys.
                await working(app.store.check, StorageUnavailable, seconds=DEADLINE)
                await eventually(lambda: app.keys.loaded, deadline=DEADLINE)
            sock = listening()
            await app.serve(sock)
            yield Serving(app, sock.getsockname()[1])
        finally:
            await app.close()
