# SPDX-License-Identifier: Apache-2.0
"""How templates show values: text of strangers, times, numbers, sizes."""

from __future__ import annotations

import datetime
from typing import Final

from engage.api import MAX_TIME
from engage.monitoring.visible import LONGEST, one_line, visible

__all__ = [
    "LONGEST",
    "clock",
    "compact",
    "iso",
    "number",
    "one_line",
    "percent",
    "plural",
    "size",
    "visible",
]

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

#: Rows of a page of a list: a few screens, and one read of the store.
ROWS: Final = 50


def _moment(milliseconds: int) -> datetime.datetime:
    # A program that writes to the log or to the store can choose any number.
    return _EPOCH + datetime.timedelta(milliseconds=max(0, min(milliseconds, MAX_TIME)))


def iso(milliseconds: int) -> str:
    """Return a time as ``2026-11-22T12:00:00.000Z``."""
    return _moment(milliseconds).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def clock(milliseconds: int) -> str:
    """Return a time for people: ``2026-11-22 12:00:00 UTC``."""
    return f"{_moment(milliseconds):%Y-%m-%d %H:%M:%S} UTC"


def number(value: float) -> str:
    """Return a number with its thousands apart: ``41 230``."""
    return f"{value:,}".replace(",", "\u202f")


def plural(count: int, singular: str, many: str = "") -> str:
    """Return a count with its noun: ``1 event``, ``2 events``.

    :param many: the noun for other counts; by default ``singular`` with an ``s``.
    """
    return f"{number(count)} {singular if count == 1 else many or singular + 's'}"


def percent(part: float, whole: float) -> str:
    """Return a share: ``0.3 %``, ``12 %``."""
    share = 100 * part / whole
    return f"{share:.1g}\u202f%" if 0 < share < 1 else f"{share:.0f}\u202f%"


def span(seconds: float) -> str:
    """Return a duration in one unit: ``3 s``, ``12 min``, ``5 h``, ``3 days``."""
    for limit, unit in ((2 * 86_400, "days"), (2 * 3600, "h"), (120, "min")):
        if seconds >= limit:
            return f"{seconds // (limit // 2):.0f}\u202f{unit}"
    return f"{seconds:.0f}\u202fs"


def compact(value: float) -> str:
    """Return a number in few characters: ``41 k``."""
    for limit, unit in ((1_000_000, "M"), (1000, "k")):
        if value >= limit:
            return f"{value / limit:.3g}\u202f{unit}"
    return f"{value:g}"


def size(count: int) -> str:
    """Return a number of bytes: ``64 KiB``."""
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= limit:
            number = count / limit
            # Not 1e+03 for 1000 to 1023.
            return f"{number:{'.0f' if number >= 100 else '.3g'}}\u202f{unit}"
    return f"{count} bytes"
