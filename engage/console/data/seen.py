# SPDX-License-Identifier: Apache-2.0
"""Names of events and ids of users that were seen lately: suggestions for the search fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from engage.console.display.formats import ROWS
from engage.monitoring.visible import cell
from engage.reading.live import Row

__all__ = ["Seen", "seen"]


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Suggestions, the last one that was seen first."""

    names: Sequence[str] = ()
    users: Sequence[str] = ()


def seen(rows: Iterable[Row]) -> Seen:
    """Return the suggestions that rows of the ring give."""
    texts = [row.texts for row in rows]
    return Seen(
        _typable(row.name for row in texts),
        _typable(row.user_id or row.anonymous_id for row in texts),
    )


def _typable(texts: Iterable[str | None]) -> list[str]:
    """Return each text once, without those that cannot be read in one line as they are."""
    typable = dict.fromkeys(text for text in texts if text and text == cell(text))
    return list(typable)[:ROWS]
