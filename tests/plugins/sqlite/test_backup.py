# SPDX-License-Identifier: Apache-2.0
"""Backups of SQLite stores: what is in them, bad targets and files, and kills at every step."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    Backup,
    Record,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)
from engage.store import records
from engage.store.facade import Storage
from engage.testing import event
from engage.testing.factories import TIME, ids, store_all
from engage_plugins.sqlite import schema
from engage_plugins.sqlite.backup import UNFINISHED
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.store import SqliteStorage
from support import sqlite
from support.sqlite import expire, file_limit, large, make
from support.sqlite_keys import are_duplicates, finish, opened, stored, write, write_all

ROOT = Path(__file__).resolve().parents[3]
SECRET = b"a-secret-that-is-left-out"


def nothing(done: int, total: int) -> None:
    """Ignore the progress."""


def back_up(
    store: Path, target: Path, on_bytes: Callable[[int, int], None] = nothing, **options: Any
) -> Backup:
    """Back up the store ``engage.db`` of a folder."""
    made: Backup = make(store, **options).back_up(target, without=["link"], on_bytes=on_bytes)
    return made


async def unchanged(store: Storage, made: Backup) -> None:
    """Change nothing."""


def restore(source: Path, folder: Path) -> Backup:
    """Make the store ``engage.db`` of a folder, which is created."""
    folder.mkdir(exist_ok=True)
    made: Backup = make(folder).restore(source, prepare=unchanged, on_bytes=nothing)
    return made


def names(folder: Path) -> list[str]:
    """Return the files of a folder, except those that a store leaves beside it."""
    beside = ("-writer.lock", "-keys", "-wal", "-shm")
    return sorted(
        path.name
        for path in folder.iterdir()
        if UNFINISHED in path.name or not path.name.endswith(beside)
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a folder with a store, and return the path of the store."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder / "engage.db"


@pytest.fixture
def engine(path: Path) -> Engine:
    """A store with 100 events, open for writing."""
    engine = opened(path)
    write_all(engine, range(100))
    return engine


# -------------------------------------------------------------------------------- what is in it
def test_a_backup_is_one_file_that_opens_alone(engine: Engine, path: Path, tmp_path: Path) -> None:
    """Also on a disk that cannot be written, where SQLite can make no log beside it."""
    back_up(path.parent, tmp_path / "backup.db")
    assert names(tmp_path) == ["backup.db", "store"]
    with contextlib.closing(sqlite3.connect(f"file:{tmp_path}/backup.db?mode=ro", uri=True)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM events").fetchone() == (100,)
    assert names(tmp_path) == ["backup.db", "store"]
    engine.close()


@pytest.mark.usefixtures("small_merges")
def test_what_is_written_meanwhile_is_not_in_it(engine: Engine, path: Path, tmp_path: Path) -> None:
    """Nor is what retention deletes meanwhile missing, and the copy does not begin again."""
    for number in range(100, 140):
        write(engine, number)
        finish(engine)
    large_rows(engine, 200, 60)
    steps: list[int] = []

    def on_bytes(done: int, total: int) -> None:
        number = 1000 + len(steps)
        assert steps == sorted(steps), "it began again"
        steps.append(done)
        write(engine, number)
        assert expire(engine, TIME + 10**9, 3, force=True) == 3
        finish(engine)

    made = back_up(path.parent, tmp_path / "backup.db", on_bytes)
    assert len(steps) > 2
    assert made.events == 200
    assert stored(tmp_path / "backup.db") == [str(number) for number in [*range(140), *LARGE]]
    engine.close()
    restore(tmp_path / "backup.db", tmp_path / "new")
    with contextlib.closing(opened(tmp_path / "new" / "engage.db")) as restored:
        assert are_duplicates(restored, [0, 1, 2, 99, 139])


LARGE = range(200, 260)


def large_rows(engine: Engine, first: int, number: int) -> None:
    """Write events of 50 kB, so that a backup has several steps."""
    for one in range(first, first + number):
        sqlite.write(engine, large(str(one)))


def test_deleted_content_is_not_in_it(engine: Engine, path: Path, tmp_path: Path) -> None:
    """Neither records of the left out kinds nor what the free pages of the store still have."""
    body = b'{"text":"%s"}' % (SECRET * 1000)
    kept = Record(kind="key", workspace_id="", id="k", body=b"{}", at=TIME)
    engine.run(records.put, (kept, None))
    for number in range(20):
        link = Record(kind="link", workspace_id="", id=f"{number}", body=body, at=0)
        engine.run(records.put, (link, 0))
    engine.check()
    for number in range(10):
        engine.run(records.delete, ("link", "", f"{number}"))
    engine.close()
    assert SECRET in path.read_bytes()
    back_up(path.parent, tmp_path / "backup.db")
    assert SECRET not in (tmp_path / "backup.db").read_bytes()
    with contextlib.closing(sqlite3.connect(tmp_path / "backup.db")) as db:
        assert db.execute("SELECT kind, id FROM records").fetchall() == [("key", "k")]
        assert db.execute("PRAGMA freelist_count").fetchone()[0] > 20


def test_a_store_of_an_earlier_version_is_backed_up_and_brought_up_to_date(
    engine: Engine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.close()
    following = schema.VERSION + 1
    monkeypatch.setattr(schema, "VERSION", following)
    monkeypatch.setattr(schema, "MIGRATIONS", {following: ["CREATE TABLE added (name TEXT)"]})
    back_up(path.parent, tmp_path / "backup.db")
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert schema.version_of(db) == following - 1
    restore(tmp_path / "backup.db", tmp_path / "new")
    with contextlib.closing(sqlite3.connect(tmp_path / "new" / "engage.db")) as db:
        assert schema.version_of(db) == following
        assert db.execute("SELECT * FROM added").fetchall() == []


def test_a_backup_while_a_newer_version_changes_the_tables(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """It has the state before the change, and the next one is refused."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        newer = "UPDATE store SET value = ? WHERE name IN ('version', 'min_reader')"
        db.execute(newer, (schema.VERSION + 1,))
        assert back_up(path.parent, tmp_path / "backup.db").events == 100
        db.execute("COMMIT")
    with pytest.raises(StorageIncompatible, match="newer version of engage"):
        back_up(path.parent, tmp_path / "next.db")
    restore(tmp_path / "backup.db", tmp_path / "new")
    engine.close()
    assert names(tmp_path) == ["backup.db", "new", "store"]


