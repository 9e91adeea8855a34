# SPDX-License-Identifier: Apache-2.0
"""``python -m engage.server.child``: a process that :mod:`engage.server.children` starts.

It is a worker, a loader, the console, or the helper process of the storage. It runs in a new
interpreter. A fork would share the parent's event loop, threads and locks. The first argument is
only for those who read the list of processes.

The child and its parent are connected by a socket pair, the channel. The parent sends the
:class:`Setup`, the line ``drain`` to stop the child, and ``restarts`` to the first of its kind. The
child sends the line ``ready`` (the console adds its URL and whether the storage has answered), or
``failed`` and the reason; a loader sends ``state`` each second. The event loop sends ``beat`` all
the time: without it, the child hangs, and the parent kills it. SIGUSR1 makes its main thread send
its stack, whatever it does.

If the parent dies, the channel closes and the child exits at once. That loses nothing, because only
durable events are acknowledged; an orphan would block the port and the database file for the next
server.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import faulthandler
import json
import logging
import os
import pickle
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from engage.api import EngageError
from engage.monitoring import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engage.api import Helper
    from engage.config import Config
    from engage.console.process import ConsoleProcess
    from engage.server.load.process import LoaderProcess
    from engage.server.worker import Worker

__all__ = [
    "BEAT_SECONDS",
    "BLOCKED",
    "ConsoleSetup",
    "Setup",
    "main",
    "receive_setup",
    "send_setup",
]

_log = logging.getLogger(__name__)
#: Signals that stay blocked in a new child until it can handle them.
BLOCKED = {signal.SIGINT, signal.SIGTERM}
if sys.platform != "win32":
    BLOCKED.add(signal.SIGHUP)
#: Seconds between two heartbeats of a child: a small part of ``server.hang_timeout``.
BEAT_SECONDS = 0.5

_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, slots=True)
class ConsoleSetup:
    """The arguments that only the console receives."""

    #: The hash of the token of a one-time link; see :mod:`engage.console.sign_in.links`.
    link_hash: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """The arguments that a child receives from its parent.

    It contains the parent's config, because the file may have changed since the server started.
    """

    config: Config
    #: 0, 1 …; a replacement has the number of the worker that died.
    number: int
    #: Whether the server was already running when this child was started.
    server_running: bool
    #: Strings to mask in the log.
    secrets: tuple[str, ...]
    #: Whether this worker serves the metrics, because it is the only one.
    serves_metrics: bool = False
    #: What the first worker or loader shows for the parent: see :meth:`Metrics.restarts`.
    restarts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: Descriptor of the file in which the workers count their connections
    #: (:mod:`engage.http1.shares`); ``None`` if there is only one worker.
    shares: int | None = None
    #: Memory that all workers have for rate limits (:mod:`engage.keys.limits`).
    buckets: int | None = None
    #: Set if the child is a loader, the console, or the helper process; otherwise it is a worker.
    loads: bool = False
    console: ConsoleSetup | None = None
    helper: Helper | None = None

    @property
    def kind(self) -> str:
        """What the child is, in one word."""
        if self.helper is not None:
            return "helper"
        if self.console is not None:
            return "console"
        return "loader" if self.loads else "worker"

    @property
    def kind_and_number(self) -> str:
        """What the child is in the log: with its number, if there are others of its kind."""
        log = self.config.log
        counts = {"worker": self.config.server.workers, "loader": log.loaders if log else 1}
        return self.kind if counts.get(self.kind, 1) == 1 else f"{self.kind} {self.number}"


def send_setup(channel: socket.socket, setup: Setup) -> None:
    """Send a child its setup.

    :param channel: a blocking socket, unless the setup fits into the socket's buffer.
    :raises OSError: if the child has died.
    """
    data = pickle.dumps(setup)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive_setup(channel: socket.socket) -> Setup:
    """Receive what :func:`send_setup` sends.

    :raises EOFError: if the parent has died.
    """

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = channel.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    # Unpickling is safe: only the parent has the other end of the socket pair.
    setup: Setup = pickle.loads(exactly(*_LENGTH.unpack(exactly(_LENGTH.size))))  # noqa: S301
    return setup


def main(channel_fd: int, listening_fd: int | None = None) -> int:
    """Run a child.

    :param channel_fd: the inherited end of the channel to the parent.
    :param listening_fd: the inherited listening socket of a worker.
    :return: the exit status.
    """
    # Only the parent reacts to Ctrl-C and to a closed terminal; it sends "drain". SIGTERM drains
    # this child only.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=channel_fd)
    faulthandler.register(signal.SIGUSR1, file=channel_fd, all_threads=False)
    try:
        setup = receive_setup(channel)
    except EOFError:
        return 1
    if sys.platform == "linux":
        # If the event loop hangs, it does not notice that the channel is closed. Then the kernel
        # kills this process when the parent dies.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging_ = setup.config.logging
    logs.configure(
        logging_.level, logging_.format, secrets=setup.secrets, process=setup.kind_and_number
    )
    try:
        if setup.helper is not None:
            return _run_helper(setup.helper, channel)
        if setup.console is not None:
            return asyncio.run(_run_console(setup, channel))
        # Imported here, so that a helper process does not load the parts of a server.
        from engage.server.worker import new_event_loop

        if listening_fd is None:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(_run_loader(setup, channel))
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_run_worker(setup, socket.socket(fileno=listening_fd), channel))
    except (EngageError, OSError) as error:
        channel.setblocking(True)
        channel.sendall(b"failed " + json.dumps(str(error)).encode() + b"\n")
        return 1
    finally:
        logs.flush()


def _run_helper(helper: Helper, channel: socket.socket) -> int:
    # A service manager's SIGTERM also reaches this process, while others may still need it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    channel.sendall(b"ready\n")
    try:
        helper(channel)
    except EngageError:
        raise
    except Exception:
        _log.exception("the helper process ends because of an unexpected error")
        return 1
    return 0


async def _run_worker(setup: Setup, sock: socket.socket, channel: socket.socket) -> int:
    from engage.http1.shares import Shares
    from engage.registry import load_plugins
    from engage.server.worker import Worker

    reader, writer = await asyncio.open_connection(sock=channel.dup())
    shares = None if setup.shares is None else Shares(setup.shares, setup.number)
    worker = Worker(
        setup.config,
        load_plugins(setup.config),
        sock,
        number=setup.number,
        server_running=setup.server_running,
        supervised=True,
        serves_metrics=setup.serves_metrics,
        shares=shares,
        buckets=setup.buckets,
        ready=lambda: writer.write(b"ready\n"),
    )
    worker.metrics.restarts(setup.restarts)
    return await _run(worker, reader, writer, worker.metrics.restarts)


async def _run_loader(setup: Setup, channel: socket.socket) -> int:
    from engage.registry import load_plugins
    from engage.server.load.process import LoaderProcess

    reader, writer = await asyncio.open_connection(sock=channel.dup())

    def report(state: Mapping[str, Any]) -> None:
        writer.write(b"state " + json.dumps(state).encode() + b"\n")

    loader = LoaderProcess(
        setup.config,
        load_plugins(setup.config),
        number=setup.number,
        server_running=setup.server_running,
        supervised=True,
        ready=lambda: writer.write(b"ready\n"),
        report=report,
    )
    loader.metrics.restarts(setup.restarts)
    return await _run(loader, reader, writer, loader.metrics.restarts)


async def _run_console(setup: Setup, channel: socket.socket) -> int:
    from engage.console.process import ConsoleProcess
    from engage.registry import load_plugins

    assert setup.console is not None
    reader, writer = await asyncio.open_connection(sock=channel.dup())
    console = ConsoleProcess(
        setup.config,
        load_plugins(setup.config),
        server_running=setup.server_running,
        link_hash=setup.console.link_hash,
        ready=lambda *report: writer.write(b"ready " + json.dumps(report).encode() + b"\n"),
    )
    return await _run(console, reader, writer)


async def _run(
    process: Worker | LoaderProcess | ConsoleProcess,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    restarts: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> int:
    """Run a child until SIGTERM, or until the parent sends ``drain``.

    :param restarts: called when the parent sends ``restarts``.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)

    async def read_commands() -> None:
        while line := await reader.readline():
            if line == b"drain\n":
                process.stop()
            elif line.startswith(b"restarts "):
                restarts(json.loads(line.removeprefix(b"restarts ")))
        os._exit(1)

    async def beat() -> None:
        while True:
            writer.write(b"beat\n")
            await asyncio.sleep(BEAT_SECONDS)

    tasks = [asyncio.create_task(task()) for task in (read_commands, beat)]
    try:
        return await process.run()
    finally:
        for task in tasks:
            task.cancel()
        writer.close()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[2:])))
