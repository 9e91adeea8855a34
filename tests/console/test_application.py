# SPDX-License-Identifier: Apache-2.0
"""The console as a whole: while the storage is down, behind proxies, with many connections."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from engage.api import StorageUnavailable
from engage.console.sign_in import sessions as sessions_module
from engage.console.sign_in.links import hash_of, new_token
from engage.upkeep.audit import AUDIT, read_entry
from support.console import BrokenStore, console_here, sign_in_here
from support.memory_store import MemoryEvents, MemoryStore


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the records for each request, without the pause of two seconds."""
    monkeypatch.setattr(sessions_module, "REFRESH_SECONDS", 0.0)


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
    (entry,) = [read_entry(one) for one in found.items]
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
