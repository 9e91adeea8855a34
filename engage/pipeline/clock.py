# SPDX-License-Identifier: Apache-2.0
"""The time that the server stamps on events when it receives them.

The system's clock can be wrong: a machine without a battery starts in the past, and a bad time
source can set a clock years ahead. So this clock compares the system's clock with one that cannot
be set. It logs each step, and it has a second reading for deleting by age, which ignores steps
ahead.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Final

from engage.api import render_time

__all__ = ["Clock"]

_log = logging.getLogger(__name__)

#: Milliseconds by which the system's clock may change at once, without that being a step.
STEP_MS: Final = 120_000

# A clock that cannot be set and that goes on while the machine sleeps.
_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
_elapsed_ns: Final[Callable[[], int]] = (
    time.monotonic_ns if _BOOT is None else functools.partial(time.clock_gettime_ns, _BOOT)
)


class Clock:
    """Milliseconds since 1970 UTC. One instance for each process.

    - A step of more than two minutes, ahead or back, is logged and followed at once.
    - Otherwise the time never decreases: after a smaller step back, it stands still until the
      system's clock has caught up, so that two events without times keep their order.

    :param wall: the system's clock, in nanoseconds since 1970 UTC.
    :param elapsed: a clock in nanoseconds that cannot be set.
    """

    def __init__(
        self,
        wall: Callable[[], int] = time.time_ns,
        elapsed: Callable[[], int] = _elapsed_ns,
    ) -> None:
        self._wall = wall
        self._elapsed = elapsed
        #: The system's clock minus the one that cannot be set: now, and the least so far.
        self._offset = self._least = (wall() - elapsed()) // 1_000_000
        self._last = 0

    def __call__(self) -> int:
        """Return the current time."""
        wall, elapsed = self._wall() // 1_000_000, self._elapsed() // 1_000_000
        drift = wall - elapsed - self._offset
        self._offset += drift
        self._least = min(self._least, self._offset)
        if abs(drift) > STEP_MS:
            _log.error(
                "the system's clock was set %s by %d seconds, to %s; engage follows it%s",
                "back" if drift < 0 else "ahead",
                abs(drift) // 1000,
                render_time(max(wall, 0)),
                "" if drift < 0 else ", but does not expire records by it before the next start",
            )
            self._last = wall
        self._last = max(self._last, wall)
        return self._last

    def without_steps_ahead(self) -> int:
        """Return the current time as if the clock had not been set ahead since the start."""
        self()
        return self._elapsed() // 1_000_000 + self._least
