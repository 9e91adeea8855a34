# SPDX-License-Identifier: Apache-2.0
"""Which processes are alive, who started one, and who has a connection, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(pid: int) -> set[int]:
    """Return the ids of the living processes that ``pid`` started."""
    found: set[int] = set()
    # A child belongs to the thread that started it.
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, thread.read_text().split()))
    return {child for child in found if alive(child)}


def descendants(pid: int) -> set[int]:
    """Return the ids of the living processes that ``pid`` started, and of their descendants."""
    found = children(pid)
    for child in tuple(found):
        found |= descendants(child)
    return found


def holder(pids: Iterable[int], local_port: int) -> int | None:
    """Return which of the processes has the other end of a connection over 127.0.0.1.

    :param local_port: the client's port.
    :return: ``None`` if none has accepted the connection yet.
    """
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == local_port:
            inodes.add(f"socket:[{fields[9]}]")
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor) in inodes:
                    return pid
    return None
