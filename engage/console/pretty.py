# SPDX-License-Identifier: Apache-2.0
"""JSON text on several lines, with its values as they stand: ``1.0`` and integers beyond 2^53 stay.

The text is never decoded, only cut into tokens, so that nothing of it changes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Final

from engage.console.pointers import Place, deepest, places

__all__ = ["Line", "json_lines", "one_line"]

_TOKEN: Final = re.compile(
    r'\s*("[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],:]|[^\s{}\[\],:"]+)', re.DOTALL
)
#: Lines of a text; the rest is one line that says so.
MAX_LINES: Final = 5000


@dataclasses.dataclass(slots=True)
class Line:
    """One line of a text."""

    #: (class, text): ``k`` a key, ``s`` a string, ``n`` another value, ``""`` punctuation.
    tokens: list[tuple[str, str]]
    #: Whether a reason points to the value that begins in the line.
    marked: bool = False


def _tokens(text: str) -> list[str] | None:
    found, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        found.append(match[1])
        place = match.end()
    return found


def json_lines(text: str, marked: Collection[str] = ()) -> list[Line]:
    """Cut a JSON text into lines, two spaces for each level.

    :param text: any text; one that is not JSON is returned line by line.
    :param marked: pointers (RFC 6901) of the values whose lines are marked. If the text has no such
        value, that is its nearest parent; the first line is never marked.
    """
    pieces = _tokens(text)
    if pieces is None or len(pieces) < 2:
        return [Line([("", line)]) for line in text.splitlines() or [""]]
    lines = [Line([])]
    root = places(marked)
    root.found(0)
    #: For each open container: its place, and the index of the current item (None: an object).
    stack: list[tuple[Place | None, int | None]] = []
    place: Place | None = root
    key = False
    for index, piece in enumerate(pieces):
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        if piece in "}]" and stack:
            stack.pop()
            if pieces[index - 1] not in "{[":
                lines.append(Line([("", "  " * len(stack))]))
            lines[-1].tokens.append(("", piece))
            continue
        inner = stack[-1] if stack else None
        if inner is not None and not key and piece not in ",:":
            place = inner[0]
            if place is not None:
                place = place.member(piece) if inner[1] is None else place.item(inner[1])
            if place is not None:
                place.found(len(lines))
            lines.append(Line([("", "  " * len(stack))]))
        line = lines[-1].tokens
        if piece in "{[":
            line.append(("", piece))
            stack.append((place, 0 if piece == "[" else None))
            key = False
        elif piece == ":":
            line.append(("", ": "))
            key = True
        elif piece == ",":
            line.append(("", ","))
            key = False
            if inner is not None and inner[1] is not None:
                stack[-1] = (inner[0], inner[1] + 1)
        else:
            kind = "k" if following == ":" and not key else "s" if piece[0] == '"' else "n"
            line.append((kind, piece))
            key = False
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [Line([("", "… the rest is not shown here")])]
            break
    for pointer in marked:
        line_number = deepest(root, pointer).line
        if line_number and line_number < MAX_LINES:
            lines[line_number].marked = True
    return lines


def one_line(text: str, length: int) -> str:
    """Return the beginning of a text on one line."""
    text = " ".join(text[: length * 2].split())
    return text if len(text) <= length else text[: length - 1] + "…"
