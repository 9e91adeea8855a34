# SPDX-License-Identifier: Apache-2.0
"""Runs the servers that are measured. At the end, no process and no temporary file is left."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import usage

from support.server_process import SQLITE, Server, config_text
from support.waiting import wait_for

HERE = Path(__file__).resolve().parent

#: Seconds that a process which uses the store may take to end after the server.
_END_SECONDS = 60.0
#: A server has settled if its processes together use less than this share of a core for this long.
_QUIET_SHARE, _QUIET_SECONDS = 0.04, 0.5
#: Maximum seconds to wait for that.
_SETTLE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that runs."""

    #: Without a path.
    url: str
    #: Returns its processes.
    roles: Callable[[], usage.Roles]
    #: Seconds from the start of the process until ``/readyz`` answered 200.
    started_in: float = 0.0


@contextlib.contextmanager
def tornado() -> Iterator[Running]:
    """Run the baseline, plain Tornado: see ``bare.py``."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "bare.py")],
        stdout=subprocess.PIPE,
        text=True,
        # A separate process group, so that ^C reaches this process only.
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
            yield Running(url, lambda: {process.pid: "worker"})
        finally:
            process.kill()


@contextlib.contextmanager
def engage(
    folder: Path | None = None,
    *,
    workers: int = 1,
    storage: str = SQLITE,
    server: str = "",
    config_extra: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Run engage; drain it at the end.

    :param folder: for its config, its log and its store, which stay; by default a temporary one.
    :param storage: the tables of the storage; by default SQLite in ``folder``.
    :param server: additional lines of ``[server]``.
    :param config_extra: additional tables of the config.
    :raises AssertionError: if it does not become ready; the message has its log.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="engage-bench-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
        config = config_text(
            workers=workers, storage=storage, server=server, config_extra=config_extra
        )
        process = Server(folder, config, environment=environment)
        # In this order: the server is killed, if it still runs, and then the store is free.
        stack.callback(free, process.database)
        stack.enter_context(process)
        started_in = _start(process)
        _settle(lambda: usage.roles(process), workers)
        yield Running(process.url, lambda: usage.roles(process), started_in)
        process.stop()


def _start(server: Server) -> float:
    """Start a server, and return the seconds until it was ready."""
    begin = time.perf_counter()
    process = server.launch()
    try:
        server.url = wait_for(server.listening, what="the server to listen")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        while True:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                connection.close()
                return time.perf_counter() - begin
            assert process.poll() is None, "it ended before it was ready"
            assert time.perf_counter() - begin < 600, "it did not become ready"
            time.sleep(0.01)
    except (AssertionError, OSError) as error:
        raise AssertionError(f"{error}\n{server.log()[-4000:]}") from error


def _settle(find: Callable[[], usage.Roles], workers: int) -> None:
    """Wait until all processes have started and have nothing to do.

    A server is ready when its first worker is, and it does some work in the background then.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        with usage.Meter(find) as meter:
            time.sleep(_QUIET_SECONDS)
        started = len(meter.seconds.get("worker", ())) == workers
        used = sum(value for values in meter.seconds.values() for value in values)
        if started and used < _QUIET_SHARE * _QUIET_SECONDS:
            return


def free(store: Path) -> None:
    """Wait until no process uses a store; kill those that do not end."""
    deadline = time.monotonic() + _END_SECONDS
    while left := usage.holders(store):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts its background jobs in this way.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark and exit with its status.

    ^C and SIGTERM end its processes and delete its files.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
