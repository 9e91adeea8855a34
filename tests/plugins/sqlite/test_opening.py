# SPDX-License-Identifier: Apache-2.0
"""Opening an SQLite store: what may be in place of its file."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Awaitable
from pathlib import Path

import pytest

from engage.api import (
    StorageContext,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)
from engage.testing import event, identify
from engage.testing.factories import ids, store_all
from engage.testing.harness import eventually
from engage_plugins.sqlite import schema
from engage_plugins.sqlite.store import SqliteStorage
from support.sqlite import engine_of, file_limit, large, make


async def one_line(opening: Awaitable[None], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        await opening
    message = str(raised.value)
    assert "\n" not in message
    assert "engage.db" in message
    return message


async def test_a_missing_store_is_an_error(tmp_path: Path) -> None:
    store = make(tmp_path)
    await one_line(store.open(create=False), StorageMissing)
    assert os.listdir(tmp_path) == []
    (tmp_path / "engage.db").touch()
    await one_line(store.open(create=False), StorageMissing)
    await store.open(create=True)
    await store.close()


async def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    store = make(tmp_path, path="nowhere/engage.db")
    message = await one_line(store.open(create=True), StorageUnavailable)
    assert re.search(r"the folder .*nowhere does not exist; create it", message)


async def test_a_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "engage.db").mkdir()
    for create in (True, False):
        await one_line(make(tmp_path).open(create=create), StorageUnavailable)


@pytest.mark.parametrize(
    "content", [b"hello", b"\x00" * 5000, bytes(range(256)) * 80], ids=range(3)
)
async def test_a_file_that_is_not_a_database_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "engage.db").write_bytes(content)
    for create in (True, False):
        message = await one_line(make(tmp_path).open(create=create), StorageUnavailable)
        assert "not a SQLite database" in message
    assert (tmp_path / "engage.db").read_bytes() == content


async def test_a_database_of_another_program_is_an_error(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        db.execute("CREATE TABLE events (seq INTEGER)")
    before = (tmp_path / "engage.db").read_bytes()
    store = make(tmp_path)
    await one_line(store.open(create=True), StorageIncompatible)
    assert (tmp_path / "engage.db").read_bytes() == before


async def test_a_newer_store_is_opened_only_if_it_is_readable(
    tmp_path: Path, store: SqliteStorage
) -> None:
    await store_all(store, event("m"))
    await store.close()

    def set_version(version: int, min_reader: int) -> None:
        with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
            db.execute("UPDATE store SET value = ? WHERE name = 'version'", (version,))
            db.execute("UPDATE store SET value = ? WHERE name = 'min_reader'", (min_reader,))
            db.commit()

    set_version(schema.VERSION + 7, schema.VERSION + 1)
    for create in (True, False):
        message = await one_line(store.open(create=create), StorageIncompatible)
        assert "newer version" in message
    # Newer, but readable by this version.
    set_version(schema.VERSION + 7, schema.VERSION)
    await store.open(create=False)
    assert await ids(store) == ["m"]


async def test_a_store_on_a_full_disk_can_be_read(tmp_path: Path) -> None:
    store = make(tmp_path)
    with file_limit(8192):
        await one_line(store.open(create=True), StorageUnavailable)
    await store.open(create=True)
    await store_all(store, event("m"))
    await store.close()
    again = make(tmp_path)
    with file_limit(8192):
        await one_line(again.open(create=True), StorageUnavailable)
    with file_limit(33_000):
        # Enough for the index of the log, which is all that reading needs.
        await again.open(create=False)
        assert await ids(again) == ["m"]
        with pytest.raises(StorageUnavailable):
            await again.write([large("n")])
    await eventually(again.check, StorageUnavailable)
    await again.close()


async def test_opening_for_writing_commits(tmp_path: Path) -> None:
    """Data that a killed process wrote and did not sync becomes durable before it is used."""

    def opens() -> int:
        with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
            (value,) = db.execute("SELECT value FROM store WHERE name = 'opens'").fetchone()
        return int(value)

    store = make(tmp_path)
    for expected in (1, 2):
        await store.open(create=True)
        assert opens() == expected
        await store.close()
    await store.open(create=False)
    assert opens() == 2
    await store_all(store, event("m"))
    assert opens() == 3
    await store_all(store, event("n"))
    assert opens() == 3
    await store.close()


async def test_each_commit_is_synced(tmp_path: Path) -> None:
    """By SQLite, before the commit returns. The power cuts of ``make test-all`` show the disk."""
    store = make(tmp_path)
    await store.open(create=True)
    try:
        await store_all(store, event("m"))
        db = engine_of(store).connection()
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    finally:
        await store.close()


async def test_only_the_owner_may_read_the_files(tmp_path: Path) -> None:
    """Events are personal data; the umask does not matter."""
    before = os.umask(0)
    try:
        store = make(tmp_path)
        await store.open(create=True)
        await store_all(store, event("m"))
        names = sorted(os.listdir(tmp_path))
        assert names == ["engage.db", "engage.db-shm", "engage.db-wal", "engage.db-writer.lock"]
        for name in names:
            assert os.stat(tmp_path / name).st_mode & 0o777 == 0o600
        await store.close()
    finally:
        os.umask(before)


async def test_a_reader_does_not_change_the_lookups_of_the_server(tmp_path: Path) -> None:
    """An operator runs ``engage check`` with a changed config while the server still runs."""
    server = make(tmp_path)
    await server.open(create=True)
    await store_all(server, identify("1", "u", traits={"email": "a@b.c"}))
    context = StorageContext(base_dir=tmp_path, identifiers={"acme": ["phone"], "new": ["email"]})
    other = SqliteStorage.from_options({"writer": "thread"}, context)
    await other.open(create=False)
    await other.check()
    assert await server.find_users("acme", "email", ["a@b.c"]) == {"a@b.c": ["u"]}
    # The server finds what this command writes.
    await store_all(other, identify("2", "v", traits={"email": "d@e.f"}))
    await other.close()
    users = await server.find_users("acme", "email", ["a@b.c", "d@e.f"])
    assert users == {"a@b.c": ["u"], "d@e.f": ["v"]}
    await server.close()
