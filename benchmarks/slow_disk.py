# SPDX-License-Identifier: Apache-2.0
"""A disk that can be made slow for the processes of one server, and for no others.

A small library (``slow_disk.c``) is preloaded into these processes: it delays the system calls with
which SQLite writes and syncs its files. It is compiled when it is needed.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("slow_disk.c")
_STATE = struct.Struct("=qqq")


class SlowDisk:
    """The disk of the processes that have its environment.

    :param folder: for the library and its state.
    :raises SystemExit: if there is no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        if shutil.which("cc") is None:
            raise SystemExit("a C compiler is needed (Debian: apt-get install gcc libc6-dev)")
        library, state = folder / "slow_disk.so", folder / "slow_disk"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True
        )
        state.write_bytes(bytes(_STATE.size))
        with state.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STATE.size)
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "SLOW_DISK": str(state),
        }

    def set(self, sync: float, write: float) -> None:
        """Make the disk slow; with 0, as fast as it is.

        :param sync: seconds that each fsync takes longer.
        :param write: seconds that each write of a page takes longer.
        """
        self._map[:16] = struct.pack("=qq", round(sync * 1e6), round(write * 1e6))

    @property
    def delayed(self) -> int:
        """The number of calls that were delayed so far."""
        return int(_STATE.unpack(self._map[:])[2])
