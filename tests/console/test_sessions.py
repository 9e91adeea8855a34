# SPDX-License-Identifier: Apache-2.0
"""Sessions, links, passwords and addresses, with clocks and storages of the test."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from pathlib import Path
from typing import Any

import pytest

from engage.api import EventFilter, Page, Record, StorageUnavailable
from engage.config import ConsoleConfig
from engage.console import passwords as passwords_module
from engage.console import reader as reader_module
from engage.console import sessions as sessions_module
from engage.console.addresses import Addresses, client_address
from engage.console.housekeeping import KEPT, expire_once
from engage.console.links import QUEUE, Links, hash_of, new_token
from engage.console.passwords import (
    ADDRESS_FAILURES,
    ALL_FAILURES,
    Passwords,
    Throttle,
    TooBusy,
    hash_password,
    is_password,
)
from engage.console.reader import Reader
from engage.console.sessions import IDLE_SECONDS, LONGEST_SECONDS, Sessions, new_secret
from engage.storage.audit import AUDIT, read_entry
from support.console import Clock, console_here, sign_in_here
from support.memory_store import MemoryEvents, MemoryStore

NAME = "engage-console-1"


class Broken(MemoryStore):
    """A storage that does not answer while ``error`` is set."""

    error: Exception | None = None

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
        await super()._wait()


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the records for each request, without the pause of two seconds."""
    monkeypatch.setattr(sessions_module, "REFRESH_SECONDS", 0.0)


def make_sessions(store: Any, clock: Clock, *, password: str | None = None) -> Sessions:
    return Sessions(store, Reader(5.0), password=password, clock=clock)


# ----------------------------------------------------------------------------------------- sessions
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


async def test_sessions_go_on_while_the_storage_is_away() -> None:
    store = Broken()
    sessions = make_sessions(store, Clock())
    session, cookie = await sessions.issue(NAME, "link")
    store.error = StorageUnavailable("away")
    assert await sessions.check(NAME, cookie) == session
    # A console that has never read the secret cannot tell.
    with pytest.raises(StorageUnavailable):
        await make_sessions(store, Clock()).check(NAME, cookie)


# -------------------------------------------------------------------------------------------- links
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


async def test_too_many_who_try_links_at_once_are_refused() -> None:
    class Slow(MemoryStore):
        async def _wait(self) -> None:
            await asyncio.sleep(0.001)

    links = Links(Slow(), Reader(5.0))
    tries = [links.redeem(new_token()) for _ in range(30)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert [type(one) for one in results].count(TooBusy) == 30 - QUEUE


async def test_a_link_that_cannot_be_stored_works_on_this_console() -> None:
    store = Broken()
    store.error = StorageUnavailable("away")
    links = Links(store, Reader(5.0))
    token = new_token()
    await links.add(hash_of(token))
    assert await links.redeem(token)
    with pytest.raises(StorageUnavailable):
        await links.redeem(new_token())


async def test_old_records_of_the_console_are_deleted() -> None:
    clock, store = Clock(), MemoryStore()
    now = round(clock.now * 1000)
    for kind, seconds in KEPT.items():
        for name, age in (("old", seconds + 1), ("new", seconds - 1)):
            at = now - age * 1000
            await store.put_record(Record(kind=kind, workspace_id="", id=name, body=b"{}", at=at))
    # Keys are not deleted, and the audit only while the time can be trusted.
    for kind in ("key", AUDIT):
        await store.put_record(Record(kind=kind, workspace_id="", id="old", body=b"{}", at=1))
    await expire_once(store, Reader(5.0), clock)
    left = (await store.list_records(None, limit=99)).items
    kept = {("key", "old"), (AUDIT, "old"), *((kind, "new") for kind in KEPT)}
    assert {(one.kind, one.id) for one in left} == kept


# ---------------------------------------------------------------------------------------- passwords
def test_a_hash_is_that_of_one_password() -> None:
    setting = hash_password("pässword")
    assert setting.startswith("scrypt$15$8$3$")
    assert is_password(setting, "pässword")
    assert not is_password(setting, "password")
    assert setting != hash_password("pässword")


async def test_passwords_are_checked_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    release = asyncio.Event()

    async def to_thread(*_: Any) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        return False

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    checker = Passwords("x")
    tasks = [asyncio.create_task(checker.check("p")) for _ in range(8)]
    await asyncio.sleep(0.01)
    release.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 1
    assert [type(one) for one in results] == [bool] * 5 + [TooBusy] * 3
    assert not await checker.check("p" * 2000)


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_address_has_five_guesses_in_fifteen_minutes() -> None:
    clock = Seconds()
    throttle = Throttle(clock)
    for _ in range(ADDRESS_FAILURES):
        assert throttle.wait("192.0.2.1") == 0
        throttle.failed("192.0.2.1")
        clock.now += 60
    assert throttle.wait("192.0.2.1") == 600
    assert throttle.wait("::ffff:192.0.2.1") == 600
    assert throttle.wait("192.0.2.2") == 0
    clock.now += 600
    assert throttle.wait("192.0.2.1") == 0
    throttle.failed("192.0.2.1")
    assert throttle.wait("192.0.2.1") == 60
    throttle.succeeded("192.0.2.1")
    assert throttle.wait("192.0.2.1") == 0


def test_all_addresses_together_have_twenty_guesses_a_minute() -> None:
    clock = Seconds()
    throttle = Throttle(clock)
    for number in range(ALL_FAILURES):
        assert throttle.wait(f"192.0.2.{number}") == 0
        throttle.failed(f"192.0.2.{number}")
    assert throttle.wait("198.51.100.1") == 60
    clock.now += 60
    assert throttle.wait("198.51.100.1") == 0


def test_the_addresses_of_one_network_count_as_one() -> None:
    throttle = Throttle(Seconds())
    for number in range(ADDRESS_FAILURES):
        throttle.failed(f"2001:db8::{number:x}")
    assert throttle.wait("2001:db8::ffff:1") > 0
    assert throttle.wait("2001:db8:0:1::1") == 0


def test_the_throttle_does_not_grow() -> None:
    throttle = Throttle(Seconds())
    for number in range(passwords_module.MAX_ADDRESSES + 100):
        throttle.failed(str(ipaddress.ip_address(number)))
    assert len(throttle._of_address) == passwords_module.MAX_ADDRESSES


# ---------------------------------------------------------------------------------------- addresses
NETWORKS = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("::1")]


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("::ffff:10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7, 10.9.9.9", "198.51.100.7"),
        ("::1", "10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "nonsense", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9, nonsense", "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("", "198.51.100.7", ""),
    ],
)
def test_only_trusted_proxies_name_the_address_of_a_client(
    peer: str, forwarded: str | None, address: str
) -> None:
    assert client_address(peer, forwarded, NETWORKS) == address


