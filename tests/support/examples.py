# SPDX-License-Identifier: Apache-2.0
"""The plugins that the pages of docs/ build, installed with pip as separate distributions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.cache import cached

TESTS = Path(__file__).resolve().parents[1]


def install(name: str) -> Path:
    """Install an example, and return the folder to put on the path.

    :param name: the folder of its sources in ``tests/``, such as ``example_log``.
    """
    sources = TESTS / name
    ingredients = b"".join(path.read_bytes() for path in sorted(sources.glob("*.*")))

    def make(folder: Path) -> None:
        source = folder / "source"  # a build leaves folders beside the sources
        shutil.copytree(sources, source, ignore=shutil.ignore_patterns("__pycache__", "build"))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run(folder, *pip, "--no-deps", "--target", str(folder / "site"), str(source))

    return cached(name.replace("_", "-"), ingredients, make) / "site"


def run(folder: Path, *arguments: str, path: Path | None = None, seconds: float = 300) -> str:
    """Run a process that must succeed, and return what it writes.

    :param path: a folder to put on the path of Python.
    """
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def engage(folder: Path, *arguments: str, path: Path) -> str:
    """Run a command of ``engage`` that must succeed, and return what it writes."""
    return run(folder, sys.executable, "-m", "engage", *arguments, path=path)


def check_conformance(folder: Path, test: str, path: Path) -> None:
    """Run the test of an example in an empty folder.

    :param test: the path of the test in ``tests/``.
    """
    shutil.copy(TESTS / test, folder)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert " passed" in run(folder, *pytest, Path(test).name, path=path)
