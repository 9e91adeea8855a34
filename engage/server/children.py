# SPDX-License-Identifier: Apache-2.0
"""Child processes of the supervisor: start one, hear when it is ready, tell it to drain.

A child whose event loop does not turn sends no heartbeat. It is killed, and then replaced like one
that died. A child that waits for something, such as an answer of the storage, does send heartbeats.
The time for which a child waits for a processor does not count, unless it also had one for long
enough: on a machine that is too slow, replacements would make it slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from engage.server.child import BEAT_SECONDS, BLOCKED, Setup, send_setup
from engage.server.metrics_endpoint import SHARED_FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Child", "start_child"]

_log = logging.getLogger(__name__)

#: Seconds without a report after which a child is killed that is not ready yet: on a slow machine,
#: its event loop does not turn for a while, because it loads the application.
START_SECONDS: Final = 60.0


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
    #: Whether it has sent a heartbeat; a helper process of a plugin may send none.
    beats: bool = False
    draining: bool = False
    #: Whether it was killed because it sent no heartbeat.
    hung: bool = False
    #: Whether it was asked where it is, since its last heartbeat …
    asked: bool = False
    #: … and what it has shown.
    stack: list[str] = dataclasses.field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """Why it could not start, if it reported that."""
        result = self.started.result() if self.started.done() else None
        return result if isinstance(result, str) else None

    def drain(self) -> None:
        """Tell the child to finish its requests and to exit."""
        self.draining = True
        self.writer.write(b"drain\n")

    def tell_restarts(self, counts: Mapping[str, int]) -> None:
        """Tell the child how many processes were started again, by kind."""
        self.writer.write(b"restarts " + json.dumps(counts).encode() + b"\n")

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
    shared = [part for part in (setup.shares, setup.buckets) if part is not None]
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
                pass_fds=(*sockets, *shared, theirs.fileno()),
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
    """Read the reports of a child until it has exited; kill it if it sends none."""
    pid = child.process.pid
    # Within this time of a processor, an event loop turns, which takes 150 ms at most.
    late = 2 * BEAT_SECONDS
    silent, (ran, waited) = 0.0, _scheduled(pid)
    with contextlib.suppress(OSError):
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    line = await reader.readline()
                if not line:
                    break
                alive = _take(child, line.rstrip(b"\n"))
            except TimeoutError:
                silent += BEAT_SECONDS
                # If this process was late itself, because it was stopped or had no processor, then
                # so was the child.
                alive = time.monotonic() - began > late
                if not alive:
                    now = _scheduled(pid)
                    starved = now[1] - waited if now[0] - ran < late else 0.0
                    _judge(child, silent - starved)
            if alive:
                silent, (ran, waited) = 0.0, _scheduled(pid)
                child.asked = False
    if not child.started.done():
        child.started.set_result(False)


def _scheduled(pid: int) -> tuple[float, float]:
    """Return for how many seconds the main thread of a process had a processor, and for how many it
    was ready to run but had none; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            ran, waited, _ = (int(number) / 1e9 for number in file.read().split())
            return ran, waited
    except (OSError, ValueError):
        return 0.0, 0.0


def _take(child: Child, line: bytes) -> bool:
    """Take in a line that a child sent, and return whether its event loop (or helper) sent it."""
    report, _, value = line.partition(b" ")
    if report == b"beat":
        child.beats = True
    elif report == b"state":
        child.state = time.monotonic(), json.loads(value)
    elif report == b"ready" and not child.started.done():
        child.report = json.loads(value) if value else ()
        child.started.set_result(True)
    elif report == b"failed" and not child.started.done():
        child.started.set_result(str(json.loads(value)))
    else:
        child.stack.append(line.decode(errors="replace").strip())
        return False
    return True


def _judge(child: Child, silent: float) -> None:
    """Kill a child that hangs; first ask it where it is.

    :param silent: seconds since its last report.
    """
    limit = child.setup.config.server.hang_timeout
    if not child.started.done():
        limit = max(limit, START_SECONDS)
    elif not child.beats:
        limit = math.inf
    if child.draining or child.hung or silent < limit - BEAT_SECONDS:
        return
    if not child.asked:
        child.asked = True
        child.stack.clear()
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGUSR1)
        return
    if silent < limit:
        return
    stack = [line for line in child.stack if line.startswith("File ")]
    _log.error(
        "%s has hung for %.0f s and is killed; it was %s",
        child.setup.kind_and_number,
        silent,
        f"at {stack[0]}" if stack else "stopped, or in a call of the system",
        extra={"pid": child.process.pid, "stack": stack},
    )
    child.hung = True
    child.kill()
