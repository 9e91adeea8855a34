# SPDX-License-Identifier: Apache-2.0
"""The console as a whole: while the storage is down, behind proxies, with many connections."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import socket
from pathlib import Path

import pytest
from tornado.iostream import IOStream

from engage.api import StorageUnavailable
from engage.audit import AUDIT, read_entry
from engage.console.application import ACCEPTED_FIRST
from engage.console.sign_in import sessions as sessions_module
from engage.console.sign_in.links import hash_of, link_record, new_token
from support.console import BrokenStore, console_here, sign_in_here
from support.memory_store import MemoryStore
from support.waiting import eventually


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the records for each request, without the pause of two seconds."""
    monkeypatch.setattr(sessions_module, "REFRESH_SECONDS", 0.0)


async def test_a_link_is_not_used_up_while_the_storage_is_away(tmp_path: Path) -> None:
    store = BrokenStore()
    store.error = StorageUnavailable("away")
    async with console_here(tmp_path, store) as (console, client):
        token = new_token()
        await console.links.add(hash_of(token))
        assert (await client.post("link", data={"t": token})).status_code == 503
        store.error = None
        assert (await client.post("link", data={"t": token})).status_code == 303
        assert (await client.post("link", data={"t": token})).status_code == 403


async def test_pages_open_while_the_storage_is_away(tmp_path: Path) -> None:
    store = BrokenStore()
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
        found = await store.list_records(AUDIT, limit=9)
    (entry,) = [read_entry(item) for item in found.items]
    assert entry.actor.origin == address


async def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engage.console.connections.MAX_CONNECTIONS", 3)
    async with console_here(tmp_path, MemoryStore()) as (console, client):
        port = console.addresses.port
        opened = []
        for _ in range(6):
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            opened[-1][1].write(b"GET /healthz HTTP/1.1\r\nHost: 127")
        # Clients that send nothing more do not keep the operators away.
        assert (await client.get("healthz")).status_code == 200
        for reader, _ in opened[:4]:
            assert await reader.read(1) == b""
        for _, writer in opened:
            writer.close()


async def test_newcomers_are_accepted_before_more_strangers_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many in one turn of the event loop, but not so many that they hold it."""
    async with console_here(tmp_path, MemoryStore()) as (console, _):
        turn, turns = 0, []
        add = console.connections.add

        def noting(stream: IOStream, address: str) -> None:
            turns.append(turn)
            add(stream, address)

        monkeypatch.setattr(console.connections, "add", noting)
        port = console.addresses.port
        # The kernel completes these while the event loop does nothing.
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        while len(turns) < len(clients):
            turn += 1
            await asyncio.sleep(0)
        assert max(collections.Counter(turns).values()) == ACCEPTED_FIRST
        for client in clients:
            client.close()


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return the head of an answer, and wait for its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"0\r\n\r\n"))
    return head


async def test_the_connection_of_a_stranger_is_closed_after_its_answer(tmp_path: Path) -> None:
    async with console_here(tmp_path, MemoryStore()) as (console, _):
        token, port = new_token(), console.addresses.port
        await console.links.add(hash_of(token))
        for path, closes in (("login", True), (f"link?t={token}", False), ("nowhere", True)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * 2)
            assert (b"Connection: close" in await read_answer(reader)) == closes
            if closes:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            else:
                assert b"200 OK" in await read_answer(reader)
            writer.close()


async def test_links_and_sessions_go_ahead_of_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers whose requests take for ever do not keep the operators away."""
    from engage.console.pages.sign_in import LoginHandler

    begun, release = 0, asyncio.Event()

    async def get(self: LoginHandler) -> None:
        nonlocal begun
        begun += 1
        await release.wait()
        self.json({})

    monkeypatch.setattr(LoginHandler, "get", get)
    store = MemoryStore()
    async with console_here(tmp_path, store) as (console, client):
        strangers = [asyncio.create_task(client.get("login")) for _ in range(9)]
        await eventually(lambda: begun == 2)
        token = new_token()
        await store.put_record(link_record(hash_of(token), console.now()))
        assert (await client.get("link", params={"t": token})).status_code == 200
        await eventually(lambda: begun == 2)
        assert (await client.post("link", data={"t": token})).status_code == 303
        assert (await client.get("keys")).status_code == 200
        assert (await client.get("healthz")).status_code == 200
        assert begun == 2
        release.set()
        assert [(await stranger).status_code for stranger in strangers] == [200] * 9


async def test_a_session_that_may_have_ended_changes_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BrokenStore()
    async with console_here(tmp_path, store) as (console, client):
        await sign_in_here(console, client)
        key = re.search(r"[0-9a-f]{32}|test-key", (await client.get("keys")).text)

        async def fail(kind: str) -> int:
            raise StorageUnavailable("the sessions cannot be read")

        monkeypatch.setattr(store, "records_version", fail)
        answer = await client.get("keys")
        assert answer.status_code == 200
        assert "the sessions cannot be read" in answer.text
        assert key is None or key[0] not in answer.text
        assert (await client.get("live.json")).json()["outage"] == "the sessions cannot be read"
        form = {"action": "create", "id": "new"}
        assert (await client.post("keys", data=form)).status_code == 503
        monkeypatch.setattr(sessions_module, "OUTAGE_SECONDS", 0.0)
        assert (await client.get("keys")).status_code == 503
        monkeypatch.undo()
        assert "new" not in [one.id for one in console.keys.keys]
        assert (await client.get("keys")).status_code == 200
