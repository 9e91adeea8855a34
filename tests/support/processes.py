# SPDX-License-Identifier: Apache-2.0
"""Looking at processes, by what Linux shows in /proc."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(pid: int) -> set[int]:
    """Ids of the living processes that ``pid`` started."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {child for child in map(int, text.split()) if alive(child)}


def descendants(pid: int) -> set[int]:
    """Ids of the living processes that ``pid`` started, and of those that these started …"""
    found = children(pid)
    for child in tuple(found):
        found |= descendants(child)
    return found
