# SPDX-License-Identifier: Apache-2.0
"""A newer version of engage brings a store up to date while this version has it open.

This version must then write nothing, answer 503, and say why; and it must not read what it would
misunderstand.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    EventFilter,
    StorageIncompatible,
    StorageUnavailable,
)
from engage.store import events, records, suppressions
from engage.store.tables import Plan
from engage.testing import event
from engage.testing.factories import TIME, ids, record, store_all
from engage_plugins.sqlite import schema
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.reader import Reader
from engage_plugins.sqlite.steps import execute
from engage_plugins.sqlite.writer.sockets import AVAILABLE
from support import writer
from support.console import CONSOLE, signed_in
from support.each import each
from support.server_process import start_server
from support.sqlite import expire, find, settings
from support.sqlite_keys import backup, finish, opened, restore, stored, write, write_all
from support.waiting import wait_for

REASON = f"newer version of engage .*store version {schema.VERSION + 1}"

#: What the next version may do to the tables, besides its version.
CHANGES = {
    "nothing": (),
    "keys": ("DROP TABLE event_keys", "DELETE FROM store WHERE name IN ('merged', 'epoch')"),
    "columns": (
        "ALTER TABLE event_keys RENAME COLUMN part TO bucket",
        "ALTER TABLE events RENAME COLUMN body TO content",
        "ALTER TABLE profiles RENAME COLUMN traits TO properties",
    ),
}


def upgrade(path: Path, change: str = "keys") -> None:
    """Do to a store what the next version of engage may do, in one transaction."""
    with contextlib.closing(sqlite3.connect(path, timeout=30)) as db, db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN IMMEDIATE")
        epoch = random.getrandbits(62)
        db.execute("UPDATE store SET value = ? WHERE name = 'epoch'", (epoch,))
        for statement in CHANGES[change]:
            db.execute(statement)
        db.execute(
            "UPDATE store SET value = ? WHERE name IN ('version', 'min_reader')",
            (schema.VERSION + 1,),
        )


def content(path: Path) -> list[str]:
    """Return everything that a store has."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


@pytest.fixture
def stores(small_merges: None, tmp_path: Path) -> Iterator[Iterator[Path]]:
    """Any number of stores with the same 30 events; their keys are to be merged."""
    engine = opened(tmp_path / "first.db")
    write_all(engine, range(30))

    def copies() -> Iterator[Path]:
        for number in itertools.count():
            path = tmp_path / f"{number}.db"
            backup(tmp_path / "first.db", path)
            yield path

    yield copies()
    engine.close()


def taken_over(path: Path, events: Iterable[int]) -> Engine:
    """Open a store as its writer, and write more events; all that is left to do is to merge."""
    engine = opened(path)
    write_all(engine, events)
    while engine.keys.build_filter_due:
        engine.work()
    assert engine.keys.merger.has_work
    return engine


# ------------------------------------------------------------------------------------ an engine
CALLS: dict[str, Callable[[Engine], object]] = {
    "write": lambda engine: write(engine, 100),
    "duplicate": lambda engine: write(engine, 1),
    "check": lambda engine: engine.check(),
    "find": lambda engine: find(engine, "1"),
    "expire": lambda engine: expire(engine, TIME + 9, 9, force=True),
    "run": lambda engine: engine.run(records.put, (record("r"), None)),
    "run, freeing": lambda engine: engine.run(records.expire, ("key", TIME, 9)),
    "run, overwriting": lambda engine: engine.run(suppressions.erase, ("acme", [("email", "a")])),
}


@each("call", CALLS)
@each("is_taken_over, change", itertools.product((True, False), CHANGES))
def test_a_writer_changes_nothing(
    stores: Iterator[Path], call: str, is_taken_over: bool, change: str
) -> None:
    """Also one that has looked at the version, and not at the keys, before the upgrade."""
    path = next(stores)
    engine = taken_over(path, [30])
    if not is_taken_over:
        engine.keys.reset()
    upgrade(path, change)
    before = content(path)
    for _ in range(3):
        with pytest.raises(StorageUnavailable, match=REASON):
            CALLS[call](engine)
        finish(engine)
    assert not engine.work()
    engine.close()
    assert content(path) == before


