# SPDX-License-Identifier: Apache-2.0
"""Several servers and commands share the process that writes an SQLite store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engage.api import StorageUnavailable
from engage.testing import event
from engage.testing.factories import ids
from engage_plugins.sqlite.lock import Note, WriterLock, read_note
from engage_plugins.sqlite.writer import AVAILABLE
from support.processes import alive, holder
from support.server_process import KEY, SQLITE, Server, config_text, start_server
from support.sqlite import config_file, open_store
from support.waiting import DEADLINE, wait_for
from support.writer import make, pid_of

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


def writer_of(folder: Path) -> int:
    """Return the id of the process that writes the store of a folder."""
    note = read_note(str(folder / "engage.db"))
    assert note is not None
    assert alive(note.pid)
    return int(note.pid)


class Singles:
    """Sends single events, one after the other, and counts what was answered."""

    def __init__(self, server: Server, name: str) -> None:
        self.sent = 0
        self.wrong: list[str] = []
        self._server = server
        self._name = name
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=DEADLINE) as client:
            while not self._stopping.is_set():
                body = {"userId": "u", "event": "E", "messageId": f"{self._name}{self.sent}"}
                answer = client.post(f"/v1/track?writeKey={KEY}", json=body)
                if answer.status_code != 200:
                    self.wrong.append(answer.text)
                self.sent += 1

    def __enter__(self) -> Singles:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE)
        assert not self.wrong


def test_two_servers_write_through_one_process(tmp_path: Path) -> None:
    """And the first one may go, although it started the process."""
    config = config_text(workers=2, storage=SQLITE)
    (tmp_path / "other").mkdir()
    with start_server(tmp_path, workers=2) as one:
        writer = writer_of(tmp_path)
        path = f'path = "{tmp_path / "engage.db"}"'
        other = Server(tmp_path / "other", config.replace('path = "engage.db"', path)).start()
        with other:
            assert one.track("a").status_code == other.track("b").status_code == 200
            assert one.stop() == 0
            assert other.track("c").status_code == 200
            assert writer_of(tmp_path) == writer
            assert other.stop() == 0
        wait_for(lambda: not alive(writer), what="the writer process to end")
        assert [event["messageId"] for event in one.export()] == ["a", "b", "c"]


@pytest.mark.slow
def test_a_stopped_worker_does_not_stop_the_others(tmp_path: Path) -> None:
    """It has sent requests, and reads no answers; afterwards it goes on, and nothing is lost."""
    with start_server(tmp_path, workers=4) as server, contextlib.ExitStack() as stack:
        workers = wait_for(
            lambda: len(server.workers()) == 4 and server.workers(), what="all workers"
        )
        clients: dict[int, httpx.Client] = {}
        # A client of each worker: others have to wait for a stopped one.
        while set(clients) != workers:
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=DEADLINE))
            answer = client.get("/livez")
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            worker = holder(workers, port)
            assert worker is not None
            if worker in clients:
                client.close()
            clients.setdefault(worker, client)
        stopped, *running = clients
        sent = []

        def send(worker: int, name: str) -> None:
            body = {"userId": "u", "event": "E", "messageId": name}
            answer = clients[worker].post(f"/v1/track?writeKey={KEY}", json=body)
            assert answer.status_code == 200
            sent.append(name)

        # It is stopped at some moment of its requests.
        def send_many() -> None:
            for number in range(200):
                send(stopped, f"stopped{number}")

        busy = threading.Thread(target=send_many)
        busy.start()
        wait_for(lambda: len(sent) > 20, what="some requests")
        os.kill(stopped, signal.SIGSTOP)
        # Longer than the process waits for a client that reads no answers.
        for number in range(300):
            for worker in running:
                send(worker, f"{worker}-{number}")
        os.kill(stopped, signal.SIGCONT)
        busy.join(DEADLINE)
        assert not busy.is_alive()
        stored = [event["messageId"] for event in server.export()]
        assert sorted(stored) == sorted(sent)
        assert len(sent) == 200 + 900


@pytest.mark.slow
def test_a_copy_beside_a_busy_server_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = config_file(tmp_path / "source")

    async def fill() -> None:
        async with open_store(source) as store:
            for start in range(0, 20_000, 1000):
                await store.write([event(f"copied{start + n}") for n in range(1000)])

    asyncio.run(fill())
    with start_server(tmp_path, workers=2) as server:
        with Singles(server, "a") as one, Singles(server, "b") as other:
            copy = subprocess.run(
                [sys.executable, "-m", "engage", "copy", "--from", source, "--to", server.config],
                capture_output=True,
                text=True,
                check=False,
            )
            assert copy.returncode == 0, copy.stderr
            assert one.sent > 20
            assert other.sent > 20
        stored = [item["messageId"] for item in server.export()]
    assert len(stored) == len(set(stored)) == 20_000 + one.sent + other.sent


# ---------------------------------------------------------------------------------------- root
@pytest.fixture
def nobody_folder() -> Iterator[Path]:
    """A folder of another user, who can also read this Python and engage."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    user = pwd.getpwnam("nobody")
    folder = Path("/tmp") / f"engage-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, user.pw_uid, user.pw_gid)
    yield folder
    shutil.rmtree(folder)


