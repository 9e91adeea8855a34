# SPDX-License-Identifier: Apache-2.0
"""Copy everything in one store to another.

Events are copied unchanged, and the target builds the profiles from them, as for any event. Then
follow the subscription changes of the history, the choices that no history explains, the suppressed
addresses, the dead letters, and the console's data (``copy_records.py``). Everything keeps its id,
so that copying is idempotent: run an interrupted copy again. At the end, the profiles of both
stores are compared. They differ where events have expired at the source, because a profile keeps
the traits of expired events.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from engage.api import (
    ERASED,
    DeadLetter,
    Event,
    EventFilter,
    Status,
    Subject,
    SubscriptionChange,
    SubscriptionRecord,
    UserProfile,
)
from engage.copy.records import COPIED_KINDS, copy_counters, copy_records
from engage.copy.report import Counts, OnProgress, canonical, same_json
from engage.reading.scans import PAGE, all_pages
from engage.store.facade import Storage

__all__ = ["Counts", "copy_all"]

#: Bytes of bodies that are written at once.
_WRITE_BYTES: Final = 4 * 1024 * 1024

Item = TypeVar("Item")


async def copy_all(
    source: Storage, target: Storage, on_progress: OnProgress | None = None
) -> AsyncGenerator[Counts, None]:
    """Copy everything from one store to another.

    :param source: an open store, which is only read.
    :param target: an open store.
    :param on_progress: called often, with the counts so far of the current kind.
    :return: the counts of each kind, when that kind is complete.
    :raises StorageUnavailable: if one of the stores fails; run the copy again to continue.
    """
    report = on_progress or (lambda _: None)
    yield await _events(source, target, report)
    yield await _subscriptions(source, target, report)
    yield await _suppressions(source, target, report)
    yield await _dead_letters(source, target, report)
    for name, kinds in COPIED_KINDS.items():
        yield await copy_records(source, target, name, kinds, report)
    yield await copy_counters(source, target, report)
    yield await _compare_profiles(source, target, report)


# ---------------------------------------------------------------------------------------- events
async def _events(source: Storage, target: Storage, report: OnProgress) -> Counts:
    counts = Counts("events")
    stored = all_pages(functools.partial(source.scan, EventFilter()))
    async for events in _batches(stored, lambda event: len(event.body)):
        await _write(target, events, counts)
        report(counts)
    return counts


async def _batches(
    records: AsyncIterator[Item], size_of: Callable[[Item], int]
) -> AsyncGenerator[list[Item], None]:
    """Group records into batches of a limited number and size.

    :param size_of: the size of a record in bytes.
    """
    batch: list[Item] = []
    size = 0
    async for record in records:
        batch.append(record)
        size += size_of(record)
        if len(batch) >= PAGE or size >= _WRITE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _write(target: Storage, events: Sequence[Event], counts: Counts) -> None:
    outcomes = await target.write(events)
    for event, outcome in zip(events, outcomes, strict=True):
        if outcome.status is Status.STORED:
            counts.copied += 1
        elif outcome.status is Status.REFUSED:
            counts.refuse(outcome.reason or "the target refused the event")
        elif (
            not outcome.stored
            or outcome.stored.startswith(ERASED)
            or same_json(outcome.stored, event.body)
        ):
            counts.duplicate += 1
        else:
            counts.conflict("the target has another event with the same message id")


# --------------------------------------------------------------------------------- subscriptions
async def _subscriptions(source: Storage, target: Storage, report: OnProgress) -> Counts:
    counts = Counts("subscription changes")
    changes = _changes(source)
    async for change in changes:
        await _apply(source, target, change, counts)
        report(counts)
    await _copy_unexplained_choices(source, target, counts)
    return counts


async def _changes(source: Storage) -> AsyncGenerator[SubscriptionChange, None]:
    """Rebuild the changes of a history. The records of one change follow each other."""
    together: list[SubscriptionRecord] = []
    async for record in all_pages(functools.partial(source.history, None, None)):
        if together and _change_key(together[0]) != _change_key(record):
            yield _change(together)
            together = []
        together.append(record)
    if together:
        yield _change(together)


def _change_key(record: SubscriptionRecord) -> tuple[str, Subject, str, int]:
    return (record.workspace_id, record.subject, record.change_id, record.at)


def _change(records: Sequence[SubscriptionRecord]) -> SubscriptionChange:
    first = records[0]
    return SubscriptionChange(
        id=first.change_id,
        workspace_id=first.workspace_id,
        subject=first.subject,
        choices={record.group_id: record.after for record in records},
        at=first.at,
        how=first.how,
        secret=first.secret,
        user_agent=first.user_agent,
        address=first.address,
    )


async def _apply(
    source: Storage, target: Storage, change: SubscriptionChange, counts: Counts
) -> None:
    later: list[SubscriptionRecord] = []
    whose = (change.workspace_id, change.subject)
    async for record in all_pages(functools.partial(target.history, *whose)):
        if record.change_id == change.id:
            counts.duplicate += 1
            return
        if record.at > change.at:
            later.append(record)
    newer: set[str] = set()
    if later:
        # Of several processes, a record may be written after one with a later time: what the
        # source has as well is in the order of the source.
        history = functools.partial(source.history, *whose)
        own = {record.change_id async for record in all_pages(history)}
        newer = {record.group_id for record in later if record.change_id not in own}
    # The user may have made a newer choice at the target; an older one must not override it.
    choices = {group: choice for group, choice in change.choices.items() if group not in newer}
    if choices:
        await target.apply(dataclasses.replace(change, choices=choices))
    if len(choices) < len(change.choices):
        counts.conflict("the user has made a newer choice at the target")
    else:
        counts.copied += 1


async def _copy_unexplained_choices(source: Storage, target: Storage, counts: Counts) -> None:
    """Copy the current choices of the source that its history does not explain: such as those that
    were repeated, which makes them later."""
    async for state in all_pages(functools.partial(source.scan_subscriptions, None)):
        history = functools.partial(target.history, state.workspace_id, state.subject)
        explained = -1
        async for record in all_pages(history):
            if record.group_id == state.group_id:
                # As storages do it: a choice is later than the one that it replaces.
                explained = max(record.at, explained + 1)
        if explained >= state.updated_at:
            continue
        parts = (state.workspace_id, *state.subject, state.group_id, str(state.updated_at))
        digest = hashlib.blake2b(canonical(parts), digest_size=16).hexdigest()
        await target.apply(
            SubscriptionChange(
                id=f"copy-{digest}",
                workspace_id=state.workspace_id,
                subject=state.subject,
                choices={state.group_id: state.subscribed},
                at=state.updated_at,
                how="copy",
            )
        )
        counts.copied += 1


# ---------------------------------------------------------------------------------- suppressions
async def _suppressions(source: Storage, target: Storage, report: OnProgress) -> Counts:
    """Copy suppressed addresses.

    They are written again by each copy, because the latest stays: none is reported as a duplicate.
    """
    counts = Counts("suppressions")
    stored = all_pages(functools.partial(source.scan_suppressions, None))
    async for batch in _batches(stored, lambda suppression: len(suppression.address)):
        await target.suppress(batch)
        counts.copied += len(batch)
        report(counts)
    return counts


# ---------------------------------------------------------------------------------- dead letters
async def _dead_letters(source: Storage, target: Storage, report: OnProgress) -> Counts:
    counts = Counts("dead letters")
    letters = all_pages(functools.partial(source.scan_dead_letters, None))
    # The budgets limit the number of dead letters, so their ids fit into memory.
    existing = {
        (letter.workspace_id, letter.id)
        async for letter in all_pages(functools.partial(target.scan_dead_letters, None))
    }
    async for batch in _batches(
        letters, lambda letter: len(letter.item) + len(letter.envelope or b"")
    ):
        new = [letter for letter in batch if (letter.workspace_id, letter.id) not in existing]
        counts.duplicate += len(batch) - len(new)
        if new:
            await _put(target, new, counts)
        report(counts)
    return counts


async def _put(target: Storage, letters: Sequence[DeadLetter], counts: Counts) -> None:
    dropped = await target.put(letters)
    counts.copied += len(letters) - dropped
    if dropped:
        counts.refuse("the budget for dead letters is used up at the target", dropped)


# -------------------------------------------------------------------------------------- profiles
async def _compare_profiles(source: Storage, target: Storage, report: OnProgress) -> Counts:
    """Compare the profiles. Nothing is copied: the target has built them from the events."""
    counts = Counts("profiles")
    async for profile in all_pages(functools.partial(source.scan_users, None)):
        existing = await target.profile(profile.workspace_id, profile.user_id)
        if existing is not None and _contains(existing, profile):
            counts.copied += 1
        else:
            counts.conflict(
                "a profile differs: some of its events have expired, or new ones have arrived"
            )
        report(counts)
    return counts


def _contains(existing: UserProfile, profile: UserProfile) -> bool:
    """Return whether a profile includes another.

    :param existing: the profile at the target; events of the target may have added more to it.
    """
    if existing.updated_at > profile.updated_at:
        # Newer events may have changed values; they never remove traits or links.
        return existing.traits.keys() >= profile.traits.keys() and set(
            existing.anonymous_ids
        ) >= set(profile.anonymous_ids)
    values = {key: existing.traits[key] for key in profile.traits if key in existing.traits}
    return (
        canonical(values) == canonical(dict(profile.traits))
        and set(existing.anonymous_ids) >= set(profile.anonymous_ids)
        and set(existing.groups) >= set(profile.groups)
    )
