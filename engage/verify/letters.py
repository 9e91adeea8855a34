# SPDX-License-Identifier: Apache-2.0
"""Compare dead letters with their budgets, with the stored events and with the counters."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Collection

from engage.api import (
    CONFLICT,
    DAY_MS,
    DeadLetter,
)
from engage.audit import AUDIT, read_entry
from engage.monitoring.history import EVENTS, HOUR, HOURS_KEPT
from engage.reading.scans import PAUSE, all_pages
from engage.store.facade import Storage
from engage.verify.report import TRIES, Report

__all__ = ["check_letters"]

_Uses = dict[tuple[str, str], tuple[int, int]]


async def check_letters(
    store: Storage,
    report: Report,
    now: int,
    days: int | None,
    expires: bool,
    erased: Collection[str],
) -> None:
    """Compare the dead letters of a store.

    :param now: milliseconds since 1970 UTC.
    :param days: after which letters expire.
    :param expires: whether events expire.
    :param erased: the workspaces from which people were erased, with their letters.
    """
    conflicts: dict[tuple[str, str, str], str] = {}
    seen: tuple[_Uses, _Uses] | None = None
    for _ in range(TRIES):
        conflicts.clear()
        before = await _uses(store)
        sums: dict[tuple[str, str], list[int]] = {}
        async for letter in all_pages(functools.partial(store.scan_dead_letters, None)):
            total = sums.setdefault((letter.workspace_id, letter.budget), [0, 0])
            total[0] += 1
            total[1] += letter.size
            if letter.reason == CONFLICT:
                key = (letter.workspace_id, letter.origin, letter.message_id or "")
                conflicts[key] = _problem(letter)
        totals = {key: (count, size) for key, (count, size) in sums.items()}
        same = (before, totals)
        # What is wrong twice in the same way is wrong: letters did not change in between.
        if before == totals or not before or same == seen:
            break
        seen = same if before == await _uses(store) else None
        await asyncio.sleep(PAUSE)
    else:
        report.unprovable["dead letters", "changed all the time"] += 1
        before = {}
    report.checked["dead letters"] = sum(count for count, _ in totals.values())
    # Without any, the storage may not know how much is used.
    for workspace, budget in before.keys() | (totals.keys() if before else set()):
        kept, used = (counts.get((workspace, budget), (0, 0)) for counts in (totals, before))
        if kept != used:
            message = f"{workspace}: the budget {budget} counts {used} letters and bytes"
            report.differs("dead letters", f"{message}, not {kept}")
    for (workspace, origin, message_id), problem in conflicts.items():
        whose = f"{workspace}: the conflict with the message id {message_id!r}"
        if problem:
            report.differs("conflicts", f"{whose} {problem}")
        elif await store.find(workspace, origin, message_id) is None:
            reason = "events that expired" if expires else None
            reason = reason or ("events that were erased" if workspace in erased else None)
            report.judge("conflicts", f"{whose} has no stored event", reason)
    report.checked["conflicts"] = len(conflicts)
    kept_of = {key[0] for key in conflicts}.union(erased)
    await _check_counters(store, report, kept_of, now=now, days=days)


async def _uses(store: Storage) -> _Uses:
    uses = {(use.workspace_id, use.budget): use for use in await store.budget_use()}
    return {key: (use.count, use.size) for key, use in uses.items() if use.count or use.size}


def _problem(letter: DeadLetter) -> str:
    """Return what is wrong with the letter of a conflict, if anything."""
    try:
        item = json.loads(letter.item)
    except ValueError:
        return "cannot be read"
    if letter.truncated or not isinstance(item, dict) or item.get("messageId") != letter.message_id:
        return "is not whole"
    return ""


async def _check_counters(
    store: Storage, report: Report, kept: set[str], *, now: int, days: int | None
) -> None:
    """Compare the workspaces whose counters have conflicts with those that have letters of some."""
    # An hour later, because a counter is of a whole hour.
    since = now - (HOURS_KEPT if days is None else days * DAY_MS) + HOUR * 1000
    counted: Counter[str] = Counter()
    read = functools.partial(store.counts, HOUR, since=since, until=now, names=(EVENTS,))
    async for count in all_pages(read):
        if count.labels[2:] == ("conflict",):
            counted[count.workspace_id] += count.total
    lost = {workspace for workspace, count in counted.items() if count and workspace not in kept}
    if lost:
        async for record in all_pages(functools.partial(store.list_records, AUDIT)):
            entry = read_entry(record)
            if entry.action.startswith("letter") and entry.at >= since:
                lost.discard(str(entry.details.get("workspace")))
    for workspace in sorted(lost):
        message = f"{workspace}: {counted[workspace]} conflicts were counted, and no letter is left"
        report.differs("conflicts", message)