@each("work", ["merging", "building a filter"])
@each("change", [*CHANGES, "moved away"])
def test_background_work_ends(stores: Iterator[Path], change: str, work: str) -> None:
    """Without an error: it has no caller, and would end the writer process."""
    path = next(stores)
    engine = taken_over(path, range(30, 59))
    if work == "merging":
        assert engine.keys.merge_due_alone()
    else:
        engine.drop()
        engine = opened(path)
        assert engine.keys.build_filter_due
    if change == "moved away":
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path = path.rename(path.with_name(f"away-{path.name}"))
    else:
        upgrade(path, change)
    before = content(path)
    for _ in range(3):
        more = engine.work()
        assert not more or change == "moved away"
    engine.close()
    if change != "moved away":
        assert content(path) == before


def test_a_server_that_is_opening_the_store_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upgrade comes after the look at the version."""
    opened(path).close()
    before: list[str] = []

    def migrate(*_: object) -> None:
        upgrade(path)
        before.extend(content(path))

    monkeypatch.setattr(schema, "migrate", migrate)
    engine = Engine(settings(path, identifiers={"acme": ("email",)}))
    with pytest.raises(StorageIncompatible, match=REASON):
        engine.open(True, True)
    assert before
    assert content(path) == before


READS: dict[str, tuple[Plan[..., Any], tuple[Any, ...]]] = {
    "scan": (events.scan, (EventFilter(), None, 9, False)),
    "recent": (events.scan, (EventFilter(), None, 9, True)),
    "find": (events.find, ("acme", "api", "1")),
    "version": (records.version, ("key",)),
}


@each("read, change", itertools.product(READS, CHANGES))
def test_a_reader_reads_nothing(
    stores: Iterator[Path], tmp_path: Path, read: str, change: str
) -> None:
    path = next(stores)
    engine = opened(path)
    reader = Reader(settings(path))
    reader.open()
    plan, arguments = READS[read]

    def call() -> None:
        reader.call(execute, plan(*arguments), engine.context)

    call()
    backup(path, tmp_path / "before.db")
    upgrade(path, change)
    for _ in range(3):
        with pytest.raises(StorageUnavailable, match=REASON):
            call()
    # When the operator goes back, it reads again.
    restore(path, tmp_path / "before.db")
    call()
    reader.drop()
    engine.close()


# ------------------------------------------------------------------------------------- processes
@pytest.mark.parametrize(
    "kind",
    [
        "thread",
        pytest.param(
            "process", marks=pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")
        ),
    ],
)
async def test_a_running_store_is_unavailable_until_the_operator_goes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = tmp_path / "engage.db"
    async with writer.opened(writer.make(tmp_path, kind)) as store:
        await store_all(store, *(event(str(number)) for number in range(5)))
        pid = writer.pid_of(store) if kind == "process" else 0
        backup(path, tmp_path / "before.db")
        upgrade(path)
        before = content(path)
        for number in range(10):
            results = await asyncio.gather(
                store.write([event(f"new {number}")]),
                store.write([event(f"more {number}"), event("1")]),
                store.find("acme", "api", "1"),
                store.check(),
                store.scan(EventFilter(), after=None, limit=9),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [StorageUnavailable] * 5
            assert all(re.search(REASON, str(result)) for result in results)
        assert content(path) == before
        # It is the same writer, and says nothing on its own.
        assert kind == "thread" or writer.pid_of(store) == pid
        assert caplog.text == ""
        restore(path, tmp_path / "before.db")
        await store_all(store, event("new"))
        assert await ids(store) == ["0", "1", "2", "3", "4", "new"]


def test_a_server_answers_503_and_logs_the_reason(tmp_path: Path) -> None:
    """So do its console and a command."""
    with start_server(tmp_path, config_extra=CONSOLE) as server, signed_in(server) as browser:
        assert server.track("a").status_code == 200
        backup(server.database, tmp_path / "before.db")
        upgrade(server.database)
        before, worker = content(server.database), server.worker
        for number in range(20):
            answer = server.track(f"new {number}")
            assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        wait_for(lambda: server.get("/readyz").status_code == 503, what="/readyz to answer 503")
        for page in ("", "live", "rejected", "users?id=u"):
            assert re.search(REASON, browser.get(page).text)
        command = [sys.executable, *"-m engage export events --config".split(), str(server.config)]
        export = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (export.returncode, export.stdout) == (1, "")
        assert re.search(REASON, export.stderr)
        assert export.stderr.count("\n") == 1
        assert content(server.database) == before
        reasons = [line["logger"] for line in server.lines() if re.search(REASON, line["message"])]
        assert reasons.count("engage.pipeline.group_commit") == 1
        assert server.worker == worker
        restore(server.database, tmp_path / "before.db")
        wait_for(lambda: server.track("b").status_code == 200, what="the server to store events")
        assert stored(server.database) == ["a", "b"]
