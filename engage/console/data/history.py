# SPDX-License-Identifier: Apache-2.0
"""The plots of the overview: the counters of the store, summed over processes."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import CountSum
from engage.monitoring.history import (
    DAY,
    EVENTS,
    HOUR,
    MINUTE,
    QUEUE,
    REFUSED,
    REQUESTS,
    UNKNOWN_KEY,
    UP,
)
from engage.monitoring.metrics import REQUEST_BUCKETS
from engage.pipeline.items import NOTICES

if TYPE_CHECKING:
    from engage.console.data.reader import Reader
    from engage.store.facade import Storage

__all__ = ["OUTCOMES", "RANGES", "Overview", "overview"]

#: Range → (length, smallest step), in seconds. The counters of the store have these steps.
RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "1h": (HOUR, MINUTE),
    "24h": (DAY, MINUTE),
    "14d": (14 * DAY, HOUR),
}
#: Steps of a plot that has not enough pixels for smaller ones, in seconds.
STEPS: Final = (MINUTE, 5 * MINUTE, 10 * MINUTE, HOUR, 2 * HOUR, 6 * HOUR, DAY)

#: The outcomes of an event or a request. ``rejected`` are events that became dead letters,
#: ``refused`` requests without any (wrong key, too large, bad JSON).
OUTCOMES: Final = ("stored", "duplicate", "rejected", "refused")

_NAMES: Final = (EVENTS, REFUSED, REQUESTS, QUEUE, UP)
#: Why a request is refused because of its write key.
_KEY_REASONS: Final = frozenset({"missing_write_key", "invalid_write_key", "write_key_disabled"})
#: Sums that one call of the storage returns, and that one overview reads.
_PAGE: Final = 20_000
MAX_SUMS: Final = 200_000
#: Upper bounds of the buckets of durations, in seconds.
_BOUNDS: Final = (*REQUEST_BUCKETS, math.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The numbers of one workspace over a range of time.

    Every series has one value for each step, in the order of time; the last step is the current
    one, which has not ended.
    """

    #: A key of :data:`RANGES`.
    range: str
    #: Seconds of a step: one of :data:`STEPS`. A step begins at a multiple of it since 1970 UTC.
    step: int
    #: When each step began: milliseconds since 1970 UTC.
    at: Sequence[int]
    #: Whether any process was running in the step. Where it is false, the values of the other
    #: series are 0 or ``None`` and the plots are hatched, from the first start on.
    running: Sequence[bool]
    #: When the first process started that the store knows of: milliseconds since 1970 UTC, as
    #: exact as the steps.
    started: int
    #: Each of :data:`OUTCOMES` → requests seen.
    outcomes: Mapping[str, Sequence[int]]
    #: ``p50``, ``p95``, ``p99`` → milliseconds of a request of the whole server; ``None``: there
    #: was no request in the step.
    latency: Mapping[str, Sequence[float | None]]
    #: The buckets that the p50 and the p95 of the whole range lie in, in milliseconds: (more than,
    #: at most); ``None``: no request.
    p50: tuple[float, float] | None
    p95: tuple[float, float] | None
    #: The greatest number of events that waited for the storage in one process; ``None``: unknown.
    queue: Sequence[int | None]
    #: Id of a write key of the workspace → events with it, of all outcomes. ``?``: requests that
    #: were refused because of their key.
    keys: Mapping[str, Sequence[int]]
    #: The lines of :data:`engage.pipeline.items.NOTICES` → their events.
    noticed: Mapping[str, int]

    @property
    def stopped(self) -> bool:
        """Whether no process was running in a step after the first start."""
        return any(
            not up and at >= self.started for up, at in zip(self.running, self.at, strict=True)
        )


