# SPDX-License-Identifier: Apache-2.0
"""The log is copied by a thread and the writer, and an error of either makes it doubtful."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engage.testing import event
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite import checkpoint
from engage_plugins.sqlite.engine import Engine
from support import sqlite
from support.sqlite import large, make, settings


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 400_000)
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_BYTES", 1_200_000)
    monkeypatch.setattr(checkpoint, "REST_BYTES", 100_000)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_PAUSE", 0.0)
    engine = Engine(settings(tmp_path / "engage.db"))
    engine.open(True, True)
    yield engine
    engine.close()


def log_bytes(tmp_path: Path) -> int:
    return os.stat(tmp_path / "engage.db-wal").st_size


def write(engine: Engine, name: object) -> None:
    sqlite.write(engine, large(str(name)))


def test_the_log_is_copied_while_writes_continue(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer waits for the thread only when the log has become too long."""
    free, begun = threading.Event(), threading.Event()
    real = checkpoint.run

    def run(db: sqlite3.Connection, mode: str, wait: float) -> bool:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            free.wait(60)
        return bool(real(db, mode, wait))

    monkeypatch.setattr(checkpoint, "run", run)
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_WAIT", 0.01)
    for number in range(40):
        write(engine, number)
        engine.work()
    assert begun.wait(60)
    assert log_bytes(tmp_path) > 2_000_000
    free.set()
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_WAIT", 60.0)
    monkeypatch.setattr(checkpoint, "KEPT_WAL_BYTES", 100_000)
    engine.work()
    for _ in range(20):
        engine.work()
    # A new log begins, and its first frames replace the old ones.
    write(engine, "last")
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
        _, frames, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert frames < 50


def test_a_reader_that_stays_is_not_waited_for_all_the_time(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor, when it has ended, the thread that copies the long log, unless that grows much more."""
    waits: list[int] = []
    free, begun = threading.Event(), threading.Event()
    free.set()
    real = checkpoint.run

    def run(db: sqlite3.Connection, mode: str, wait: float) -> bool:
        if mode == "RESTART":
            waits.append(log_bytes(tmp_path))
        if threading.current_thread().name == "engage-sqlite-checkpoint":
            begun.set()
            free.wait(60)
        return bool(real(db, mode, 0.001))

    monkeypatch.setattr(checkpoint, "run", run)
    monkeypatch.setattr(checkpoint, "READERS_WAIT", 0.001)
    write(engine, "first")
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchone()
        number = 0
        while log_bytes(tmp_path) < 4_000_000:
            write(engine, number := number + 1)
            engine.work()
            time.sleep(0.005)
        assert 2 <= len(waits) <= (4_000_000 - 1_200_000) // 400_000 + 1
        assert all(later - earlier >= 400_000 for earlier, later in itertools.pairwise(waits))
        free.clear()
        begun.clear()
        while not begun.wait(0.01):
            engine.work()
        reader.execute("ROLLBACK")
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_WAIT", 60.0)
    before = time.monotonic()
    for _ in range(5):
        write(engine, number := number + 1)
        engine.work()
    assert time.monotonic() - before < 30
    free.set()


@pytest.mark.parametrize("where", ["thread", "writer"])
def test_an_error_makes_the_log_doubtful(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nothing is acknowledged until a checkpoint has read and synced all of it."""
    real = checkpoint.run
    modes: list[str] = []

    def run(db: sqlite3.Connection, mode: str, wait: float) -> bool:
        # Beside the thread that copies the log while others write.
        in_writer = threading.current_thread().name.startswith("engage-sqlite-disk")
        if in_writer:
            modes.append(mode)
        if in_writer == (where == "writer") and mode == "PASSIVE":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return bool(real(db, mode, wait))

    monkeypatch.setattr(checkpoint, "run", run)
    for number in range(1000):
        write(engine, number)
        engine.work()
        if "TRUNCATE" in modes:
            break
    assert modes == ["TRUNCATE"] if where == "thread" else ["PASSIVE", "TRUNCATE"]
    assert log_bytes(tmp_path) < 400_000
    outcomes = sqlite.write(engine, event("0"))
    assert outcomes[0].stored is not None


def test_closing_waits_for_the_thread(engine: Engine, tmp_path: Path) -> None:
    while not engine._checkpoints._copying:
        write(engine, os.urandom(8).hex())
        engine.work()
    engine.close()
    assert not [one for one in threading.enumerate() if one.name == "engage-sqlite-checkpoint"]
    assert not (tmp_path / "engage.db-wal").exists()


async def test_a_writer_that_finds_a_log_begins_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it was killed, so what it wrote may not be on the disk."""
    modes: list[str] = []
    real = checkpoint.run

    def run(db: sqlite3.Connection, mode: str, wait: float) -> bool:
        modes.append(mode)
        return bool(real(db, mode, wait))

    monkeypatch.setattr(checkpoint, "run", run)
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        store = make(folder)
        await store.open(create=True)
        await store.write([event("m")])
        assert modes == ([] if folder == tmp_path else ["TRUNCATE"])
        for end in ("", "-wal"):
            if folder == tmp_path:
                shutil.copy(folder / f"engage.db{end}", folder / "other")
        await store.close()


async def test_a_log_that_a_reader_holds_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader prevents the checkpoint with which a writer would begin."""
    synced: list[int] = []
    real = checkpoint.sync

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(checkpoint, "sync", sync)
    other = tmp_path / "other"
    other.mkdir()
    store = make(tmp_path)
    await store.open(create=True)
    await store.write([event("m")])
    for end in ("", "-wal"):
        shutil.copy(tmp_path / f"engage.db{end}", other)
    await store.close()
    with contextlib.closing(sqlite3.connect(other / "engage.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT message_id FROM events").fetchall() == [("m",)]
        store = make(other)
        await store.open(create=True)
        assert synced == [(other / "engage.db-wal").stat().st_ino]
        await store.close()


async def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 400_000)
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_BYTES", 1_200_000)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_PAUSE", 0.0)
    # The writer waits for the thread as long as the disk needs.
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_WAIT", 60.0)
    store = make(tmp_path, writer="thread")
    await store.open(create=True)
    most = 0
    for number in range(100):
        await store_all(store, large(str(number)))
        most = max(most, os.stat(tmp_path / "engage.db-wal").st_size)
    # The writer waits after a write has made the log that long, and a write has about 60 kB.
    assert most < 1_200_000 + 100_000
    assert len(await ids(store)) == 100
    await store.close()


async def test_a_reader_can_delay_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log grows while a reader needs an old state, and is short again later."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_BYTES", 400_000)
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_BYTES", 1_000_000)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_PAUSE", 0.0)
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_WAIT", 0.01)
    store = make(tmp_path, writer="thread")
    await store.open(create=True)
    log = tmp_path / "engage.db-wal"
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchone()
        for number in range(60):
            await store_all(store, large(str(number)))
        assert log.stat().st_size > 2_000_000
        reader.execute("ROLLBACK")
    monkeypatch.setattr(checkpoint, "KEPT_WAL_BYTES", 100_000)
    monkeypatch.setattr(checkpoint, "FORCED_CHECKPOINT_WAIT", 60.0)
    for number in range(60, 70):
        await store_all(store, large(str(number)))
    used = store.gauges()["wal_bytes"]
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as reader:
        _, frames, _ = reader.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert frames * 4120 < 1_000_000 or used < 1_000_000
    assert len(await ids(store)) == 70
    await store.close()
