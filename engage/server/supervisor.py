# SPDX-License-Identifier: Apache-2.0
"""The parent of the server's processes: starts them, replaces those that die, stops them.

The helper process of the storage starts with the first worker and ends last. The other workers
start later, because the first one creates the store if there is none. If it cannot start, neither
can the others, and the server exits with its error. A worker that dies later is replaced after a
pause, which doubles while the replacements die early. After ten deaths within a minute restarts do
not help: the server exits with status 1, so that a service manager notices. The helper process and
the console are not counted: see :mod:`engage.server.keepers`. Nor is a worker that was killed
because it hung: a request that makes each worker hang must not end the server for all others.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from engage.api import EngageError
from engage.http1.shares import Shares, make_shares
from engage.http1.sockets import url_of
from engage.keys.limits import make_buckets_file
from engage.server.child import Setup
from engage.server.children import Child, start_child
from engage.server.keepers import ConsoleKeeper, HelperKeeper
from engage.server.metrics_endpoint import forget_process, serve_shared_metrics
from engage.server.worker import handle_signals

if TYPE_CHECKING:
    from engage.api import Helper
    from engage.config import Config

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)

#: The server exits when this many workers have died …
MAX_DEATHS: Final = 10
#: … within this many seconds.
DEATHS_SECONDS: Final = 60.0
#: Seconds before the first restart. Each early death doubles the pause, up to the maximum.
RESTART_PAUSE: Final = 0.1
MAX_RESTART_PAUSE: Final = 5.0
#: Seconds after ``server.shutdown_grace`` before a worker is killed.
KILL_DELAY: Final = 5.0
#: Seconds that the console has to stop after the workers have stopped.
CONSOLE_SECONDS: Final = 3.0
#: Seconds that the helper process of the storage has after that: SQLite's may have to copy a log of
#: 256 MiB.
HELPER_SECONDS: Final = 10.0


class Supervisor:
    """Keeps workers running on one socket.

    :param sock: a listening socket. The supervisor closes it when the drain begins; the workers
        decide how long they accept connections. ``None`` for loaders, which have none.
    :param secrets: strings that the workers mask in the log.
    :param count: the number of workers.
    :param helper: what the helper process of the storage runs, if it needs one.
    """

    #: The name of a process in the log.
    what: ClassVar[str] = "worker"

    def __init__(
        self,
        config: Config,
        sock: socket.socket | None,
        secrets: tuple[str, ...],
        *,
        count: int,
        helper: Helper | None = None,
    ) -> None:
        self._config = config
        self._sock = sock
        self._count = count
        self._secrets = secrets
        self._children: set[Child] = set()
        self._deaths: collections.deque[float] = collections.deque(maxlen=MAX_DEATHS)
        self._stopping = asyncio.Event()
        self._failed = False
        self._server_running = False
        self._shares_file = make_shares(count)
        self._buckets = None if sock is None else make_buckets_file()
        #: Whether several workers accept connections of the socket.
        self._shared = sock is not None and count > 1
        # Only to note which workers have died.
        self._shares = Shares(self._shares_file.fileno(), 0)
        self._console: ConsoleKeeper | None = None
        if sock is not None and config.console is not None:
            self._console = ConsoleKeeper(Setup(config, 0, True, secrets), self._restarted)
        self._helper: HelperKeeper | None = None
        if helper is not None:
            setup = Setup(config, 0, True, secrets, helper=helper)
            self._helper = HelperKeeper(setup, self._restarted)
        self._helping: asyncio.Task[None] | None = None
        #: Kind of process → how many were started in place of another one.
        self._restarts = dict.fromkeys((self.what, "console", "helper"), 0)

    async def run(self) -> int:
        """Run the workers until a signal arrives, or until too many of them have died.

        :return: the exit status.
        :raises EngageError: if the first worker cannot start; the message is its error.
        """
        handle_signals(self._stopping.set, self._kill_all)
        with contextlib.ExitStack() as stack:
            self._open_services(stack)
            try:
                if self._helper is not None:
                    self._helping = asyncio.create_task(self._helper.run())
                first = await self._start_worker(0)
                await self._wait_for_first(first)
                keepers = [asyncio.create_task(self._keep_running(0, first))]
                keepers += [
                    asyncio.create_task(self._keep_running(number))
                    for number in range(1, self._count)
                ]
                console = self._console
                running = asyncio.create_task(console.run()) if console is not None else None
                await self._stopping.wait()
                return await self._drain(keepers, running)
            finally:
                self._kill_all()
                await self._end_helper()

    async def _wait_for_first(self, child: Child) -> None:
        stop = asyncio.create_task(self._stopping.wait())
        waiting: set[asyncio.Future[Any]] = {child.started, stop}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not child.started.done():
            return
        result = child.started.result()
        if isinstance(result, str):
            await child.process.wait()
            raise EngageError(result)
        if not result:
            status = await child.process.wait()
            raise EngageError(
                f"the first {self.what} exited with status {status} before it was ready"
            )
        self._server_running = True
        self._announce()

    def _open_services(self, stack: contextlib.ExitStack) -> None:
        """Start the services of this process itself; they end with the stack."""
        # A single worker serves its metrics itself.
        if self._config.server.metrics_port is not None and self._count > 1:
            stack.callback(serve_shared_metrics(self._config))

    def _announce(self) -> None:
        """Log that the first process is ready."""
        assert self._sock is not None
        extra = {"url": url_of(self._sock), "pid": os.getpid(), "workers": self._count}
        _log.info("listening", extra=extra)

    def _setup(self, number: int) -> Setup:
        """Return the setup of a process."""
        return Setup(
            self._config,
            number,
            self._server_running,
            self._secrets,
            serves_metrics=self._count == 1,
            restarts={} if number else self._restarts,
            shares=self._shares_file.fileno()
            if self._sock is not None and self._count > 1
            else None,
            buckets=self._buckets,
        )

    def _restarted(self, kind: str) -> None:
        """Count a process that is started in place of another one; the first worker shows it."""
        self._restarts[kind] += 1
        for child in self._children:
            if child.setup.number == 0:
                child.tell_restarts(self._restarts)

    async def _start_worker(self, number: int) -> Child:
        child = await start_child(self._setup(number), [] if self._sock is None else [self._sock])
        self._children.add(child)
        if self._stopping.is_set():  # Draining began before this child was registered.
            child.drain()
        return child

    async def _keep_running(self, number: int, child: Child | None = None) -> None:
        """Run the worker ``number``, and replace it when it dies, until the drain."""
        early_deaths = 0
        while child is not None or not self._stopping.is_set():
            started = time.monotonic()
            try:
                if child is None:
                    child = await self._start_worker(number)
                if not await self._wait_for_death(child):
                    return
            except OSError as error:  # Out of processes, memory or file descriptors.
                _log.error("%s %d could not be started: %s", self.what, number, error)
            now = time.monotonic()
            hung = child is not None and child.hung
            if not hung:
                self._deaths.append(now)
            if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_SECONDS:
                _log.error(
                    "%d %ss died within %d seconds; giving up",
                    *(MAX_DEATHS, self.what, DEATHS_SECONDS),
                )
                self._failed = True
                self._stopping.set()
                return
            early_deaths = 0 if hung or now - started > DEATHS_SECONDS else early_deaths + 1
            pause = min(RESTART_PAUSE * 2 ** max(early_deaths - 1, 0), MAX_RESTART_PAUSE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                    return
            child = None
            self._restarted(self.what)

    async def _wait_for_death(self, child: Child) -> bool:
        """Wait until a worker has exited.

        :return: whether to replace it: true unless the drain has begun.
        """
        status = await child.process.wait()
        self._children.discard(child)
        child.writer.close()
        forget_process(child.process.pid)
        self._shares.leave(child.setup.number)
        if self._stopping.is_set():
            self._failed |= status != 0 and not child.hung
            return False
        about = {"pid": child.process.pid}
        if status == 0:  # After a SIGTERM to this worker.
            _log.warning("%s %d has ended", self.what, child.setup.number, extra=about)
            return True
        _log.error(
            "%s %d died with status %d%s",
            self.what,
            child.setup.number,
            status,
            f": {child.reason}" if child.reason is not None else "",
            extra=about,
        )
        return True

    def _kill_all(self) -> None:
        """Kill the workers and the console; the helper process ends with this one at the latest."""
        for child in self._children:
            child.kill()
        if self._console is not None:
            self._console.kill()

    async def _drain(
        self, keepers: list[asyncio.Task[None]], console: asyncio.Task[None] | None
    ) -> int:
        _log.info("draining")
        # Otherwise connections would pile up here after the last worker has stopped accepting.
        if self._sock is not None:
            self._sock.close()
        for child in self._children:
            child.drain()
        if self._console is not None:
            self._console.stop()
        grace = self._config.server.shutdown_grace + KILL_DELAY
        _, late = await asyncio.wait(keepers, timeout=grace)
        if late:
            _log.error("%d %ss did not stop in time and were killed", len(late), self.what)
            self._failed = True
            for child in self._children:
                child.kill()
            await asyncio.wait(late)
        if console is not None:
            # It has had as much time as the workers, and at least its own.
            await asyncio.wait([console], timeout=CONSOLE_SECONDS)
            if not console.done():
                _log.warning("the console did not stop in time and was killed")
                self._kill_all()
        await self._end_helper()
        _log.info("stopped")
        return 1 if self._failed else 0

    async def _end_helper(self) -> None:
        """End the helper process. Idempotent."""
        if self._helper is None or self._helping is None:
            return
        self._helper.stop()
        await asyncio.wait([self._helping], timeout=HELPER_SECONDS)
        if not self._helping.done():
            _log.warning("%s did not stop in time and was killed", self._helper.what)
            self._helper.kill()
            await asyncio.wait([self._helping])
