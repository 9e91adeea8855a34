# SPDX-License-Identifier: Apache-2.0
"""JSON text on several lines, with its values as they stand: ``1.0`` and integers beyond 2^53 stay.

The text is never decoded, only cut into tokens, so that nothing of it changes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from typing import Final

__all__ = ["Line", "json_lines", "one_line"]

_TOKEN: Final = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+)', re.DOTALL)
#: Lines of a text; the rest is one line that says so.
MAX_LINES: Final = 5000


@dataclasses.dataclass(slots=True)
class Line:
    """One line of a text."""

    #: (class, text): ``k`` a key, ``s`` a string, ``n`` another value, ``""`` punctuation.
    tokens: list[tuple[str, str]]
    #: The JSON Pointer (RFC 6901) of the value that begins in the line.
    pointer: str
    #: Whether a reason points to it.
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


def _part(key: str) -> str:
    try:
        name = str(json.loads(key))
    except ValueError:
        name = key
    return name.replace("~", "~0").replace("/", "~1")


def json_lines(text: str, marked: Collection[str] = ()) -> list[Line]:
    """Cut a JSON text into lines, two spaces for each level.

    :param text: any text; one that is not JSON is returned line by line.
    :param marked: pointers of the values whose lines are marked.
    """
    pieces = _tokens(text)
    if pieces is None or len(pieces) < 2:
        return [Line([("", line)], "") for line in text.splitlines() or [""]]
    lines = [Line([], "")]
    #: For each open container: the pointer, and the index of the current item (None: an object).
    stack: list[tuple[str, int | None]] = []
    pointer, key = "", False
    for index, piece in enumerate(pieces):
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        if piece in "}]" and stack:
            pointer = stack.pop()[0]
            if pieces[index - 1] not in "{[":
                lines.append(Line([("", "  " * len(stack))], pointer))
            lines[-1].tokens.append(("", piece))
            continue
        inner = stack[-1] if stack else None
        if inner is not None and not key and piece not in ",:":
            part = _part(piece) if inner[1] is None else str(inner[1])
            pointer = f"{inner[0]}/{part}"
            lines.append(Line([("", "  " * len(stack))], pointer, pointer in marked))
        line = lines[-1].tokens
        if piece in "{[":
            line.append(("", piece))
            stack.append((pointer, 0 if piece == "[" else None))
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
            return [*lines[:MAX_LINES], Line([("", "… the rest is not shown here")], "")]
    if "" in marked:
        lines[0].marked = True
    return lines


def one_line(text: str, length: int) -> str:
    """Return the beginning of a text on one line."""
    text = " ".join(text[: length * 2].split())
    return text if len(text) <= length else text[: length - 1] + "…"
