# SPDX-License-Identifier: Apache-2.0
"""Shows the text of strangers to people: in a page of the console, and in a terminal."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["LONGEST", "cell", "one_line", "visible"]

#: Characters of a cell of a table.
LONGEST: Final = 140

#: C0 and C1 control characters, and characters that reorder or hide text: bidi marks, embeddings
#: and isolates, zero-width and line-separating characters, the byte order mark, tags. A joiner is
#: part of the spelling after a letter of Hebrew and the scripts behind it, or after an emoji.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e0fff]|(?<![\u0590-\u1fff\u2100-\U0010ffff])[\u200c\u200d]"
)


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


def one_line(text: str, length: int) -> str:
    """Return the beginning of a text on one line.

    :param length: characters.
    """
    text = " ".join(text[: length * 2].split())
    return text if len(text) <= length else text[: length - 1] + "…"


def cell(text: str) -> str:
    """Return the beginning of a text for a cell of a table: escaped, on one line."""
    # Escaping makes a text only longer, and hundreds of long ones are shown at once.
    return one_line(visible(text[: LONGEST * 2]), LONGEST)
