# SPDX-License-Identifier: Apache-2.0
"""Who is signed in: cookies and the secret that signs them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.console.data.reader import Reader
from engage.console.sign_in import sessions as sessions_module
from engage.console.sign_in.sessions import IDLE_SECONDS, LONGEST_SECONDS, Sessions, new_secret
from support.console import BrokenStore, Clock
from support.memory_store import MemoryStore
from support.waiting import eventually

NAME = "engage-console-1"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the records for each request, without the pause of two seconds."""
    monkeypatch.setattr(sessions_module, "REFRESH_SECONDS", 0.0)


def make_sessions(store: Any, clock: Clock, *, password: str | None = None) -> Sessions:
    return Sessions(store, Reader(5.0), password=password, clock=clock)


async def test_a_session_ends_when_it_is_idle_or_old() -> None:
    clock = Clock()
    sessions = make_sessions(MemoryStore(), clock)
    begun = clock.now
    _, cookie = await sessions.issue(NAME, "link")
    clock.now = begun + IDLE_SECONDS - 1
    session = await sessions.check(NAME, cookie)
    assert session is not None
    clock.now = begun + IDLE_SECONDS + 1
    assert await sessions.check(NAME, cookie) is None
    # Somebody who opens a page now and then stays for seven days, and no longer.
    clock.now = begun
    while clock.now - begun < LONGEST_SECONDS:
        session = await sessions.check(NAME, cookie)
        assert session is not None
        cookie = sessions.renewed(NAME, session) or cookie
        clock.now += IDLE_SECONDS / 2
    clock.now += 1
    assert await sessions.check(NAME, cookie) is None


async def test_a_cookie_is_signed_again_after_five_minutes() -> None:
    clock = Clock()
    sessions = make_sessions(MemoryStore(), clock)
    session, _ = await sessions.issue(NAME, "link")
    assert sessions.renewed(NAME, session) is None
    clock.now += 300
    cookie = sessions.renewed(NAME, session)
    assert cookie is not None
    again = await sessions.check(NAME, cookie)
    assert again is not None
    assert (again.id, again.began) == (session.id, session.began)


async def test_all_consoles_of_a_store_accept_a_session_and_end_it_together() -> None:
    clock, store = Clock(), MemoryStore()
    one, other = make_sessions(store, clock), make_sessions(store, clock)
    (session, cookie), (_, second) = await asyncio.gather(
        one.issue(NAME, "link"), other.issue(NAME, "password")
    )
    assert await other.check(NAME, cookie) == session
    assert await one.check(NAME, second) is not None
    await one.end(session)
    assert await other.check(NAME, cookie) is None
    assert await other.check(NAME, second) is not None
    await store.put_record(new_secret(round(clock.now * 1000)))
    assert await one.check(NAME, second) is None


@pytest.mark.parametrize("password", ["", "scrypt$15$8$3$other$hash"])
async def test_another_password_ends_the_session(password: str) -> None:
    clock, store = Clock(), MemoryStore()
    _, cookie = await make_sessions(store, clock, password="scrypt$15$8$3$a$b").issue(NAME, "link")
    assert await make_sessions(store, clock, password=password).check(NAME, cookie) is None


async def test_a_cookie_of_another_name_or_a_changed_one_is_not_accepted() -> None:
    sessions = make_sessions(MemoryStore(), Clock())
    _, cookie = await sessions.issue(NAME, "link")
    assert await sessions.check("engage-console-2", cookie) is None
    for position in range(0, len(cookie), 7):
        changed = cookie[:position] + chr(ord(cookie[position]) ^ 1) + cookie[position + 1 :]
        assert await sessions.check(NAME, changed) is None, position


async def test_sessions_are_remembered_while_the_storage_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = BrokenStore()
    sessions = make_sessions(store, Clock())
    session, cookie = await sessions.issue(NAME, "link")
    store.error = StorageUnavailable("away")
    with pytest.raises(StorageUnavailable):
        await sessions.check(NAME, cookie)
    assert sessions.recall(NAME, cookie) == session
    assert sessions.recall("another", cookie) is None
    monkeypatch.setattr(sessions_module, "OUTAGE_SECONDS", 0.0)
    with pytest.raises(StorageUnavailable):
        sessions.recall(NAME, cookie)
    # A console that has never read the secret cannot tell.
    with pytest.raises(StorageUnavailable):
        make_sessions(store, Clock()).recall(NAME, cookie)


class _Slow(MemoryStore):
    """A storage whose answers wait until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()
        self.release.set()
        self.reads = 0

    async def records_version(self, kind: str) -> int:
        version = await super().records_version(kind)
        self.reads += 1
        await self.release.wait()
        return version


async def test_a_session_is_checked_with_a_reading_that_began_in_time() -> None:
    """One that is under way may have begun before the session was ended."""
    clock, store = Clock(), _Slow()
    sessions = make_sessions(store, clock)
    _, cookie = await sessions.issue(NAME, "link")
    assert await sessions.check(NAME, cookie) is not None
    store.release.clear()
    early = [asyncio.create_task(sessions.check(NAME, cookie)) for _ in range(9)]
    before = store.reads
    await eventually(lambda: store.reads == before + 2)
    await store.put_record(new_secret(round(clock.now * 1000)))
    late = [asyncio.create_task(sessions.check(NAME, cookie)) for _ in range(9)]
    store.release.set()
    assert None not in await asyncio.gather(*early)
    assert await asyncio.gather(*late) == [None] * 9
    assert store.reads == before + 4, "all requests share a reading"


async def test_reading_the_records_does_not_wait_for_the_pages() -> None:
    reader = Reader(60.0)
    sessions = Sessions(MemoryStore(), reader, password=None, clock=Clock())
    pages = [asyncio.create_task(reader.read(asyncio.sleep(3600))) for _ in range(9)]
    await asyncio.sleep(0)
    _, cookie = await sessions.issue(NAME, "link")
    assert await sessions.check(NAME, cookie) is not None
    for page in pages:
        page.cancel()
