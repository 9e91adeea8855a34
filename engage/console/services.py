# SPDX-License-Identifier: Apache-2.0
"""The services that the pages of the console use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engage.console.connections import Connections
from engage.console.data.badge import Badge
from engage.console.data.history import Overview, overview
from engage.console.data.names import Names
from engage.console.data.reader import Reader
from engage.console.display.snippets import server_url
from engage.console.sign_in.addresses import Addresses, is_loopback
from engage.console.sign_in.guesses import Guesses
from engage.console.sign_in.housekeeping import expire_periodically
from engage.console.sign_in.links import Links
from engage.console.sign_in.passwords import Passwords, Throttle
from engage.console.sign_in.sessions import Sessions
from engage.http1.addresses import is_within, networks
from engage.reading.live import Live

if TYPE_CHECKING:
    from engage.app import App
    from engage.console.data.erasing import Erasing
    from engage.log.lag import Lag
    from engage.pipeline.bulk_replay import BulkReplay
    from engage.registry import Registry

__all__ = ["Console"]

#: Seconds that a replay has for its last write when the console stops. After that the store is
#: closed, and letters that were not removed can be replayed again.
CLOSE_SECONDS: Final = 5.0


class Console:
    """The parts of a running console. One object for the process.

    :param app: the composed server, for its pipeline and its deliveries; it does not listen. Its
        config has a ``[console]``.
    :param registry: the installed plugins.
    :param port: the port on which the console listens.
    :param clock: the time in seconds since 1970.
    """

    def __init__(
        self, app: App, registry: Registry, port: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        config, settings, store = app.config, app.config.console, app.store
        assert settings is not None
        self.app, self.registry, self.clock = app, registry, clock
        #: The settings of the server, of which the console shows some, and ``[console]``.
        self.config, self.settings = config, settings
        self.store = store
        #: The write keys, as this process knows them; they follow the store within seconds.
        self.keys = app.keys
        #: Calls the store: a few calls at a time, each within a time limit.
        self.reader = reader = Reader(config.storage.write_timeout, clock=clock)
        #: Where the console is.
        self.addresses = Addresses(settings, port)
        #: ``server.trusted_proxies``.
        self.trusted_proxies = networks(config.server.trusted_proxies)
        #: The open connections, and the requests that are being answered.
        self.connections = Connections(
            lambda address: is_loopback(address) or is_within(address, self.trusted_proxies)
        )
        #: The one-time links.
        self.links = Links(store, reader, clock=clock)
        #: Checks passwords; ``None``: the console has no password.
        self.passwords = Passwords(settings.password) if settings.password else None
        #: Counts wrong passwords, and counts them for the audit.
        self.throttle, self.guesses = Throttle(), Guesses(clock)
        #: Who is signed in.
        self.sessions = Sessions(store, reader, password=settings.password, clock=clock)
        #: The newest events, which all tabs share.
        self.live = Live(store, reader)
        #: How many events were rejected lately.
        self.badge = Badge(store, reader, clock)
        #: The most frequent names of the newest events.
        self.names = Names(store, reader, clock)
        #: (workspace id, range) → the last numbers, shown while the store does not answer.
        self.overviews: dict[tuple[str, str], Overview] = {}
        #: The last replay of many dead letters, and the last erasure, that this process began.
        self.replay: BulkReplay | None = None
        self.erasing: Erasing | None = None
        #: Where test events are sent; see :func:`engage.console.display.snippets.server_url`.
        self.events_url = server_url(config)
        #: How far the loaders are; ``None``: there is no log.
        self.lag = self._lag()
        #: Deletes old records.
        self.housekeeping: asyncio.Task[None] | None = None

    def _lag(self) -> Lag | None:
        config, log = self.config, self.registry.make_log(self.config)
        if log is None or config.log is None:
            return None
        from engage.log.lag import Lag

        timeout = config.storage.write_timeout
        return Lag(log, config.log, clock=self.now, timeout=timeout, opens=True)

    async def open(self) -> None:
        """Begin the work in the background."""
        if self.lag is not None:
            await self.lag.start()
        if not self.settings.read_only:
            work = expire_periodically(self.store, self.reader, self.clock)
            self.housekeeping = asyncio.create_task(work, name="housekeeping")

    async def close(self) -> None:
        """End the work in the background; a replay stops after the letters that it is writing."""
        if self.housekeeping is not None:
            self.housekeeping.cancel()
            await asyncio.wait([self.housekeeping])
        if self.lag is not None:
            await self.lag.close()
        await self.live.close()
        if self.erasing is not None:
            await self.erasing.close()
        if self.replay is not None:
            self.replay.cancel()
            await self.replay.wait(CLOSE_SECONDS)

    async def overview(self, workspace_id: str, span: str, bars: int | None = None) -> Overview:
        """Return the numbers of a workspace.

        :param span: a key of :data:`engage.console.data.history.RANGES`.
        :param bars: see :func:`engage.console.data.history.overview`.
        :raises StorageUnavailable: if the storage does not answer.
        """
        now = self.now()
        return await overview(self.store, self.reader, workspace_id, span, now=now, bars=bars)

    def now(self) -> int:
        """Return the time in milliseconds since 1970."""
        return round(self.clock() * 1000)
