# SPDX-License-Identifier: Apache-2.0
"""JSON as text: on several lines, and the lines in which the values of JSON pointers begin.

The text is only cut into pieces, never decoded and written again, so that nothing of it changes:
``1.10``, ``1e400`` and integers of 20 digits stay as they are.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Final

from engage.pipeline.replay import MAX_SHOWN

__all__ = ["Line", "json_lines", "places_of"]

_STRING: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
#: A piece of a valid JSON text: a key, a string, another value, or punctuation.
_PIECE: Final = re.compile(
    rf'(?P<k>{_STRING}(?=\s*:))|(?P<s>{_STRING})|(?P<n>[^\s{{}}\[\],:"]+)|[{{}}\[\],:]', re.DOTALL
)
#: Lines of a text, so that a browser can show it; the rest is one line that says so, as it is
#: beyond :data:`MAX_SHOWN` characters of the text or of its indentation.
MAX_LINES: Final = 5000


@dataclasses.dataclass(slots=True)
class Line:
    """One line of a text."""

    #: (class, text): ``k`` a key, ``s`` a string, ``n`` another value, ``""`` punctuation.
    tokens: list[tuple[str, str]]
    #: Whether a reason points to the value that begins in the line.
    marked: bool = False


class _Place(dict[str, "_Place"]):
    """A value that a pointer names, or one that contains it: its members by their names.

    Only these are followed: the pointers of all values of a text can have thousands of times its
    size.
    """

    #: Where in the text the value begins, or its name does; ``None``: the text does not have it.
    offset: int | None = None


def json_lines(text: str, marked: Collection[str] = ()) -> list[Line]:
    """Cut a JSON text into lines, two spaces for each level.

    :param text: any text; one that is not JSON is returned line by line.
    :param marked: pointers (RFC 6901) of the values whose lines are marked. If the text has no such
        value, that is its nearest parent; the first line is never marked.
    """
    rest = Line([("", "… the rest is not shown here")])
    if len(text) > MAX_SHOWN or _wrong_at(text) is not None:
        plain = [Line([("", line)]) for line in text[:MAX_SHOWN].splitlines() or [""]]
        cut = len(text) > MAX_SHOWN or len(plain) > MAX_LINES
        return [*plain[:MAX_LINES], rest] if cut else plain
    lines = [Line([])]
    begins = [0]  # where in the text each line begins
    depth = indented = 0
    before = ""
    for match in _PIECE.finditer(text):
        piece = match[0]
        opened, closes = before in ("{", "["), piece in ("}", "]")
        depth -= closes
        if before == "," or opened != closes:
            indented += 2 * depth
            if len(lines) == MAX_LINES or indented > MAX_SHOWN:
                lines.append(rest)
                begins.append(match.start())
                break
            lines.append(Line([("", "  " * depth)]))
            begins.append(match.start())
        lines[-1].tokens.append((match.lastgroup or "", ": " if piece == ":" else piece))
        depth += piece in ("{", "[")
        before = piece
    for offset in _offsets(text, marked).values():
        line = bisect.bisect_right(begins, offset) - 1
        lines[line].marked = line > 0
    return lines


def places_of(text: str, pointers: Collection[str]) -> Mapping[str, tuple[int, int]]:
    """Return pointer → the line and the column in which its value begins, from 1.

    :param text: any text, as a person wrote it. If it is not JSON, all pointers have the place in
        which that shows.
    :param pointers: see RFC 6901. If the text has no such value, its nearest parent is meant.
    """
    wrong = _wrong_at(text)
    offsets = _offsets(text, pointers) if wrong is None else dict.fromkeys(pointers, wrong)
    return {
        pointer: (text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))
        for pointer, offset in offsets.items()
    }


def _wrong_at(text: str) -> int | None:
    """Return where a text stops being JSON; ``None``: it is JSON."""
    try:
        # Numbers need not be made, and integers of many digits could not.
        json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        return error.pos
    except RecursionError:
        return 0
    return None


def _offsets(text: str, pointers: Collection[str]) -> dict[str, int]:
    """Return pointer → where in a valid JSON text its value begins, or its nearest parent does."""
    root, elsewhere = _Place(), _Place()
    for pointer in pointers:
        place = root
        for part in _parts(pointer):
            place = place.setdefault(part, _Place())
    place = root
    #: The open containers, each with the index of its current item (``None``: it is an object).
    stack: list[tuple[_Place, int | None]] = []
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece == ":":
            continue
        if piece in ("}", "]"):
            stack.pop()
            continue
        outer, index = stack[-1] if stack else (root, None)
        if piece == ",":
            if index is not None:
                stack[-1] = (outer, index + 1)
            continue
        if index is not None:
            place = outer.get(str(index), elsewhere) if outer else elsewhere
        elif match.lastgroup == "k":
            place = outer.get(json.loads(piece), elsewhere) if outer else elsewhere
        if place.offset is None:
            place.offset = match.start()
        if piece in ("{", "["):
            stack.append((place, 0 if piece == "[" else None))
    offsets = {}
    for pointer in pointers:
        place = root
        for part in _parts(pointer):
            inner = place[part]
            if inner.offset is None:
                break
            place = inner
        offsets[pointer] = place.offset or 0
    return offsets


def _parts(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