# -------------------------------------------------------------------------------- bad targets
def test_bad_targets(engine: Engine, path: Path, tmp_path: Path) -> None:
    for target, reason in (
        (path, "there is a file already"),
        (path.parent, "a folder"),
        (tmp_path / "missing" / "backup.db", "does not exist; create it"),
        (path.with_name("engage.db-keys"), "engage has files with such names"),
        (tmp_path / f"backup.db{UNFINISHED}", "engage has files with such names"),
        (path.with_name("engage.db-wal"), "there is a file already"),
    ):
        with pytest.raises(StorageUnavailable, match=reason):
            back_up(path.parent, target)
    with pytest.raises(StorageMissing):
        back_up(tmp_path, tmp_path / "backup.db")
    # Beside the store there is room for a backup.
    assert back_up(path.parent, path.with_name("backup.db")).events == 100
    assert names(path.parent) == ["backup.db", "engage.db"]
    assert write(engine, 500)
    engine.close()


def test_a_disk_without_room(engine: Engine, path: Path, tmp_path: Path) -> None:
    large_rows(engine, 200, 60)
    engine.close()
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StorageUnavailable, match=r"MiB are free on this disk, and .* are needed"):
        back_up(path.parent, tmp_path / "backup.db", min_free_bytes=free - 1_000_000)
    with file_limit(1_000_000), pytest.raises(StorageUnavailable, match=r"backup\.db: "):
        back_up(path.parent, tmp_path / "backup.db")
    assert names(tmp_path) == ["store"]
    back_up(path.parent, tmp_path / "backup.db")
    (tmp_path / "new").mkdir()
    with file_limit(1_000_000), pytest.raises(StorageUnavailable):
        restore(tmp_path / "backup.db", tmp_path / "new")
    assert names(tmp_path / "new") == []


