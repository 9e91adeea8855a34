# SPDX-License-Identifier: Apache-2.0
"""What a process that writes remembers between its plans."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any, Final

from engage.store.tables import Remember

#: How many values of a topic are remembered: most events of a visitor then need no look-up.
_MAX_VALUES: Final = 100_000


class Remembered:
    """What is remembered; see :class:`~engage.store.tables.Remember`."""

    def __init__(self) -> None:
        self._topics = collections.defaultdict[str, collections.OrderedDict[Any, Any]](
            collections.OrderedDict
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered."""
        return not any(self._topics.values())

    def of(self, topic: str) -> Mapping[Any, Any]:
        """Return what is remembered of a topic."""
        return self._topics[topic]

    def forget(self, topic: str | None = None) -> None:
        """Forget a topic, or everything."""
        if topic is None:
            self._topics.clear()
        else:
            self._topics[topic].clear()

    def keep(self, steps: Iterable[Remember]) -> None:
        """Remember what a plan said, whose transaction is committed."""
        for step in steps:
            values = self._topics[step.topic]
            values.update(step.values or {})
            while len(values) > _MAX_VALUES:
                values.popitem(last=False)
