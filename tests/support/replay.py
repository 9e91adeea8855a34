# SPDX-License-Identifier: Apache-2.0
"""A pipeline on a store, with the parts that check and replay its dead letters.

:func:`make_bench` composes one; :meth:`Bench.send` and :meth:`Bench.send_batch` send to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from engage.api import DeadLetter, Event, EventFilter, Transform, WebhookResult
from engage.config import DEFAULT_LIMITS, Limits
from engage.errors import ApiError
from engage.pipeline.conflicts import Conflicts
from engage.pipeline.explain import Explainer
from engage.pipeline.replay import Replays
from engage.pipeline.transforms import Transforms
from engage.store.facade import Storage
from engage.testing.factories import all_pages
from support import mongo
from support.memory_store import MemoryStore
from support.pipeline import NOW, SCHEMAS, Core, make_core, send_batch, send_event
from support.sqlite import config_file, open_store

#: Milliseconds between the arrival of an event and its replay.
LATER = 3_600_000


@dataclasses.dataclass
class Bench:
    """The parts, and a clock."""

    core: Core
    explainer: Explainer
    replays: Replays
    store: Any
    #: Milliseconds since 1970 UTC.
    now: int = NOW
    #: What the next retries of deliveries return.
    retried: list[WebhookResult] = dataclasses.field(default_factory=list)

    async def send(self, item: Any, operation: str = "track", **options: Any) -> ApiError | None:
        """Send one event; return the refusal."""
        try:
            await send_event(self.core, item, operation, **options)
        except ApiError as error:
            return error
        return None

    async def send_batch(self, items: Any, more: Any = None, **options: Any) -> None:
        """Send a batch, of which all items may be refused."""
        with contextlib.suppress(ApiError):
            await send_batch(self.core, items, more, **options)

    async def letters(self) -> list[DeadLetter]:
        """Return all dead letters."""
        return await all_pages(self.store.scan_dead_letters, None)

    async def events(self) -> list[Event]:
        """Return all events."""
        return await all_pages(self.store.scan, EventFilter())

    async def documents(self) -> list[dict[str, Any]]:
        """Return all events as they are stored."""
        return [event.document() for event in await self.events()]


@contextlib.asynccontextmanager
async def make_bench(
    folder: Path,
    *,
    backend: str = "memory",
    transforms: Sequence[tuple[str, Transform]] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[Bench]:
    """Compose the parts on a new store.

    :param backend: ``memory``, ``sqlite`` or ``mongo``.
    """
    if backend == "memory":
        yield compose(MemoryStore(), transforms, limits)
        return
    path = config_file(folder)
    if backend == "mongo":
        url = mongo.shared(mongo.kinds()[0]).url()
        tables = path.read_text().partition("[[workspaces]]")[2]
        path.write_text(f'[storage.mongo]\nurl = "{url}"\n[[workspaces]]{tables}')
    async with open_store(path) as store:
        yield compose(store, transforms, limits)


def compose(
    store: Storage,
    transforms: Sequence[tuple[str, Transform]] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Bench:
    """Compose the parts on an open store."""
    core = make_core(
        store,  # type: ignore[arg-type]
        limits=limits,
        transforms=transforms,
        clock=lambda: bench.now,
    )
    conflicts = Conflicts(core.ingest, None)
    explainer = Explainer(
        schemas=SCHEMAS,
        transforms=Transforms(transforms, SCHEMAS, json_depth=limits.json_depth),
        limits=limits,
        conflicts=conflicts,
        ingest=core.ingest,
        rules=lambda _workspace_id, _key_id: None,
        clock=lambda: bench.now,
    )

    async def retry(letter: DeadLetter) -> WebhookResult:
        return bench.retried.pop(0)

    replays = Replays(
        explainer=explainer,
        ingest=core.ingest,
        conflicts=conflicts,
        retry=retry,
    )
    bench = Bench(core=core, explainer=explainer, replays=replays, store=store)
    return bench


def edited(letter: DeadLetter, **fields: Any) -> bytes:
    """Return the item of a letter with other fields; ``None`` removes one."""
    item = {**orjson.loads(letter.item), **fields}
    return orjson.dumps({name: value for name, value in item.items() if value is not None})
