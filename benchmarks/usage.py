# SPDX-License-Identifier: Apache-2.0
"""The CPU time and the memory of each process of a server, from Linux's /proc."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.processes import descendants
from support.server_process import Server

_TICKS = os.sysconf("SC_CLK_TCK")

#: Process id → ``supervisor``, ``worker``, ``writer``, ``console`` or ``other``.
Roles = Mapping[int, str]


def roles(server: Server) -> Roles:
    """Return the processes of a running server.

    The process that writes to SQLite may be that of another server, or a command. It is found
    because it has the store open.
    """
    if server.process is None:
        return {}
    supervisor = server.process.pid
    workers, consoles = server.workers(), server.consoles()
    found = {supervisor: "supervisor"}
    for pid in sorted(descendants(supervisor) | holders(server.database)):
        if pid in workers:
            found[pid] = "worker"
        elif pid in consoles:
            found[pid] = "console"
        elif pid != supervisor:
            found[pid] = "writer" if "engage.server.child helper" in _command(pid) else "other"
    return found


def holders(path: Path) -> set[int]:
    """Return the processes that have a file open whose path begins with ``path``.

    These are the processes that use the store at ``path``, its log or its lock; this process is
    left out.
    """
    start = os.path.realpath(path)
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        # A process of another user, or one that has just ended, cannot be examined.
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(start):
                        found.add(int(process.name))
                        break
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Meter:
    """Measures the CPU time of each process while the ``with`` block runs.

    :param find: returns the processes.
    """

    def __init__(self, find: Callable[[], Roles]) -> None:
        self._find = find
        #: Role → the CPU seconds of each process of this role.
        self.seconds: dict[str, list[float]] = {}

    def __enter__(self) -> Self:
        self._before = {pid: cpu_seconds(pid) for pid in self._find()}
        return self

    def __exit__(self, *_: object) -> None:
        for pid, role in sorted(self._find().items()):
            used = cpu_seconds(pid) - self._before.get(pid, 0.0)
            self.seconds.setdefault(role, []).append(used)

    def per(self, count: int) -> dict[str, list[float]]:
        """Return the microseconds of CPU time per request or event, by role, busiest first.

        :param count: the number of requests or events.
        """
        return {
            role: sorted((one * 1e6 / max(count, 1) for one in seconds), reverse=True)
            for role, seconds in self.seconds.items()
        }


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a process in bytes."""

    #: Resident: all that is in memory, shared or not.
    rss: int
    #: Proportional: a page that n processes share counts as 1/n of a page.
    pss: int


def memory(pid: int) -> Memory | None:
    """Return the memory of a process; ``None`` if it has ended."""
    found = {}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value = line.split()[:2]
            found[name] = int(value) * 1024
        return Memory(found["Rss:"], found["Pss:"])
    except (OSError, KeyError):
        return None


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the memory of a process changed."""

    name: str
    start: Memory
    end: Memory

    @property
    def percent(self) -> float:
        """The growth of the resident memory in percent."""
        return (self.end.rss / self.start.rss - 1) * 100


class MemoryLog:
    """Records the memory of each process every few seconds while the ``with`` block runs.

    :param find: returns the processes.
    :param every: seconds between two samples.
    """

    def __init__(self, find: Callable[[], Roles], *, every: float = 5.0) -> None:
        self._find = find
        self._every = every
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._samples: dict[tuple[str, int], list[tuple[float, Memory]]] = {}
        self._seconds = 0.0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._seconds = time.monotonic() - self._start

    def _run(self) -> None:
        while True:
            at = time.monotonic() - self._start
            for pid, role in self._find().items():
                if (now := memory(pid)) is not None:
                    self._samples.setdefault((role, pid), []).append((at, now))
            if self._ending.wait(self._every):
                return

    def growth(self, *, after: float = 120.0, window: float = 30.0) -> list[Growth]:
        """Return the growth of each process: medians around ``after`` and at the end.

        :param after: seconds after which the memory should not grow. A log of less than four times
            this length begins after a quarter of its length.
        :param window: seconds before and after ``after``, and before the end, that count.
        """
        after = min(after, self._seconds / 4)
        window = min(window, max(after, self._every))
        found = []
        for (role, pid), samples in sorted(self._samples.items()):
            start = [one for at, one in samples if abs(at - after) <= window]
            end = [one for at, one in samples if at >= self._seconds - window]
            if not start or not end:
                continue
            found.append(Growth(f"{role} {pid}", _median(start), _median(end)))
        return found

    @property
    def incomplete(self) -> Sequence[str]:
        """The names of the processes that started or ended during it: their growth is unknown."""
        known = {growth.name for growth in self.growth()}
        return [name for role, pid in self._samples if (name := f"{role} {pid}") not in known]


def _median(samples: Sequence[Memory]) -> Memory:
    return Memory(
        round(statistics.median(one.rss for one in samples)),
        round(statistics.median(one.pss for one in samples)),
    )


def drop_cache(path: Path) -> None:
    """Remove a file, and those beside it whose names begin with its name, from the page cache."""
    for one in path.parent.glob(path.name + "*"):
        if one.is_file():
            descriptor = os.open(one, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