@pytest.mark.parametrize(
    ("config", "url"),
    [
        ({}, "http://127.0.0.1:8081"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8081"),
        ({"host": "::"}, "http://[::1]:8081"),
        ({"host": "::1"}, "http://[::1]:8081"),
        ({"host": "console.lan"}, "http://console.lan:8081"),
        ({"public_url": "https://ops.example.com/engage"}, "https://ops.example.com/engage"),
    ],
)
def test_the_url_of_the_console(config: dict[str, Any], url: str) -> None:
    assert Addresses(ConsoleConfig(**config), 8081).url == url


# ------------------------------------------------------------------------------------------- reader
async def test_two_calls_of_the_store_run_at_once() -> None:
    running, most = 0, 0

    async def call() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    reader = Reader(5.0)
    await asyncio.gather(*(reader.read(call()) for _ in range(20)))
    assert most == 2


async def test_a_call_that_takes_too_long_is_given_up() -> None:
    reader = Reader(0.05)
    assert await reader.read(asyncio.sleep(0, "value")) == "value"
    assert reader.error is None
    hanging = [reader.read(asyncio.sleep(9)) for _ in range(5)]
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert [type(one) for one in results] == [StorageUnavailable] * 5
    assert reader.error == "the storage did not answer within 0.05 seconds"
    await reader.read(asyncio.sleep(0))
    assert reader.error is None


async def test_after_a_call_that_took_too_long_reads_fail_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_module, "HASTY_TIMEOUT", 0.05)
    monkeypatch.setattr(reader_module, "HASTY_SECONDS", 60.0)
    reader = Reader(30.0)
    for within, seconds in ((0.1, 0.1), (30.0, 0.05), (30.0, 0.05)):
        with pytest.raises(StorageUnavailable, match=f"within {seconds:g} seconds"):
            await reader.read(asyncio.sleep(60), within=within)
    # What changes something has its time.
    assert await reader.read(asyncio.sleep(0.1, "written")) == "written"
    assert await reader.read(asyncio.sleep(0.1, "read"), within=30.0) == "read"


# --------------------------------------------------------------------------------------- as a whole
async def test_a_storage_without_records_has_a_console(tmp_path: Path) -> None:
    """Links and sessions are in memory; pages that lack their source say so."""
    async with console_here(tmp_path, MemoryEvents()) as (console, client):
        assert (await client.get("audit")).status_code == 303
        await sign_in_here(console, client)
        for path in ("", "live", "live.json", "events", "keys", "users", "audit", "system"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.post("logout")).status_code == 303
        assert (await client.get("audit")).status_code == 303


