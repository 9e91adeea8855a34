# SPDX-License-Identifier: Apache-2.0
"""One process at a time writes a store: its lock, its socket, and who may reach them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engage.api import Status, StorageUnavailable
from engage.testing import event
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite.writer import lock, writer
from engage_plugins.sqlite.writer.lock import holder
from engage_plugins.sqlite.writer.sockets import AVAILABLE, WriterSocket
from support.writer import helped, load, make, opened, pid_of, until

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


# ---------------------------------------------------------------------------- lock and socket
async def test_a_deleted_lock_loses_nothing(tmp_path: Path) -> None:
    """Two writers exist for a moment."""
    async with helped(tmp_path) as store, opened(make(tmp_path)) as other, load(store, other):
        for _ in range(2):
            (tmp_path / "engage.db-writer.lock").unlink(missing_ok=True)
            await until(lambda: (tmp_path / "engage.db-writer.lock").exists())
            await until(lambda: pid_of(store) == pid_of(other) != 0)


async def test_a_stopped_process_whose_lock_was_deleted_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it goes on, another process has written."""
    # Others wait for so long for the stopped process to speak.
    monkeypatch.setattr(writer, "_GREETING", 0.2)
    async with helped(tmp_path) as store:
        await store_all(store, event("before"))
        first = pid_of(store)
        os.kill(first, signal.SIGSTOP)
        late = asyncio.ensure_future(store.write([event("late")]))
        await asyncio.sleep(0.2)
        (tmp_path / "engage.db-writer.lock").unlink()
        async with opened(make(tmp_path)) as other:
            assert pid_of(other) == os.getpid()
            await store_all(other, event("during"))
            (outcome,) = await other.write([event("late")])
            os.kill(first, signal.SIGCONT)
            statuses = [outcome.status, (await late)[0].status]
            assert sorted(statuses) == [Status.DUPLICATE, Status.STORED]
            await until(lambda: pid_of(store) != first)
            await store_all(store, event("after"))
            assert pid_of(store) == os.getpid()
            assert sorted(await ids(other)) == ["after", "before", "during", "late"]


@pytest.mark.parametrize("suffix", ["lock", "sock"])
async def test_a_deleted_lock_or_socket_is_made_again(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"engage.db-writer.{suffix}"
    async with helped(tmp_path) as store:
        path.unlink()
        await until(path.exists)
        async with opened(make(tmp_path, supervised=True)) as other:
            assert pid_of(other)
            await asyncio.gather(store_all(store, event("a")), store_all(other, event("b")))


def test_a_lock_that_is_deleted_while_it_is_taken_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process can take the one that is made next."""
    store = str(tmp_path / "engage.db")
    take = lock._lock

    def take_deleted(descriptor: int) -> bool:
        os.unlink(lock.lock_path(store))
        return bool(take(descriptor))

    with monkeypatch.context() as patch:
        patch.setattr(lock, "_lock", take_deleted)
        assert lock.WriterLock.acquire(store) is None
    held = lock.WriterLock.acquire(store)
    assert held is not None
    assert lock.WriterLock.acquire(store) is None
    held.release()


async def test_a_client_finds_out_why_there_is_no_lock(tmp_path: Path) -> None:
    """The helper process cannot tell it; usually the folder is read-only."""
    (tmp_path / "engage.db-writer.lock").mkdir()
    with pytest.raises(StorageUnavailable, match=r"engage\.db-writer\.lock: Is a directory"):
        await make(tmp_path, supervised=True, timeout=0.1).open(create=True)


def test_a_lock_is_not_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "engage.db-writer.lock").symlink_to("elsewhere")
    with pytest.raises(StorageUnavailable, match="symbolic links"):
        lock.WriterLock.acquire(str(tmp_path / "engage.db"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_writer_deletes_no_socket_of_the_next_one(tmp_path: Path) -> None:
    first, second = (WriterSocket(str(tmp_path / "engage.db")) for _ in range(2))
    first.close()
    assert second.is_current()
    second.close()
    assert not second.is_current()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_a_socket_may_have_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    async with helped(folder) as store:
        path = folder / "engage.db-writer.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        os.kill(pid_of(store), signal.SIGKILL)
        await store_all(store, event("m"))
    assert not path.exists()


async def test_a_folder_that_takes_no_sockets_means_a_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The name of the store leaves no room for that of a socket here; some file systems take
    none."""
    name = "n" * 200 + ".db"
    assert make(tmp_path, "auto", path=name).helper() is None
    assert "takes no sockets, so a thread of this process writes to it" in caplog.text
    # There is no helper process, so the thread is in the worker.
    async with opened(make(tmp_path, "auto", path=name, supervised=True)) as store:
        await store_all(store, event("m"))
        result = opens(tmp_path, "auto", name)
        assert f"process {os.getpid()} writes in a thread" in result.stdout, result.stderr


async def test_the_log_of_a_linked_store_is_found(tmp_path: Path) -> None:
    """SQLite keeps it beside the file, not beside the link; without it, it is never copied."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "engage.db")
    async with opened(make(tmp_path, path="link.db")) as store:
        await store_all(store, event("m"))
        size = (tmp_path / "real" / "engage.db-wal").stat().st_size
        assert size > 0
        assert store.gauges()["wal_bytes"] == size
        async with opened(make(tmp_path / "real", supervised=True)) as other:
            assert await ids(other) == ["m"]


async def test_only_the_owner_can_reach_the_process(tmp_path: Path) -> None:
    async with helped(tmp_path) as store:
        for name in ("engage.db", "engage.db-writer.lock", "engage.db-writer.sock"):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert holder(str(tmp_path / "engage.db")) == (pid_of(store), False)


# ------------------------------------------------------------------------------------ threads
async def test_a_thread_of_another_process_may_be_the_only_writer(tmp_path: Path) -> None:
    async with opened(make(tmp_path, "thread")) as store:
        async with opened(make(tmp_path, "thread")) as same_process:
            await store_all(same_process, event("a"))
        for writer in ("thread", "process"):
            result = opens(tmp_path, writer, "engage.db")
            assert f"process {os.getpid()} writes in a thread" in result.stdout, result.stderr
            assert 'set storage.sqlite.writer = "process" there' in result.stdout
        await store_all(store, event("b"))
    async with helped(tmp_path) as store:
        # It need not be the writer.
        async with opened(make(tmp_path, "thread")) as thread:
            await store_all(thread, event("c"))
        assert await ids(store) == ["a", "b", "c"]


def opens(folder: Path, writer: str, name: str) -> subprocess.CompletedProcess[str]:
    """Open a store in another process, which prints the error if it cannot."""
    return subprocess.run(
        [sys.executable, "-c", OPENS, str(folder), writer, name],
        capture_output=True,
        text=True,
        check=False,
    )


OPENS = """
import asyncio, sys
from pathlib import Path
from engage.api import StorageContext, StorageUnavailable
from engage_plugins.sqlite.store import SqliteStorage

async def main():
    context = StorageContext(base_dir=Path(sys.argv[1]), identifiers={})
    store = SqliteStorage.from_options({"writer": sys.argv[2], "path": sys.argv[3]}, context)
    try:
        await store.open(create=True)
    except StorageUnavailable as error:
        print(error)

asyncio.run(main())
"""
