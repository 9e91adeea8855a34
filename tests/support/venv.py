# SPDX-License-Identifier: Apache-2.0
"""Virtual environments for packages that must not be installed beside engage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.cache import cached


def venv(requirements: Path) -> Path:
    """Make a virtual environment with the packages of a requirements file; return its Python."""

    def make(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, timeout=300)
        done = subprocess.run(
            [folder / "env/bin/pip", "install", "-q", "-r", requirements],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    ingredients = requirements.read_bytes() + sys.version.encode()
    return cached(f"venv-{requirements.stem}", ingredients, make) / "env/bin/python"
