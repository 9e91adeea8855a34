# SPDX-License-Identifier: Apache-2.0
"""The parent of several workers: starts them, replaces those that die, and stops them.

The first worker is started alone, because it creates the store if there is none. If it cannot
start, neither can the others, and the server exits with its error. A worker that dies later is
replaced after a pause, which doubles while the replacements die early. After ten deaths within a
minute restarts do not help: the server exits with status 1, so that a service manager notices.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from engage.api import EngageError
from engage.http1.sockets import url_of
from engage.monitoring import logs
from engage.server.child import BLOCKED, Setup, send_setup
from engage.server.metrics_endpoint import forget_process, serve_shared_metrics
from engage.server.worker import handle_signals

if TYPE_CHECKING:
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


@dataclasses.dataclass(eq=False, slots=True)
class _Child:
    number: int
    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter
    #: True: it answers requests. A string: the reason why it cannot start. False: it died before
    #: it reported either.
    started: asyncio.Future[bool | str]
    #: Reads what the worker reports.
    reading: asyncio.Task[None] | None = None


class Supervisor:
    """Keeps ``config.server.workers`` workers running on one socket.

    :param sock: a listening socket. The supervisor closes it when the drain begins; the workers
        decide how long they accept connections.
    :param secrets: strings that the workers mask in the log.
    """

    def __init__(self, config: Config, sock: socket.socket, secrets: tuple[str, ...]) -> None:
        self._config = config
        self._sock = sock
        self._secrets = secrets
        self._children: set[_Child] = set()
        self._deaths: collections.deque[float] = collections.deque(maxlen=MAX_DEATHS)
        self._stopping = asyncio.Event()
        self._failed = False
        self._server_running = False

    async def run(self) -> int:
        """Run the workers until a signal arrives, or until too many of them have died.

        :return: the exit status.
        :raises EngageError: if the first worker cannot start; the message is its error.
        """
        handle_signals(self._on_signal)
        with contextlib.ExitStack() as stack:
            if self._config.server.metrics_port is not None:
                stack.callback(serve_shared_metrics(self._config))
            try:
                first = await self._start_worker(0)
                await self._wait_for_first(first)
                keepers = [asyncio.create_task(self._keep_running(0, first))]
                keepers += [
                    asyncio.create_task(self._keep_running(number))
                    for number in range(1, self._config.server.workers)
                ]
                await self._stopping.wait()
                return await self._drain(keepers)
            finally:
                for child in self._children:
                    _kill(child)

    async def _wait_for_first(self, child: _Child) -> None:
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
            raise EngageError(f"the first worker exited with status {status} before it was ready")
        self._server_running = True
        _log.info(
            "listening",
            extra={
                "url": url_of(self._sock),
                "pid": os.getpid(),
                "workers": self._config.server.workers,
            },
        )

    async def _start_worker(self, number: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            # A child inherits the blocked signals, and unblocks them when it can handle them.
            # Ctrl-C, and the SIGTERM of a service manager, also reach a process that just started.
            signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "engage.server.child", str(self._sock.fileno()), str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(self._sock.fileno(), theirs.fileno()),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
        setup = Setup(self._config, number, self._server_running, self._secrets)
        # The child waits only for this. If it has died, _keep_running notices.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(send_setup, ours, setup)
        reader, writer = await asyncio.open_connection(sock=ours)
        started = asyncio.get_running_loop().create_future()
        child = _Child(number, process, writer, started)
        child.reading = asyncio.create_task(_read_reports(child, reader))
        self._children.add(child)
        if self._stopping.is_set():  # Draining began before this child was registered.
            writer.write(b"drain\n")
        return child

    async def _keep_running(self, number: int, child: _Child | None = None) -> None:
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
                _log.error("worker %d could not be started: %s", number, error)
            now = time.monotonic()
            self._deaths.append(now)
            if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_SECONDS:
                _log.error(
                    "%d workers died within %d seconds; giving up", MAX_DEATHS, DEATHS_SECONDS
                )
                self._failed = True
                self._stopping.set()
                return
            early_deaths = 0 if now - started > DEATHS_SECONDS else early_deaths + 1
            pause = min(RESTART_PAUSE * 2 ** max(early_deaths - 1, 0), MAX_RESTART_PAUSE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                    return
            child = None

    async def _wait_for_death(self, child: _Child) -> bool:
        """Wait until a worker has exited.

        :return: whether to replace it: true unless the drain has begun.
        """
        status = await child.process.wait()
        self._children.discard(child)
        child.writer.close()
        forget_process(child.process.pid)
        if self._stopping.is_set():
            self._failed |= status != 0
            return False
        reason = child.started.result() if child.started.done() else False
        _log.error(
            "worker %d died with status %d%s",
            child.number,
            status,
            f": {reason}" if isinstance(reason, str) else "",
            extra={"pid": child.process.pid},
        )
        return True

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            for child in self._children:
                _kill(child)
            logs.flush()
            os._exit(1)
        self._stopping.set()

    async def _drain(self, keepers: list[asyncio.Task[None]]) -> int:
        _log.info("draining")
        # Otherwise connections would pile up here after the last worker has stopped accepting.
        self._sock.close()
        for child in self._children:
            child.writer.write(b"drain\n")
        grace = self._config.server.shutdown_grace + KILL_DELAY
        _, late = await asyncio.wait(keepers, timeout=grace)
        if late:
            _log.error("%d workers did not stop in time and were killed", len(late))
            self._failed = True
            for child in self._children:
                _kill(child)
            await asyncio.wait(late)
        _log.info("stopped")
        return 1 if self._failed else 0


async def _read_reports(child: _Child, reader: asyncio.StreamReader) -> None:
    """Read what a worker reports until it has exited."""
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            if child.started.done():
                continue
            if line == b"ready\n":
                child.started.set_result(True)
            elif line.startswith(b"failed "):
                child.started.set_result(str(json.loads(line[7:])))
    if not child.started.done():
        child.started.set_result(False)


def _kill(child: _Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.kill()
