# SPDX-License-Identifier: Apache-2.0
"""Copy all that one store holds into another.

Events are written as they are; the profiles come from them, as everywhere. Then the subscription
changes of the history, and choices that no history explains; then the dead letters. Everything is
idempotent by the ids that the records have, so a copy that was cut off is simply run again. At the
end the profiles of both stores are compared: those of a store that has expired events hold traits
that no event explains any more.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import orjson

from engage.api import (
    DeadLetter,
    DeadLetterStore,
    Event,
    EventFilter,
    EventStore,
    ProfileStore,
    Status,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionStore,
    UserProfile,
)
from engage.storage.export import all_pages

__all__ = ["Counts", "copy_all"]

_PAGE: Final = 200
#: Bytes of bodies in one write.
_WRITE: Final = 4 * 1024 * 1024
_HISTORY: Final = 1000


@dataclasses.dataclass(slots=True)
class Counts:
    """What became of one kind of record."""

    kind: str
    copied: int = 0
    #: Was there already, the same.
    duplicate: int = 0
    #: Something else is there under the same id; it was left as it is.
    conflicting: int = 0
    #: Could not be taken.
    refused: int = 0
    #: The first reasons, without anybody's data.
    reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """How many were read."""
        return self.copied + self.duplicate + self.conflicting + self.refused

    @property
    def arrived(self) -> bool:
        """Whether everything that was read is in the other store now."""
        return not (self.conflicting or self.refused)

    def because(self, reason: str) -> None:
        """Remember a reason, once, and at most ten."""
        if reason not in self.reasons and len(self.reasons) < 10:
            self.reasons.append(reason)


#: Told after every write.
Told = Callable[[Counts], None]


async def copy_all(
    source: EventStore, target: EventStore, told: Told | None = None
) -> AsyncGenerator[Counts, None]:
    """Copy everything.

    :param source: open; only read.
    :param target: open.
    :param told: called often, with what was counted so far.
    :return: the counts of each kind when that kind is done.
    :raises StorageUnavailable: one of the stores failed; run it again to go on.
    """
    tell = told or (lambda _: None)
    yield await _events(source, target, tell)
    if isinstance(source, SubscriptionStore):
        yield await _subscriptions(source, target, tell)
    if isinstance(source, DeadLetterStore):
        yield await _dead_letters(source, target, tell)
    if isinstance(source, ProfileStore):
        yield await _compare_profiles(source, target, tell)


# ---------------------------------------------------------------------------------------- events
async def _events(source: EventStore, target: EventStore, tell: Told) -> Counts:
    counts = Counts("events")
    waiting: list[Event] = []
    size = 0
    wanted = EventFilter()
    async for event in all_pages(lambda after: source.scan(wanted, after=after, limit=_PAGE)):
        waiting.append(event)
        size += len(event.body)
        if len(waiting) >= _PAGE or size >= _WRITE:
            await _write(target, waiting, counts)
            tell(counts)
            waiting, size = [], 0
    if waiting:
        await _write(target, waiting, counts)
        tell(counts)
    return counts


async def _write(target: EventStore, events: Sequence[Event], counts: Counts) -> None:
    outcomes = await target.write(events)
    for event, outcome in zip(events, outcomes, strict=True):
        if outcome.status is Status.STORED:
            counts.copied += 1
        elif outcome.status is Status.REFUSED:
            counts.refused += 1
            counts.because(outcome.reason or "refused by the storage")
        elif outcome.stored is None or _same_json(outcome.stored, event.body):
            counts.duplicate += 1
        else:
            counts.conflicting += 1
            counts.because("another event is stored under the same message id")


def _same_json(one: bytes, other: bytes) -> bool:
    """Whether two texts mean the same; ``1`` and ``1.0`` and ``true`` do not."""
    return one == other or _canonical(orjson.loads(one)) == _canonical(orjson.loads(other))


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


# --------------------------------------------------------------------------------- subscriptions
async def _subscriptions(source: SubscriptionStore, target: EventStore, tell: Told) -> Counts:
    counts = Counts("subscription changes")
    changes = _changes(source)
    async for change in changes:
        if not isinstance(target, SubscriptionStore):
            counts.refused += 1
            counts.because("the storage keeps no subscriptions")
            continue
        await _apply(target, change, counts)
        tell(counts)
    if isinstance(target, SubscriptionStore):
        await _unexplained(source, target, counts)
    return counts


async def _changes(source: SubscriptionStore) -> AsyncGenerator[SubscriptionChange, None]:
    """Put the records of the history together again: those of one change stand side by side."""
    together: list[SubscriptionRecord] = []
    async for record in all_pages(
        lambda after: source.history(None, None, after=after, limit=_PAGE)
    ):
        if together and _change_key(together[0]) != _change_key(record):
            yield _change(together)
            together = []
        together.append(record)
    if together:
        yield _change(together)


def _change_key(record: SubscriptionRecord) -> tuple[str, str, str, int]:
    return (record.workspace_id, record.user_id, record.change_id, record.at)


def _change(records: Sequence[SubscriptionRecord]) -> SubscriptionChange:
    first = records[0]
    return SubscriptionChange(
        id=first.change_id,
        workspace_id=first.workspace_id,
        user_id=first.user_id,
        choices={record.group_id: record.after for record in records},
        at=first.at,
        how=first.how,
    )


async def _history(
    store: SubscriptionStore, workspace_id: str, user_id: str
) -> AsyncGenerator[SubscriptionRecord, None]:
    async for record in all_pages(
        lambda after: store.history(workspace_id, user_id, after=after, limit=_HISTORY)
    ):
        yield record


async def _apply(target: SubscriptionStore, change: SubscriptionChange, counts: Counts) -> None:
    newer: set[str] = set()
    async for record in _history(target, change.workspace_id, change.user_id):
        if record.change_id == change.id:
            counts.duplicate += 1
            return
        if record.at > change.at:
            newer.add(record.group_id)
    # The user may have chosen anew at the target: what is older must not overrule that.
    choices = {group: choice for group, choice in change.choices.items() if group not in newer}
    if choices:
        await target.apply(dataclasses.replace(change, choices=choices))
    if len(choices) < len(change.choices):
        counts.conflicting += 1
        counts.because("the user has made a newer choice there")
    else:
        counts.copied += 1


async def _unexplained(
    source: SubscriptionStore, target: SubscriptionStore, counts: Counts
) -> None:
    """Copy choices that hold at the source and that its history does not explain."""
    async for state in all_pages(
        lambda after: source.scan_subscriptions(None, after=after, limit=_PAGE)
    ):
        there = await target.state(state.workspace_id, state.user_id)
        if there.get(state.group_id) is state.subscribed:
            continue
        moved_on = False
        async for record in _history(target, state.workspace_id, state.user_id):
            if record.group_id == state.group_id and record.at > state.updated_at:
                moved_on = True
        if moved_on:
            continue
        parts = (state.workspace_id, state.user_id, state.group_id, str(state.updated_at))
        digest = hashlib.blake2b(_canonical(parts), digest_size=16).hexdigest()
        await target.apply(
            SubscriptionChange(
                id=f"copy-{digest}",
                workspace_id=state.workspace_id,
                user_id=state.user_id,
                choices={state.group_id: state.subscribed},
                at=state.updated_at,
                how="copy",
            )
        )
        counts.copied += 1


# ---------------------------------------------------------------------------------- dead letters
async def _dead_letters(source: DeadLetterStore, target: EventStore, tell: Told) -> Counts:
    counts = Counts("dead letters")
    known: set[tuple[str, str]] = set()
    if isinstance(target, DeadLetterStore):
        # As many as the budgets allow, so their ids fit in memory.
        async for letter in all_pages(
            lambda after: target.scan_dead_letters(None, after=after, limit=_PAGE)
        ):
            known.add((letter.workspace_id, letter.id))
    waiting: list[DeadLetter] = []
    size = 0
    async for letter in all_pages(
        lambda after: source.scan_dead_letters(None, after=after, limit=_PAGE)
    ):
        if not isinstance(target, DeadLetterStore):
            counts.refused += 1
            counts.because("the storage keeps no dead letters")
        elif (letter.workspace_id, letter.id) in known:
            counts.duplicate += 1
        else:
            waiting.append(letter)
            size += len(letter.item)
            if len(waiting) >= _PAGE or size >= _WRITE:
                await _put(target, waiting, counts)
                waiting, size = [], 0
        tell(counts)
    if waiting and isinstance(target, DeadLetterStore):
        await _put(target, waiting, counts)
        tell(counts)
    return counts


async def _put(target: DeadLetterStore, letters: Sequence[DeadLetter], counts: Counts) -> None:
    dropped = await target.put(letters)
    counts.copied += len(letters) - dropped
    if dropped:
        counts.refused += dropped
        counts.because("the budget for dead letters is full there")


# -------------------------------------------------------------------------------------- profiles
async def _compare_profiles(source: ProfileStore, target: EventStore, tell: Told) -> Counts:
    """Nothing is written here: profiles are the merge of the events that were copied."""
    counts = Counts("profiles")
    async for profile in all_pages(lambda after: source.scan_users(None, after=after, limit=_PAGE)):
        if not isinstance(target, ProfileStore):
            counts.refused += 1
            counts.because("the storage keeps no profiles")
            tell(counts)
            continue
        there = await target.profile(profile.workspace_id, profile.user_id)
        if there is not None and _contains(there, profile):
            counts.copied += 1
        else:
            counts.conflicting += 1
            counts.because(
                "a profile differs: events that made it have expired, or some came meanwhile"
            )
        tell(counts)
    return counts


def _contains(there: UserProfile, profile: UserProfile) -> bool:
    """Whether a profile holds all of another; it may hold more, from events of its own store."""
    if there.updated_at > profile.updated_at:
        # Values may have changed since; traits and links are never taken away.
        return there.traits.keys() >= profile.traits.keys() and set(there.anonymous_ids) >= set(
            profile.anonymous_ids
        )
    values = {key: there.traits[key] for key in profile.traits if key in there.traits}
    return (
        _canonical(values) == _canonical(dict(profile.traits))
        and set(there.anonymous_ids) >= set(profile.anonymous_ids)
        and set(there.groups) >= set(profile.groups)
    )
