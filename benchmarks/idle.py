# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/idle.py``: measures the cost of open connections that send nothing.

Each connection sends one request and then stays open, as the connections of SDKs and of load
balancers do. The speed of 32 other connections is measured in turns, with and without idle ones.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import resource
import socket
import statistics
import sys
from collections.abc import Iterator

import report
import run
import servers
import usage
from load import Case
from report import Goal

#: Connections of one address of this machine. All of 127.0.0.0/8 is this machine, and each address
#: has ports for about 28,000 connections to one server.
_PER_ADDRESS = 10_000
#: Descriptors that a process needs beside those of the connections.
_SPARE = 1000
#: The part of the rate without idle connections that counts as unchanged.
UNCHANGED = 0.95
#: The connections that send events at the same time, and the events per request.
CASE = Case(32, 1)


@dataclasses.dataclass
class Figures:
    """The measurements: one value for each round."""

    alone: list[run.Sample] = dataclasses.field(default_factory=list)
    beside: list[run.Sample] = dataclasses.field(default_factory=list)
    #: Bytes of memory that the workers need for each idle connection.
    bytes: list[float] = dataclasses.field(default_factory=list)
    #: Idle connections that the server closed.
    closed: int = 0


@contextlib.contextmanager
def connections(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Open connections that have sent one request each; close them at the end."""
    port = int(url.rpartition(":")[2])
    request = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    opened: list[socket.socket] = []
    try:
        for number in range(count):
            sock = socket.socket()
            opened.append(sock)
            sock.settimeout(30)
            if sys.platform == "linux":
                sock.bind((f"127.0.0.{2 + number // _PER_ADDRESS}", 0))
            sock.connect(("127.0.0.1", port))
            sock.sendall(request)
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += sock.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
        yield opened
    finally:
        for sock in opened:
            sock.close()


def is_closed(sock: socket.socket) -> bool:
    """Return whether the server has closed a connection whose answer was read."""
    sock.setblocking(False)
    try:
        while received := sock.recv(4096):
            # The rest of the answer.
            del received
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def workers_memory(running: servers.Running) -> int:
    """Return the proportional memory of all workers in bytes."""
    found = (usage.memory(pid) for pid, role in running.roles().items() if role == "worker")
    return sum(one.pss for one in found if one is not None)


def measure(figures: Figures, count: int, workers: int, how: run.Load) -> None:
    """Measure two new servers, the first without and the second with idle connections."""
    limits = f"max_connections = {count + _SPARE}\nidle_timeout = 3600\n"
    with servers.engage(workers=workers, server=limits) as running:
        figures.alone.append(how.measure(running, CASE))
    with servers.engage(workers=workers, server=limits) as running:
        with connections(running.url, 2 * workers):
            before = workers_memory(running)
        with connections(running.url, count) as opened:
            figures.bytes.append((workers_memory(running) - before) / count)
            figures.beside.append(how.measure(running, CASE))
            figures.closed += sum(map(is_closed, opened))


def raise_limit(count: int) -> None:
    """Let this process, and those that it starts, have this number of open files.

    :raises SystemExit: if this user may not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(hard, count)))
    except (ValueError, OSError):
        raise SystemExit(
            f"{count} open files are needed; this user may have {hard} (`ulimit -Hn`)"
        ) from None


def main() -> int:
    """Measure and print; return 1 if a request failed or a connection was closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000, help="idle connections")
    run.add_arguments(parser, rounds=3)
    parser.add_argument("--workers", type=int, default=2, help="processes of engage")
    arguments = parser.parse_args()
    count = arguments.connections
    raise_limit(count + _SPARE)
    run.print_head(arguments, f"{arguments.workers} worker(s)")
    figures = Figures()
    how = run.Load(arguments.tool, arguments.seconds)
    for _ in range(arguments.rounds):
        measure(figures, count, arguments.workers, how)
    bases = [sample.result.requests_per_second for sample in figures.alone]
    alone, beside = run.Row.of(figures.alone, bases), run.Row.of(figures.beside, bases)
    columns = ["idle connections", "connections", "events per request", "requests/s", "events/s"]
    columns += ["p50 ms", "p99 ms", "ratio to without", *report.CPU_COLUMNS]
    report.print_table(columns, [alone.cells("0", CASE), beside.cells(f"{count:,}", CASE)])
    size = statistics.median(figures.bytes)
    print(f"\nmemory for each idle connection: {size / 1024:.1f} KiB in the worker")
    name = f"{CASE.name} beside idle connections: ratio to without"
    report.print_goals([Goal(name, beside.ratio, UNCHANGED, at_least=True)])
    bad = sum(sample.result.bad for sample in [*figures.alone, *figures.beside])
    if bad:
        print(f"\n{bad} requests failed")
    if figures.closed:
        print(f"\nthe server closed {figures.closed} idle connections")
    return 1 if bad or figures.closed else 0


if __name__ == "__main__":
    servers.run_main(main)
