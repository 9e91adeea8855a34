# SPDX-License-Identifier: Apache-2.0
"""Several servers and commands share the process that writes an SQLite store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from engage.api import StorageUnavailable
from engage.testing import event
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite.writer.lock import read_note
from engage_plugins.sqlite.writer.writer import AVAILABLE
from support.processes import alive, holder
from support.server_process import KEY, SQLITE, Server, config_text, start_server
from support.sqlite import config_file, open_store
from support.waiting import DEADLINE, wait_for
from support.writer import make, opened

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


# ------------------------------------------------------------------------------------- other users
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
@pytest.mark.parametrize("writer", ["process", "thread"])
async def test_only_the_owner_may_write(tmp_path: Path, writer: str) -> None:
    """Root neither: it would leave files that the owner cannot use. It may read."""
    async with opened(make(tmp_path)) as store:
        await store_all(store, event("m"))
    os.chown(tmp_path / "engage.db", pwd.getpwnam("nobody").pw_uid, -1)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageUnavailable, match="sudo -u nobody engage"):
        await make(tmp_path, writer).open(create=True)
    reader = make(tmp_path, writer)
    await reader.open(create=False)
    with pytest.raises(StorageUnavailable, match="sudo -u nobody engage"):
        await reader.check()
    assert await ids(reader) == ["m"]
    await reader.close()
    assert sorted(os.listdir(tmp_path)) == before


@needs_root
async def test_a_socket_of_another_user_is_not_used(tmp_path: Path) -> None:
    """Whoever can replace the socket must not receive events."""
    async with opened(make(tmp_path)):
        pass
    ours, theirs = socket.socketpair()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening, ours:
        listening.bind(str(tmp_path / "engage.db-writer.sock"))
        code = "import socket; socket.socket(fileno=0).listen(); print(flush=True); input()"
        foreign = subprocess.Popen(  # noqa: ASYNC220
            ["/usr/bin/env", "python3", "-c", code],
            stdin=listening.fileno(),
            stdout=theirs.fileno(),
            user=pwd.getpwnam("nobody").pw_uid,
        )
        assert ours.recv(1) == b"\n"
        with pytest.raises(StorageUnavailable, match="a process of another user writes to it"):
            await make(tmp_path).open(create=True)
        foreign.kill()
        foreign.wait()
    theirs.close()
