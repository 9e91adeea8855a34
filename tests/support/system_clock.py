# SPDX-License-Identifier: Apache-2.0
"""The clock of a machine, which is set while a server runs."""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

SHIM = Path(__file__).with_name("fake_clock.c")


class SystemClock:
    """The clock of the servers that have its environment."""

    def __init__(self, folder: Path) -> None:
        library, offset = folder / "fake_clock.so", folder / "offset"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True)
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(offset)}

    def set(self, seconds: int) -> None:
        """Set the clock ahead of the right time; a negative number sets it back."""
        self._map[:] = struct.pack("=q", seconds)
