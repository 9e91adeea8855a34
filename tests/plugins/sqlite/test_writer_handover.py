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
from pathlib import Path
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.testing import event, identify
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite import protocol, writer_client
from engage_plugins.sqlite.lock import WriterLock
from engage_plugins.sqlite.writer import AVAILABLE
from support.exactly_once import check_exactly_once
from support.processes import alive
from support.writer import (
    Load,
    client_of,
    disconnect,
    load,
    make,
    opened,
    pid_of,
    together,
    until,
)

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


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
