# SPDX-License-Identifier: Apache-2.0
"""A server starts at once after a reboot, with the files that the boot before left beside a store.

No clock and no process id of that boot means anything now: the clock that never goes back begins at
0 again, and the number of a process that wrote then may be that of any process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engage_plugins.sqlite.writer.lock import lock_path
from engage_plugins.sqlite.writer.sockets import AVAILABLE, socket_path
from support.commands import run
from support.server_process import SQLITE, Server, start_server

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")

EVENTS = [f"m{number}" for number in range(20)]
#: Notes in the lock's file: of processes that run, of one that cannot, of other versions.
NOTES = {
    "this-process": f"{os.getpid()} alone\n".encode(),
    "nobody": b"4194304999\n",
    "reserved": b'{"pid":1,"reserved":"0123456789abcdef","reserved_until":1000000000}',
    "noise": os.urandom(200),
}


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[Server]:
    """A server that a power cut ended: its files are as they were."""
    with start_server(tmp_path, storage=f'{SQLITE}writer = "process"\n') as server:
        for name in EVENTS:
            assert server.track(name).status_code == 200
        server.kill()
        yield server


def starts_at_once(server: Server) -> None:
    """Check that a server starts, waits for nothing, and has all events once."""
    before = len(server.lines())
    server.start()
    assert sorted(event["messageId"] for event in server.export()) == sorted(EVENTS)
    for name in (*EVENTS, "new"):
        assert server.track(name).status_code == 200
    assert len(server.export()) == len(EVENTS) + 1
    levels = {line["level"] for line in server.lines()[before:]}
    assert not levels & {"warning", "error", "critical"}


@pytest.mark.parametrize("note", NOTES)
def test_the_note_of_another_boot_in_the_lock_delays_nothing(cut_off: Server, note: str) -> None:
    lock = Path(lock_path(str(cut_off.database)))
    assert lock.exists()
    lock.write_bytes(NOTES[note])
    starts_at_once(cut_off)


def test_the_socket_of_another_boot_delays_nothing(cut_off: Server) -> None:
    address = Path(socket_path(str(cut_off.database)))
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(address))
        listening.listen()
    starts_at_once(cut_off)


@pytest.mark.parametrize("suffix", ["-shm", "-keys"])
def test_the_index_and_the_keys_of_another_store_delay_nothing(
    cut_off: Server, tmp_path: Path, suffix: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    with start_server(folder, storage=f'{SQLITE}writer = "process"\n') as other:
        assert other.track("of-another-store").status_code == 200
        left = Path(f"{other.database}{suffix}")
        if suffix == "-keys":
            other.stop()
        Path(f"{cut_off.database}{suffix}").write_bytes(left.read_bytes())
    starts_at_once(cut_off)


@pytest.mark.parametrize("content", ["noise", "empty"])
def test_all_files_of_another_boot_together_delay_nothing(cut_off: Server, content: str) -> None:
    """Those of a hand-over between two servers, and of a command, at the time of the cut."""
    store = str(cut_off.database)
    Path(lock_path(store)).write_bytes(NOTES["reserved"])
    for name in ("-shm", "-keys", "-keys.tmp", "-writer.sock.1"):
        Path(store + name).write_bytes(os.urandom(1000) if content == "noise" else b"")
    Path(f"{store}-journal").write_bytes(b"")
    assert run("check", "--config", cut_off.config).exit_code == 0
    starts_at_once(cut_off)
