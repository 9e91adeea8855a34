# SPDX-License-Identifier: Apache-2.0
"""What a power cut leaves of files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_folder"]


def sync_folder(folder: Path) -> None:
    """Make the names of the files in a folder durable: those of new, replaced and deleted ones.

    :raises OSError: if that is not possible.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
