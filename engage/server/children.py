# SPDX-License-Identifier: Apache-2.0
"""Child processes of the supervisor: start one, hear when it is ready, tell it to drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from engage.server.child import BLOCKED, Setup, send_setup
from engage.server.metrics_endpoint import SHARED_FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Child", "start_child"]


@dataclasses.dataclass(eq=False, slots=True)
class Child:
    """A child process."""

    setup: Setup
    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter
    #: True: it answers requests. A string: the reason why it cannot start. False: it died before
    #: it reported either.
    started: asyncio.Future[bool | str]
    #: What it added to the report that it is ready.
    report: Sequence[Any] = ()
    #: The last report of a loader, and its time by the monotonic clock in seconds.
    state: tuple[float, Mapping[str, Any]] | None = None
    #: Reads the reports of the child.
    reading: asyncio.Task[None] | None = None

    @property
    def reason(self) -> str | None:
        """Why it could not start, if it reported that."""
        result = self.started.result() if self.started.done() else None
        return result if isinstance(result, str) else None

    def drain(self) -> None:
        """Tell the child to finish its requests and to exit."""
        self.writer.write(b"drain\n")

    def kill(self) -> None:
        """Kill the child; it is not an error if it is dead."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


async def start_child(setup: Setup, inherited: Sequence[socket.socket] = ()) -> Child:
    """Start a child process.

    :param setup: its arguments.
    :param inherited: the listening socket of a worker.
    :raises OSError: if the system cannot start another process.
    """
    ours, theirs = socket.socketpair()
    sockets = [sock.fileno() for sock in inherited]
    shares = [] if setup.shares is None else [setup.shares]
    environment = dict(os.environ)
    if setup.kind in ("console", "helper"):
        # The metrics are those of the workers.
        environment.pop(SHARED_FOLDER_VARIABLE, None)
    with theirs:
        # A child inherits the blocked signals, and unblocks them when it can handle them.
        # Ctrl-C, and the SIGTERM of a service manager, also reach a process that just started.
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Without -P, modules in the working directory would hide those of the same name.
                *("-P", "-m", "engage.server.child", setup.kind),
                *map(str, (theirs.fileno(), *sockets)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(*sockets, *shares, theirs.fileno()),
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    # The child waits only for this. If it has died, its exit is noticed.
    with contextlib.suppress(OSError):
        await asyncio.to_thread(send_setup, ours, setup)
    reader, writer = await asyncio.open_connection(sock=ours)
    started = asyncio.get_running_loop().create_future()
    child = Child(setup, process, writer, started)
    child.reading = asyncio.create_task(_read_reports(child, reader))
    return child


async def _read_reports(child: Child, reader: asyncio.StreamReader) -> None:
    """Read the reports of a child until it has exited."""
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            report, _, value = line.rstrip(b"\n").partition(b" ")
            if report == b"state":
                child.state = time.monotonic(), json.loads(value)
            if child.started.done():
                continue
            if report == b"ready":
                child.report = json.loads(value) if value else ()
                child.started.set_result(True)
            elif report == b"failed":
                child.started.set_result(str(json.loads(value)))
    if not child.started.done():
        child.started.set_result(False)
