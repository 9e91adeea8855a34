# SPDX-License-Identifier: Apache-2.0
"""The pipeline without HTTP and without a disk: on a :class:`~support.memory_store.MemoryStore`.

:func:`make_core` composes one; :func:`send_event`, :func:`send_batch` and :func:`deliver` send to
it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
import pytest

from engage.api import (
    DeadLetter,
    Event,
    Transform,
)
from engage.config import DEFAULT_LIMITS, Limits, SubscriptionGroup, Workspace, WriteKey
from engage.errors import ApiError, Limit
from engage.keys.auth import Authenticator, Principal
from engage.keys.limits import Rules
from engage.monitoring.metrics import Metrics
from engage.pipeline.conflicts import Conflicts
from engage.pipeline.ingest import Ingest
from engage.pipeline.normalise import Arrival, normalise
from engage.pipeline.pipeline import Pipeline
from engage.pipeline.results import BatchResult, Delivered
from engage.pipeline.transforms import Transforms
from engage.pipeline.validate import Schemas
from support.memory_store import MemoryStore

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

#: An item that is valid, and one that is not: it has no name.
GOOD = {"type": "track", "userId": "u", "event": "e"}
BAD = {"type": "track", "userId": "u", "messageId": "bad"}


class CountingMetrics(Metrics):
    """Metrics that keep what was counted."""

    def __init__(self) -> None:
        super().__init__()
        self.events: collections.Counter[tuple[str, str]] = collections.Counter()
        self.writes: list[int] = []
        self.lost: collections.Counter[str] = collections.Counter()
        self.letters: collections.Counter[str] = collections.Counter()
        self.errors = 0
        self.appended: list[int] = []
        self.loads: collections.Counter[str] = collections.Counter()
        self.log_errors = 0
        self.gap_records = 0
        self.paused_partitions = 0
        self.gauges: dict[str, float] = {}

    def event(
        self,
        kind: str,
        outcome: str,
        count: int = 1,
        workspace_id: str = "",
        write_key_id: str | None = None,
    ) -> None:
        self.events[kind, outcome] += count

    def write(self, seconds: float, events: int, waiting: int, *, to: str = "write") -> None:
        (self.writes if to == "write" else self.appended).append(events)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        match name:
            case "storage_errors":
                self.errors += by
            case "log_errors":
                self.log_errors += by
            case "log_gap_records":
                self.gap_records += by
            case "loaded_records":
                self.loads[labels[0]] += by
            case "dead_letters":
                self.letters[labels[0]] += by
            case "dropped":
                self.lost[labels[0]] += by
            case _:
                super().count(name, *labels, by=by)

    def paused(self, partitions: int) -> None:
        self.paused_partitions = partitions

    def report(self, part: str, gauges: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self.gauges.update(gauges)


@dataclasses.dataclass
class Core:
    """A composed pipeline and its parts."""

    pipeline: Pipeline
    ingest: Ingest
    store: MemoryStore
    metrics: CountingMetrics
    principal: Principal
    limits: Limits
    clock: Callable[[], int]

    @property
    def documents(self) -> list[dict[str, Any]]:
        """Return the documents of the stored events."""
        return [event.document() for event in self.store.events.values()]

    @property
    def letters(self) -> list[DeadLetter]:
        """Return the dead letters."""
        return list(self.store.letters.values())


def make_core(
    store: MemoryStore | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    transforms: Sequence[tuple[str, Transform]] = (),
    write_timeout: float = 30.0,
    workspace: Workspace = ACME,
    other: Workspace = OTHER,
    clock: Callable[[], int] = lambda: NOW,
    erasures_key: str | None = None,
    **changed: Any,
) -> Core:
    """Compose a pipeline on a store in memory.

    :param changed: replaces single values of ``limits``.
    """
    limits = dataclasses.replace(limits, **changed)
    store = MemoryStore() if store is None else store
    metrics = CountingMetrics()
    ingest = Ingest(store, limits=limits, write_timeout=write_timeout, metrics=metrics)
    workspaces = [workspace, other]
    authenticator = Authenticator(workspaces)
    pipeline = Pipeline(
        workspaces=workspaces,
        limits=limits,
        authenticator=authenticator,
        schemas=SCHEMAS,
        transforms=Transforms(transforms, SCHEMAS, json_depth=limits.json_depth),
        ingest=ingest,
        conflicts=Conflicts(ingest, erasures_key),
        metrics=metrics,
        clock=clock,
        erasures_key=erasures_key,
    )
    principal = Principal(workspace, workspace.write_keys[0])
    return Core(pipeline, ingest, store, metrics, principal, limits, clock)


async def send_event(core: Core, item: Any, operation: str = "track", **options: Any) -> Any:
    """Send one event with the usual write key."""
    options.setdefault("principal", core.principal)
    return await core.pipeline.event(operation, orjson.dumps(item), **options)


async def send_batch(core: Core, items: Any, more: Any = None, **options: Any) -> BatchResult:
    """Send a batch with the usual write key.

    :param more: further fields of the body.
    """
    options.setdefault("principal", core.principal)
    return await core.pipeline.batch(orjson.dumps({"batch": items, **(more or {})}), **options)


async def deliver(
    core: Core, documents: Sequence[Any], provider: str = "stripe", *, rules: Rules | None = None
) -> Delivered:
    """Store the events of a webhook delivery, as :mod:`engage.deliveries` does."""
    arrival = Arrival.of_delivery(
        "acme", provider, received_at=core.clock(), limits=core.limits, rules=rules
    )
    with await core.ingest.admission.enter(f"webhook acme {provider}", small=True) as admitted:
        return await core.pipeline.deliver(arrival, documents, admitted)


async def error_of(call: Awaitable[object]) -> ApiError:
    """Return the error with which the server refuses a request."""
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value


def make_event(message_id: str, body: bytes | None = None) -> Event:
    """Make a track event with that id, as the pipeline would.

    :param body: instead of the usual one.
    """
    item = {"type": "track", "messageId": message_id, "userId": "u", "event": "e"}
    arrival = Arrival(
        workspace_id="acme", write_key_id="website", received_at=NOW, event_limit=limit(65536)
    )
    made = normalise(item, "track", arrival)
    return made if body is None else dataclasses.replace(made, body=body)


def limit(size: int, key: str = "limits.event_bytes") -> Limit:
    """Return a limit of ``size`` bytes."""
    return Limit(size, key)


async def turns(count: int = 5) -> None:
    """Let the tasks run that can run now."""
    for _ in range(count):
        await asyncio.sleep(0)