async def test_a_link_is_not_used_up_while_the_storage_is_away(tmp_path: Path) -> None:
    store = Broken()
    store.error = StorageUnavailable("away")
    async with console_here(tmp_path, store) as (console, client):
        token = new_token()
        await console.links.add(hash_of(token))
        assert (await client.post("link", data={"t": token})).status_code == 503
        store.error = None
        assert (await client.post("link", data={"t": token})).status_code == 303
        assert (await client.post("link", data={"t": token})).status_code == 403


async def test_pages_open_while_the_storage_is_away(tmp_path: Path) -> None:
    class Away(Broken):
        async def recent(
            self, wanted: EventFilter, *, before: str | None = None, limit: int
        ) -> Page[Any]:
            await self._wait()
            return await super().recent(wanted, before=before, limit=limit)

    store = Away()
    async with console_here(tmp_path, store) as (console, client):
        await sign_in_here(console, client)
        store.error = StorageUnavailable("the disk is <gone>")
        for path in ("", "events", "keys", "users", "audit", "system"):
            answer = await client.get(path)
            assert answer.status_code == 200, path
        answer = await client.get("events")
        assert "the disk is &lt;gone&gt;" in answer.text
        # What changes something fails, and says why.
        answer = await client.post("link", data={"t": new_token()})
        assert answer.status_code == 503
        assert "Traceback" not in answer.text
        store.error = None
        assert "the disk is" not in (await client.get("events")).text


async def test_a_page_that_fails_shows_the_id_of_the_log_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engage.console.pages.audit import AuditHandler

    async def get(self: AuditHandler) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(AuditHandler, "get", get)
    async with console_here(tmp_path, MemoryStore()) as (console, client):
        await sign_in_here(console, client)
        answer = await client.get("audit")
        assert answer.status_code == 500
        assert "secret detail" not in answer.text
        assert "Traceback" not in answer.text
        assert answer.headers["X-Request-Id"] in answer.text
        (record,) = [one for one in caplog.records if "a page failed" in one.message]
        assert vars(record)["requestId"] == answer.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("proxies", "address"),
    [('["127.0.0.1"]', "203.0.113.9"), ('["192.0.2.1"]', "127.0.0.1"), ("[]", "127.0.0.1")],
)
async def test_the_audit_has_the_address_that_a_trusted_proxy_names(
    tmp_path: Path, proxies: str, address: str
) -> None:
    store = MemoryStore()
    server = f"trusted_proxies = {proxies}"
    async with console_here(tmp_path, store, server=server) as (console, client):
        client.headers["X-Forwarded-For"] = "198.51.100.1, 203.0.113.9"
        client.headers["X-Forwarded-Host"] = "evil.example"
        client.headers["X-Forwarded-Proto"] = "https"
        await sign_in_here(console, client)
    (entry,) = [read_entry(one) for one in (await store.list_records(AUDIT, limit=9)).items]
    assert entry.actor.origin == address


async def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engage.console.application.MAX_CONNECTIONS", 3)
    async with console_here(tmp_path, MemoryStore()) as (console, client):
        port = console.addresses.port
        opened = []
        for _ in range(6):
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            opened[-1][1].write(b"GET /healthz HTTP/1.1\r\nHost: 127")
            await asyncio.sleep(0.02)
        # Clients that send nothing more do not keep the operators away.
        assert (await client.get("healthz")).status_code == 200
        closed = []
        for reader, _ in opened:
            with contextlib.suppress(TimeoutError):
                closed.append(await asyncio.wait_for(reader.read(1), 0.05) == b"")
        assert closed == [True] * 4
        for _, writer in opened:
            writer.close()


async def test_a_request_of_an_operator_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engage.console.application.MAX_CONNECTIONS", 3)
    async with console_here(tmp_path, MemoryStore()) as (console, client):
        await sign_in_here(console, client)
        port = console.addresses.port
        cookie = "; ".join(f"{one.name}={one.value}" for one in client.cookies.jar)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /logout HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n"
            "Sec-Fetch-Site: same-origin\r\nContent-Length: 3\r\n\r\na"
        )
        writer.write(head.encode())
        await asyncio.sleep(0.05)
        others = []
        for _ in range(6):
            others.append(await asyncio.open_connection("127.0.0.1", port))
            await asyncio.sleep(0.02)
        writer.write(b"=b")
        assert (await reader.readline()).startswith(b"HTTP/1.1 303")
        for _, other in [*others, (reader, writer)]:
            other.close()
