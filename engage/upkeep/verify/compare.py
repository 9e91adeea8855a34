# SPDX-License-Identifier: Apache-2.0
"""Compare a profile with what the stored events make of it.

Events arrive while the store is read, so there are two merges: of the events that were surely
stored before the profile was read (``low``), and of all that were read afterwards (``high``). Where
both are equal, the profile must be the same. Where they differ, it must be one of them, or between
them.

If events expire, a profile also has what expired events made. The time of a value is never later
than the receipt of its event. So a value with a time after the horizon, before which events may
have expired, must come from a stored event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from engage.upkeep.copy_report import canonical
from engage.upkeep.verify.folds import View

__all__ = ["TIMES", "compare"]

#: The name of the difference of ``created_at`` and ``updated_at``.
TIMES: Final = "the times of the first and the last event"

#: Marks a trait that a profile does not have, and its time.
_ABSENT: Final = object()
_NEVER: Final = float("-inf")


def compare(low: View, high: View, actual: View, horizon: float) -> Iterator[tuple[str, bool]]:
    """Yield what differs, and whether expired events may be the reason.

    :param horizon: the time before which events may have expired, in milliseconds; ``-inf``: none.
    """
    yield from _compare_times(low, high, actual, horizon)
    traits = canonical(dict(actual.traits))
    if traits != canonical(dict(low.traits)) or low is not high or _times_differ(low, actual):
        for name in low.traits.keys() | high.traits.keys() | actual.traits.keys():
            if (excused := _trait(name, low, high, actual, horizon)) is not None:
                yield f"the trait {name!r}", excused
    if low is not high or set(actual.groups) != set(low.groups):
        for group in {*low.groups, *high.groups, *actual.groups}:
            times = [one.group_times.get(group, _NEVER) for one in (low, high)]
            # Of a membership that changed meanwhile, only the times at both ends are known.
            if times[0] == times[1] and (group in actual.groups) != (group in high.groups):
                yield f"the membership in {group!r}", times[0] < horizon
    for name in {*low.anonymous_ids, *high.anonymous_ids, *actual.anonymous_ids}:
        is_linked = name in actual.anonymous_ids
        if is_linked not in (name in low.anonymous_ids, name in high.anonymous_ids):
            yield f"the anonymous id {name!r}", False
    if low is high and actual.left_out != low.left_out:
        yield "how much a limit leaves out", horizon > _NEVER


def _compare_times(
    low: View, high: View, actual: View, horizon: float
) -> Iterator[tuple[str, bool]]:
    if actual.created_at is None:
        return
    created = [one.created_at for one in (low, high) if one.created_at is not None]
    updated = [one.updated_at for one in (low, high)]
    is_late = low.created_at is not None and actual.created_at > max(created)
    if is_late or actual.updated_at < min(updated):
        yield TIMES, False
    elif actual.created_at < min(created, default=_NEVER):
        yield TIMES, actual.created_at < horizon
    elif actual.updated_at > max(updated):
        yield TIMES, actual.updated_at < horizon


def _times_differ(low: View, actual: View) -> bool:
    times = actual.trait_times
    return bool(times) and any(
        low.trait_times.get(name, times.get(name)) != times.get(name) for name in actual.traits
    )


def _trait(name: str, low: View, high: View, actual: View, horizon: float) -> bool | None:
    """Return ``None`` if a trait is as it should be, otherwise whether this may be right."""
    here = _entry(name, actual)
    wanted = [_entry(name, one) for one in ((low,) if low is high else (low, high))]
    for value, at in wanted:
        if value is here[0] is _ABSENT:
            return None
        if value is _ABSENT or here[0] is _ABSENT or canonical(value) != canonical(here[0]):
            continue
        if here[1] in (_NEVER, at) or at == _NEVER:
            return None
    times = [at for _, at in wanted]
    if times[0] != times[-1]:
        # It may have been removed in between, of which the profile has no time.
        is_between = min(times) <= here[1] <= max(times)
        if here[0] is _ABSENT or not actual.trait_times or is_between:
            return None
    return max(here[1], *times) < horizon


def _entry(name: str, view: View) -> tuple[Any, float]:
    times: Mapping[str, int] = view.trait_times
    return view.traits.get(name, _ABSENT), times.get(name, _NEVER)
