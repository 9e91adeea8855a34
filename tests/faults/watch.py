# SPDX-License-Identifier: Apache-2.0
"""What the processes of a server need, and what its log says, while it runs for long."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import orjson

from faults.program import Report
from support.processes import descendants
from support.server_process import Server
from support.waiting import wait_for

_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Bytes of the log after which it is emptied: all of it has been read.
_LOG_BYTES = 32 * 1024 * 1024


class Use(NamedTuple):
    """What a process needs."""

    #: ``supervisor``, ``worker``, ``helper`` or ``console``.
    kind: str
    #: Resident memory, in bytes.
    rss: int
    descriptors: int


def usage(server: Server) -> dict[int, Use]:
    """Return what each process of a server needs now."""
    assert server.process is not None
    parent = server.process.pid
    found = {}
    for pid in {parent, *descendants(parent)}:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        name = "engage.server.child"
        kind = line[line.index(name) + 1] if name in line else "supervisor"
        rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        found[pid] = Use(kind, rss, len(os.listdir(f"/proc/{pid}/fd")))
    return found


def quiet(server: Server, descriptors: Mapping[int, int] | None = None) -> dict[int, Use]:
    """Wait for three seconds in which a server without clients does nothing, and return its use.

    SQLite's writer merges keys and builds filters when it has nothing else to do. A filter for 30
    million keys takes half a minute, and 60 MB until it replaces the others.

    :param descriptors: process id → how many it should have in the end.
    """
    last: list[dict[int, Use]] = []
    seconds: list[float] = []

    def settled() -> bool:
        last.append(usage(server))
        seconds.append(sum(map(_processor_seconds, last[-1])))
        if any(one != last[-1] for one in last[-150:]) or len(last) < 150:
            return False
        if seconds[-1] - seconds[-150] > 0.5:
            return False
        now = {pid: use.descriptors for pid, use in last[-1].items()}
        return descriptors is None or now == descriptors

    with contextlib.suppress(AssertionError):
        wait_for(settled, deadline=180)
    return last[-1]


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def copy_a_log(server: Server) -> None:
    """Make SQLite's log so long that it is copied: the writer opens files for it, for good."""
    large = {
        "type": "track",
        "userId": "large",
        "event": "Large",
        "properties": {"a": "x" * 25_000},
    }
    opened = max(use.descriptors for use in usage(server).values() if use.kind == "helper")

    def copied() -> bool:
        assert server.post("/v1/batch", {"batch": [large] * 35}).json()["accepted"] == 35
        now = (use.descriptors for use in usage(server).values() if use.kind == "helper")
        return max(now) >= opened + 2

    wait_for(copied, what="a checkpoint")


def describe(uses: Mapping[int, Use]) -> str:
    """Return the use of each process as text."""
    return ", ".join(
        f"{use.kind} {use.rss / 2**20:.1f} MiB {use.descriptors} descriptors"
        for _, use in sorted(uses.items())
    )


def judge(report: Report, before: Use, after: Use | None, growth: int) -> None:
    """Report a process that died, or that has not released something.

    :param growth: how many bytes of memory more it may have.
    """
    if after is None:
        report.fail(f"a {before.kind} died")
        return
    if after.descriptors != before.descriptors:
        report.fail(f"{before.kind}: {before.descriptors} descriptors, then {after.descriptors}")
    if after.rss > before.rss + growth:
        grown, most = (after.rss - before.rss) / 2**20, growth / 2**20
        report.fail(f"{before.kind}: {grown:.1f} MiB more memory than before; {most:.1f} may be")


def verify(server: Server, report: Report) -> None:
    """Let ``engage verify`` look at the store while the server runs."""
    command = [
        *(sys.executable, "-m", "engage", "verify"),
        "--json",
        "--config",
        str(server.config),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        report.fail(
            f"engage verify: {result.returncode}: {result.stdout[-4000:]}{result.stderr[-500:]}"
        )
    else:
        report.say(f"engage verify: {result.stdout.strip()[:500]}")


class LogReader:
    """Reads the log of a server that runs, and empties it from time to time."""

    def __init__(self, server: Server) -> None:
        self._path = server.log_path
        self._at = self._path.stat().st_size
        self._rest = b""
        #: (operation, status, code of the error) → requests.
        self.requests: collections.Counter[tuple[str, int, str]] = collections.Counter()
        #: Lines of errors, and what is not in the format of the log.
        self.wrong: list[str] = []

    def read(self) -> None:
        """Read what is new."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._note(line)
        if self._at > _LOG_BYTES and not self._rest:
            # Lines that come at this moment are lost; the server appends after them.
            os.truncate(self._path, 0)
            self._at = 0

    def _note(self, line: bytes) -> None:
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError:
            fields = {}
        if "route" in fields:
            key = fields["route"], fields["status"], fields.get("code") or ""
            self.requests[key] += 1
        if not fields or fields["level"] in ("error", "critical") or b"Traceback" in line:
            self.wrong.append(line.decode("utf-8", "replace")[:4000])
