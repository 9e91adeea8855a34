# SPDX-License-Identifier: Apache-2.0
"""The most frequent names of the newest events."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path

from engage.api import Event, EventFilter, Page, StorageUnavailable
from engage.console.data import names as module
from engage.console.data.badge import FRESH
from engage.console.data.names import Counted, Names
from engage.console.data.reader import Reader
from support.console import BrokenStore, Clock, console_here, sign_in_here
from support.memory_store import MemoryStore
from support.pipeline import make_event


def events(name: str | None, count: int, kind: str = "track", to: str = "acme") -> list[Event]:
    """Return events of one name, each with an id of its own."""
    made = [make_event(f"{to}-{kind}-{name}-{number}") for number in range(count)]
    return [dataclasses.replace(one, name=name, type=kind, workspace_id=to) for one in made]


async def test_the_ten_most_frequent_names_of_a_workspace() -> None:
    store = MemoryStore()
    await store.write(events("other's", 50, to="other"))
    for number in range(12):
        await store.write(events(f"N{number:02}", 20 - number))
    await store.write([*events(None, 30, "identify"), *events("N00", 5, "page")])
    found = await Names(store, Reader(8.0), Clock()).newest("acme")
    assert found is not None
    assert found.events == sum(range(9, 21)) + 35
    assert found.names[:3] == [("identify", "", 30), ("track", "N00", 20), ("track", "N01", 19)]
    assert len(found.names) == 10


async def test_only_the_newest_events_are_read_and_rarely() -> None:
    class Counting(MemoryStore):
        limits: list[int] = []

        async def recent(
            self, wanted: EventFilter, *, before: str | None = None, limit: int
        ) -> Page[Event]:
            self.limits.append(limit)
            return await super().recent(wanted, before=before, limit=7)

    store, clock = Counting(), Clock()
    await store.write([*events("Old", 9), *events("New", 7)])
    names = Names(store, Reader(8.0), clock)
    for _ in range(3):
        assert await names.newest("acme") == Counted(7, [("track", "New", 7)])
    assert store.limits == [module.EVENTS] == [10_000]
    await names.newest("other")
    clock.now += FRESH
    await names.newest("acme")
    assert len(store.limits) == 3


async def test_a_store_that_does_not_answer_shows_the_last_names() -> None:
    store, clock = BrokenStore(), Clock()
    await store.write(events("E", 2))
    names = Names(store, Reader(8.0), clock)
    known = await names.newest("acme")
    assert known == Counted(2, [("track", "E", 2)])
    clock.now += FRESH
    store.error = StorageUnavailable("away")
    assert await names.newest("acme") == known
    assert await names.newest("other") is None


async def test_the_overview_links_each_name_to_its_events(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.write([*events('<b> "x"', 2), *events(None, 1, "identify")])
    async with console_here(tmp_path, store) as (console, client):
        await sign_in_here(console, client)
        page = (await client.get("")).text
        assert "of the newest 3 events" in " ".join(re.sub(r"<[^>]*>", "", page).split())
        cells = page[page.index("byname") :]
        links = re.findall(r'href="(events[^"]*)">([^<]*)</a>', cells)[:2]
        assert [text for _, text in links] == ["&lt;b&gt; &quot;x&quot;", "identify"]
        for (href, _), count in zip(links, (2, 1), strict=True):
            shown = (await client.get(html.unescape(href))).text
            assert shown.count('<tr class="row"') == count
