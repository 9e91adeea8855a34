# SPDX-License-Identifier: Apache-2.0
"""One process that answers requests: open the store, serve, drain, close.

:mod:`engage.server.child` runs one in each child of :mod:`engage.server.supervisor`. On Windows,
:mod:`engage.server.serve` runs the :class:`Worker` in the process of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from engage.api import (
    BackupStore,
    DeadLetterBudget,
    StorageError,
)
from engage.copy.backups import last_backup
from engage.http1.sockets import url_of
from engage.monitoring import logs
from engage.monitoring.history import History, expire_history, record_periodically
from engage.monitoring.metrics import Metrics
from engage.monitoring.prometheus import SharedNumbers, registry_of
from engage.server.metrics_endpoint import serve_metrics
from engage.store.facade import Storage
from engage.upkeep.budgets import fullness
from engage.upkeep.dropped_changes import report_dropped_changes
from engage.upkeep.retention import expire_periodically

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from engage.app import App
    from engage.config import Config
    from engage.http1.shares import Shares
    from engage.registry import Registry

__all__ = ["Worker", "handle_signals", "new_event_loop", "sample", "start_task"]

_log = logging.getLogger(__name__)

#: Seconds between two readings of the storage's gauges.
SAMPLE_SECONDS = 5.0
#: Seconds between two readings of the budgets of dead letters and of the last backup.
BUDGET_SECONDS = 60.0
#: Seconds of ``server.shutdown_grace`` that are reserved for closing the store.
CLOSE_SECONDS = 2.0
#: Number of new containers after which the garbage collector runs. With Python's default of 700 it
#: would run several times within one batch of 100 events, whose objects it cannot free yet and
#: which are freed without it.
GC_THRESHOLD = 10_000


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's where it exists, asyncio's on Windows."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


class Worker:
    """Serves on a listening socket until :meth:`stop` is called.

    :param sock: a listening socket that does not block; the worker closes it when it stops
        accepting connections.
    :param number: 0, 1 … among the children of one parent. ``None``: this process is the whole
        server, as on Windows, so it also handles the signals and serves the metrics.
    :param server_running: whether the server was running before this worker. Then there has been a
        store, and the worker starts even if the store cannot be opened now, just as the other
        workers go on.
    :param supervised: see :attr:`engage.api.StorageContext.supervised`.
    :param serves_metrics: whether it serves the metrics although it has a parent.
    :param shares: how many connections the other workers have; ``None`` if there are no others.
    :param buckets: see :func:`engage.keys.limits.open_buckets`.
    :param ready: called once when requests are answered.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        sock: socket.socket,
        *,
        number: int | None = None,
        server_running: bool = False,
        supervised: bool = False,
        serves_metrics: bool = False,
        shares: Shares | None = None,
        buckets: int | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._registry = registry
        self._sock = sock
        self._number = number
        self._server_running = server_running
        self._supervised = supervised
        self._serves_metrics = serves_metrics or number is None
        self._shares = shares
        self._buckets = buckets
        self._ready = ready
        self._stop = asyncio.Event()
        #: What it counts.
        self.metrics = Metrics()
        #: Writes what the metrics have counted to the files that the processes share.
        self._flush: Callable[[], None] = lambda: None

    def stop(self) -> None:
        """Begin to drain. A second call has no effect."""
        self._stop.set()

    async def run(self) -> int:
        """Serve, then drain.

        :return: the exit status.
        :raises EngageError: if the worker cannot start.
        """
        # Imported here, so that a supervisor does not load the application.
        from engage.app import build

        config = self._config
        if self._number is None:
            handle_signals(self.stop, lambda: self._flush())
        shown = config.server.metrics_port is not None
        metrics = self.metrics
        shared = SharedNumbers(metrics) if shown and not self._serves_metrics else None
        if shared is not None:
            self._flush = shared.flush
        app = build(
            config,
            self._registry,
            metrics,
            had_store=self._server_running,
            supervised=self._supervised,
            buckets=self._buckets,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._flush)
            # Close the store in any case: a failed open may have acquired resources too.
            stack.push_async_callback(app.close)
            await app.open(patient=self._server_running)
            if shown and self._serves_metrics:
                stack.callback(serve_metrics(config, registry_of(metrics)))
            # Background tasks need the open store, so they end before it is closed.
            background = await stack.enter_async_context(contextlib.AsyncExitStack())
            # Only the first worker expires records.
            if not self._number:
                clock = app.clock.without_steps_ahead
                expiring = expire_periodically(app.store, config.retention, clock)
                start_task(background, "retention", expiring)
                start_task(background, "old history", expire_history(app.store, clock))
            look = None
            if app.quotas is not None:
                look = functools.partial(app.quotas.look, logs=not self._number)
            recording = record_periodically(app.store, History(metrics), app.clock, look)
            start_task(background, "history", recording)
            reporting = report_dropped_changes(app.store, metrics)
            start_task(background, "dropped changes", reporting)
            if shared is not None:
                start_task(background, "metrics", shared.run())
            if shown:
                start_task(background, "sampling", sample(app.store, metrics))
                measuring = _measure(app.store, config.limits.dead_letter_budget, metrics)
                start_task(background, "budgets", measuring)
            await app.serve(self._sock, self._shares)
            # The objects of the application live as long as the process: the garbage collector
            # need not check them again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            if self._number is None:
                _log.info("listening", extra={"url": url_of(self._sock), "pid": os.getpid()})
            if self._ready is not None:
                self._ready()
            await self._stop.wait()
            return await self._drain(app, background)

    async def _drain(self, app: App, background: contextlib.AsyncExitStack) -> int:
        server = self._config.server
        deadline = time.monotonic() + server.shutdown_grace
        _log.info("draining")
        app.start_draining()
        # /readyz now answers 503, so the load balancer stops sending new clients. Requests that
        # still arrive during the delay are answered.
        longest_delay = max(server.shutdown_grace - CLOSE_SECONDS, 0)
        await asyncio.sleep(min(server.shutdown_delay, longest_delay))
        await app.stop_accepting()
        left = deadline - CLOSE_SECONDS - time.monotonic()
        if not await app.drain(max(left, 0.1)):
            _log.warning("some requests were aborted because server.shutdown_grace is over")
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), CLOSE_SECONDS)):
                await background.aclose()
                await app.close()
        except TimeoutError:
            _log.error("the storage did not close in time")
            self._flush()
            logs.flush()
            os._exit(1)
        _log.info("stopped")
        return 0


