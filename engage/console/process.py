# SPDX-License-Identifier: Apache-2.0
"""The console's process: open the store, listen, serve, drain, close.

It has the parts of a worker, so that a replayed event takes the same steps as one from a client;
but it listens on its own port only, and does none of a worker's work in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Final

from engage.api import ConfigError, StorageUnavailable
from engage.app import build
from engage.console.application import ConsoleServer, make_application
from engage.console.display.snippets import listener_url
from engage.console.services import Console
from engage.console.sign_in.addresses import is_loopback
from engage.http1.sockets import listen

if TYPE_CHECKING:
    from collections.abc import Callable

    from engage.app import App
    from engage.config import Config
    from engage.registry import Registry

__all__ = ["ConsoleProcess"]

_log = logging.getLogger(__name__)

#: Added to the priority of the process: answering clients comes first.
NICENESS: Final = 15
#: Seconds for which the first page waits for the store to be opened.
OPEN_SECONDS: Final = 2.0
#: Seconds for which requests in flight may go on when the console stops …
DRAIN_SECONDS: Final = 5.0
#: … and for closing the store after that.
CLOSE_SECONDS: Final = 2.0


class ConsoleProcess:
    """Serves the console until :meth:`stop` is called.

    :param config: with ``[console]``.
    :param server_running: whether a server has opened the store before; then it is not created.
    :param link_hash: of the token of a one-time link that is valid from now on; see
        :mod:`engage.console.sign_in.links`.
    :param ready: called once when requests are answered, with the console's URL and whether the
        storage has answered.
    :raises ConfigError: if the config has no ``[console]``.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        *,
        server_running: bool = False,
        link_hash: str | None = None,
        ready: Callable[[str, bool], None] | None = None,
    ) -> None:
        if config.console is None:
            raise ConfigError(f"{config.path}: there is no [console] section, so no console")
        self._config = config
        self._settings = config.console
        self._registry = registry
        self._server_running = server_running
        self._link_hash = link_hash
        self._ready = ready
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begin to drain. A second call has no effect."""
        self._stop.set()

    async def run(self) -> int:
        """Serve, then drain.

        :return: the exit status.
        :raises EngageError: if the port cannot be opened, or an option is wrong.
        """
        settings = self._settings
        sock = listen(settings.host, settings.port, keys="console.host, console.port")
        if sys.platform != "win32":
            os.nice(NICENESS)
        with contextlib.closing(sock):
            app = build(
                self._config,
                self._registry,
                had_store=self._server_running,
                # Only a server that runs starts the console as one of its processes.
                supervised=self._server_running,
                direct=True,
            )
            async with contextlib.AsyncExitStack() as stack:
                # Close the store in any case: a failed open may have acquired resources too.
                stack.push_async_callback(self._close, app)
                console = Console(app, self._registry, sock.getsockname()[1])
                stack.push_async_callback(console.close)
                if self._server_running:
                    console.events_url = listener_url(self._config)
                opening = asyncio.create_task(self._open(console), name="open the store")
                stack.push_async_callback(_end, opening)
                # The pages must open without an answer of the storage, because they report it.
                await asyncio.wait([opening], timeout=OPEN_SECONDS)
                if opening.done():
                    opening.result()
                else:
                    opening.add_done_callback(_log_failure)
                server = ConsoleServer(make_application(console))
                server.add_socket(sock)
                self._report(console, opening.done() and console.reader.error is None)
                await self._stop.wait()
                await self._drain(server, console)
        return 0

    async def _open(self, console: Console) -> None:
        await console.app.open(patient=True)
        await console.open()
        if self._link_hash is not None:
            await console.links.add(self._link_hash)
        with contextlib.suppress(StorageUnavailable):
            await console.sessions.read_secret()

    def _report(self, console: Console, available: bool) -> None:
        addresses = console.addresses
        if not addresses.https and not is_loopback(self._settings.host):
            _log.warning(
                "the console is served without TLS beyond this machine: anyone who can read the"
                " traffic can take over a session (console.host is %s)",
                self._settings.host,
            )
        if self._ready is not None:
            self._ready(addresses.url, available)

    async def _close(self, app: App) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await app.close()
        except TimeoutError:
            _log.error("the storage did not close in time")

    async def _drain(self, server: ConsoleServer, console: Console) -> None:
        server.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await console.connections.finished()
        await server.close_all_connections()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("the store could not be opened", exc_info=task.exception())


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
