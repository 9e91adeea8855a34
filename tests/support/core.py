# SPDX-License-Identifier: Apache-2.0
"""The steps of the server without HTTP and without a disk."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engage.api import (
    DeadLetter,
    DeadLetterStore,
    Event,
    EventFilter,
    EventStore,
    GroupProfile,
    Outcome,
    Page,
    ProfileStore,
    Status,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
    SubscriptionStore,
    Transform,
    UserProfile,
)
from engage.config import DEFAULT_LIMITS, Limits, SubscriptionGroup, Workspace, WriteKey
from engage.errors import Limit
from engage.metrics import Metrics
from engage.pipeline.auth import Authenticator, Principal
from engage.pipeline.ingest import Ingest
from engage.pipeline.normalise import Arrival, normalise
from engage.pipeline.pipeline import Pipeline
from engage.pipeline.transforms import Transforms
from engage.pipeline.validate import Schemas

#: 2026-11-21T09:30:00.000Z
NOW = 1795253400000

SECRET = "00112233aabbccdd"

ACME = Workspace(
    id="acme",
    name="Acme",
    subscription_secrets=(SECRET, "an older one"),
    subscription_groups=(
        SubscriptionGroup(id="news", name="News", channel="email", type="opt_out"),
        SubscriptionGroup(id="offers", name="Offers", channel="email", type="opt_in"),
    ),
    write_keys=(
        WriteKey(id="website", key="key-1"),
        WriteKey(id="old", key="key-0", disabled=True),
    ),
)
OTHER = Workspace(id="other", name="Other", write_keys=(WriteKey(id="app", key="key-2"),))

SCHEMAS = Schemas.load()


class CountingMetrics(Metrics):
    """Remembers what was counted."""

    def __init__(self) -> None:
        self.events: collections.Counter[tuple[str, str]] = collections.Counter()
        self.writes: list[int] = []
        self.lost: collections.Counter[str] = collections.Counter()
        self.letters: collections.Counter[str] = collections.Counter()
        self.errors = 0

    def event(self, kind: str, outcome: str, count: int = 1) -> None:
        self.events[kind, outcome] += count

    def write(self, seconds: float, events: int) -> None:
        self.writes.append(events)

    def storage_error(self) -> None:
        self.errors += 1

    def dead_letter(self, reason: str, count: int = 1) -> None:
        self.letters[reason] += count

    def dropped(self, what: str, count: int = 1) -> None:
        self.lost[what] += count


class MemoryStore(EventStore, ProfileStore, SubscriptionStore, DeadLetterStore):
    """Keeps everything in dictionaries, and does to a write what a test wants."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, str, str], Event] = {}
        self.letters: dict[tuple[str, str], DeadLetter] = {}
        self.choices: dict[tuple[str, str], dict[str, bool]] = {}
        self.changes: list[SubscriptionChange] = []
        self.users: dict[tuple[str, str, str], list[str]] = {}
        self.asked: list[tuple[str, str, Sequence[str]]] = []
        #: The message ids of each write.
        self.writes: list[list[str]] = []
        self.opened = 0
        self.closed = 0
        #: Called before a write, with its events; may raise or wait.
        self.before: Callable[[Sequence[Event]], Any] | None = None
        #: Like ``before``, for dead letters.
        self.before_put: Callable[[], None] | None = None
        #: Events that are refused: message id → reason.
        self.refuse: dict[str, str] = {}
        #: Whether outcomes of duplicates carry the stored event.
        self.with_stored = True
        #: Whether ``find`` never returns.
        self.hangs_finding = False

    async def open(self, *, create: bool) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def check(self) -> None:
        pass

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        self.writes.append([event.message_id for event in events])
        if self.before is not None:
            waited = self.before(events)
            if waited is not None:
                await waited
        outcomes = []
        for event in events:
            there = self.events.get(event.identity)
            if event.message_id in self.refuse:
                outcomes.append(Outcome(Status.REFUSED, reason=self.refuse[event.message_id]))
            elif there is not None:
                body = there.body if self.with_stored else None
                outcomes.append(Outcome(Status.DUPLICATE, stored=body))
            else:
                self.events[event.identity] = event
                outcomes.append(Outcome(Status.STORED))
        return outcomes

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        if self.hangs_finding:
            await asyncio.Event().wait()
        return self.events.get((workspace_id, origin, message_id))

    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        return Page(list(self.events.values()), None)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        return 0

    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        return None

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        self.asked.append((workspace_id, trait, values))
        found = {value: self.users.get((workspace_id, trait, value)) for value in values}
        return {value: users for value, users in found.items() if users}

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        return Page([], None)

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        return Page([], None)

    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        choices = self.choices.setdefault((change.workspace_id, change.user_id), {})
        if all(change.id != other.id for other in self.changes):
            self.changes.append(change)
            choices.update(change.choices)
        return dict(choices)

    async def state(self, workspace_id: str, user_id: str) -> Mapping[str, bool]:
        return self.choices.get((workspace_id, user_id), {})

    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionState]:
        return Page([], None)

    async def history(
        self, workspace_id: str | None, user_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionRecord]:
        return Page([], None)

    async def put(self, letters: Sequence[DeadLetter]) -> int:
        if self.before_put is not None:
            self.before_put()
        for letter in letters:
            self.letters.setdefault((letter.workspace_id, letter.id), letter)
        return 0

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        return Page(list(self.letters.values()), None)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        return 0

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        return 0


@dataclasses.dataclass
class Core:
    """A composed pipeline and what it is made of."""

    pipeline: Pipeline
    ingest: Ingest
    store: MemoryStore
    metrics: CountingMetrics
    principal: Principal

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The stored events."""
        return [event.document() for event in self.store.events.values()]

    @property
    def letters(self) -> list[DeadLetter]:
        """The dead letters."""
        return list(self.store.letters.values())


def make_core(
    store: MemoryStore | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    transforms: Sequence[tuple[str, Transform]] = (),
    write_timeout: float = 30.0,
    workspace: Workspace = ACME,
    **changed: int,
) -> Core:
    """Compose a pipeline on a store in memory.

    :param changed: limits that differ from ``limits``.
    """
    limits = dataclasses.replace(limits, **changed)
    store = MemoryStore() if store is None else store
    metrics = CountingMetrics()
    ingest = Ingest(store, limits=limits, write_timeout=write_timeout, metrics=metrics)
    workspaces = [workspace, OTHER]
    authenticator = Authenticator(workspaces)
    pipeline = Pipeline(
        workspaces=workspaces,
        limits=limits,
        authenticator=authenticator,
        schemas=SCHEMAS,
        transforms=Transforms(transforms, SCHEMAS, json_depth=limits.json_depth),
        ingest=ingest,
        store=store,
        metrics=metrics,
        timeout=write_timeout,
        clock=lambda: NOW,
    )
    return Core(pipeline, ingest, store, metrics, Principal(workspace, workspace.write_keys[0]))


def event(message_id: str, body: bytes | None = None) -> Event:
    """:return: a track event with that id.

    :param body: instead of its own.
    """
    item = {"type": "track", "messageId": message_id, "userId": "u", "event": "e"}
    arrival = Arrival(
        workspace_id="acme", write_key_id="website", received_at=NOW, event_limit=limit(65536)
    )
    made = normalise(item, "track", arrival)
    return made if body is None else dataclasses.replace(made, body=body)


def limit(size: int, key: str = "limits.event_bytes") -> Limit:
    """Return a limit of so many bytes."""
    return Limit(size, key)


async def turns(count: int = 5) -> None:
    """Let everything run that can run now."""
    for _ in range(count):
        await asyncio.sleep(0)
