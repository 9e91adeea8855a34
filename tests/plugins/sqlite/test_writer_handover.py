# SPDX-License-Identifier: Apache-2.0
"""Whose settings the writer process has, and how one process takes over from another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engage.api import Status, StorageUnavailable
from engage.testing import event, identify
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite import protocol, writer_client
from engage_plugins.sqlite.lock import WriterLock, read_note
from engage_plugins.sqlite.store import SqliteStorage
from engage_plugins.sqlite.writer import AVAILABLE
from support.exactly_once import check_exactly_once
from support.processes import alive
from support.writer import client_of, holder, make, opened, pid_of, until

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


class Load:
    """Writes events without a pause, and counts those that were acknowledged."""

    def __init__(self, store: SqliteStorage, name: str) -> None:
        self.acknowledged: list[str] = []
        self._store = store
        self._name = name
        self._stopping = False

    async def run(self) -> None:
        number = 0
        while not self._stopping:
            name = f"{self._name}-{number}"
            (outcome,) = await self._store.write([event(name)])
            # What a writer stored before it was killed is a duplicate when it is sent again.
            assert outcome.status in (Status.STORED, Status.DUPLICATE)
            self.acknowledged.append(name)
            number += 1

    def stop(self) -> None:
        self._stopping = True


@contextlib.asynccontextmanager
async def load(*stores: SqliteStorage) -> AsyncIterator[None]:
    """Write to stores inside of the context. No write may fail, and none may be lost."""
    loads = [Load(store, str(number)) for number, store in enumerate(stores)]
    tasks = [asyncio.ensure_future(one.run()) for one in loads]
    try:
        yield
        # They go on after the last disturbance.
        counts = [len(one.acknowledged) for one in loads]
        await until(
            lambda: (
                any(task.done() for task in tasks)
                or all(
                    len(one.acknowledged) > count + 5
                    for one, count in zip(loads, counts, strict=True)
                )
            )
        )
    finally:
        for one in loads:
            one.stop()
        await asyncio.gather(*tasks)
    stored = await ids(stores[0], limit=1000)
    acknowledged = {name for one in loads for name in one.acknowledged}
    check_exactly_once(stored, acknowledged, acknowledged)


# ----------------------------------------------------------------------------------- settings
async def test_the_settings_of_the_server_that_started_last_count(tmp_path: Path) -> None:
    old = make(tmp_path, identifiers=("email",), started=1)
    new = make(tmp_path, identifiers=("nick",), started=2)

    async def known(trait: str, value: str) -> bool:
        return bool(await old.find_users("acme", trait, [value]))

    async with opened(old):
        pid = pid_of(old)
        await store_all(old, identify("1", "u", traits={"email": "e1", "nick": "p1"}))
        assert (await known("email", "e1"), await known("nick", "p1")) == (True, False)
        async with opened(new):
            await store_all(old, identify("2", "v", traits={"email": "e2", "nick": "p2"}))
            # The profiles that exist are in the look-up table, too.
            assert (await known("nick", "p1"), await known("nick", "p2")) == (True, True)
            assert not await known("email", "e2")
            # The process is the same, and the old server's next connection changes nothing.
            assert pid_of(old) == pid_of(new) == pid
            disconnect(old)
            await store_all(old, identify("3", "w", traits={"email": "e3", "nick": "p3"}))
            assert (await known("email", "e3"), await known("nick", "p3")) == (False, True)


async def test_a_command_changes_no_settings(tmp_path: Path) -> None:
    server = make(tmp_path, identifiers=("email",), started=5)
    async with opened(server), opened(make(tmp_path, identifiers=("nick",))) as copy:
        reading = make(tmp_path, identifiers=("nick",))
        await reading.open(create=False)
        for number, store in enumerate((copy, reading)):
            await store_all(store, identify(str(number), f"u{number}", traits={"email": "e"}))
        assert await server.find_users("acme", "email", ["e"]) == {"e": ["u0", "u1"]}
        await reading.close()


async def test_a_server_takes_over_the_process_of_a_command(tmp_path: Path) -> None:
    async with opened(make(tmp_path, "thread", started=1)) as store:
        await store_all(store, event("m"))
    command = make(tmp_path)
    await command.open(create=False)
    await store_all(command, identify("1", "u", traits={"email": "e"}))
    async with opened(make(tmp_path, identifiers=("email",), started=2)) as server:
        assert await server.find_users("acme", "email", ["e"]) == {"e": ["u"]}
        assert pid_of(server) == pid_of(command)
    await command.close()


async def test_servers_with_different_settings_do_not_alternate(tmp_path: Path) -> None:
    """Whichever server starts the next process, it has the settings of the later one at the end."""
    old = make(tmp_path, identifiers=("email",), started=1)
    new = make(tmp_path, identifiers=("nick",), started=2)
    async with opened(old), opened(new):
        async with load(old, new):
            for _ in range(3):
                # It may be handing over to another one at this moment.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid_of(new), signal.SIGKILL)
                await together(old, new)
        await store_all(old, identify("i", "u", traits={"email": "e", "nick": "p"}))
        assert await old.find_users("acme", "nick", ["p"]) == {"p": ["u"]}
        assert not await old.find_users("acme", "email", ["e"])


def disconnect(store: SqliteStorage) -> None:
    """Cut the connection of a storage, if there is one."""
    connection = client_of(store)._connection
    if connection is not None:
        connection.abort()


async def together(*stores: SqliteStorage) -> int:
    """Wait until all storages are connected to one living process, and return its id."""
    await until(
        lambda: (
            len({client_of(store).pid for store in stores}) == 1 and alive(client_of(stores[0]).pid)
        )
    )
    return pid_of(stores[0])


# ---------------------------------------------------------------------------------- versions
@pytest.fixture
def other_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the storage that is of another version of engage."""
    folder = tmp_path_factory.mktemp("other") / "engage_plugins"
    shutil.copytree(Path(__file__).parents[3] / "plugins", folder)
    path = folder / "sqlite" / "protocol.py"
    text = path.read_text()
    changed = text.replace('importlib.metadata.version("engage-server")', '"999.0"')
    assert changed != text
    path.write_text(changed)
    return folder.parent


