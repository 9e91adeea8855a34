# SPDX-License-Identifier: Apache-2.0
"""What another process uses, from Linux's ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: Where the fields are in ``/proc/PID/stat``, counted from the one after the name (proc(5)).
_USER, _SYSTEM, _RESIDENT = 11, 12, 21


def writer_gauges(pid: int) -> Mapping[str, float]:
    """Return the gauges of a writer process: its memory, its processor time and its id.

    :param pid: its id as this process sees it.
    :return: nothing if the process has ended, and where there is no ``/proc``.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        ticks = int(fields[_USER]) + int(fields[_SYSTEM])
        return {
            "writer_memory_bytes": int(fields[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE"),
            "writer_cpu_seconds": ticks / os.sysconf("SC_CLK_TCK"),
            "writer_process_pid": pid,
        }
    except (OSError, ValueError, IndexError):
        return {}