def test_the_backup_ends_before_the_log_fills_the_disk(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """The space that is missing is taken by a sparse file with blocks; the store stays usable."""
    large_rows(engine, 200, 400)
    space = os.statvfs(tmp_path)
    filler = tmp_path / "filler"
    kept = space.f_bavail * space.f_frsize - 200_000_000

    def fill(done: int, total: int) -> None:
        if not filler.exists():
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 400_000_000)

    try:
        with pytest.raises(StorageUnavailable, match="its disk has less than"):
            back_up(path.parent, tmp_path / "backup.db", fill, min_free_bytes=kept)
    finally:
        filler.unlink(missing_ok=True)
    assert names(tmp_path) == ["store"]
    assert write(engine, 1000)
    engine.close()


def test_two_backups_at_once(engine: Engine, path: Path, tmp_path: Path) -> None:
    made: list[Backup] = []

    def on_bytes(done: int, total: int) -> None:
        if not made:
            with pytest.raises(StorageUnavailable, match="another process is writing it"):
                back_up(path.parent, tmp_path / "backup.db")
            made.append(back_up(path.parent, tmp_path / "other.db"))

    made.append(back_up(path.parent, tmp_path / "backup.db", on_bytes))
    assert [one.events for one in made] == [100, 100]
    assert names(tmp_path) == ["backup.db", "other.db", "store"]
    engine.close()


# ---------------------------------------------------------------------------------- bad files
def test_bad_files(engine: Engine, path: Path, tmp_path: Path) -> None:
    back_up(path.parent, tmp_path / "backup.db")
    engine.close()
    whole = (tmp_path / "backup.db").read_bytes()
    with contextlib.closing(sqlite3.connect(tmp_path / "foreign.db")) as db:
        db.execute("CREATE TABLE store (name TEXT, value INTEGER)")
    (tmp_path / "damaged.db").write_bytes(whole[:8192] + bytes(8192) + whole[16384:])
    # SQLite has no checksums: it does not notice another byte of a text.
    body = whole.rindex(b'"type"')
    (tmp_path / "changed.db").write_bytes(whole[:body] + b"?" + whole[body + 1 :])
    (tmp_path / "short.db").write_bytes(whole[:-32])
    (tmp_path / "truncated.db").write_bytes(whole[:-4096])
    (tmp_path / "text.db").write_text("no database", encoding="utf-8")
    (tmp_path / "newer.db").write_bytes(whole)
    (tmp_path / "fewer.db").write_bytes(whole)
    with contextlib.closing(sqlite3.connect(tmp_path / "newer.db")) as db, db:
        db.execute("UPDATE store SET value = 99 WHERE name IN ('version', 'min_reader')")
    with contextlib.closing(sqlite3.connect(tmp_path / "fewer.db")) as db, db:
        db.execute("DELETE FROM events WHERE seq = 7")
    for name, reason in (
        ("store/engage.db", "a store, and not a backup"),
        ("foreign.db", "a SQLite database that engage did not create"),
        ("damaged.db", "damaged"),
        ("changed.db", "damaged"),
        ("short.db", "damaged"),
        ("truncated.db", "truncated or damaged"),
        ("text.db", "not a backup"),
        ("newer.db", "newer version of engage"),
        ("fewer.db", "damaged"),
    ):
        with pytest.raises(StorageIncompatible, match=f"{name}: .*{reason}"):
            restore(tmp_path / name, tmp_path / "new")
        assert names(tmp_path / "new") == [], name
    with pytest.raises(StorageUnavailable, match="No such file"):
        restore(tmp_path / "missing.db", tmp_path / "new")


def test_a_store_is_not_replaced(engine: Engine, path: Path, tmp_path: Path) -> None:
    """Nor the log of one, nor while a process waits for the store to come back."""
    back_up(path.parent, tmp_path / "backup.db")
    with pytest.raises(StorageUnavailable, match="there is a store already"):
        restore(tmp_path / "backup.db", path.parent)
    engine.close()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "engage.db-wal").write_bytes(b"acknowledged")
    with pytest.raises(StorageUnavailable, match=r"engage\.db-wal: there is a store already"):
        restore(tmp_path / "backup.db", tmp_path / "new")

    async def served() -> None:
        store = make(path.parent)
        await store.open(create=True)
        os.rename(path, tmp_path / "away.db")
        with pytest.raises(StorageUnavailable, match=f"process {os.getpid()} writes to it: stop"):
            await asyncio.to_thread(restore, tmp_path / "backup.db", path.parent)
        os.rename(tmp_path / "away.db", path)
        assert len(await ids(store)) == 100
        await store.close()

    asyncio.run(served())