SERVER = """
import asyncio, sys
from pathlib import Path
import engage_plugins.sqlite
assert engage_plugins.sqlite.__file__.startswith(sys.argv[3])
from engage.testing import event
from engage.api import StorageContext
from engage_plugins.sqlite.store import SqliteStorage

async def main():
    context = StorageContext(
        base_dir=Path(sys.argv[1]), identifiers={}, server_started=float(sys.argv[2])
    )
    store = SqliteStorage.from_options({"writer": "process", "min_free_bytes": 0}, context)
    await store.open(create=True)
    print("open", store._writer._backend.pid, flush=True)
    number = 0
    while True:
        await store.write([event("other" + str(number))])
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


def start_other(folder: Path, package: Path, started: float) -> subprocess.Popen[str]:
    """Start a process with another version of the storage, which writes events."""
    code = f"import sys; sys.path.insert(0, {str(package)!r})\n{SERVER}"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(started), str(package)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )


async def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def test_a_later_server_of_another_version_starts_its_process(
    tmp_path: Path, other_version: Path
) -> None:
    """The earlier one goes on through it, and loses nothing; both write at the same time."""
    async with opened(make(tmp_path, started=1)) as old:
        first = pid_of(old)
        loads = Load(old, "old")
        writing = asyncio.ensure_future(loads.run())
        with start_other(tmp_path, other_version, 2) as other:
            second = int((await line(other)).removeprefix("open "))
            assert second != first
            last = [await line(other) for _ in range(50)][-1]
            await until(lambda: client_of(old).pid == second)
            await until(lambda: not alive(first))
            before = len(loads.acknowledged)
            await until(lambda: len(loads.acknowledged) > before + 20)
            # It stays, although the earlier server connects again and again.
            for _ in range(3):
                disconnect(old)
                await store_all(old, event(f"again{_}"))
            assert pid_of(old) == second
            other.kill()
        loads.stop()
        await writing
        stored = await ids(old, limit=1000)
    acknowledged = {*loads.acknowledged, *(f"other{n}" for n in range(int(last) + 1))}
    check_exactly_once(stored, acknowledged)


async def test_an_earlier_server_of_another_version_uses_the_process(
    tmp_path: Path, other_version: Path
) -> None:
    async with opened(make(tmp_path, started=2)) as store:
        with start_other(tmp_path, other_version, 1) as other:
            assert (await line(other)) == f"open {pid_of(store)}"
            other.kill()


async def test_a_server_uses_the_process_of_the_version_that_replaced_it_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a running server starts after an update is of the new version, again and again."""
    async with (
        opened(make(tmp_path, started=5, timeout=10)) as one,
        opened(make(tmp_path, started=5, timeout=10)) as other,
    ):
        monkeypatch.setattr(writer_client, "version", lambda: "0.0.1")
        os.kill(pid_of(one), signal.SIGKILL)
        await asyncio.gather(store_all(one, event("a")), store_all(other, event("b")))
        pid = pid_of(one)
        await asyncio.gather(store_all(one, event("c")), store_all(other, event("d")))
        assert pid_of(one) == pid_of(other) == pid
        assert sorted(await ids(one)) == ["a", "b", "c", "d"]


async def test_an_incompatible_protocol_is_refused_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(make(tmp_path, started=2)) as store:
        monkeypatch.setattr(writer_client, "PROTOCOL", protocol.PROTOCOL + 1)
        earlier = make(tmp_path, started=1)
        with pytest.raises(StorageUnavailable, match="use the same version here"):
            await earlier.open(create=True)
        await store_all(store, event("m"))


