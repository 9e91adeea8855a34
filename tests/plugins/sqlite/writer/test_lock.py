# SPDX-License-Identifier: Apache-2.0
"""One process or thread at a time writes a store: its lock, its socket, and who may reach them."""

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
from engage_plugins.sqlite.writer.writer import AVAILABLE
from support.processes import alive
from support.writer import (
    disconnect,
    holder,
    load,
    make,
    opened,
    pid_of,
    together,
    until,
)

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


# ---------------------------------------------------------------------------- lock and socket
async def test_a_deleted_lock_loses_nothing(tmp_path: Path) -> None:
    """Two processes exist for a moment; the later one writes, and the earlier one ends."""
    one, other = make(tmp_path), make(tmp_path)
    async with opened(one):
        first = pid_of(one)
        (tmp_path / "engage.db-writer.lock").unlink()
        async with opened(other), load(one, other):
            await until(lambda: not alive(first))
            second = await together(one, other)
            assert second not in (0, first)
            assert second == holder(tmp_path / "engage.db")


async def test_a_lock_that_is_deleted_again_and_again_loses_nothing(tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path)
    async with opened(one), opened(other), load(one, other):
        for _ in range(4):
            (tmp_path / "engage.db-writer.lock").unlink(missing_ok=True)
            disconnect(other)
            await asyncio.sleep(0.6)


async def test_a_stopped_process_whose_lock_was_deleted_doubles_nothing(tmp_path: Path) -> None:
    """When it goes on, another process has written meanwhile."""
    one, other = make(tmp_path), make(tmp_path)
    async with opened(one):
        await store_all(one, event("before"))
        first = pid_of(one)
        os.kill(first, signal.SIGSTOP)
        late = asyncio.ensure_future(one.write([event("late")]))
        await asyncio.sleep(0.2)
        (tmp_path / "engage.db-writer.lock").unlink()
        async with opened(other):
            assert pid_of(other) != first
            await store_all(other, event("during"))
            (outcome,) = await other.write([event("late")])
            os.kill(first, signal.SIGCONT)
            statuses = [outcome.status, (await late)[0].status]
            assert sorted(statuses) == [Status.DUPLICATE, Status.STORED]
            await until(lambda: not alive(first))
            assert sorted(await ids(other)) == ["before", "during", "late"]


async def test_a_deleted_socket_is_made_again(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as one:
        (tmp_path / "engage.db-writer.sock").unlink()
        async with opened(make(tmp_path)) as other:
            assert pid_of(other) == pid_of(one)
            await asyncio.gather(store_all(one, event("a")), store_all(other, event("b")))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_a_socket_may_have_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    async with opened(make(folder, "auto")) as store:
        path = folder / "engage.db-writer.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        async with opened(make(folder, "auto")) as other:
            assert pid_of(other) == pid_of(store)
        os.kill(pid_of(store), signal.SIGKILL)
        await store_all(store, event("m"))
    assert not path.exists()


async def test_a_folder_that_takes_no_sockets_means_a_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The name of the store leaves no room for that of a socket here; some file systems take
    none."""
    name = "n" * 200 + ".db"
    async with opened(make(tmp_path, "auto", path=name)) as store:
        await store_all(store, event("m"))
        result = opens(tmp_path, "auto", name)
        assert f"process {os.getpid()} writes in a thread" in result.stdout, result.stderr
    assert "takes no sockets, so a thread of this process writes to it" in caplog.text


async def test_a_link_to_the_store_leads_to_the_same_process(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as store:
        (tmp_path / "link.db").symlink_to(tmp_path / "engage.db")
        async with opened(make(tmp_path, path="link.db")) as other:
            assert pid_of(other) == pid_of(store)


async def test_the_log_of_a_linked_store_is_found(tmp_path: Path) -> None:
    """SQLite keeps it beside the file, not beside the link; without it, it is never copied."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "engage.db")
    async with opened(make(tmp_path, path="link.db")) as store:
        await store_all(store, event("m"))
        size = (tmp_path / "real" / "engage.db-wal").stat().st_size
        assert size > 0
        assert store.gauges()["wal_bytes"] == size


async def test_only_the_owner_can_reach_the_process(tmp_path: Path) -> None:
    async with opened(make(tmp_path)):
        for name in ("engage.db", "engage.db-writer.lock", "engage.db-writer.sock"):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------ threads
async def test_a_thread_of_another_process_is_the_only_writer(tmp_path: Path) -> None:
    async with opened(make(tmp_path, "thread")) as store:
        async with opened(make(tmp_path, "thread")) as same_process:
            await store_all(same_process, event("a"))
        for writer in ("thread", "process", "auto"):
            result = opens(tmp_path, writer, "engage.db")
            assert f"process {os.getpid()} writes in a thread" in result.stdout, result.stderr
            assert 'set storage.sqlite.writer = "process" there' in result.stdout
        await store_all(store, event("b"))
    async with opened(make(tmp_path)) as store:
        assert await ids(store) == ["a", "b"]


async def test_a_thread_does_not_write_beside_a_process(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as store:
        with pytest.raises(StorageUnavailable, match=f"process {pid_of(store)} writes this store"):
            await make(tmp_path, "thread").open(create=True)


async def test_a_thread_that_lost_the_store_says_who_has_it(tmp_path: Path) -> None:
    """Its lock was deleted, and a process took the store over. Nothing is lost or doubled."""
    async with opened(make(tmp_path, "thread")) as thread:
        await store_all(thread, event("a"))
        (tmp_path / "engage.db-writer.lock").unlink()
        async with opened(make(tmp_path)) as store:
            await store_all(store, event("b"))
            with pytest.raises(StorageUnavailable, match="another process writes to it now"):
                await thread.write([event("c")])
            with pytest.raises(StorageUnavailable, match=f"process {pid_of(store)} writes this"):
                await thread.write([event("c")])
            await store_all(store, event("c"))
        # The process has ended.
        (outcome,) = await thread.write([event("c")])
        assert outcome.status is Status.DUPLICATE
        assert await ids(thread) == ["a", "b", "c"]


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