# -------------------------------------------------------------------------------------- kills
#: Runs a command again and again, each time in a child that is killed at the next of its steps: a
#: step is an event of Python's audit (a file that is opened, renamed or deleted, a connection) or a
#: report of the progress.
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from support.sqlite import make
import shutil

command, first, source, target, check = sys.argv[1:]
STEPS = ("open", "os.", "shutil.", "sqlite3.connect", "fcntl.flock", "glob.glob")

from engage.testing import event

async def prepared(store, made):
    await store.write([event("prepared", at=9)])

def run(last):
    left = last
    def step(*_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(lambda name, _: step() if name.startswith(STEPS) else None)
    if command == "backup":
        make(Path(source)).back_up(Path(target), without=["link"], on_bytes=step)
    else:
        make(Path(target)).restore(Path(source), prepare=prepared, on_bytes=step)

for last in range(int(first), 10_000):
    child = os.fork()
    if not child:
        try:
            run(last)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(last, status, flush=True)
    sys.stdin.readline()
    if status >= 0:
        break
"""


def killed(command: str, source: Path, target: Path, check: Callable[[], None]) -> int:
    """Kill a command at each of its steps, and return how many there are.

    :param check: called after each kill.
    """
    arguments = [command, "1", str(source), str(target), ""]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            step, status = map(int, line.split())
            if status != -signal.SIGKILL:
                assert status == 0
                process.stdin.close()
                return step
            check()
            process.stdin.write("\n")
            process.stdin.flush()
    raise AssertionError("it ended without a result")


def test_a_backup_that_is_killed_leaves_nothing_or_all(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """What else it leaves, the next one deletes."""
    folder = tmp_path / "backups"
    folder.mkdir()
    target = folder / "backup.db"
    large_rows(engine, 200, 60)
    seen: set[Sequence[str]] = set()

    def check() -> None:
        seen.add(tuple(names(folder)))
        if target.exists():
            assert len(stored(target)) == 160
            target.unlink()

    assert killed("backup", path.parent, target, check) > 20
    assert seen == {(), ("backup.db",), ("backup.db" + UNFINISHED,)}
    assert names(folder) == ["backup.db"]
    engine.close()


def test_a_restore_that_is_killed_leaves_nothing_or_all(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    large_rows(engine, 200, 60)
    back_up(path.parent, tmp_path / "backup.db")
    engine.close()
    folder = tmp_path / "new"
    folder.mkdir()
    store = folder / "engage.db"
    seen: set[bool] = set()

    def check() -> None:
        seen.add(store.exists())
        if store.exists():
            assert len(stored(store)) == 161
            store.unlink()

    assert killed("restore", tmp_path / "backup.db", folder, check) > 40
    assert seen == {True, False}
    assert names(folder) == ["engage.db"]
    with contextlib.closing(opened(store)) as restored:
        assert are_duplicates(restored, range(100))


def test_an_unfinished_file_of_a_running_backup_is_left_alone(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """Unlike that of a killed one to another target, and that of no one."""
    (tmp_path / f"old.db{UNFINISHED}").write_bytes(b"x")
    (tmp_path / f"old.db{UNFINISHED}-journal").write_bytes(b"x")
    (tmp_path / "unfinished").write_bytes(b"x")

    def on_bytes(done: int, total: int) -> None:
        if not (tmp_path / "other.db").exists():
            back_up(path.parent, tmp_path / "other.db")
            assert (tmp_path / f"backup.db{UNFINISHED}").exists()

    back_up(path.parent, tmp_path / "backup.db", on_bytes)
    assert names(tmp_path) == ["backup.db", "other.db", "store", "unfinished"]
    engine.close()


def test_an_interrupted_backup_leaves_nothing(engine: Engine, path: Path, tmp_path: Path) -> None:
    def on_bytes(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(path.parent, tmp_path / "backup.db", on_bytes)
    assert names(tmp_path) == ["store"]
    assert write(engine, 500)
    engine.close()


def test_a_backup_needs_no_writer(path: Path, tmp_path: Path) -> None:
    """With a log that a killed process left, or while no process has the store open."""

    async def write_some() -> None:
        store: SqliteStorage = make(path.parent)
        await store.open(create=True)
        await store_all(store, event("a"))
        await store.close()

    asyncio.run(write_some())
    assert back_up(path.parent, tmp_path / "backup.db").events == 1