async def overview(
    store: Storage,
    reader: Reader,
    workspace: str,
    span: str,
    *,
    now: int,
    bars: int | None = None,
) -> Overview:
    """Read the numbers for a workspace.

    :param workspace: its id.
    :param span: a key of :data:`RANGES`.
    :param now: milliseconds since 1970.
    :param bars: the most steps, as far as :data:`STEPS` has such; by default, as many as there are.
    :raises StorageUnavailable: if the storage does not answer.
    """
    seconds, counted = RANGES[span]
    # Longer steps do not begin with the range: its first bar is a part of one.
    step = next(
        (
            step
            for step in STEPS
            if step >= counted and (bars is None or seconds // step + (step > counted) <= bars)
        ),
        DAY,
    )
    length = step * 1000
    last = now - now % length
    first = now - now % (counted * 1000) - (seconds - counted) * 1000
    at = range(first - first % length, last + length, length)
    sums: list[CountSum] = []
    after: str | None = None
    while len(sums) < MAX_SUMS:
        page = await reader.read(
            store.counts(
                counted, since=first, until=last + length, names=_NAMES, after=after, limit=_PAGE
            )
        )
        sums += page.items
        after = page.cursor
        if after is None:
            break
    hours = await reader.read(
        store.counts(HOUR, since=0, until=first, names=(UP,), after=None, limit=1)
    )
    hour = hours.items[0].at if hours.items else None
    # An hour in which the range begins may be that of the first start.
    before = hour is not None and hour + HOUR * 1000 <= first
    return _summed(sums, workspace, span, at, hour if before else None)


def _summed(
    sums: Sequence[CountSum], workspace: str, span: str, at: range, started: int | None
) -> Overview:
    steps = len(at)
    running = [False] * steps
    outcomes = {name: [0] * steps for name in OUTCOMES}
    queue: list[int | None] = [None] * steps
    keys: dict[str, list[int]] = collections.defaultdict(lambda: [0] * steps)
    buckets: list[dict[float, int]] = [collections.defaultdict(int) for _ in at]
    noticed: collections.Counter[str] = collections.Counter()
    for row in sums:
        index = (row.at - at.start) // at.step
        if not 0 <= index < steps:
            continue
        if row.name == UP:
            running[index] = True
        elif row.name == QUEUE:
            queue[index] = max(queue[index] or 0, row.greatest)
        elif row.name == REQUESTS:
            buckets[index][float(row.labels[0])] += row.total
        elif row.name == EVENTS and row.labels[1:] in NOTICES:
            noticed[NOTICES[row.labels[1:]]] += row.total if row.workspace_id == workspace else 0
        elif row.name == EVENTS and row.workspace_id == workspace:
            key, _, outcome = row.labels
            outcomes[_outcome(outcome)][index] += row.total
            if key:
                keys[key][index] += row.total
        elif row.name == REFUSED and row.workspace_id in (workspace, ""):
            # A request without a known key may have been meant for any workspace.
            outcomes["refused"][index] += row.total
            key, _, reason = row.labels
            if key != UNKNOWN_KEY or reason in _KEY_REASONS:
                keys[key][index] += row.total
    for index, value in enumerate(queue):
        if value is None and running[index]:
            queue[index] = 0
    whole: dict[float, int] = collections.defaultdict(int)
    for bucket in buckets:
        for bound, count in bucket.items():
            whole[bound] += count
    return Overview(
        range=span,
        step=at.step // 1000,
        at=list(at),
        running=running,
        started=next((start for start, up in zip(at, running, strict=True) if up), at.stop)
        if started is None
        else started,
        outcomes=outcomes,
        latency={
            f"p{percent}": [_percentile(bucket, percent) for bucket in buckets]
            for percent in (50, 95, 99)
        },
        p50=_bucket_of(whole, 50),
        p95=_bucket_of(whole, 95),
        queue=queue,
        keys=dict(keys),
        noticed=dict(+noticed),
    )


def _outcome(outcome: str) -> str:
    """Return the one of :data:`OUTCOMES` for an outcome of :meth:`Metrics.event`."""
    if outcome in ("stored", "duplicate"):
        return outcome
    # A transform dropped it on purpose, and the client got a 200.
    return "stored" if outcome == "dropped" else "rejected"


def _position(bucket: Mapping[float, int], percent: int) -> tuple[float, float, float] | None:
    """Return the bounds of the bucket that a percentile lies in, and how far within it (0 to 1)."""
    total = sum(bucket.values())
    if not total:
        return None
    rank = total * percent / 100
    seen = 0
    for bound in sorted(bucket):
        count = bucket[bound]
        if seen + count >= rank:
            place = _BOUNDS.index(bound)
            return (_BOUNDS[place - 1] if place else 0.0, bound, (rank - seen) / count)
        seen += count
    raise AssertionError("the counts do not add up")


def _percentile(bucket: Mapping[float, int], percent: int) -> float | None:
    """Return a percentile in milliseconds, interpolated within its bucket."""
    position = _position(bucket, percent)
    if position is None:
        return None
    low, high, part = position
    return 1000 * (low if math.isinf(high) else low + (high - low) * part)


def _bucket_of(bucket: Mapping[float, int], percent: int) -> tuple[float, float] | None:
    position = _position(bucket, percent)
    return None if position is None else (position[0] * 1000, position[1] * 1000)
