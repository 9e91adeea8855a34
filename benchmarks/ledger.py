# SPDX-License-Identifier: Apache-2.0
"""Which message ids were sent and acknowledged, and whether each of them is stored once.

It needs one byte for each id, so it can hold millions of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

_SENT, _ACKNOWLEDGED, _STORED = 1, 2, 4


@dataclasses.dataclass
class Balance:
    """The sent events, compared with the stored ones."""

    acknowledged: int = 0
    stored: int = 0
    #: Acknowledged and not stored.
    lost: int = 0
    #: Stored again: each additional copy counts.
    repeated: int = 0
    #: Stored and never sent.
    foreign: int = 0
    #: Sent and never acknowledged; may be stored or not.
    unanswered: int = 0

    @property
    def good(self) -> bool:
        """Whether each acknowledged id is stored once, and no id is stored that was not sent."""
        return not (self.lost or self.repeated or self.foreign)


class Ledger:
    """Records the ids of all series; an id is ``<series>-<number>``."""

    def __init__(self) -> None:
        self._series: dict[str, bytearray] = {}

    def next(self, series: str) -> str:
        """Return the next id of a series, which is about to be sent.

        :param series: a name.
        """
        states = self._series.setdefault(series, bytearray())
        states.append(_SENT)
        return f"{series}-{len(states) - 1:09d}"

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Note that ids were answered with 2xx."""
        for one in ids:
            series, _, number = one.rpartition("-")
            self._series[series][int(number)] |= _ACKNOWLEDGED

    def compare(self, stored: Iterable[str]) -> Balance:
        """Return how the ids that were sent compare with those that are stored."""
        balance = Balance()
        for one in stored:
            balance.stored += 1
            series, _, number = one.rpartition("-")
            states = self._series.get(series, b"")
            if not number.isdecimal() or int(number) >= len(states):
                balance.foreign += 1
            elif states[int(number)] & _STORED:
                balance.repeated += 1
            else:
                self._series[series][int(number)] |= _STORED
        for states in self._series.values():
            for state in states:
                if state & _ACKNOWLEDGED:
                    balance.acknowledged += 1
                    balance.lost += not state & _STORED
                else:
                    balance.unanswered += 1
        return balance
