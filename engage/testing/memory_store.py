# SPDX-License-Identifier: Apache-2.0
"""A storage in memory, for tests of plugins and of one's own code.

:class:`MemoryStore` keeps all promises of the conformance suite that do not need a disk: another
process does not see what it stores, and the end of the process loses it. It never forgets the id of
a change of subscriptions, and reads a page by looking at everything: it is for some thousands of
events. A test that needs one method to behave differently makes a subclass. Each interface is a
class of its own, so that a test can also have a storage without profiles or without dead letters.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from engage import api
from engage.api import Kind
from engage.store.facade import (
    PlannedCounts,
    PlannedLetters,
    PlannedRecords,
    PlannedSuppressions,
)
from engage.store.letters import HEADS

from .memory_base import Memory, Stored, delete, of_workspace, page_by_key, stored
from .memory_profiles import MemoryProfiles, extended

__all__ = ["MemoryProfiles", "MemoryStore", "Stored", "stored"]


class MemoryEvents(Memory, api.EventStore):
    """Events only."""

    async def write(self, events: Sequence[api.Event]) -> Sequence[api.Outcome]:
        self.contents()
        return [self._write(event) for event in events]

    def _write(self, event: api.Event) -> api.Outcome:
        texts = (*event.identity, event.user_id, event.anonymous_id, event.name)
        try:
            "".join(text for text in texts if text is not None).encode()
        except UnicodeEncodeError:
            return api.Outcome(api.Status.REFUSED, reason="an id is not Unicode text")
        known = self.stored.events.get(event.identity)
        if event.identity in self.stored.erased:
            return api.Outcome(api.Status.DUPLICATE, stored=self.stored.erased[event.identity][1])
        if known is not None:
            return api.Outcome(api.Status.DUPLICATE, stored=known.body)
        self.stored.events[event.identity] = event
        self.apply_changes(event)
        return api.Outcome(api.Status.STORED)

    async def find(self, workspace_id: str, origin: str, message_id: str) -> api.Event | None:
        return self.contents().events.get((workspace_id, origin, message_id))

    async def scan(
        self, wanted: api.EventFilter, *, after: str | None, limit: int
    ) -> api.Page[api.Event]:
        return self.contents().events.page(wanted.matches, after, limit)

    async def recent(
        self, wanted: api.EventFilter, *, before: str | None = None, limit: int
    ) -> api.Page[api.Event]:
        return self.contents().events.page(wanted.matches, before, limit, back=True)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        events = self.contents().events
        times = sorted((event.received_at, key) for key, event in events.items())
        if not times or (times[-1][0] < before and not force):
            return 0
        erased = self.contents().erased
        gone = delete(erased, [key for key, (at, _) in erased.items() if at < before][:limit])
        limit -= gone
        return gone + delete(events, [key for at, key in times if at < before][:limit])

    async def erase_events(self, events: Sequence[api.Event], marks: Sequence[bytes]) -> int:
        known = self.contents()
        known.erased |= {
            event.identity: (known.events[event.identity].received_at, mark)
            for event, mark in zip(events, marks, strict=True)
            if event.identity in known.events
        }
        return delete(known.events, [event.identity for event in events])

    async def settle(self) -> bool:
        self.contents()
        return True


class MemorySubscriptions(Memory, api.SubscriptionStore):
    """Subscription choices and their history."""

    async def apply(self, change: api.SubscriptionChange) -> Mapping[str, bool]:
        data, subject = self.contents(), (change.workspace_id, change.subject)
        if (change.workspace_id, change.id) not in data.applied:
            data.applied.add((change.workspace_id, change.id))
            if change.subject.kind is Kind.USER:
                user = data.profile(change.workspace_id, *change.subject)
                user.chosen = extended(user.chosen, change.at)
            before, changed = await self.state(*subject), []
            common: Any = {"workspace_id": change.workspace_id, "subject": change.subject}
            for group, wanted in change.choices.items():
                known = data.choices.get((*subject, group))
                if change.dated and known is not None and known.updated_at >= change.at:
                    continue
                if before.get(group) is not wanted:
                    changed.append(group)
                data.choices[*subject, group] = api.SubscriptionState(
                    **common,
                    group_id=group,
                    subscribed=wanted,
                    updated_at=change.at if known is None else max(change.at, known.updated_at + 1),
                    change_id=change.id,
                )
            for group in changed:
                data.history[change.workspace_id, change.id, group] = api.SubscriptionRecord(
                    **common,
                    group_id=group,
                    change_id=change.id,
                    before=before.get(group),
                    after=change.choices[group],
                    at=change.at,
                    how=change.how,
                    secret=change.secret,
                    user_agent=change.user_agent,
                    address=change.address,
                )
        return await self.state(*subject)

    async def state(self, workspace_id: str, subject: api.Subject) -> Mapping[str, bool]:
        return {
            one.group_id: one.subscribed
            for key, one in self.contents().choices.items()
            if key[:2] == (workspace_id, subject)
        }

    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> api.Page[api.SubscriptionState]:
        return self.contents().choices.page(of_workspace(workspace_id), after, limit)

    async def history(
        self,
        workspace_id: str | None,
        subject: api.Subject | None,
        *,
        since: int = 0,
        after: str | None,
        limit: int,
    ) -> api.Page[api.SubscriptionRecord]:
        wanted = of_workspace(workspace_id)
        return self.contents().history.page(
            lambda one: wanted(one) and subject in (None, one.subject) and one.at >= since,
            after,
            limit,
        )

    async def erase_choices(
        self, workspace_id: str, subject: api.Subject, pseudonym: str
    ) -> tuple[int, int]:
        data = self.contents()
        choices = [key for key in data.choices if key[:2] == (workspace_id, subject)]
        records = [
            key
            for key, one in data.history.items()
            if (one.workspace_id, one.subject) == (workspace_id, subject)
        ]
        gone: Any = {"secret": "", "user_agent": "", "address": ""}
        gone["subject"] = api.Subject(subject.kind, pseudonym)
        new = {data.history[key].change_id: str(uuid.uuid4()) for key in records}
        data.applied |= {(workspace_id, one) for one in new.values()}
        for key in records:
            known = data.history[key]
            data.history[key] = dataclasses.replace(known, change_id=new[known.change_id], **gone)
        return delete(data.choices, choices), len(records)


class MemoryDeadLetters(Memory, PlannedLetters):
    """Dead letters, within their budgets."""


class MemoryRecords(Memory, PlannedRecords):
    """Records."""


class MemoryCounts(Memory, PlannedCounts):
    """Counters."""


class MemorySuppressions(Memory, PlannedSuppressions):
    """Suppressed addresses."""


class MemoryVerification(Memory, api.VerifiableStore):
    """What only this storage knows of itself."""

    async def problems(self) -> AsyncIterator[api.StoreProblem | int]:
        data = self.contents()
        yield len(data.events) + len(data.tables.rows(HEADS)) + len(data.profiles)
        for key, event in data.events.items():
            if key != event.identity:
                yield api.StoreProblem(what="keys", message=f"{key} leads to {event.identity}")
        for profile in data.profiles.values():
            if not profile.sizes.keys() <= profile.values().keys():
                yield api.StoreProblem(what="sizes", message=f"{profile.id}: of no trait")

    async def scan_links(self, *, after: str | None, limit: int) -> api.Page[api.StoredLink]:
        found = {
            (user.workspace_id, user.id, name): api.StoredLink(
                workspace_id=user.workspace_id,
                user_id=user.id,
                anonymous_id=name,
                first=user.links.get(name),
                counts=user.decisions.get(name, (None, True))[1],
            )
            for user in self.contents().profiles.values()
            for name in {**user.links, **user.decisions}
        }
        return page_by_key(found, after, limit)


class MemoryStore(
    MemoryEvents,
    MemoryProfiles,
    MemorySubscriptions,
    MemorySuppressions,
    MemoryDeadLetters,
    MemoryRecords,
    MemoryCounts,
    MemoryVerification,
    api.ErasureStore,
):
    """A storage in memory with all interfaces."""


@api.hookimpl
def engage_register_storage(register: api.Register[api.StorageFactory]) -> None:
    """Register the storage ``memory``, for a conformance suite; no entry point names this."""
    register("memory", MemoryStore, {"type": "object", "required": ["name"]})
