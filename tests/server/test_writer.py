# SPDX-License-Identifier: Apache-2.0
"""Several servers and commands share the process that writes an SQLite store."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from engage.api import StorageUnavailable
from engage.testing import event
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite.writer.lock import holder as holder_of_lock
from engage_plugins.sqlite.writer.sockets import AVAILABLE
from support.commands import run
from support.exactly_once import check_exactly_once
from support.processes import alive
from support.senders import Senders
from support.server_process import KEY, SQLITE, Server, config_text, start_server
from support.sqlite import config_file, open_store
from support.waiting import DEADLINE, wait_for
from support.writer import make, opened

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


class Singles(Senders):
    """Threads that send single events to servers, one after the other; all must be answered 200."""

    def __init__(self, *servers: Server) -> None:
        super().__init__(len(servers))
        self._urls = [server.url for server in servers]
        self.sent = [0] * len(servers)
        self.wrong: list[str] = []

    def _send(self, number: int) -> None:
        with httpx.Client(base_url=self._urls[number], timeout=DEADLINE) as client:
            while not self._stop.is_set():
                name = f"{number}-{self.sent[number]}"
                body = {"userId": "u", "event": "E", "messageId": name}
                answer = client.post(f"/v1/track?writeKey={KEY}", json=body)
                if answer.status_code != 200:
                    self.wrong.append(answer.text)
                self.sent[number] += 1

    def more(self) -> None:
        """Wait until each thread has sent more events."""
        before = list(self.sent)
        wait_for(
            lambda: all(now > old + 5 for now, old in zip(self.sent, before, strict=True)),
            what="more events",
        )

    def check(self, server: Server, others: int = 0) -> None:
        """Check that the store has each event once, and so many others."""
        assert not self.wrong
        names = {f"{number}-{n}" for number, count in enumerate(self.sent) for n in range(count)}
        stored = [item["messageId"] for item in server.export()]
        check_exactly_once([one for one in stored if one in names], names, names)
        assert len(stored) == len(names) + others


@contextlib.contextmanager
def two_servers(folder: Path) -> Iterator[tuple[Server, Server]]:
    """Run two servers with one store."""
    config = config_text(workers=2, storage=SQLITE)
    (folder / "other").mkdir()
    path = f'path = "{folder / "engage.db"}"'
    with (
        start_server(folder, workers=2) as server,
        Server(folder / "other", config.replace('path = "engage.db"', path)).start() as other,
    ):
        yield server, other


def writer_of(folder: Path) -> int:
    """Return the id of the process that writes the store of a folder."""
    found = holder_of_lock(str(folder / "engage.db"))
    assert found is not None
    return int(found.pid)


@pytest.mark.parametrize("end", [Server.stop, Server.kill])
def test_two_servers_write_through_one_process(
    tmp_path: Path, end: Callable[[Server], object]
) -> None:
    """The first one's, until it is stopped or killed; then the other one's takes over."""
    with two_servers(tmp_path) as (one, other):
        singles = Singles(other)
        with singles.running():
            assert writer_of(tmp_path) == one.helper
            singles.more()
            end(one)
            wait_for(lambda: writer_of(tmp_path) == other.helper, what="the other process")
            singles.more()
        # The one that is started again waits in turn.
        one.start()
        assert one.track("again").status_code == 200
        assert writer_of(tmp_path) == other.helper
        singles.check(one, others=1)


def test_the_killed_process_is_replaced(tmp_path: Path) -> None:
    """No request fails, and a command that writes does not, either."""
    with two_servers(tmp_path) as (one, other):
        singles = Singles(one, other)
        with singles.running():
            singles.more()
            killed = one.helper
            os.kill(killed, signal.SIGKILL)
            assert run("check", "--config", one.config).exit_code == 0
            wait_for(lambda: killed not in one.children(), what="the end of the process")
            singles.more()
        assert [one.stop(), other.stop()] == [0, 0]
        singles.check(one)
        assert not (tmp_path / "engage.db-writer.sock").exists()


def test_a_process_that_hangs_means_503(tmp_path: Path) -> None:
    """Its clients get the answer in time, and are served when it goes on."""
    storage = SQLITE.replace("[storage]\n", "[storage]\nwrite_timeout = 1\n")
    with start_server(tmp_path, storage=storage, server="hang_timeout = 600") as server:
        os.kill(server.helper, signal.SIGSTOP)
        answer = server.track("during")
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        os.kill(server.helper, signal.SIGCONT)
        wait_for(lambda: server.track("after").status_code == 200, what="the store")
        assert server.stop() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when it goes on")
def test_a_process_that_hangs_ends_with_the_server(tmp_path: Path) -> None:
    """It would keep the lock from the next server."""
    with start_server(tmp_path) as server:
        process = server.helper
        os.kill(process, signal.SIGSTOP)
        server.signal(signal.SIGKILL)
        wait_for(lambda: not alive(process), what="the end of the process")


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
    # SQLite gives its files to the owner.
    assert {*os.listdir(tmp_path)} - {*before} <= {"engage.db-shm", "engage.db-wal"}
    left = tmp_path.glob("engage.db-[sw][ha]*")  # noqa: ASYNC240
    assert {path.owner() for path in left} == {"nobody"}


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
            await make(tmp_path, supervised=True).open(create=True)
        foreign.kill()
        foreign.wait()
    theirs.close()


#: Starts a program that the modes of files apply to, also if this process is of root.
BOUND = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.mark.skipif(sys.platform != "linux", reason="needs setpriv")
@pytest.mark.parametrize(
    ("name", "mode"), [("", 0o500), ("engage.db", 0o400), ("engage.db-shm", 0o400)]
)
async def test_a_mode_that_forbids_writing_is_one_line(
    tmp_path: Path, name: str, mode: int
) -> None:
    """SQLite would make more files of that mode, and a helper process could not listen."""
    config = config_file(tmp_path)
    text = config.read_text().replace('"thread"', '"process"')
    config.write_text(f'server.port = 0\nlogging.level = "error"\n{text}')
    async with open_store(config):
        pass
    path = tmp_path / name
    path.touch()
    before = sorted(os.listdir(tmp_path))
    path.chmod(mode)
    done = subprocess.run(  # noqa: ASYNC221
        [*BOUND, sys.executable, "-m", "engage", "serve", "--config", config],
        capture_output=True,
        text=True,
        check=False,
    )
    path.chmod(0o700)
    assert done.returncode == 1
    owner = pwd.getpwuid(os.geteuid()).pw_name
    why = f"this user may not write to it: it belongs to {owner}, and its mode is {mode:o}"
    assert f"{path.resolve()}: {why}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before


@needs_root
async def test_a_read_only_file_system_is_one_line(tmp_path: Path) -> None:
    """So is /etc in the unit of docs/running.md, where modes are not what is wrong."""
    config = config_file(tmp_path)
    text = config.read_text().replace('"thread"', '"process"')
    config.write_text(f'server.port = 0\nlogging.level = "error"\n{text}')
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    serve = f"{sys.executable} -m engage serve --config {config}"
    done = subprocess.run(  # noqa: ASYNC221
        ["unshare", "--mount", "sh", "-c", f"{mount} && exec {serve}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path}: the file system is read-only for this process" in done.stderr
    assert "set storage.sqlite.path" in done.stderr
    assert done.stderr.count("\n") == 1


@needs_root
async def test_a_file_that_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    """It says which user may."""
    config = config_file(tmp_path)
    async with open_store(config):
        pass
    os.chown(tmp_path / "engage.db", pwd.getpwnam("nobody").pw_uid, -1)
    done = subprocess.run(  # noqa: ASYNC221
        [*BOUND, sys.executable, "-m", "engage", "export", "events", "--config", config],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == (
        f"engage: {tmp_path}/engage.db: only its owner may read it: sudo -u nobody engage …\n"
    )


@needs_root
async def test_a_process_of_another_user_is_not_served(tmp_path: Path) -> None:
    """Not even if the file of the socket has got another mode."""
    async with opened(make(tmp_path)):
        os.chmod(tmp_path, 0o755)
        os.chmod(tmp_path / "engage.db-writer.sock", 0o666)
        code = (
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect('engage.db-writer.sock')"
        )
        result = subprocess.run(  # noqa: ASYNC221
            ["/usr/bin/env", "python3", "-c", f"{code}; print(s.recv(100))"],
            cwd=tmp_path,
            user=pwd.getpwnam("nobody").pw_uid,
            capture_output=True,
            check=False,
        )
        assert result.stdout == b"b''\n", result.stderr
