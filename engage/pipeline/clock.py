# SPDX-License-Identifier: Apache-2.0
"""The time that the server stamps on what it receives.

The system's clock can be wrong: a machine without a battery starts in the past, and a bad time
source can set a clock years ahead. Events that are stamped with a time in the future win over all
later ones, and retention deletes by time. So this clock compares the system's clock with one that
cannot be set, and does not follow a step ahead until the new time has held for a while.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Final

from engage.api import render_time

__all__ = ["STEP_MS", "Clock"]

_log = logging.getLogger(__name__)

#: Milliseconds by which the system's clock may change at once, without that being a step.
STEP_MS: Final = 120_000
#: Milliseconds for which a time after a step ahead must hold before it is taken over.
STABLE_MS: Final = 600_000
#: Milliseconds since the last call within which a call does not look at the other clock.
_NEAR_MS: Final = 1000
#: 2026-01-01, a time before this version was made: a clock that shows less was never set, and a
#: step ahead from there sets it right.
EARLIEST_MS: Final = 1_767_225_600_000

# A clock that cannot be set and that goes on while the machine sleeps.
_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
_elapsed_ns: Final[Callable[[], int]] = (
    time.monotonic_ns if _BOOT is None else functools.partial(time.clock_gettime_ns, _BOOT)
)


class Clock:
    """Milliseconds since 1970 UTC. One instance for each process.

    - A step ahead of more than two minutes is logged. The clock goes on as if the step had not
      happened, and follows when the system's clock has kept the new time for ten minutes.
    - A step back of more than two minutes is logged, and followed at once.
    - Otherwise the time never decreases: it stands still until the system's clock has caught up.

    :param wall: the system's clock, in nanoseconds since 1970 UTC.
    :param elapsed: a clock in nanoseconds that cannot be set.
    """

    #: Milliseconds by which two clocks may differ.
    step_ms = STEP_MS

    def __init__(
        self,
        wall: Callable[[], int] = time.time_ns,
        elapsed: Callable[[], int] = _elapsed_ns,
    ) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._started = self._changed = elapsed() // 1_000_000
        #: The system's clock minus the one that cannot be set.
        self._offset = wall() // 1_000_000 - self._started
        self._last = 0
        #: After a step ahead: the offset of the new time, and since when it holds.
        self._ahead: tuple[int, int] | None = None
        #: Whether the system's clock made a step since the start.
        self.stepped = False

    def __call__(self) -> int:
        """Return the current time."""
        now = self._wall() // 1_000_000
        if 0 <= now - self._last <= _NEAR_MS and self._ahead is None:
            # Most calls: a step would show without the other clock.
            self._last = now
            return now
        elapsed = self._elapsed() // 1_000_000
        drift = now - elapsed - self._offset
        if -STEP_MS <= drift <= STEP_MS:
            self._offset += drift
            if self._ahead is not None:
                self._ahead = None
                self._changed = elapsed
                _log.warning("the system's clock is right again")
        else:
            now = self._after_step(now, elapsed, drift)
        if now > self._last:
            self._last = now
        return self._last

    @property
    def steady_seconds(self) -> float:
        """Seconds since the last step, or since the start if there was none."""
        self()
        return (self._elapsed() // 1_000_000 - self._changed) / 1000

    @property
    def disputed(self) -> int | None:
        """The system's time in milliseconds, while this clock does not follow it."""
        self()
        return None if self._ahead is None else self._wall() // 1_000_000

    def _after_step(self, now: int, elapsed: int, drift: int) -> int:
        """Return the time after the system's clock was set.

        :param now: what the system's clock shows.
        :param elapsed: what the clock that cannot be set shows.
        :param drift: by how much the system's clock is ahead of what was expected.
        """
        before = elapsed + self._offset
        if drift < 0 or before < EARLIEST_MS:
            self._follow(now, elapsed)
            _log.error(
                "the system's clock was set %s by %d seconds, to %s; engage follows it",
                "back" if drift < 0 else "ahead",
                abs(drift) // 1000,
                render_time(max(now, 0)),
            )
            return now
        if self._ahead is None or abs(now - elapsed - self._ahead[0]) > STEP_MS:
            self._ahead = now - elapsed, elapsed
            self._changed = elapsed
            self.stepped = True
            _log.error(
                "the system's clock was set ahead by %d seconds, to %s; engage goes on from %s "
                "until the new time has held for %d minutes",
                drift // 1000,
                render_time(now),
                render_time(before),
                STABLE_MS // 60_000,
            )
        elif elapsed - self._ahead[1] >= STABLE_MS:
            self._follow(now, elapsed)
            _log.error(
                "the system's clock has been ahead by %d seconds for %d minutes; engage follows it,"
                " to %s",
                drift // 1000,
                STABLE_MS // 60_000,
                render_time(now),
            )
            return now
        return before

    def _follow(self, now: int, elapsed: int) -> None:
        self._offset = now - elapsed
        self._last = now
        self._ahead = None
        self._changed = elapsed
        self.stepped = True
