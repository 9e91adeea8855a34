# SPDX-License-Identifier: Apache-2.0
"""Which processes are alive, and which a process started, read from Linux's /proc."""

from __future__ import annotations

import contextlib
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
