# SPDX-License-Identifier: Apache-2.0
"""Wrong passwords in the audit: one entry an hour and network, so that they do not fill it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engage.audit import new_id
from engage.http1.addresses import network_of

__all__ = ["Guesses"]

#: Seconds for which guesses share an entry …
PERIOD: Final = 3600
#: … and the networks with entries of their own; the others share one more.
NETWORKS: Final = 20


class Guesses:
    """Counts the wrong passwords of this hour.

    :param clock: the time in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hour = 0
        #: Network → the id of its entry, and how many there were.
        self._counts: dict[str, tuple[str, int]] = {}

    def add(self, address: str) -> tuple[str, str, int]:
        """Count a wrong password.

        :return: the id of the entry to write, the address that it names, and the number.
        """
        now = self._clock()
        if now // PERIOD != self._hour:
            self._hour = int(now // PERIOD)
            self._counts.clear()
        network = network_of(address)
        if network not in self._counts and len(self._counts) >= NETWORKS:
            network = address = "other networks"
        entry_id, count = self._counts.get(network, (new_id(round(now * 1000)), 0))
        self._counts[network] = entry_id, count + 1
        return entry_id, address, count + 1
