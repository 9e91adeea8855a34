# SPDX-License-Identifier: Apache-2.0
"""Compare subscription choices with their history."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

from engage.api import Kind, Subject, SubscriptionRecord, SubscriptionState
from engage.store.facade import Storage
from engage.upkeep.export import all_pages
from engage.upkeep.tombstones import PSEUDONYM
from engage.upkeep.verify.notes import Notes
from engage.upkeep.verify.report import TRIES, Doubt, Report

__all__ = ["Choice", "Choices", "confirm_choices", "keep_choices", "keep_history"]

#: Workspace, kind of the subject, id and group.
Choice = tuple[str, str, str, str]


async def keep_choices(store: Storage, notes: Notes) -> None:
    """Keep all choices."""
    async for one in all_pages(functools.partial(store.scan_subscriptions, None)):
        kind, name = one.subject
        record = ("choice", kind.value, one.group_id, one.subscribed, one.updated_at)
        notes.add(one.workspace_id, name, record)


async def keep_history(store: Storage, notes: Notes, erased: Collection[str]) -> None:
    """Keep the records of all choices, which must have been kept before.

    :param erased: the workspaces from which people were erased: the records of these stay.
    """
    async for one in all_pages(functools.partial(store.history, None, None)):
        kind, name = one.subject
        if not (name.startswith(PSEUDONYM) and one.workspace_id in erased):
            record = ("record", kind.value, one.group_id, one.after, one.at)
            notes.add(one.workspace_id, name, record)


def _key(one: SubscriptionState | SubscriptionRecord) -> Choice:
    return (one.workspace_id, one.subject.kind.value, one.subject.id, one.group_id)


class Choices:
    """Choices, and the last record of each."""

    def __init__(self) -> None:
        #: Choice → subscribed, time.
        self.kept: dict[Choice, tuple[bool, int]] = {}
        self.records: dict[Choice, tuple[bool, int]] = {}

    def add(self, what: str, key: Choice, subscribed: bool, at: int) -> None:
        """Add what was kept, in its order."""
        (self.kept if what == "choice" else self.records)[key] = (subscribed, at)

    def chosen(self, index: int) -> bool:
        """Return whether a user has a choice or, with the index 1, a choice or a record."""
        return any(key[1] == Kind.USER for key in (*self.kept, *(self.records if index else ())))

    def wrong(self) -> Iterator[Choice]:
        """Yield the choices that differ from the last record, or have none, or are missing."""
        for key in self.kept.keys() | self.records.keys():
            choice, record = self.kept.get(key), self.records.get(key)
            if (
                choice is None
                or record is None
                or choice[0] is not record[0]
                or choice[1] < record[1]
            ):
                yield key


async def confirm_choices(store: Storage, keys: set[Choice], report: Report, doubt: Doubt) -> None:
    """Read the choices again that differ: they may have changed between the two scans."""
    for _ in range(TRIES):
        if not keys:
            return
        now, before = Choices(), await _last(store, keys)
        async for state in all_pages(functools.partial(store.scan_subscriptions, None)):
            if _key(state) in keys:
                now.add("choice", _key(state), state.subscribed, state.updated_at)
        now.records = await _last(store, keys)
        steady = {key for key in keys if before.get(key) == now.records.get(key)}
        keys = keys.intersection(now.wrong())
        for workspace, kind, name, group in sorted(keys & steady):
            message = f"{workspace}: {group!r} of {kind} {name!r} is not as its last record says"
            report.judge("choices", message, doubt(workspace, Kind(kind), name))
        keys -= steady
    report.unprovable["choices", "changed all the time"] += len(keys)


async def _last(store: Storage, keys: set[Choice]) -> dict[Choice, tuple[bool, int]]:
    """Return the last record of each choice."""
    found: dict[Choice, tuple[bool, int]] = {}
    for workspace, kind, name in {key[:3] for key in keys}:
        subject = Subject(Kind(kind), name)
        async for one in all_pages(functools.partial(store.history, workspace, subject)):
            found[_key(one)] = (one.after, one.at)
    return found
