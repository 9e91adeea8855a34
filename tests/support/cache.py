# SPDX-License-Identifier: Apache-2.0
"""Keep what tests install or build once, in ``.cache/`` of the project; one process makes it."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

#: Survives between runs; deleting it is always safe.
CACHE = Path(__file__).resolve().parents[2] / ".cache"


def _folder(name: str, ingredients: bytes) -> Path:
    return CACHE / f"{name}-{hashlib.sha256(ingredients).hexdigest()[:12]}"


def is_cached(name: str, ingredients: bytes) -> bool:
    """Return whether :func:`cached` has made a folder before."""
    return (_folder(name, ingredients) / ".made").exists()


def cached(name: str, ingredients: bytes, make: Callable[[Path], None]) -> Path:
    """Make a folder once for all test processes and runs.

    :param name: the beginning of the folder's name.
    :param ingredients: what it is made of; when they change, it is made again.
    :param make: fills an empty folder. If it raises, nothing is kept.
    :return: the filled folder.
    """
    CACHE.mkdir(exist_ok=True)
    folder = _folder(name, ingredients)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".made"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                make(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            done.touch()
    return folder
