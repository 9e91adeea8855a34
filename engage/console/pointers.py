# SPDX-License-Identifier: Apache-2.0
"""Finds the values of JSON pointers while a text is read from its beginning to its end.

Only the pointers that are wanted are followed. The text is that of a stranger: the pointers of all
its values together can have thousands of times its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

__all__ = ["Place", "deepest", "places"]


class Place:
    """A value that a wanted pointer names, or one that contains it."""

    __slots__ = ("line", "members")

    def __init__(self) -> None:
        #: Part of a pointer → the member. Only members that are wanted.
        self.members: dict[str, Place] = {}
        #: The line in which the value begins; ``None``: the text does not have it.
        self.line: int | None = None

    def member(self, piece: str) -> Place | None:
        """Return the member with a name.

        :param piece: the name as it stands in the text, with its quotes.
        """
        if not self.members:
            return None
        try:
            name = str(json.loads(piece))
        except ValueError:
            name = piece
        return self.members.get(name.replace("~", "~0").replace("/", "~1"))

    def item(self, index: int) -> Place | None:
        """Return the item of an array."""
        return self.members.get(str(index)) if self.members else None

    def found(self, line: int) -> None:
        """Note where the value begins; the first of several counts."""
        if self.line is None:
            self.line = line


def places(pointers: Iterable[str]) -> Place:
    """Return the place of the whole text, below which the wanted pointers are.

    :param pointers: see RFC 6901.
    """
    root = Place()
    for pointer in pointers:
        place = root
        for part in pointer.split("/")[1:]:
            place = place.members.setdefault(part, Place())
    return root


def deepest(root: Place, pointer: str) -> Place:
    """Return the place that a pointer names, or its nearest parent that the text has."""
    place = root
    for part in pointer.split("/")[1:]:
        inner = place.members.get(part)
        if inner is None or inner.line is None:
            break
        place = inner
    return place
