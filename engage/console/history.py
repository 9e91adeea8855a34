# SPDX-License-Identifier: Apache-2.0
"""What the overview draws: the counters of the store, summed over processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engage.console.services import Console

__all__ = ["OUTCOMES", "RANGES", "Overview", "overview"]

#: Range → (length in seconds, step in seconds).
RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "1h": (3600, 60),
    "24h": (24 * 3600, 60),
    "14d": (14 * 24 * 3600, 3600),
}

#: What becomes of an event or a request. ``rejected`` are events that became dead letters,
#: ``refused`` requests without any (wrong key, too large, bad JSON).
OUTCOMES: Final = ("stored", "duplicate", "rejected", "refused")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The numbers of one workspace over a range of time.

    Every series has one value for each step, in the order of time; the last step is the current
    one, which has not ended.
    """

    #: A key of :data:`RANGES`.
    range: str
    #: Seconds of a step: 60 or 3600.
    step: int
    #: When each step began: milliseconds since 1970 UTC.
    at: Sequence[int]
    #: Whether any process was running in the step. Where it is false, the plots are hatched and the
    #: values of the other series are 0 or ``None``.
    running: Sequence[bool]
    #: Each of :data:`OUTCOMES` → requests seen.
    outcomes: Mapping[str, Sequence[int]]
    #: ``p50``, ``p95``, ``p99`` → milliseconds of a request of the whole server; ``None``: there
    #: was no request in the step.
    latency: Mapping[str, Sequence[float | None]]
    #: The bucket that the p95 of the whole range lies in, in milliseconds: (more than, at most);
    #: ``None``: no request.
    p95: tuple[float, float] | None
    #: The greatest number of events that waited for the storage in one process; ``None``: unknown.
    queue: Sequence[int | None]
    #: Id of a write key of the workspace → events with it, whatever became of them. ``?``: requests
    #: with an unknown key.
    keys: Mapping[str, Sequence[int]]


async def overview(console: Console, workspace: str, span: str) -> Overview | None:
    """Read the numbers for a workspace.

    :param workspace: its id.
    :param span: a key of :data:`RANGES`.
    :return: ``None`` if the storage keeps no counters.
    :raises StorageUnavailable: if the storage does not answer.
    """
    return None
