# SPDX-License-Identifier: Apache-2.0
"""The form and the range of stored times."""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime
from typing import Final

__all__ = ["DAY_MS", "MAX_TIME", "render_time"]

#: The members of an event that are times.
EVENT_TIMES: Final = ("timestamp", "originalTimestamp", "sentAt")
#: The last millisecond of the year 9999, since 1970 UTC: the latest time that every storage and
#: every client can hold.
MAX_TIME: Final = 253_402_300_799_999
#: A day in milliseconds.
DAY_MS: Final = 24 * 60 * 60 * 1000

_EPOCH_ORDINAL: Final = datetime(1970, 1, 1, tzinfo=UTC).toordinal()
#: The first millisecond of the year 1.
_MIN_TIME: Final = (1 - _EPOCH_ORDINAL) * DAY_MS

#: The basic format of ISO 8601.
_BASIC: Final = re.compile(r"(\d{4})(\d\d)(\d\d)(t)(\d\d)(\d\d)(\d\d)", re.ASCII | re.IGNORECASE)
#: The extended format, and what languages and people make of it.
_EXTENDED: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:([t ])((?:[01]\d|2[0-3]):[0-5]\d)(?:(:[0-5]\d|:60)(?:[.,](\d{1,9})\d*)?)?"
    r"(?: ?(?:(z|utc|gmt)|([+-](?:[01]\d|2[0-3]))(?::?([0-5]\d))?))?)?",
    re.ASCII | re.IGNORECASE,
)


def render_time(milliseconds: int) -> str:
    """Format a time as stored events and exports have it.

    :param milliseconds: since 1970 UTC; in the years 1 to 9999.
    :return: the time in RFC 3339, in UTC, with milliseconds: ``2026-11-21T09:30:00.123Z``.
    """
    minute, rest = divmod(milliseconds, 60_000)
    return _render_minute(minute) + _SECONDS[rest // 1000] + _THOUSANDTHS[rest % 1000]


def parse_time(text: str) -> int | None:
    """Parse an RFC 3339 time.

    :param text: has this form, which is not checked. The second 60 (a leap second) is read as
        59.999.
    :return: milliseconds since 1970 UTC, rounded down, negative before 1970; ``None`` if the time
        does not exist or is outside the years 1 to 9999 in UTC.
    """
    try:
        moment = datetime.fromisoformat(text)
    except TypeError:
        return None
    except ValueError:
        text = text.upper()  # fromisoformat does not accept a lower-case z
        if text[17:19] == "60":
            text = text[:17] + "59.999" + text[19:].lstrip(".0123456789")
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            return None
    zone = moment.tzinfo
    if zone is None:
        return None
    days = moment.toordinal() - _EPOCH_ORDINAL
    seconds = moment.hour * 3600 + moment.minute * 60 + moment.second
    milliseconds = days * DAY_MS + seconds * 1000 + moment.microsecond // 1000
    # For Z, ``fromisoformat`` uses this object; calling ``utcoffset`` would only take time.
    offset = None if zone is UTC else moment.utcoffset()
    if offset:
        milliseconds -= (offset.days * 86400 + offset.seconds) * 1000
    return milliseconds if _MIN_TIME <= milliseconds <= MAX_TIME else None


def standard_time(text: str) -> str | None:
    """Return a time in RFC 3339; one that has this form already is returned as it is.

    Clients write other forms of ISO 8601, and digits of the language of the device. A time without
    a zone is UTC, and a date is its first second. Digits of a second beyond nine are cut.

    :return: ``None`` for any other text. The day may not exist: see :func:`parse_time`.
    """
    if len(text) > 64:
        return None
    if not text.isascii():
        # Digits of several scripts in one time would be a guess.
        if len({ord(sign) - int(sign) for sign in text if sign.isdecimal()}) != 1:
            return None
        text = "".join(str(int(sign)) if sign.isdecimal() else sign for sign in text)
    if "-" not in text[:8]:
        text = _BASIC.sub(r"\1-\2-\3\4\5:\6:\7", text, count=1)
    match = _EXTENDED.fullmatch(text)
    if match is None:
        return None
    date, between, minute, second, fraction, zone, hours, minutes = match.groups()
    if between in (None, " "):
        between = "T"
    if zone not in ("z", "Z"):
        zone = "Z" if hours is None else f"{hours}:{minutes or '00'}"
    fraction = "" if fraction is None else f".{fraction}"
    return f"{date}{between}{minute or '00:00'}{second or ':00'}{fraction}{zone}"


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
