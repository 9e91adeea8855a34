# SPDX-License-Identifier: Apache-2.0
"""One-time links: each works once, for ten minutes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.config import ConsoleConfig
from engage.console.data.reader import Reader
from engage.console.sign_in import links as links_module
from engage.console.sign_in.links import Links, hash_of, link_record, link_url, new_token
from support.console import BrokenStore, Clock
from support.each import each
from support.memory_store import MemoryStore


async def test_a_link_works_once_within_ten_minutes() -> None:
    clock = Clock()
    links = Links(MemoryStore(), Reader(5.0), clock=clock)
    for seconds, works in ((0, True), (599.9, True), (600, False), (1e6, False)):
        token = new_token()
        await links.add(hash_of(token))
        clock.now += seconds
        assert await links.redeem(token) == works
        assert not await links.redeem(token)
    assert not await links.redeem(new_token())


async def test_of_many_who_use_a_link_one_gets_in() -> None:
    store = MemoryStore()
    consoles = [Links(store, Reader(5.0)) for _ in range(10)]
    token = new_token()
    await consoles[0].add(hash_of(token))
    assert sum(await asyncio.gather(*(console.redeem(token) for console in consoles))) == 1


async def test_a_link_that_cannot_be_stored_works_on_this_console() -> None:
    store = BrokenStore()
    store.error = StorageUnavailable("away")
    links = Links(store, Reader(5.0))
    token = new_token()
    await links.add(hash_of(token))
    assert await links.redeem(token)
    with pytest.raises(StorageUnavailable):
        await links.redeem(new_token())


async def test_made_up_links_share_a_look_at_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "LOOK_SECONDS", 0.0)
    clock, store = Clock(), MemoryStore()
    reads: list[str] = []
    version = store.records_version

    async def records_version(kind: str) -> int:
        reads.append(kind)
        return await version(kind)

    monkeypatch.setattr(store, "records_version", records_version)
    links = Links(store, Reader(5.0), clock=clock)
    assert not any(await asyncio.gather(*(links.exists(new_token()) for _ in range(99))))
    assert len(reads) <= 2
    token = new_token()
    await store.put_record(link_record(hash_of(token), round(clock.now * 1000)))
    assert await links.exists(token), "a new one is found at its first use"
    count = len(reads)
    assert await links.exists(token)
    assert not await links.exists("x" * 42)
    assert len(reads) == count
    assert await links.redeem(token)
    assert not await links.exists(token)
    await store.put_record(link_record(hash_of(token), round(clock.now * 1000)))
    assert await links.exists(token)
    clock.now += 600
    assert not await links.exists(token)


async def test_a_store_that_does_not_answer_knows_no_link() -> None:
    store = BrokenStore()
    store.error = StorageUnavailable("away")
    assert not await Links(store, Reader(5.0)).exists(new_token())


@each(
    "url, config, start",
    [
        ("http://127.0.0.1:8081", {}, r"http://[0-9a-f]{16}\.localhost:8081"),
        ("http://[::1]:8081", {"host": "::1"}, r"http://[0-9a-f]{16}\.localhost:8081"),
        ("http://127.0.0.2:8081", {"host": "127.0.0.2"}, r"http://127\.0\.0\.2:8081"),
        ("http://console.lan:8081", {"host": "console.lan"}, r"http://console\.lan:8081"),
        ("http://127.0.0.1/a", {"public_url": "http://127.0.0.1/a"}, r"http://127\.0\.0\.1/a"),
    ],
)
def test_on_this_machine_each_link_has_a_host_of_its_own(
    url: str, config: dict[str, Any], start: str
) -> None:
    shown = [link_url(ConsoleConfig(**config), url, "T") for _ in range(2)]
    assert all(re.fullmatch(rf"{start}/link\?t=T", one) for one in shown)
    assert (shown[0] != shown[1]) == ("localhost" in shown[0])