def handle_signals(stop: Callable[[], None], at_exit: Callable[[], None] = lambda: None) -> None:
    """Call ``stop`` in the running event loop on SIGTERM, SIGINT or SIGHUP.

    :param at_exit: called at a second signal, which ends the process at once with status 1. SIGHUP
        does not count as one, because a closed terminal and its shell both send it.
    """
    loop = asyncio.get_running_loop()
    stopping = False

    def begin() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            stop()

    def handler() -> None:
        if stopping:
            _log.warning("ended at once by a second signal")
            at_exit()
            logs.flush()
            os._exit(1)
        begin()

    # nohup lets a program ignore it.
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        loop.add_signal_handler(signal.SIGHUP, begin)
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, handler)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(handler))


def start_task(
    stack: contextlib.AsyncExitStack, name: str, work: Coroutine[None, None, None]
) -> None:
    """Run ``work`` in the background until the stack unwinds. A failure is only logged."""

    async def guarded() -> None:
        try:
            await work
        except Exception:
            _log.exception("the background task %s failed", name)

    task = asyncio.create_task(guarded(), name=name)

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    stack.push_async_callback(end)


async def sample(store: Storage, metrics: Metrics) -> None:
    """Read the gauges of a storage every few seconds, until cancelled."""
    while True:
        metrics.report("storage", store.gauges(), store.gauge_texts)
        await asyncio.sleep(SAMPLE_SECONDS)


async def _measure(store: Storage, budget: DeadLetterBudget, metrics: Metrics) -> None:
    """Read every minute what the store knows besides its gauges, until cancelled."""
    while True:
        with contextlib.suppress(StorageError):
            if isinstance(store, BackupStore):
                last = await last_backup(store)
                made_at = timedelta(milliseconds=0 if last is None else last.made_at)
                metrics.gauge("last_backup_timestamp_seconds", made_at.total_seconds())
            for name, used in fullness(await store.budget_use(), budget).items():
                metrics.gauge("dead_letter_budget_used_ratio", used, name)
        await asyncio.sleep(BUDGET_SECONDS)
