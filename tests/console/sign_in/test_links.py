# SPDX-License-Identifier: Apache-2.0
"""One-time links: each works once, for ten minutes."""

from __future__ import annotations

import asyncio

import pytest

from engage.api import StorageUnavailable
from engage.console.data.reader import Reader
from engage.console.sign_in.links import Links, hash_of, new_token
from support.console import BrokenStore, Clock
from support.memory_store import MemoryStore


@pytest.mark.parametrize("store", [MemoryStore(), None], ids=["records", "memory"])
async def test_a_link_works_once_within_ten_minutes(store: MemoryStore | None) -> None:
    clock = Clock()
    links = Links(store, Reader(5.0), clock=clock)
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
    assert sum(await asyncio.gather(*(one.redeem(token) for one in consoles))) == 1


async def test_a_link_that_cannot_be_stored_works_on_this_console() -> None:
    store = BrokenStore()
    store.error = StorageUnavailable("away")
    links = Links(store, Reader(5.0))
    token = new_token()
    await links.add(hash_of(token))
    assert await links.redeem(token)
    with pytest.raises(StorageUnavailable):
        await links.redeem(new_token())
