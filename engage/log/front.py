# SPDX-License-Identifier: Apache-2.0
"""The log in front of the storage, for the processes that append to it.

The server is ready while the log is. The store is opened in the background, and it may be down:
then events are accepted, and requests that need the store are answered 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engage.api import EventLog, StorageError, StorageUnavailable
from engage.log.catch_up import CatchUp
from engage.log.ingest import LogIngest
from engage.log.lag import Lag
from engage.pipeline.ingest import REOPEN_PAUSE
from engage.store.facade import Storage
from engage.upkeep.readiness import Readiness

if TYPE_CHECKING:
    from engage.config import LogConfig
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.ingest import Ingest

__all__ = ["LogFront"]

_log = logging.getLogger(__name__)


class LogFront:
    """An opened log, its lag, and the state of the store behind it.

    :param config: ``[log]``.
    :param timeout: seconds that a call of the log or the store may take.
    :param clock: returns milliseconds since 1970 UTC.
    """

    def __init__(
        self,
        log: EventLog,
        config: LogConfig,
        *,
        timeout: float,
        clock: Callable[[], int],
        metrics: Metrics,
    ) -> None:
        self.log = log
        #: How far the store is behind the log.
        self.lag = Lag(log, config, timeout=timeout, clock=clock, metrics=metrics, refuses=True)
        #: Waits until the store has the events that are in the log now.
        self.catch_up = CatchUp(log, group=config.group, timeout=timeout)
        self._timeout = timeout
        self._store: Readiness | None = None
        self._opening: asyncio.Task[None] | None = None

    def make_ingest(self, store: Storage, **options: Any) -> LogIngest:
        """Make what appends to the log. The parameters are those of :class:`LogIngest`."""
        return LogIngest(store, log=self.log, overdue=lambda: self.lag.overdue, **options)

    def watch(self, store: Storage, ingest: Ingest) -> None:
        """Report the state of a store in :meth:`state`.

        :param ingest: opens the store again if it does not answer in time: its connection may be
            dead, and no write finds that out.
        """

        async def check() -> None:
            try:
                async with asyncio.timeout(self._timeout):
                    await store.check()
            except TimeoutError:
                ingest.reopen()
                raise StorageUnavailable("no answer in time") from None

        self._store = Readiness(check, timeout=2 * self._timeout)

    def state(self) -> Mapping[str, object]:
        """Return the answer of ``/readyz`` of a process that is ready. It does not wait."""
        available = self._store is not None and self._store.latest()
        return {
            "success": True,
            "storage": "available" if available else "unavailable",
            "overdue": self.lag.overdue,
        }

    async def look_at_store(self) -> None:
        """Find out whether the store answers, for a moment at most."""
        if self._store is not None:
            await self._store.ready()

    async def open(self, *, create: bool, patient: bool) -> None:
        """Open the log, and begin to read its backlog.

        :param patient: if the log cannot be opened, try again in the background.
        :raises StorageError: see :meth:`engage.api.EventLog.open`.
        """
        try:
            await self.log.open(create=create)
        except StorageError as error:
            if not patient:
                raise
            _log.error("the log cannot be opened; retrying: %s", error)
            self._opening = asyncio.create_task(self._open_until_done(create), name="open the log")
        await self.lag.start()

    async def close(self) -> None:
        """Close the log. Idempotent. No event may be submitted after it."""
        await self.catch_up.close()
        await self.lag.close()
        if self._store is not None:
            await self._store.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self.log.close()

    async def _open_until_done(self, create: bool) -> None:
        while True:
            await asyncio.sleep(REOPEN_PAUSE)
            try:
                await self.log.open(create=create)
            except StorageError:
                continue
            _log.warning("the log is open")
            return