async def test_settings_of_another_version_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version may have other settings; its server is served with those of this one."""
    async with opened(make(tmp_path, started=2)) as store:
        monkeypatch.setattr(
            writer_client, "encode_settings", lambda _: protocol.msgspec.Raw(b'{"path": 1}')
        )
        async with opened(make(tmp_path, started=1)) as earlier:
            await store_all(earlier, event("m"))
            assert pid_of(earlier) == pid_of(store)


# ---------------------------------------------------------------------------------- priority
async def test_a_server_replaces_a_process_of_lower_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a command started with nice; nothing is lost, and the new one stays."""
    start = writer_client.start_process

    def nicely(lock: WriterLock, server_started: float) -> Any:
        started = start(lock, server_started)
        os.setpriority(os.PRIO_PROCESS, started._process.pid, 10)
        return started

    async with opened(make(tmp_path, "thread")):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(writer_client, "start_process", nicely)
        # The interpreter takes longer to start than setpriority.
        command = make(tmp_path)
        await command.open(create=False)
        await store_all(command, event("a"))
    first = pid_of(command)
    assert os.getpriority(os.PRIO_PROCESS, first) == 10
    async with opened(make(tmp_path, started=1)) as server:
        second = pid_of(server)
        assert second != first
        assert os.getpriority(os.PRIO_PROCESS, second) == os.getpriority(os.PRIO_PROCESS, 0)
        await store_all(command, event("c"))
        await store_all(server, event("s"))
        assert pid_of(command) == pid_of(server) == second
    await command.close()


# ---------------------------------------------------------------------------- lock and socket
async def test_a_deleted_lock_loses_nothing(tmp_path: Path) -> None:
    """Two processes exist for a moment; the later one writes, and the earlier one ends."""
    one, other = make(tmp_path, started=1), make(tmp_path, started=2)
    async with opened(one):
        first = pid_of(one)
        (tmp_path / "engage.db-writer.lock").unlink()
        async with opened(other), load(one, other):
            await until(lambda: not alive(first))
            second = await together(one, other)
            assert second not in (0, first)
            assert second == holder(tmp_path / "engage.db")


async def test_a_lock_that_is_deleted_again_and_again_loses_nothing(tmp_path: Path) -> None:
    one, other = make(tmp_path, started=1), make(tmp_path, started=2)
    async with opened(one), opened(other), load(one, other):
        for _ in range(4):
            (tmp_path / "engage.db-writer.lock").unlink(missing_ok=True)
            disconnect(other)
            await asyncio.sleep(0.6)


async def test_a_stopped_process_whose_lock_was_deleted_doubles_nothing(tmp_path: Path) -> None:
    """When it goes on, another process has written meanwhile."""
    one, other = make(tmp_path, started=1, timeout=3), make(tmp_path, started=2)
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


async def test_a_socket_with_a_long_path_is_in_a_temporary_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    async with opened(make(folder)) as store:
        note = read_note(str(folder / "engage.db"))
        assert note is not None
        private = Path(note.address).parent
        assert private.stat().st_mode & 0o777 == 0o700
        assert os.stat(note.address).st_mode & 0o777 == 0o600
        async with opened(make(folder)) as other:
            assert pid_of(other) == pid_of(store)
        # One that is left over is deleted by the next process.
        os.kill(pid_of(store), signal.SIGKILL)
        await store_all(store, event("m"))
        assert not private.exists()
        note = read_note(str(folder / "engage.db"))
        assert note is not None
        private = Path(note.address).parent
        # So is that of a process whose lock was deleted.
        os.unlink(folder / "engage.db-writer.lock")
        await until(lambda: not private.exists())
        await store_all(store, event("n"))
        note = read_note(str(folder / "engage.db"))
        assert note is not None
        private = Path(note.address).parent
    assert not private.exists()


async def test_a_folder_that_takes_no_socket_does_not_matter(tmp_path: Path) -> None:
    """A folder stands in its way here; some file systems take none at all."""
    (tmp_path / "engage.db-writer.sock" / "x").mkdir(parents=True)
    async with opened(make(tmp_path)) as store:
        await store_all(store, event("m"))
        note = read_note(str(tmp_path / "engage.db"))
        assert note is not None
        assert not note.address.startswith(str(tmp_path))


async def test_a_link_to_the_store_leads_to_the_same_process(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as store:
        (tmp_path / "link.db").symlink_to(tmp_path / "engage.db")
        async with opened(make(tmp_path, path="link.db")) as other:
            assert pid_of(other) == pid_of(store)


async def test_the_folder_may_have_another_path_in_a_container(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as one:
        lock = tmp_path / "engage.db-writer.lock"
        note = lock.read_text()
        assert str(tmp_path) in note
        lock.write_text(note.replace(str(tmp_path), "/data").ljust(1024))
        async with opened(make(tmp_path, timeout=5)) as other:
            assert pid_of(one) == pid_of(other)


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
            result = subprocess.run(  # noqa: ASYNC221
                [sys.executable, "-c", OPENS, str(tmp_path), writer],
                capture_output=True,
                text=True,
                check=False,
            )
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


OPENS = """
import asyncio, sys
from pathlib import Path
from engage.api import StorageContext, StorageUnavailable
from engage_plugins.sqlite.store import SqliteStorage

async def main():
    context = StorageContext(base_dir=Path(sys.argv[1]), identifiers={})
    store = SqliteStorage.from_options({"writer": sys.argv[2]}, context)
    try:
        await store.open(create=True)
    except StorageUnavailable as error:
        print(error)

asyncio.run(main())
"""
