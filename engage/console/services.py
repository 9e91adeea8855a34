# SPDX-License-Identifier: Apache-2.0
"""The services that the pages of the console use."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from engage.console.connections import Connections
from engage.console.data.badge import Badge
from engage.console.data.history import Overview, overview
from engage.console.data.names import Names
from engage.console.display.snippets import server_url
from engage.console.sign_in.addresses import is_loopback
from engage.console.sign_in.guesses import Guesses
from engage.console.sign_in.housekeeping import expire_periodically
from engage.http1.addresses import is_within
from engage.upkeep.live import Live

if TYPE_CHECKING:
    from engage.app import App
    from engage.config import Config, ConsoleConfig
    from engage.console.data.erasing import Erasing
    from engage.console.data.reader import Reader
    from engage.console.sign_in.addresses import Addresses
    from engage.console.sign_in.links import Links
    from engage.console.sign_in.passwords import Passwords, Throttle
    from engage.console.sign_in.sessions import Sessions
    from engage.http1.addresses import Network
    from engage.keys.table import KeyTable
    from engage.log.lag import Lag
    from engage.pipeline.bulk_replay import BulkReplay
    from engage.registry import Registry
    from engage.store.facade import Storage

__all__ = ["Console"]

#: Seconds that a replay has for its last write when the console stops. After that the store is
#: closed, and letters that were not removed can be replayed again.
CLOSE_SECONDS: Final = 5.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Console:
    """The parts of a running console. One object for the process."""

    #: The settings of the server, of which the console shows some.
    config: Config
    #: ``[console]``.
    settings: ConsoleConfig
    #: Where the console is.
    addresses: Addresses
    #: The composed server, for its pipeline and its deliveries. It does not listen.
    app: App
    #: The installed plugins.
    registry: Registry
    #: ``server.trusted_proxies``.
    trusted_proxies: Sequence[Network] = ()
    #: Calls the store: a few calls at a time, each within a time limit.
    reader: Reader
    #: Who is signed in.
    sessions: Sessions
    #: The newest events, which all tabs share.
    live: Live = dataclasses.field(init=False)
    #: How many events were rejected lately.
    badge: Badge = dataclasses.field(init=False)
    #: The most frequent names of the newest events.
    names: Names = dataclasses.field(init=False)
    #: (workspace id, range) → the last numbers, shown while the store does not answer.
    overviews: dict[tuple[str, str], Overview] = dataclasses.field(default_factory=dict)
    #: The last replay of many dead letters that this process began.
    replay: BulkReplay | None = None
    #: The last erasure of a user that this process began.
    erasing: Erasing | None = None
    #: The one-time links.
    links: Links
    #: Checks passwords; ``None``: the console has no password.
    passwords: Passwords | None
    #: Counts wrong passwords.
    throttle: Throttle
    #: Counts them for the audit.
    guesses: Guesses = dataclasses.field(init=False)
    #: Where test events are sent; see :func:`engage.console.display.snippets.server_url`.
    events_url: str = dataclasses.field(init=False)
    #: The open connections, and the requests that are being answered.
    connections: Connections = dataclasses.field(init=False)
    #: How far the loaders are; ``None``: there is no log.
    lag: Lag | None = None
    #: Deletes old records.
    housekeeping: asyncio.Task[None] | None = None
    #: The time in seconds since 1970.
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        """Make the parts that need no settings."""
        self.connections = Connections(
            lambda address: is_loopback(address) or is_within(address, self.trusted_proxies)
        )
        self.events_url = server_url(self.config)
        self.guesses = Guesses(self.clock)
        self.live = Live(self.app.store, self.reader)
        self.badge = Badge(self.app.store, self.reader, self.clock)
        self.names = Names(self.app.store, self.reader, self.clock)

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

    async def overview(
        self, workspace_id: str, span: str, bars: int | None = None
    ) -> Overview | None:
        """Return the numbers of a workspace; ``None`` if the storage does not answer.

        :param span: a key of :data:`engage.console.data.history.RANGES`.
        :param bars: see :func:`engage.console.data.history.overview`.
        :raises StorageUnavailable: if the storage does not answer.
        """
        now = self.now()
        return await overview(self.store, self.reader, workspace_id, span, now=now, bars=bars)

    def now(self) -> int:
        """Return the time in milliseconds since 1970."""
        return round(self.clock() * 1000)

    @property
    def keys(self) -> KeyTable:
        """The write keys, as this process knows them; they follow the store within seconds."""
        return self.app.keys

    @property
    def store(self) -> Storage:
        """The storage."""
        return self.app.store
