# SPDX-License-Identifier: Apache-2.0
"""The line of a JSON text in which the value of a JSON pointer begins, as a person wrote it."""

from __future__ import annotations

import json
import re
from typing import Final

__all__ = ["line_of"]

_PIECE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def line_of(text: str, pointer: str) -> int | None:
    """Return the number of a line, from 1.

    :param text: any text.
    :param pointer: see RFC 6901. If the text has no such value, its nearest parent is meant.
    :return: ``None`` if the text has no value at all.
    """
    found: dict[str, int] = {}
    #: The pointers of the open containers, each with the index of its next item (None: an object).
    stack: list[tuple[str, int | None]] = []
    key: str | None = None
    line, place = 1, 0
    for match in _PIECE.finditer(text):
        line += text.count("\n", place, match.start())
        place = match.start()
        piece = match[0]
        if piece in (":", ","):
            if piece == "," and stack and stack[-1][1] is not None:
                stack[-1] = (stack[-1][0], stack[-1][1] + 1)
            continue
        if piece in ("}", "]"):
            if stack:
                stack.pop()
            continue
        path = ""
        if stack:
            parent, index = stack[-1]
            if index is None and key is None:
                key = piece
                # The name of a member is where a person looks for it.
                found.setdefault(f"{parent}/{_part(piece)}", line)
                continue
            path = f"{parent}/{_part(key) if index is None and key is not None else index}"
            key = None
        found.setdefault(path, line)
        if piece in ("{", "["):
            stack.append((path, None if piece == "{" else 0))
    while pointer and pointer not in found:
        pointer = pointer.rpartition("/")[0]
    return found.get(pointer)


def _part(piece: str) -> str:
    try:
        name = str(json.loads(piece))
    except ValueError:
        name = piece
    return name.replace("~", "~0").replace("/", "~1")
