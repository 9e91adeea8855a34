# SPDX-License-Identifier: Apache-2.0
"""What ``engage verify`` found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Final

from engage.api import Kind

__all__ = ["TRIES", "Doubt", "Report"]

#: Returns why a user, visitor or group cannot be proven, such as an erasure; ``None``: it can.
Doubt = Callable[[str, Kind, str], str | None]

#: How often something is read again that changes while it is read.
TRIES: Final = 10
#: How many differences are kept; the others are counted.
_SHOWN: Final = 10


@dataclasses.dataclass
class Report:
    """What was looked at, and what differs."""

    #: What → how many were looked at.
    checked: Counter[str] = dataclasses.field(default_factory=Counter)
    #: What → how many differ.
    different: Counter[str] = dataclasses.field(default_factory=Counter)
    #: The first differences, as what and one line.
    differences: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    #: What and the reason → how many differ from the stored events for a reason that the store does
    #: not record, so that nobody can tell if they are right.
    unprovable: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    #: What → of how many the events were applied again.
    repaired: Counter[str] = dataclasses.field(default_factory=Counter)
    #: Why something could not be looked at.
    failures: list[str] = dataclasses.field(default_factory=list)

    def differs(self, what: str, message: str) -> None:
        """Count a difference."""
        self.different[what] += 1
        if len(self.differences) < _SHOWN:
            self.differences.append((what, message))

    def judge(self, what: str, message: str, reason: str | None) -> None:
        """Count a difference, or something unprovable if there is a reason for that."""
        if reason is None:
            self.differs(what, message)
        else:
            self.unprovable[what, reason] += 1
