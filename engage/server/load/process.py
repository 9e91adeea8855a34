# SPDX-License-Identifier: Apache-2.0
"""One process that loads: open the log and the store, load, drain, close.

:mod:`engage.server.child` runs one in each child of :mod:`engage.server.load.supervisor`. On
Windows, :mod:`engage.server.load.command` runs the :class:`LoaderProcess` in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from engage.api import StorageError, StorageIncompatible, StorageMissing
from engage.log.lag import Lag
from engage.log.loading import PORTION_RECORDS, Loader, Range
from engage.monitoring import logs
from engage.monitoring.metrics import Metrics
from engage.monitoring.prometheus import SharedNumbers, registry_of
from engage.pipeline.clock import Clock
from engage.pipeline.ingest import Ingest
from engage.pipeline.observers import Observers
from engage.reading.time_limit import within
from engage.server.load.endpoints import log_section, serve_endpoints
from engage.server.worker import CLOSE_SECONDS, handle_signals, sample, start_task
from engage.upkeep.dropped_changes import report_dropped_changes
from engage.upkeep.readiness import Readiness

if TYPE_CHECKING:
    from engage.config import Config
    from engage.registry import Registry

__all__ = ["Load", "LoaderProcess"]

_log = logging.getLogger(__name__)

#: Seconds between two reports of the state.
REPORT_SECONDS: Final = 1.0


class Load:
    """A log, a store, and what loads the one into the other.

    :param had_store: see :class:`engage.api.StorageContext`, also for ``supervised``.
    :raises ConfigError: if the config has no log, or an option is wrong.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        metrics: Metrics,
        *,
        had_store: bool = False,
        supervised: bool = False,
    ) -> None:
        self._settings = log_section(config)
        self._config = config
        self._timeout = config.storage.write_timeout
        self._metrics = metrics
        self._patient = had_store
        log = registry.make_log(config)
        assert log is not None
        self.log = log
        self.store = registry.make_storage(config, had_store=had_store, supervised=supervised)
        #: The time of this process.
        self.clock = Clock()
        self._observers = Observers(dict(registry.make_observers(config)), metrics)
        #: Whether the store can be written to now.
        self.readiness = Readiness(self.store.check, timeout=self._timeout)
        self._ingest = Ingest(
            self.store,
            limits=config.limits,
            # A storage ends a slow call itself. To open it again would only add to its load.
            write_timeout=2 * self._timeout,
            metrics=metrics,
            stored=self._observers.publish if self._observers else None,
            alive=self.readiness.alive,
            failed=self.readiness.write_failed,
            # The loader divides what fails: the letters of its events must not be dropped.
            refuses=False,
            group_weight=PORTION_RECORDS,
        )

    def loader(self, range_: Range | None = None) -> Loader:
        """Make a loader.

        :param range_: the part of the log to read again.
        """
        return Loader(
            self.log,
            self.store,
            self._ingest,
            config=self._settings,
            limits=self._config.limits,
            timeout=self._timeout,
            clock=self.clock,
            metrics=self._metrics,
            range_=range_,
            erasures_key=self._config.erasures.key,
        )

    async def open(self) -> None:
        """Open both. A store that is down is opened in the background.

        :raises StorageError: if the log cannot be opened, or if the store can never be used.
        """
        await self._open_log()
        try:
            async with within(2 * self._timeout):
                await self.store.open(create=True)
        except (StorageIncompatible, StorageMissing):
            if not self._patient:
                raise
            self._ingest.reopen()
        except StorageError:
            self._ingest.reopen()

    async def _open_log(self) -> None:
        logged = False
        while True:
            try:
                await self.log.open(create=True)
            except StorageError as error:
                if not self._patient:
                    raise
                if not logged:
                    _log.error("the log cannot be opened; retrying: %s", error)
                logged = True
                await asyncio.sleep(1)
            else:
                return

    async def close(self) -> None:
        """Close everything. Idempotent."""
        await self.readiness.close()
        await self._ingest.close()
        await self._observers.close()
        await self.log.close()
        await self.store.close()


