# SPDX-License-Identifier: Apache-2.0
"""One process that answers requests: open the store, serve, drain, close.

:class:`Worker` is run by :mod:`engage.server.serve` in its own process when there is only one, and
    by
:mod:`engage.server.child` in each child of :mod:`engage.server.supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from engage import logs
from engage.api import EventStore, ProfileStore
from engage.http1.sockets import url_of
from engage.metrics import Metrics, PrometheusMetrics
from engage.server.metrics_endpoint import serve_metrics
from engage.storage.retention import expire_periodically

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from engage.app import App
    from engage.config import Config
    from engage.registry import Registry

__all__ = ["Worker", "new_event_loop"]

_log = logging.getLogger(__name__)

#: Seconds between two looks at the storage's own numbers.
SAMPLE_SECONDS = 5.0
#: Seconds of the grace that are kept for closing the store.
CLOSE_SECONDS = 2.0
#: New containers between two looks of the garbage collector. Python's own 700 is less than one
#: batch of 100 events: it would be looked at several times while it is alive, and freed without.
GARBAGE = 10_000


def new_event_loop() -> asyncio.AbstractEventLoop:
    """:return: uvloop's where there is one, else asyncio's own."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


class Worker:
    """Serves on a listening socket until told to stop.

    :param sock: listening, not blocking; closed by the worker when it stops to accept.
    :param number: 0, 1 … among the children of one parent; ``None``: there is no parent, this
        process is the server, takes the signals and shows the metrics.
    :param joins: the server runs already, so it has had its store: trouble with that is no reason
        not to start, as it is none for the others to end.
    :param ready: called once requests are answered.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        sock: socket.socket,
        *,
        number: int | None = None,
        joins: bool = False,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._registry = registry
        self._sock = sock
        self._number = number
        self._joins = joins
        self._ready = ready
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begin to drain; a second call changes nothing."""
        self._stop.set()

    async def run(self) -> int:
        """Serve, then drain.

        :return: the exit status.
        :raises EngageError: it cannot start.
        """
        # Not at the top: whoever only wants the parent need not load the application.
        from engage.app import build

        config = self._config
        if self._number is None:
            handle_signals(self._on_signal)
        shown = config.server.metrics_port is not None
        metrics = PrometheusMetrics() if shown else Metrics()
        app = build(config, self._registry, metrics, had_store=self._joins)
        async with contextlib.AsyncExitStack() as stack:
            # On any way out: also a store that was opened only half has something to give back.
            stack.push_async_callback(app.close)
            await app.open(patient=self._joins)
            if self._number is None and isinstance(metrics, PrometheusMetrics):
                stack.callback(serve_metrics(config, metrics.registry))
            # What works beside the requests, and needs the store open.
            beside = await stack.enter_async_context(contextlib.AsyncExitStack())
            # Of several processes one is enough to expire what is old.
            if not self._number:
                await _task(beside, "retention", expire_periodically(app.store, config.retention))
            if isinstance(metrics, PrometheusMetrics):
                await _task(beside, "sampling", _sample(app.store, metrics))
            await app.serve(self._sock)
            # What is there now stays: the collector need not look at it again and again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GARBAGE)
            if self._number is None:
                _log.info("listening", extra={"url": url_of(self._sock), "pid": os.getpid()})
            if self._ready is not None:
                self._ready()
            await self._stop.wait()
            return await self._drain(app, beside)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            logs.flush()
            os._exit(1)
        self._stop.set()

    async def _drain(self, app: App, beside: contextlib.AsyncExitStack) -> int:
        server = self._config.server
        deadline = time.monotonic() + server.shutdown_grace
        _log.info("draining")
        app.start_draining()
        # The load balancer sees /readyz fail and sends nobody new; whoever still comes is answered.
        patience = max(server.shutdown_grace - CLOSE_SECONDS, 0)
        await asyncio.sleep(min(server.shutdown_delay, patience))
        await app.stop_accepting()
        left = deadline - CLOSE_SECONDS - time.monotonic()
        if not await app.drain(max(left, 0.1)):
            _log.warning("some requests were cut off: server.shutdown_grace is over")
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), CLOSE_SECONDS)):
                await beside.aclose()
                await app.close()
        except TimeoutError:
            _log.error("the storage did not close in time")
            logs.flush()
            os._exit(1)
        _log.info("stopped")
        return 0


def handle_signals(handler: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call ``handler`` in the running event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, handler)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(handler))


async def _task(
    stack: contextlib.AsyncExitStack, name: str, work: Coroutine[None, None, None]
) -> None:
    """Run ``work`` beside the server until the stack unwinds; a failure is logged, not more."""

    async def guarded() -> None:
        try:
            await work
        except Exception:
            _log.exception("%s stopped working", name)

    task = asyncio.create_task(guarded(), name=name)

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    stack.push_async_callback(end)


async def _sample(store: EventStore, metrics: Metrics) -> None:
    dropped = 0
    while True:
        metrics.storage(store.gauges())
        if isinstance(store, ProfileStore) and store.dropped_changes != dropped:
            metrics.dropped("profile_change", store.dropped_changes - dropped)
            dropped = store.dropped_changes
        await asyncio.sleep(SAMPLE_SECONDS)
