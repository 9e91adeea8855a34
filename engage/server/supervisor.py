# SPDX-License-Identifier: Apache-2.0
"""The parent of several workers: starts them, replaces those that die, ends them.

The first worker is started alone: it makes the store if there is none, and when it cannot start,
nobody can, and its reason is the server's. Whoever dies later is replaced after a pause that
doubles while its successors die young. Ten deaths in a minute: something is wrong that no restart
cures, and the server ends with status 1, for whoever watches it to see.
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

from engage import logs
from engage.api import EngageError
from engage.http1.sockets import url_of
from engage.server.child import BLOCKED, Setup, send_setup
from engage.server.metrics_endpoint import forget_process, serve_shared_metrics
from engage.server.worker import handle_signals

if TYPE_CHECKING:
    from engage.config import Config

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)

#: So many deaths …
MAX_DEATHS: Final = 10
#: … within so many seconds end the server.
DEATHS_SECONDS: Final = 60.0
#: Seconds before the first restart; doubles with each early death up to the greatest.
PAUSE: Final = 0.1
MAX_PAUSE: Final = 5.0
#: Seconds that a worker gets beyond the grace before it is killed.
PATIENCE: Final = 5.0


@dataclasses.dataclass(eq=False, slots=True)
class _Child:
    number: int
    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter
    #: True: it answers requests. A string: why it cannot. False: it died before it said either.
    started: asyncio.Future[bool | str]
    talk: asyncio.Task[None] | None = None


class Supervisor:
    """Keeps ``config.server.workers`` workers alive on one socket.

    :param sock: listening; closed here when the drain begins, so that it is the workers who decide
        how long connections are accepted.
    """

    def __init__(self, config: Config, sock: socket.socket, secrets: tuple[str, ...]) -> None:
        self._config = config
        self._sock = sock
        self._secrets = secrets
        self._children: set[_Child] = set()
        self._deaths: collections.deque[float] = collections.deque(maxlen=MAX_DEATHS)
        self._stopping = asyncio.Event()
        self._failed = False
        self._listening = False

    async def run(self) -> int:
        """Supervise until a signal, or until it is hopeless.

        :return: the exit status.
        :raises EngageError: the first worker could not start; the message is its reason.
        """
        handle_signals(self._on_signal)
        with contextlib.ExitStack() as stack:
            if self._config.server.metrics_port is not None:
                stack.callback(serve_shared_metrics(self._config))
            try:
                first = await self._start(0)
                await self._first(first)
                keepers = [asyncio.create_task(self._keep(0, first))]
                keepers += [
                    asyncio.create_task(self._keep(number))
                    for number in range(1, self._config.server.workers)
                ]
                await self._stopping.wait()
                return await self._drain(keepers)
            finally:
                for child in self._children:
                    _kill(child)

    async def _first(self, child: _Child) -> None:
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
            raise EngageError(f"the first worker ended with status {status} before it was ready")
        self._listening = True
        _log.info(
            "listening",
            extra={
                "url": url_of(self._sock),
                "pid": os.getpid(),
                "workers": self._config.server.workers,
            },
        )

    async def _start(self, number: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            # Blocked signals stay blocked in the child until it can take them: Ctrl-C, and a
            # service manager's SIGTERM, go to all processes, also to those that just begin.
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
        setup = Setup(self._config, number, self._listening, self._secrets)
        # It waits for nothing else; a child that died meanwhile is noticed by whoever keeps it.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(send_setup, ours, setup)
        reader, writer = await asyncio.open_connection(sock=ours)
        started = asyncio.get_running_loop().create_future()
        child = _Child(number, process, writer, started)
        child.talk = asyncio.create_task(_listen_to(child, reader))
        self._children.add(child)
        if self._stopping.is_set():  # Since when, nobody told this one.
            writer.write(b"drain\n")
        return child

    async def _keep(self, number: int, child: _Child | None = None) -> None:
        """Have a worker ``number`` until the drain."""
        early = 0
        while child is not None or not self._stopping.is_set():
            started = time.monotonic()
            try:
                if child is None:
                    child = await self._start(number)
                if not await self._lives(child):
                    return
            except OSError as error:  # No process, no memory, no file descriptor.
                _log.error("worker %d cannot be started: %s", number, error)
            now = time.monotonic()
            self._deaths.append(now)
            if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_SECONDS:
                _log.error("%d workers died within %d s: giving up", MAX_DEATHS, DEATHS_SECONDS)
                self._failed = True
                self._stopping.set()
                return
            early = 0 if now - started > DEATHS_SECONDS else early + 1
            pause = min(PAUSE * 2 ** max(early - 1, 0), MAX_PAUSE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                    return
            child = None

    async def _lives(self, child: _Child) -> bool:
        """Wait until a worker is gone.

        :return: whether it is missed: no drain has begun.
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
        # Otherwise connections would go on piling up here when the last worker stops to accept.
        self._sock.close()
        for child in self._children:
            child.writer.write(b"drain\n")
        grace = self._config.server.shutdown_grace + PATIENCE
        _, late = await asyncio.wait(keepers, timeout=grace)
        if late:
            _log.error("%d workers had to be killed", len(late))
            self._failed = True
            for child in self._children:
                _kill(child)
            await asyncio.wait(late)
        _log.info("stopped")
        return 1 if self._failed else 0


async def _listen_to(child: _Child, reader: asyncio.StreamReader) -> None:
    """Take in what a worker says until it is gone."""
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
