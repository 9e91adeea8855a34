# SPDX-License-Identifier: Apache-2.0
"""The form and the range of stored times."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Final

__all__ = ["DAY_MS", "MAX_TIME", "render_time"]

#: The last millisecond of the year 9999, since 1970 UTC: the latest time that every storage and
#: every client can hold.
MAX_TIME: Final = 253_402_300_799_999
#: A day in milliseconds.
DAY_MS: Final = 24 * 60 * 60 * 1000

_EPOCH_ORDINAL: Final = datetime(1970, 1, 1, tzinfo=UTC).toordinal()


def render_time(milliseconds: int) -> str:
    """Format a time as stored events and exports have it.

    :param milliseconds: since 1970 UTC; in the years 1 to 9999.
    :return: the time in RFC 3339, in UTC, with milliseconds: ``2026-11-21T09:30:00.123Z``.
    """
    minute, rest = divmod(milliseconds, 60_000)
    return _render_minute(minute) + _SECONDS[rest // 1000] + _THOUSANDTHS[rest % 1000]


#: Looking up a text takes a third of the time of formatting it.
_SECONDS: Final = tuple(f"{second:02d}." for second in range(60))
_THOUSANDTHS: Final = tuple(f"{part:03d}Z" for part in range(1000))


@functools.lru_cache(4096)  # most events have a time near that of the others
def _render_minute(minute: int) -> str:
    day, minutes = divmod(minute, 1440)
    date = datetime.fromordinal(_EPOCH_ORDINAL + day)
    return (
        f"{date.year:04d}-{date.month:02d}-{date.day:02d}T{minutes // 60:02d}:{minutes % 60:02d}:"
    )
