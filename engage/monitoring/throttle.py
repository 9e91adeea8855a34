# SPDX-License-Identifier: Apache-2.0
"""Limits how often a line is logged whose reason may occur many times a second."""

from __future__ import annotations

import math
import time
from typing import Final

__all__ = ["Throttle"]

#: Seconds between two lines about the same trouble: often enough to be seen in any window of a log.
LINE_SECONDS: Final = 60.0


class Throttle:
    """Lets one line through in a while, and counts the others.

    :param seconds: between two lines.
    """

    def __init__(self, seconds: float = LINE_SECONDS) -> None:
        self._seconds = seconds
        self._logged_at = -math.inf
        self._skipped = 0

    def __call__(self) -> str | None:
        """Return the end of the line, which says how many were left out; ``None``: log no line."""
        now = time.monotonic()
        if now < self._logged_at + self._seconds:
            self._skipped += 1
            return None
        self._logged_at = now
        skipped, self._skipped = self._skipped, 0
        return f"; {skipped} more since the last line" if skipped else ""
