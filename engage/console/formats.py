# SPDX-License-Identifier: Apache-2.0
"""How templates show values: text of strangers, times, numbers, sizes."""

from __future__ import annotations

import datetime
import re
from typing import Final

__all__ = ["clock", "compact", "iso", "number", "percent", "plural", "size", "visible"]

#: C0 and C1 control characters, and characters that reorder or hide text: bidi marks, embeddings
#: and isolates, zero-width and line-separating characters, the byte order mark, tags.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)
#: The first and the last millisecond of the years 1 and 9999.
EARLIEST: Final = -62_135_596_800_000
LATEST: Final = 253_402_300_799_999


def visible(text: object, *, lines: bool = False) -> str:
    """Escape the characters of a text that change how the rest of it is shown.

    :param text: a string; any other value is converted to one.
    :param lines: whether line feeds stay, as in JSON that is printed on several lines.
    :return: the text with each control or bidi character as ``\\uXXXX``, the escape of JSON: a JSON
        text keeps its meaning. The text is not escaped for HTML; templates do that.
    """

    def escaped(match: re.Match[str]) -> str:
        if lines and match[0] == "\n":
            return "\n"
        code = ord(match[0])
        if code > 0xFFFF:
            code -= 0x10000
            return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
        return f"\\u{code:04x}"

    return _UNSAFE.sub(escaped, str(text))


def _moment(milliseconds: int) -> datetime.datetime:
    """Return a time; the nearest one with a year of four digits if there is no such year."""
    within = min(max(milliseconds, EARLIEST), LATEST)
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        milliseconds=within
    )


def iso(milliseconds: int) -> str:
    """Return a time as ``2026-11-22T12:00:00.000Z``."""
    return _moment(milliseconds).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def clock(milliseconds: int) -> str:
    """Return a time for people: ``2026-11-22 12:00:00 UTC``."""
    return f"{_moment(milliseconds):%Y-%m-%d %H:%M:%S} UTC"


def number(value: float) -> str:
    """Return a number with its thousands apart: ``41 230``."""
    return f"{value:,}".replace(",", "\u202f")


def plural(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: ``1 event``, ``2 events``.

    :param many: the noun for other counts; by default ``one`` with an ``s``.
    """
    return f"{number(count)} {one if count == 1 else many or one + 's'}"


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
            return f"{count / limit:.3g}\u202f{unit}"
    return f"{count} bytes"
