# SPDX-License-Identifier: Apache-2.0
"""What the pages of the console use."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engage.api import RecordStore
from engage.console.badge import Badge
from engage.console.housekeeping import expire_periodically
from engage.console.live import Live

if TYPE_CHECKING:
    from engage.api import EventStore
    from engage.app import App
    from engage.config import Config, ConsoleConfig
    from engage.console.addresses import Addresses, Network
    from engage.console.links import Links
    from engage.console.passwords import Passwords, Throttle
    from engage.console.reader import Reader
    from engage.console.sessions import Sessions
    from engage.pipeline.keys import KeyTable
    from engage.registry import Registry
    from engage.storage.log_progress import LogProgress

__all__ = ["Console", "Requests"]


class Requests:
    """Counts the requests in flight, so that the console can finish them before it stops."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self) -> None:
        """Count a request."""
        self._count += 1
        self._none.clear()

    def end(self) -> None:
        """Count a request as answered."""
        self._count -= 1
        if not self._count:
            self._none.set()

    async def finished(self) -> None:
        """Wait until no request is in flight."""
        await self._none.wait()


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
    #: (workspace id, range) → the last :class:`engage.console.history.Overview`, shown while the
    #: store does not answer.
    overviews: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    #: Work that takes longer than a request, such as a replay.
    jobs: Any = None
    #: The one-time links.
    links: Links
    #: Checks passwords; ``None``: the console has no password.
    passwords: Passwords | None
    #: Counts wrong passwords.
    throttle: Throttle
    #: The requests that are being answered.
    requests: Requests = dataclasses.field(default_factory=Requests)
    #: How far the loaders are; ``None``: there is no log.
    loading: LogProgress | None = None
    #: Deletes old records.
    housekeeping: asyncio.Task[None] | None = None
    #: The time in seconds since 1970.
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        """Make the parts that need no settings."""
        self.live = Live(self.app.store, self.reader)
        self.badge = Badge(self.app.store, self.reader, self.clock)

    async def open(self) -> None:
        """Begin the work in the background: the jobs that an earlier console left unfinished."""
        if not self.settings.read_only:
            self.jobs.open()
            if self.records is not None:
                work = expire_periodically(self.records, self.reader, self.clock)
                self.housekeeping = asyncio.create_task(work, name="housekeeping")

    async def close(self) -> None:
        """End the work in the background."""
        if self.housekeeping is not None:
            self.housekeeping.cancel()
            await asyncio.wait([self.housekeeping])
        if self.loading is not None:
            await self.loading.close()
        await self.live.close()
        await self.jobs.close()

    @property
    def keys(self) -> KeyTable:
        """The write keys, as this process knows them; they follow the store within seconds."""
        return self.app.keys

    @property
    def store(self) -> EventStore:
        """The storage. Ask ``isinstance(store, CountStore)`` … for the optional interfaces."""
        return self.app.store

    @property
    def records(self) -> RecordStore | None:
        """The storage, if it keeps records."""
        store = self.app.store
        return store if isinstance(store, RecordStore) else None
