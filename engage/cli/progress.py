# SPDX-License-Identifier: Apache-2.0
"""A progress bar on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self

_WIDTH: Final = 30


class Progress:
    """A bar that is shown if standard error is a terminal and the work takes over a second.

    :param noun: the counted things, in the plural.
    :param wanted: whether to show the bar at all.
    """

    def __init__(self, noun: str, *, wanted: bool = True) -> None:
        self._noun = noun
        self._on = wanted and sys.stderr.isatty()
        self._started = self._shown = time.monotonic()
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def show(self, count: int, fraction: float | None = None, *, noun: str | None = None) -> None:
        """Show the progress. It is cheap enough to call for each record.

        :param count: the number of records so far.
        :param fraction: the part of the work that is done, 0 to 1; ``None`` if it is unknown.
        :param noun: the counted things from now on. The rate begins anew with others.
        """
        if not self._on:
            return
        now = time.monotonic()
        if noun is not None and noun != self._noun:
            self._noun, self._started = noun, now
        if now - self._started < 1 or now - self._shown < 0.1:
            return
        self._shown, self._drawn = now, True
        rate = count / (now - self._started)
        self._draw(f"{count:,} {self._noun}, {rate:,.0f}/s", fraction)

    def say(self, step: str, count: int = 0) -> None:
        """Show what is done at the moment, and for how long the work has gone on.

        :param count: how many things of it are done; 0: that is not shown.
        """
        if self._on:
            seconds = time.monotonic() - self._started
            self._drawn = True
            self._draw(f"{step}{f': {count:,}' if count else ''} ({seconds:.0f} s)")

    def _draw(self, text: str, fraction: float | None = None) -> None:
        if fraction is not None:
            full = round(_WIDTH * min(1.0, max(0.0, fraction)))
            text = f"[{'#' * full}{'.' * (_WIDTH - full)}] {100 * fraction:3.0f} %  {text}"
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
