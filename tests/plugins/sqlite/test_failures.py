# SPDX-License-Identifier: Apache-2.0
"""Real failures of a running SQLite store: disks, locks, moved files. It works again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    Event,
    EventFilter,
    Outcome,
    Status,
    StorageContext,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)
from engage.testing import event, identify
from engage.testing.factories import (
    TIME,
    change,
    count,
    ids,
    letter,
    record,
    store_all,
    sums,
    suppression,
)
from engage.testing.harness import eventually
from engage_plugins.sqlite import engine
from engage_plugins.sqlite.store import SqliteStorage
from support.sqlite import engine_of, file_limit, large, make, until_full

#: The second on a machine so busy that even this error comes too late.
LOCKED = "locked|no answer within"


async def test_a_write_fails_while_files_may_not_grow(store: SqliteStorage) -> None:
    with file_limit(2_000_000):
        acknowledged = await until_full(store)
        assert acknowledged
        for _ in range(3):
            # After an I/O error nothing is acknowledged, not even a stored event.
            with pytest.raises(StorageUnavailable):
                await store.write([large(str(len(acknowledged)))])
        assert (await ids(store))[: len(acknowledged)] == acknowledged
    await eventually(store.check, StorageUnavailable)
    outcomes = await store.write([*(large(one) for one in acknowledged), large("after")])
    assert {outcome.status for outcome in outcomes[:-1]} == {Status.DUPLICATE}
    assert outcomes[-1].status is Status.STORED


async def test_all_of_the_log_is_copied_after_an_io_error(tmp_path: Path) -> None:
    """A reader can delay that; until then the log is written again and synced."""
    patient, store = make(tmp_path), make(tmp_path, timeout=3)
    await patient.open(create=True)
    await store_all(patient, event("before"))
    await patient.close()
    await eventually(lambda: store.open(create=True), StorageUnavailable)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchone()
        with file_limit(500_000):
            await until_full(store)
        wal = os.stat(tmp_path / "engage.db-wal")
        (outcome,) = await eventually(lambda: store.write([event("before")]), StorageUnavailable)
        assert outcome.status is Status.DUPLICATE
        assert os.stat(tmp_path / "engage.db-wal").st_mtime_ns > wal.st_mtime_ns
        reader.execute("ROLLBACK")
        frames, copied = reader.execute("PRAGMA wal_checkpoint").fetchone()[1:]
        assert frames == copied > 0
    await store.close()


async def test_max_bytes_bounds_the_file(tmp_path: Path) -> None:
    store = make(tmp_path, max_bytes=2_000_000)
    await store.open(create=True)
    await store.put([letter("l")])
    acknowledged = await until_full(store)
    assert 10 < len(acknowledged) < 40
    # Reads work, and expiring events makes room.
    assert await ids(store) == acknowledged
    assert await store.expire(TIME + 1, limit=10, force=True) == 10
    assert await store.remove("acme", ["l"]) == 1
    await store_all(store, *(large(f"n{number}") for number in range(5)))
    await store.close()


async def test_min_free_bytes_stops_writes(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    await store_all(store, *(event(str(number), at=number) for number in range(5)))
    for name in "ab":
        await store.put_record(record(name))
    await store.put_counts([count(1)])
    await store.close()
    full = make(tmp_path, min_free_bytes=2**53 - 1)
    await full.open(create=True)
    for _ in range(2):
        for call in (
            full.check,
            lambda: full.write([event("n")]),
            lambda: full.put([letter("l")]),
            lambda: full.put_record(record("new")),
            lambda: full.put_counts([count(1)]),
        ):
            with pytest.raises(StorageUnavailable, match="min_free_bytes"):
                await call()
    assert len(await ids(full)) == 5
    assert await full.expire(TIME + 3, limit=10) == 3
    assert await ids(full) == ["3", "4"]
    assert await full.delete_record("key", "acme", "a")
    assert await full.expire_records("key", TIME + 1, limit=9) == 1
    assert await full.expire_counts(60, TIME + 1, limit=9) == 1
    await full.close()


async def test_a_long_lock_is_unavailability(tmp_path: Path) -> None:
    patient, store = make(tmp_path), make(tmp_path, timeout=1)
    # The writer has the settings of the first.
    await eventually(lambda: store.open(create=True), StorageUnavailable)
    await patient.open(create=True)
    await store_all(patient, event("before"))
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match=LOCKED):
                await store.write([event("during")])
        assert await ids(patient) == ["before"]
        db.execute("ROLLBACK")
    await eventually(lambda: store.write([event("during")]), StorageUnavailable)
    assert await ids(patient) == ["before", "during"]
    await store.close()
    await patient.close()


async def test_a_short_lock_delays_a_write(tmp_path: Path, store: SqliteStorage) -> None:
    db = sqlite3.connect(tmp_path / "engage.db", isolation_level=None, check_same_thread=False)
    with contextlib.closing(db):
        db.execute("BEGIN IMMEDIATE")
        writing = asyncio.ensure_future(store.write([event("m")]))
        await asyncio.sleep(0.2)
        assert not writing.done()
        db.execute("COMMIT")
        (outcome,) = await writing
    assert outcome.status is Status.STORED


async def test_another_process_may_open_and_close_the_store(tmp_path: Path) -> None:
    """It must notice this process: SQLite deletes the log when the last process closes the file."""
    store, second = make(tmp_path), make(tmp_path)
    await store.open(create=True)
    await store_all(store, event("a"))
    assert await ids(store) == ["a"]
    await second.open(create=True)
    assert await ids(second) == ["a"]
    await second.close()
    script = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]);"
        "print(db.execute('SELECT count(*) FROM events').fetchone()[0]); db.close()"
    )

    async def count() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, tmp_path / "engage.db", stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()
        return int(output)

    assert await count() == 1
    log = os.stat(tmp_path / "engage.db-wal")
    await store_all(store, event("b"))
    assert await count() == 2
    assert os.stat(tmp_path / "engage.db-wal").st_ino == log.st_ino
    await store.close()


async def test_another_store_in_place_of_the_file_is_used(
    tmp_path: Path, store: SqliteStorage
) -> None:
    """As when a backup is restored under a running server."""
    await store_all(store, event("before"))
    for name in ("engage.db", "engage.db-wal", "engage.db-shm"):
        (tmp_path / name).rename(tmp_path / f"away.{name}")
    other = make(tmp_path)
    await other.open(create=True)
    await store_all(other, event("restored"))
    await other.close()
    await eventually(store.check, StorageUnavailable)
    await store_all(store, event("after"))
    assert await ids(store) == ["restored", "after"]


@pytest.mark.parametrize("what", ["gone", "junk", "empty", "other"])
async def test_a_replaced_file_is_noticed(tmp_path: Path, store: SqliteStorage, what: str) -> None:
    """Events written to a file that has no name any more would be lost."""
    path, away = tmp_path / "engage.db", tmp_path / "away.db"
    await store_all(store, event("before"))
    path.rename(away)
    if what == "junk":
        path.write_bytes(b"junk" * 5000)
    elif what == "empty":
        path.touch()
    elif what == "other":
        with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as db:
            db.execute("CREATE TABLE t (x)")
        (tmp_path / "other.db").rename(path)
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await store.write([event("during")])
        with pytest.raises(StorageUnavailable):
            await store.scan(EventFilter(), after=None, limit=1)
    path.unlink(missing_ok=True)
    away.rename(path)
    await eventually(store.check, StorageUnavailable)
    assert await ids(store) == ["before"]


async def test_a_store_that_was_moved_away_is_not_created_again(
    tmp_path: Path, store: SqliteStorage
) -> None:
    """Not even when it is opened again: the events in a new file would later be lost."""
    path, away = tmp_path / "engage.db", tmp_path / "away.db"
    await store_all(store, event("before"))
    path.rename(away)
    await store.close()
    for _ in range(2):
        with pytest.raises(StorageMissing, match=r"there is no store$"):
            await store.open(create=True)
        assert not path.exists()
    away.rename(path)
    await store.open(create=True)
    assert await ids(store) == ["before"]


@pytest.mark.parametrize("what", ["gone", "empty"])
async def test_a_log_without_its_file_is_kept(tmp_path: Path, what: str) -> None:
    """The file was moved alone. SQLite would delete the log of a new store in its place."""
    running = make(tmp_path)
    await running.open(create=True)
    await store_all(running, event("before"))
    folder = tmp_path / "killed"
    folder.mkdir()
    for name in ("engage.db", "engage.db-wal"):  # like those that a killed process leaves
        shutil.copy(tmp_path / name, folder)
    await running.close()

    path, log, away = folder / "engage.db", folder / "engage.db-wal", folder / "away.db"
    path.rename(away)
    if what == "empty":
        path.touch()
    kept = log.read_bytes()
    store = make(folder)
    with pytest.raises(StorageIncompatible, match=r"engage\.db-wal contains acknowledged"):
        await store.open(create=True)
    assert log.read_bytes() == kept
    assert path.exists() == (what == "empty")
    away.rename(path)
    await store.open(create=True)
    assert await ids(store) == ["before"]
    await store.close()


async def test_a_limited_number_of_threads_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, timeout=0.2)
    free, started = threading.Event(), 0

    def hang(*_: Any) -> None:
        nonlocal started
        started += 1
        free.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "open", hang)
        for _ in range(8):
            with pytest.raises(StorageUnavailable):
                await store.open(create=True)
    assert started <= 4
    free.set()
    await eventually(lambda: store.open(create=True), StorageUnavailable)
    await store.close()


async def test_a_disk_that_hangs_is_unavailability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets an error in time, and the store works again when the disk does."""
    store = make(tmp_path, timeout=0.5)
    await eventually(lambda: store.open(create=True), StorageUnavailable)
    free = threading.Event()
    real = engine.Engine.run

    def slow(self: engine.Engine, *arguments: Any) -> Any:
        free.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(engine.Engine, "run", slow)
    results = await asyncio.gather(
        *(store.write([event(str(number))]) for number in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [StorageUnavailable] * 3
    free.set()
    await eventually(store.check, StorageUnavailable)
    # The transaction that was running continued; requests that it did not have were skipped.
    stored = await eventually(lambda: ids(store), StorageUnavailable)
    assert stored == ["0", "1", "2"][: len(stored)]
    await store.close()


async def test_a_read_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    store = make(tmp_path, timeout=0.5)
    await eventually(lambda: store.open(create=True), StorageUnavailable)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"

    def read(db: sqlite3.Connection) -> None:
        db.execute(endless).fetchone()

    with pytest.raises(StorageUnavailable):
        await store._read(read)
    assert await eventually(lambda: ids(store), StorageUnavailable) == []
    await store.close()


class FailsToCommit:
    """A connection whose next ``COMMIT`` raises an error."""

    def __init__(self, db: sqlite3.Connection, code: int) -> None:
        self._db = db
        self._code: int | None = code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement == "COMMIT" and self._code is not None:
            error = sqlite3.OperationalError("told to fail")
            error.sqlite_errorcode, self._code = self._code, None
            raise error
        return self._db.execute(statement, *arguments)


#: A lock, after which the connection is used again, and a full disk, after which it is not.
@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL])
async def test_a_write_is_whole_after_its_commit_failed(store: SqliteStorage, code: int) -> None:
    """What a failed attempt may have remembered makes the next one leave nothing out."""
    traits = {"email": "a@b.c", "plan": "pro"}
    numbers = itertools.count(2)

    def linking(number: int) -> Event:
        return event(f"t{number}", user_id="u", anonymous_id="v", at=number)

    group = event("g", type="group", user_id="u", groupId="team", traits={"size": 3})
    calls: list[tuple[Callable[[], Awaitable[Any]], Any]] = [
        (lambda: store.write([identify("i", "u", 1, traits=traits)]), [Outcome(Status.STORED)]),
        # The first is not sent again, and the link of the second is looked for among known ones.
        (
            lambda: store.write([linking(next(numbers))]),
            [Outcome(Status.STORED)],
        ),
        (lambda: store.write([group]), [Outcome(Status.STORED)]),
        (lambda: store.write([identify("n", "u", 3, traits={"email": "new@b.c"})]), None),
        (lambda: store.reapply([event("t", user_id="u", anonymous_id="w", at=4)]), None),
        (lambda: store.apply(change("c", at=5, g=True)), {"g": True}),
        (lambda: store.keep([letter("l")]), [True]),
        (lambda: store.put_record(record("r")), 1),
        (lambda: store.suppress([suppression()]), None),
        (lambda: store.put_counts([count(1)]), None),
    ]
    engine = engine_of(store)
    for call, expected in calls:
        engine._db = FailsToCommit(engine.connection(), code)
        with pytest.raises(StorageUnavailable):
            await call()
        answer = await call()
        assert expected is None or answer == expected
    profile = await store.profile("acme", "u")
    assert profile is not None
    assert profile.traits == {**traits, "email": "new@b.c"}
    assert (profile.anonymous_ids, profile.groups) == (["v", "w"], ["team"])
    assert await store.find_users("acme", "email", ["new@b.c"]) == {"new@b.c": ["u"]}
    claims = await store.identifier_history("acme", "email", ["u"])
    assert {*claims["u"]} == {"a@b.c", "new@b.c"}
    history = await store.history("acme", None, after=None, limit=9)
    assert [one.change_id for one in history.items] == ["c"]
    assert await store.records_version("key") == 1
    assert len(await store.suppressions("acme", [("email", "a@b.c")])) == 1
    assert [total.total for total in await sums(store)] == [1]
    assert sorted(await ids(store)) == ["g", "i", "n", "t3"]


# ------------------------------------------------------------------------------------- look-ups
async def test_an_identifier_may_be_declared_later(tmp_path: Path) -> None:
    def with_traits(*traits: str) -> SqliteStorage:
        context = StorageContext(base_dir=tmp_path, identifiers={"acme": traits})
        return SqliteStorage.from_options({}, context)

    store = with_traits("email")
    await store.open(create=True)
    await store_all(store, identify("1", "u", traits={"email": "a@b.c", "code": "X"}))
    assert await store.find_users("acme", "code", ["X"]) == {}
    await store.close()
    store = with_traits("code")
    await store.open(create=True)
    assert await store.find_users("acme", "code", ["X"]) == {"X": ["u"]}
    assert await store.find_users("acme", "email", ["a@b.c"]) == {}
    await store_all(store, identify("2", "u", 1, traits={"email": "new@b.c"}))
    await store.close()
    store = with_traits("email", "code")
    await store.open(create=True)
    assert await store.find_users("acme", "email", ["a@b.c", "new@b.c"]) == {"new@b.c": ["u"]}
    await store.close()
