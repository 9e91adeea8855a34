# SPDX-License-Identifier: Apache-2.0
"""The lines of a JSON text in which the values of JSON pointers begin, as a person wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from engage.console.pointers import Place, deepest, places

__all__ = ["lines_of"]

# A string that does not end is one piece; otherwise each quote in it would be tried.
_PIECE: Final = re.compile(
    r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL
)


def lines_of(text: str, pointers: Iterable[str]) -> Mapping[str, int | None]:
    """Return pointer → the number of its line, from 1.

    :param text: any text.
    :param pointers: see RFC 6901. If the text has no such value, its nearest parent is meant.
    :return: ``None`` for each if the text has no value at all.
    """
    pointers = list(pointers)
    root = places(pointers)
    #: The open containers, each with the index of its next item (None: an object).
    stack: list[tuple[Place | None, int | None]] = []
    key: str | None = None
    line, at = 1, 0
    for match in _PIECE.finditer(text):
        line += text.count("\n", at, match.start())
        at = match.start()
        piece = match[0]
        if piece in (":", ","):
            if piece == "," and stack and stack[-1][1] is not None:
                stack[-1] = (stack[-1][0], stack[-1][1] + 1)
            continue
        if piece in ("}", "]"):
            if stack:
                stack.pop()
            continue
        place: Place | None = root
        if stack:
            outer, index = stack[-1]
            if index is not None:
                place = None if outer is None else outer.item(index)
            elif key is None:
                key = piece
                place = None if outer is None else outer.member(piece)
                # The name of a member is where a person looks for it.
                if place is not None:
                    place.found(line)
                continue
            else:
                place = None if outer is None else outer.member(key)
                key = None
        if place is not None:
            place.found(line)
        if piece in ("{", "["):
            stack.append((place, None if piece == "{" else 0))
    return {pointer: deepest(root, pointer).line for pointer in pointers}
