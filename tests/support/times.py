# SPDX-License-Identifier: Apache-2.0
"""The clocks of a machine, as a test wants them."""

from __future__ import annotations

from engage.pipeline.clock import Clock

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class Times:
    """A system's clock, and one that cannot be set; both in milliseconds."""

    def __init__(self, now: int) -> None:
        self.wall = now
        self.elapsed = 12_345

    def pass_(self, milliseconds: int) -> None:
        """Let time pass."""
        self.wall += milliseconds
        self.elapsed += milliseconds

    def step(self, milliseconds: int) -> None:
        """Set the system's clock."""
        self.wall += milliseconds

    def clock(self) -> Clock:
        """Return a clock of engage."""
        return Clock(lambda: self.wall * 1_000_000, lambda: self.elapsed * 1_000_000)
