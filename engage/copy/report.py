# SPDX-License-Identifier: Apache-2.0
"""The report of a copy, and its comparison of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import orjson

__all__ = ["Counts", "OnProgress", "canonical", "same_json"]


@dataclasses.dataclass(slots=True)
class Counts:
    """The results for the records of one kind."""

    kind: str
    copied: int = 0
    #: The target already has the same record.
    duplicate: int = 0
    #: The target has a different record with the same id, which was not changed.
    conflicting: int = 0
    #: The target cannot store the record.
    refused: int = 0
    #: The first reasons for conflicts and refusals; they contain no user data.
    reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of records read."""
        return self.copied + self.duplicate + self.conflicting + self.refused

    @property
    def arrived(self) -> bool:
        """Whether the target now has every record that was read."""
        return not (self.conflicting or self.refused)

    def refuse(self, reason: str, count: int = 1) -> None:
        """Count records that the target cannot store."""
        self.refused += count
        self._keep(reason)

    def conflict(self, reason: str) -> None:
        """Count a record of which the target has another one."""
        self.conflicting += 1
        self._keep(reason)

    def _keep(self, reason: str) -> None:
        """Keep a reason, unless it is known or there are ten already."""
        if reason not in self.reasons and len(self.reasons) < 10:
            self.reasons.append(reason)


#: Called with the counts so far.
OnProgress = Callable[[Counts], None]


def same_json(first: bytes, other: bytes) -> bool:
    """Return whether two JSON texts are equal; ``1``, ``1.0`` and ``true`` are different."""
    return first == other or canonical(orjson.loads(first)) == canonical(orjson.loads(other))


def canonical(value: Any) -> bytes:
    """Return a value as JSON in which the order of keys does not matter."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
