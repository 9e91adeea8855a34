# SPDX-License-Identifier: Apache-2.0
"""What the console shows of a log in front of the storage."""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from engage.api import LogRecord, Record
from engage.config import Config
from engage.console.services import Console
from engage.registry import Registry
from support.console import CONSOLE, console_here, sign_in_here
from support.memory_log import MemoryBroker, MemoryLog
from support.memory_store import MemoryStore

#: The config names a log that is installed; the tests replace what is made from it.
LOG = f'{CONSOLE}[log]\n[log.kafka]\nservers = "127.0.0.1:1"\n'


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """Connect every log to this broker."""
    made = MemoryBroker(2, retention=1000 * 86_400)

    def make_log(_: Registry, config: Config) -> MemoryLog | None:
        return None if config.log is None else MemoryLog(made)

    monkeypatch.setattr(Registry, "make_log", make_log)
    return made


@contextlib.asynccontextmanager
async def signed_in(folder: Path) -> AsyncIterator[tuple[Console, httpx.AsyncClient]]:
    """Have a console of a config with a log, and a client that is signed in."""
    async with console_here(folder, MemoryStore(), config_extra=LOG) as (console, client):
        await sign_in_here(console, client)
        yield console, client


async def text(console: Console, client: httpx.AsyncClient, path: str) -> str:
    """Return a page as text, after another reading of the log."""
    assert console.lag is not None
    await console.lag.read()
    answer = await client.get(path)
    assert answer.status_code == 200
    shown = re.sub(r"<[^>]+>", " ", answer.text.partition("<main")[2])
    return " ".join(html.unescape(shown).split())


def append(broker: MemoryBroker) -> None:
    broker.inject(LogRecord(key=b"k", value=b"{}", headers={}), partition=1)


async def test_the_loaders_are_shown(tmp_path: Path, broker: MemoryBroker) -> None:
    async with signed_in(tmp_path) as here:
        assert "Waiting for the first event" in await text(*here, "")
        shown = await text(*here, "system")
        assert "Log answers Plugin kafka Group of the loaders engage Not loaded 0 records" in shown
        assert "Records are kept 24\u202fh".replace("\u202f", " ") in shown.replace("\u202f", " ")
        now = broker.clock()
        broker.clock = lambda: now - 600_000
        append(broker)
        shown = (await text(*here, "")).replace("\u202f", " ")
        assert "Waiting for the first event" not in shown
        assert "The loaders are 10 min behind: is engage load running?" in shown
        assert "Not loaded 1 the oldest 10 min ago" in shown
        shown = (await text(*here, "system")).replace("\u202f", " ")
        assert "Not loaded 1 record Oldest of them 10 min old" in shown


async def test_an_alarm_is_on_both_pages(tmp_path: Path, broker: MemoryBroker) -> None:
    async with signed_in(tmp_path) as here:
        console = here[0]
        for _ in range(3):
            append(broker)
        broker.commit("engage", {1: 1})
        broker.expire(1, 2)
        for page in ("", "system"):
            shown = await text(*here, page)
            assert "acknowledged events may be lost" in shown
            assert "partition 1 (expected 1, begins at 2)" in shown
        broker.commit("engage", {1: 2})
        records = console.store
        body = b'{"partition": 1, "expected": 1, "first": 2}'
        await records.put_record(
            Record(kind="log_gap", workspace_id="", id="1-1", body=body, at=broker.clock())
        )
        for page in ("", "system"):
            shown = await text(*here, page)
            assert "acknowledged events may be lost: 1 records of partition 1, from 1" in shown
        broker.down = True
        for page in ("", "system"):
            assert "the log is not available: the broker is down" in await text(*here, page)


async def test_without_a_log_nothing_is_shown(tmp_path: Path) -> None:
    async with console_here(tmp_path, MemoryStore()) as (console, client):
        await sign_in_here(console, client)
        assert console.lag is None
        assert ">Log<" not in (await client.get("system")).text