def owners(folder: Path) -> set[str]:
    """Return the users that the files of a store belong to."""
    return {path.owner() for path in folder.iterdir() if path.name.startswith("engage.db")}


async def test_root_leaves_no_file_of_its_own(nobody_folder: Path) -> None:
    """``sudo engage copy``, before there is a server: the process is the user's."""
    store = make(nobody_folder)
    await store.open(create=True)
    await store.write([event("m")])
    status = Path(f"/proc/{pid_of(store)}/status").read_text()  # noqa: ASYNC240
    uid = pwd.getpwnam("nobody").pw_uid
    assert f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in status
    assert owners(nobody_folder) == {"nobody"}
    await store.close()
    assert owners(nobody_folder) == {"nobody"}


async def test_root_and_a_user_share_a_process(nobody_folder: Path) -> None:
    """``sudo engage copy`` beside a server. Whoever starts the process, both can use it."""
    code = USER.format(folder=str(nobody_folder), uid=pwd.getpwnam("nobody").pw_uid)
    user = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert user.stdout is not None
    assert user.stdin is not None
    store = make(nobody_folder)
    await store.open(create=True)
    user.stdin.write("\n")
    user.stdin.flush()
    assert int(user.stdout.readline()) == pid_of(store)
    await store.write([event("root")])
    os.kill(pid_of(store), signal.SIGKILL)
    await store.write([event("root again")])
    user.stdin.write("\n")
    user.stdin.flush()
    assert user.stdout.readline() == "written\n"
    assert owners(nobody_folder) == {"nobody"}
    assert sorted(await ids(store)) == ["root", "root again", "user"]
    user.communicate()
    await store.close()


#: It becomes another user when it has imported everything, because that user may not be allowed to
#: read this Python.
USER = """
import asyncio, os, sys
from pathlib import Path
from engage.api import StorageContext
from engage.testing import event
from engage_plugins.sqlite import protocol
from engage_plugins.sqlite.store import SqliteStorage

protocol.version()
os.setgroups([])
os.setuid({uid})

async def main():
    context = StorageContext(base_dir=Path({folder!r}), identifiers={{"acme": []}})
    store = SqliteStorage.from_options({{"min_free_bytes": 0}}, context)
    sys.stdin.readline()
    await store.open(create=True)
    print(store._writer._backend.pid, flush=True)
    sys.stdin.readline()
    await store.write([event("user")])
    print("written", flush=True)
    sys.stdin.readline()
    await store.close()

asyncio.run(main())
"""


async def test_a_socket_of_another_user_is_not_used(nobody_folder: Path, tmp_path: Path) -> None:
    """Whoever can replace the note in the lock's file must not receive events."""
    address = str(nobody_folder / "sock")
    code = (
        f"import socket; s=socket.socket(socket.AF_UNIX); s.bind({address!r}); s.listen(); input()"
    )
    foreign = subprocess.Popen(  # noqa: ASYNC220
        ["/usr/bin/env", "python3", "-c", f"{code}; input()"],
        stdin=subprocess.PIPE,
        user=pwd.getpwnam("nobody").pw_uid,
    )
    with foreign:
        wait_for(lambda: Path(address).exists(), what="the socket")
        lock = WriterLock.acquire(str(tmp_path / "engage.db"))
        assert lock is not None
        lock.write(Note(pid=1, address=address))
        with pytest.raises(StorageUnavailable, match="a process of another user listens there"):
            await make(tmp_path).open(create=True)
        lock.release()
        foreign.kill()
