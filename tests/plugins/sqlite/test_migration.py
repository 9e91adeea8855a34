# SPDX-License-Identifier: Apache-2.0
"""What a store has after it was brought up to date, and which programs bring it up to date."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engage.api import (
    Count,
    EventStore,
    Record,
    Status,
    StorageUnavailable,
)
from engage.cli import main
from engage.testing.factories import TIME, event, identify, ids, letter, store_all
from engage_plugins.sqlite import migration
from engage_plugins.sqlite import schema as sqlite_schema
from engage_plugins.sqlite.migration import migrate
from support.earlier_stores import Earlier
from support.sqlite import config_file


@pytest.mark.parametrize("merged", [False, True])
def test_a_process_of_version_4_notices_the_migration(tmp_path: Path, merged: bool) -> None:
    """It compares the epoch in each transaction, and then finds a store that it cannot read."""
    Earlier(tmp_path, "sqlite", 4, merged=merged)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as db:
        query = "SELECT value FROM store WHERE name = 'epoch'"
        (epoch,) = db.execute(query).fetchone()
        assert epoch
        migrate(db, str(tmp_path / "engage.db"), 0)
        assert db.execute(query).fetchone() != (epoch,)
        (least,) = db.execute("SELECT value FROM store WHERE name = 'min_reader'").fetchone()
        assert least > 4


#: How version 3 stores an event.
_INSERT_3 = (
    "INSERT INTO events (key, workspace, origin, message_id, type, received_at, timestamp, body) "
    "VALUES (x'00', 'acme', 'api', 'old', 'track', 1, 1, '{}') ON CONFLICT (key) DO NOTHING"
)


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_a_process_of_an_earlier_version_stores_no_more_events(
    tmp_path: Path, version: int
) -> None:
    """It would not see which events are duplicates. Each statement fails, and it answers 503."""
    earlier = Earlier(tmp_path, "sqlite", version)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as old:
        with old:
            old.execute(_INSERT_3)
        async with earlier.opened(create=True) as store:
            assert await ids(store) == ["1", "2", "3", "4", "5", "6", "old"]
            for _ in range(2):
                with pytest.raises(sqlite3.OperationalError, match="ON CONFLICT"):
                    old.execute(_INSERT_3)
            # It finds no connection that it may use, either.
            (least,) = old.execute("SELECT value FROM store WHERE name = 'min_reader'").fetchone()
            assert least > version
            assert await ids(store) == ["1", "2", "3", "4", "5", "6", "old"]


@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_events_are_the_same_after_the_migration(tmp_path: Path, version: int) -> None:
    """Their numbers are, which are cursors, and no number of an expired event is used again."""
    earlier = Earlier(tmp_path, "sqlite", version)
    columns = "seq, key, workspace, origin, message_id, type, user_id, anonymous_id, name"
    query = f"SELECT {columns}, received_at, timestamp, body FROM events ORDER BY seq"
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db, db:
        db.execute("DELETE FROM events WHERE seq IN (1, 6)")
        db.execute("CREATE INDEX mine ON events (name)")
        db.execute("CREATE VIEW also_mine AS SELECT user_id FROM events")
        before = db.execute(query).fetchall()
    async with earlier.opened(create=True) as store:
        outcomes = await store.write([identify(one[4], "ada", 99) for one in before])
        assert [one.status for one in outcomes] == [Status.DUPLICATE] * 4
        for one in before:
            assert (await store.find(*one[2:5])).message_id == one[4]
        assert await store.find("acme", "api", "6") is None
        await store_all(store, identify("6", "ada", 99))
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        after = db.execute(query).fetchall()
        assert after[:-1] == before
        assert after[-1][0] == 7
        assert [row[0] for row in db.execute("SELECT user_id FROM also_mine")][-1] == "ada"
        assert db.execute("PRAGMA index_info(mine)").fetchall()
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("has_saved", [True, False])
async def test_duplicates_are_found_after_the_migration(tmp_path: Path, has_saved: bool) -> None:
    """Whether the earlier version had merged the key of an event, or had it in memory only."""
    earlier = Earlier(tmp_path, "sqlite", 4, merged=True)
    if not has_saved:
        # As after a crash.
        (tmp_path / "engage.db-keys").unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        keys = dict(db.execute("SELECT key, seq FROM keys"))
        (merged,) = db.execute("SELECT value FROM store WHERE name = 'merged'").fetchone()
        events = {
            name: (seq, keys.get(key))
            for name, seq, key in db.execute("SELECT message_id, seq, key FROM events")
        }
    # It has keys in the table, keys in the events alone, and keys of deleted events. One of the
    # deleted events was stored again, and its key has both numbers.
    assert all(number == seq for seq, number in events.values() if seq <= merged)
    assert sum(seq <= merged for seq, _ in events.values()) == 70
    assert sum(number is None for _, number in events.values()) == 16
    assert events["7"] == (110, 8)
    deleted = [name for name in map(str, range(30)) if name not in events]
    assert len(keys) == 99
    assert len(deleted) == 28

    async def found(store: EventStore) -> list[str]:
        names = [*deleted, *events]
        return [name for name in names if await store.find("acme", "api", name) is not None]

    async with earlier.opened(create=True) as store:
        assert await found(store) == list(events)
        outcomes = await store.write([event(name) for name in (*events, *deleted)])
        assert {one.status for one in outcomes[: len(events)]} == {Status.DUPLICATE}
        assert {one.status for one in outcomes[len(events) :]} == {Status.STORED}
    for create in (False, True):
        async with earlier.opened(create=create) as store:
            assert len(await found(store)) == len(deleted) + len(events)
            outcomes = await store.write([event(name) for name in (*deleted, *events)])
            assert {one.status for one in outcomes} == {Status.DUPLICATE}


async def test_a_store_without_events_keeps_its_next_number(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path, "sqlite", 3)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db, db:
        db.execute("DELETE FROM events")
    async with earlier.opened(create=True) as store:
        await store_all(store, identify("1", "ada", 99))
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        assert db.execute("SELECT seq FROM events").fetchall() == [(7,)]


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_new_store_is_like_one_that_was_brought_up_to_date(tmp_path: Path, version: int) -> None:
    def tables(db: sqlite3.Connection) -> list[str]:
        rows = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        return sorted(re.sub(r"\s+", " ", sql) for (sql,) in rows)

    Earlier(tmp_path, "sqlite", version)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as db:
        migrate(db, str(tmp_path / "engage.db"), 0)
        migrated = tables(db)
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        sqlite_schema.create(db)
        assert tables(db) == migrated


@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_a_command_that_writes_asks_for_a_server_first(tmp_path: Path, version: int) -> None:
    """The store has no place for what it writes. (MongoDB makes collections as needed.)"""
    earlier = Earlier(tmp_path, "sqlite", version)
    record = Record(kind="key", workspace_id="acme", id="k", body=b"{}", at=TIME)
    count = Count(step=60, at=TIME, process="p", name="events", workspace_id="", labels=(), value=1)
    async with earlier.opened(create=False) as store:
        writes: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: store.write([identify("9", "ada")]),
            lambda: store.put([letter("worse")]),
            lambda: store.put_record(record),
            lambda: store.delete_record("key", "acme", "k"),
            lambda: store.put_counts([count]),
        )
        for write in writes:
            with pytest.raises(StorageUnavailable, match="start `engage serve` once"):
                await write()
        assert await ids(store) == ["1", "2", "3", "4", "5", "6"]
        # A server brings the store up to date meanwhile.
        async with earlier.opened(create=True):
            pass
        assert await store.put_record(record, expected_version=0) == 1
        assert await store.put([letter("worse", operation="track", envelope=b"{}")]) == 0


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_no_command_brings_a_store_up_to_date(tmp_path: Path, version: int) -> None:
    """Not even one that creates a store if there is none."""
    earlier = Earlier(tmp_path, "sqlite", version)
    config, other = config_file(tmp_path, "engage"), config_file(tmp_path, "other")

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(one) for one in arguments])

    for command in (("check",), ("export", "events"), ("export", "users"), ("keys", "list")):
        result = run(*command, "--config", config)
        assert result.exit_code == 0, result.stderr
    writing = ("keys", "add", "--workspace", "acme", "--id", "new", "--config", config)
    result = run(*writing)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "start `engage serve` once" in result.stderr
    result = run("copy", "--from", config, "--to", other)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "events\tcopied=6\t" in result.stdout
    assert run(*writing[:-1], other).exit_code == 0
    result = run("copy", "--from", other, "--to", config)
    assert result.exit_code == 1
    assert "start `engage serve` once" in result.stderr
    assert earlier.version() == version


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_check_shows_that_a_store_is_to_be_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """How long it takes, and how much space it needs; if there is less, it fails."""
    earlier = Earlier(tmp_path, "sqlite", version)
    size = (tmp_path / "engage.db").stat().st_size
    config = config_file(tmp_path)

    def run() -> Result:
        return CliRunner().invoke(main, ["check", "--config", str(config)])

    result = run()
    assert result.exit_code == 0, result.output
    (line,) = [one for one in result.output.splitlines() if one.startswith("notice")]
    assert f"store version {version}" in line
    assert "(about 6)" in line
    assert re.search(r"takes about 1 s and needs \d+ MiB on the disk, of which \d+ MiB", line)
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(migration.shutil, "disk_usage", lambda _: usage)
    result = run()
    assert result.exit_code == 1
    assert re.search(r"needs \d+ MiB on its disk, and \d+ MiB are free", result.output)
    monkeypatch.undo()
    config.write_text(config.read_text().replace("min_free_bytes = 0", f"max_bytes = {size // 2}"))
    assert "more than storage.sqlite.max_bytes" in run().output
    assert earlier.version() == version


def test_check_has_nothing_to_show_about_a_current_store(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path, "sqlite", 3)

    async def serve() -> None:
        async with earlier.opened(create=True):
            pass

    asyncio.run(serve())
    result = CliRunner().invoke(main, ["check", "--config", str(config_file(tmp_path))])
    assert result.exit_code == 0, result.output
    assert "notice" not in result.output