class LoaderProcess:
    """Loads until :meth:`stop` is called.

    :param number: 0, 1 … among the children of one parent. ``None``: this process is the whole
        loader, as on Windows, so it also handles the signals and serves the endpoints.
    :param server_running: whether loaders were running before this one: then it waits for a store
        that it cannot open.
    :param supervised: see :attr:`engage.api.StorageContext.supervised`.
    :param ready: called once when it begins to load.
    :param report: called each second with the state.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        *,
        number: int | None = None,
        server_running: bool = False,
        supervised: bool = False,
        ready: Callable[[], None] = lambda: None,
        report: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self._settings = log_section(config)
        self._config = config
        self._registry = registry
        self._number = number
        self._server_running = server_running
        self._supervised = supervised
        #: What it counts.
        self.metrics = Metrics()
        self._ready = ready
        self._report = report
        self._stop = asyncio.Event()
        self._state: Mapping[str, Any] = {}

    def stop(self) -> None:
        """Begin to drain. A second call has no effect."""
        self._stop.set()

    async def run(self) -> int:
        """Load, then drain.

        :return: the exit status.
        :raises EngageError: if the process cannot start.
        """
        if self._number is None:
            handle_signals(self.stop)
        shown = self._settings.load_port is not None
        metrics = self.metrics
        load = Load(
            self._config,
            self._registry,
            metrics,
            had_store=self._server_running,
            supervised=self._supervised,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(load.close)
            await load.open()
            background = await stack.enter_async_context(contextlib.AsyncExitStack())
            if not self._number:
                lag = Lag(
                    load.log,
                    self._settings,
                    timeout=self._config.storage.write_timeout,
                    clock=load.clock,
                    metrics=metrics,
                )
                background.push_async_callback(lag.close)
                await lag.start()
            dropped = report_dropped_changes(load.store, metrics)
            start_task(background, "dropped changes", dropped)
            if shown:
                start_task(background, "sampling", sample(load.store, metrics))
            if shown and self._number is None:
                registry = registry_of(metrics)
                stack.callback(serve_endpoints(self._settings, registry, lambda: [self._state]))
            elif shown:
                shared = SharedNumbers(metrics)
                stack.callback(shared.flush)
                start_task(background, "metrics", shared.run())
            loader = load.loader()
            start_task(background, "state", self._report_state(loader, load))
            loading = asyncio.create_task(loader.run(), name="loader")
            self._ready()
            stopped = asyncio.create_task(self._stop.wait(), name="stop")
            await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            return await self._drain(loader, loading, load, background)

    async def _report_state(self, loader: Loader, load: Load) -> None:
        while True:
            stored = await load.readiness.ready()
            logged = loader.joined and not loader.log_calls.failing
            draining = self._stop.is_set()
            self._state = {
                "ready": stored and logged and not loader.paused and not draining,
                "storage": "available" if stored else "unavailable",
                "log": "available" if logged else "unavailable",
                "paused": sorted(loader.paused),
            }
            self._report(self._state)
            await asyncio.sleep(REPORT_SECONDS)

    async def _drain(
        self,
        loader: Loader,
        loading: asyncio.Task[None],
        load: Load,
        background: contextlib.AsyncExitStack,
    ) -> int:
        deadline = time.monotonic() + self._config.server.shutdown_grace
        if not self._stop.is_set():
            error = loading.exception() if not loading.cancelled() else None
            _log.error("the loader has failed", exc_info=error)
            return 1
        _log.info("draining")
        loader.stop()
        left = max(deadline - CLOSE_SECONDS - time.monotonic(), 0.1)
        await asyncio.wait([loading], timeout=left)
        if not loading.done():
            # Another loader loads again the records that were not committed.
            _log.warning("a write was abandoned because server.shutdown_grace is over")
            loading.cancel()
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), CLOSE_SECONDS)):
                await asyncio.wait([loading])
                await background.aclose()
                await load.close()
        except TimeoutError:
            _log.error("the storage or the log did not close in time")
            logs.flush()
            os._exit(1)
        _log.info("stopped")
        return 0
