# SPDX-License-Identifier: Apache-2.0
"""Stores for tests of what works with any store."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from engage.api import Event, EventFilter, EventStore, Outcome, Page, Status
from engage.config import load
from engage.registry import load_plugins

CONFIG = """
[storage]
backend = "sqlite"
[storage.sqlite]
path = "{name}.db"
min_free_bytes = 0
[[workspaces]]
id = "acme"
[[workspaces.write_keys]]
id = "website"
key = "k-acme"
[[workspaces.subscription_groups]]
id = "news"
channel = "email"
type = "opt_in"
[[workspaces]]
id = "other"
"""


def config_file(folder: Path, name: str = "engage") -> Path:
    """Write a config with an SQLite store and the workspaces ``acme`` and ``other``."""
    path = folder / f"{name}.toml"
    path.write_text(CONFIG.format(name=name), encoding="utf-8")
    return path


@contextlib.asynccontextmanager
async def store_of(path: Path) -> AsyncIterator[EventStore]:
    """Open (and create) the store of a config file."""
    store = load_plugins().make_storage(load(path))
    await store.open(create=True)
    try:
        yield store
    finally:
        await store.close()


class Sink(EventStore):
    """A store that keeps events in memory and nothing else; it refuses those called ``bad``."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def open(self, *, create: bool) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def check(self) -> None:
        """Always well."""

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """Keep them."""
        outcomes = []
        for event in events:
            there = await self.find(*event.identity)
            if event.message_id.startswith("bad"):
                outcomes.append(Outcome(Status.REFUSED, "it is bad"))
            elif there is not None:
                outcomes.append(Outcome(Status.DUPLICATE, stored=there.body))
            else:
                self.events.append(event)
                outcomes.append(Outcome(Status.STORED))
        return outcomes

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """Look one up."""
        for event in self.events:
            if event.identity == (workspace_id, origin, message_id):
                return event
        return None

    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        """Pages of all of them; the filter is for others to test."""
        start = int(after or 0)
        items = self.events[start : start + limit]
        end = start + len(items)
        return Page(items, str(end) if end < len(self.events) else None)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        """Nothing is ever too old."""
        return 0
