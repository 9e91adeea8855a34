# SPDX-License-Identifier: Apache-2.0
"""Times as the server writes them."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Final

__all__ = ["render_time"]

_EPOCH_ORDINAL: Final = datetime(1970, 1, 1, tzinfo=UTC).toordinal()


def render_time(milliseconds: int) -> str:
    """Write a time as it stands in stored events and in exports.

    :param milliseconds: since 1970 UTC; of the years 1 to 9999.
    :return: RFC 3339, UTC, with milliseconds: ``2026-11-21T09:30:00.123Z``.
    """
    minute, rest = divmod(milliseconds, 60_000)
    return _render_minute(minute) + _SECONDS[rest // 1000] + _THOUSANDTHS[rest % 1000]


#: Looking a text up costs a third of making it.
_SECONDS: Final = tuple(f"{second:02d}." for second in range(60))
_THOUSANDTHS: Final = tuple(f"{part:03d}Z" for part in range(1000))


@functools.lru_cache(4096)  # events cluster in time
def _render_minute(minute: int) -> str:
    day, minutes = divmod(minute, 1440)
    date = datetime.fromordinal(_EPOCH_ORDINAL + day)
    return (
        f"{date.year:04d}-{date.month:02d}-{date.day:02d}T{minutes // 60:02d}:{minutes % 60:02d}:"
    )
