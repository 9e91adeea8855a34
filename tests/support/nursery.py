# SPDX-License-Identifier: Apache-2.0
"""Servers that start fast: a process that has imported engage forks them.

``python -m engage serve`` imports engage in each of its processes: the supervisor, each worker, the
console and the storage's helper. That takes half a second of a processor for each, before the
server does anything. A forked server runs the same code with the same arguments, environment,
process group and files, in processes of its own, which can be killed, stopped and looked at like
any other; only the interpreters are not new. What a test learns from a new interpreter (the
command line, imports, signals in the first milliseconds) it must learn from
``start_server(…, fork=False)``.

One such process serves a test process. It has one thread and no event loop, so that a fork copies
neither locks nor loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: Seconds between two looks at a process that is waited for.
_POLL = 0.01


class Forked:
    """A forked process, with the part of :class:`subprocess.Popen` that tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return the exit status, or ``None`` while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"status": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status; a negative one is a signal.

        :param timeout: in seconds.
        :raises subprocess.TimeoutExpired: if it runs longer.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(_POLL)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class ForkedChild(Forked):
    """The same of :class:`asyncio.subprocess.Process`."""

    async def wait(self) -> int:  # type: ignore[override]
        while (status := self.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL)
        return status


class Nursery:
    """The process that forks. It ends with the process that made it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        code = f"import sys; sys.path[:0] = {sys.path!r}; from support.nursery import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._answers = self._channel.makefile("rb")
        #: A proxy's threads may kill the same server at the same time.
        self._turn = threading.Lock()

    def fork(self, arguments: Sequence[str], log: int, environment: Mapping[str, str]) -> Forked:
        """Run ``engage`` in a new process, in a session of its own.

        :param arguments: those of ``engage``.
        :param log: descriptor of the file for standard output and error.
        """
        request = {"arguments": arguments, "environment": dict(environment), "folder": os.getcwd()}
        return Forked(self, self.ask(request, [log]))

    async def fork_child(
        self, *arguments: str, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> ForkedChild:
        """Fork the helper process that :func:`engage.server.children.start_child` would start."""
        kind = arguments[arguments.index("engage.server.child") + 1]
        return ForkedChild(self, self.ask({"child": kind, "environment": dict(env)}, pass_fds))

    def ask(self, request: Any, descriptors: Sequence[int] = ()) -> Any:
        """Send a request and return the answer.

        A request may be larger than what one message can carry, so its length goes first.
        """
        data = json.dumps(request).encode()
        with self._turn:
            socket.send_fds(self._channel, [len(data).to_bytes(4, "big")], descriptors)
            self._channel.sendall(data)
            return json.loads(self._answers.readline())


@functools.cache
def nursery() -> Nursery:
    """Return the nursery of this process."""
    return Nursery()


# --------------------------------------------------------------------------- in the other processes
def main() -> None:
    """Answer requests until the other end of the channel closes; then end, with all that live."""
    # Everything that a server imports, in whichever process of it.
    import engage.cli.serve
    import engage.console.process
    import engage.server.load.process
    import engage.server.supervisor
    import engage.server.worker  # noqa: F401
    from engage.registry import registry
    from engage.registry.discovery import discover

    # The plugins are the same in each: the environment of a forked server names no other folder.
    installed = discover()
    registry.discover = lambda *, files, **options: (  # type: ignore[attr-defined]
        discover(files=files, **options) if files else installed
    )
    gc.freeze()
    # SIGINT is for the test run; the default handlers are what a new process has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    stream = channel.makefile("wb")
    running: set[int] = set()
    while True:
        size, descriptors, _, _ = socket.recv_fds(channel, 4, 1)
        if not size:
            break
        data = bytearray()
        while len(data) < int.from_bytes(size, "big"):
            data += channel.recv(int.from_bytes(size, "big") - len(data))
        request = json.loads(data)
        if "status" in request:
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                running.discard(pid)
        else:
            answer = os.fork()
            if not answer and "child" in request:
                ours = descriptors[:1]
                _be_child([request["child"], *map(str, ours)], ours, request["environment"])
            elif not answer:
                _serve(request, descriptors[0])
            running.add(answer)
        for descriptor in descriptors:
            os.close(descriptor)
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _serve(request: Any, log: int) -> NoReturn:
    """Be ``engage`` with these arguments."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in 1, 2:
            os.dup2(log, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        _begin_anew(keep={0, 1, 2})
        asyncio.create_subprocess_exec = _fork_child  # type: ignore[assignment]
        from engage.cli import main

        main(request["arguments"], prog_name="engage")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _begin_anew(*, keep: set[int]) -> None:
    """Give up what a new process would not have: descriptors, temporary folder, random numbers."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    # An object of the other process must not close a descriptor that this one opens.
    gc.freeze()
    tempfile.tempdir = None
    random.seed()


def _end(status: int) -> NoReturn:
    """End, without what the other process would do at its end."""
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


class _Child:
    """The part of :class:`asyncio.subprocess.Process` that the supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._watch = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._watch, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watch)
        os.close(self._watch)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


async def _fork_child(
    *arguments: str, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
) -> _Child:
    """Fork what :func:`engage.server.children.start_child` would start."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(arguments[arguments.index("engage.server.child") + 1 :], pass_fds, env)
    return _Child(pid)


def _be_child(arguments: Sequence[str], keep: Sequence[int], env: Mapping[str, str]) -> NoReturn:
    """Be a worker, a loader, the console or the helper process."""
    status = 1
    try:
        kind, *descriptors = arguments
        # What `ps` shows; tests find the processes of a server by it.
        Path("/proc/self/comm").write_text(f"engage-{kind}")
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(None)
        os.environ.clear()
        os.environ.update(env)
        _begin_anew(keep={0, 1, 2, *keep})
        # The library chooses between memory and files when it is imported.
        from prometheus_client import values

        values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
        from engage.server import child

        status = child.main(*map(int, descriptors))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)
