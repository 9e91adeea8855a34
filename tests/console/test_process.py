# SPDX-License-Identifier: Apache-2.0
"""The console as a process: beside the server, alone, killed, with its port taken."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.console import CONSOLE, console_url, free_port, signed_in
from support.processes import alive
from support.server_process import Server, config_text, start_server
from support.waiting import DEADLINE, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def healthy(url: str) -> bool:
    """Return whether a console answers."""
    try:
        return httpx.get(f"{url}/healthz", timeout=DEADLINE).status_code == 200
    except httpx.TransportError:
        return False


def messages(server: Server, part: str) -> list[str]:
    """Return the messages in the log that contain a text."""
    return [line["message"] for line in server.lines() if part in line["message"]]


def test_a_killed_console_is_started_again_and_the_server_goes_on(tmp_path: Path) -> None:
    extra = f"[console]\nport = {free_port()}\n"
    with start_server(tmp_path, config_extra=extra) as server:
        url, worker = console_url(server), server.worker
        (console,) = server.consoles()
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, console) == min(mine + 15, 19)
        with signed_in(server) as client:
            os.kill(console, signal.SIGKILL)
            assert server.track("m1").status_code == 200
            wait_for(lambda: server.consoles() - {console}, what="another console")
            wait_for(lambda: healthy(url), what="the console")
            # The session lives on: its secret is in the store.
            assert client.get("audit").status_code == 200
        assert server.worker == worker
        assert messages(server, "the console died with status -9; it is started again")
        assert server.stop() == 0


@pytest.mark.long
def test_however_often_the_console_dies_the_server_stays(tmp_path: Path) -> None:
    """Ten deaths of workers within a minute would end it."""
    with start_server(tmp_path, config_extra=CONSOLE) as server:
        worker = server.worker
        killed: list[tuple[int, float]] = []
        for _ in range(4):
            known = {pid for pid, _ in killed}
            for pid in wait_for(lambda known=known: server.consoles() - known, what="a console"):  # type: ignore[misc]
                killed.append((pid, time.monotonic()))
                os.kill(pid, signal.SIGKILL)
        pauses = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(killed)]
        # They grow; the time of a start comes in addition.
        assert all(pause > least for pause, least in zip(pauses, (1, 2, 4), strict=True)), pauses
        assert server.track("m1").status_code == 200
        assert server.worker == worker
        assert server.stop() == 0


def test_a_port_that_is_taken_is_one_error_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start_server(tmp_path, config_extra=f"[console]\nport = {port}\n") as server:
            wait_for(lambda: messages(server, "the console cannot start"), what="the error")
            assert server.track("m1").status_code == 200
            time.sleep(3)  # It has tried again meanwhile.
            (line,) = messages(server, "the console cannot start")
            assert f"cannot listen on 127.0.0.1:{port}: address already in use" in line
            assert "console.port" in line
            assert "Traceback" not in server.log()
            taken.close()
            wait_for(lambda: healthy(f"http://127.0.0.1:{port}"), what="the console")
            assert server.stop() == 0


def test_the_end_of_the_server_is_the_end_of_the_console(tmp_path: Path) -> None:
    with start_server(tmp_path, config_extra=CONSOLE) as server:
        console_url(server)
        (console,) = server.consoles()
        assert server.stop() == 0
        assert not alive(console)
        server.start()
        console_url(server)
        (console,) = server.consoles()
        server.signal(signal.SIGKILL)
        server.wait()
        wait_for(lambda: not alive(console), what="the console to end")


def test_a_worker_loads_nothing_of_the_console(tmp_path: Path) -> None:
    code = (
        "import sys, engage.server.child, engage.server.worker, engage.app;"
        "print([name for name in sys.modules if name.startswith('engage.console')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------- alone
class Alone(Server):
    """``engage console`` as a process."""

    command = "console"


def test_the_console_runs_alone(tmp_path: Path) -> None:
    """On a store that a server uses at the same time. Without the section, that has no console."""
    port = free_port()
    url, folder = f"http://127.0.0.1:{port}", tmp_path / "alone"
    folder.mkdir()
    with start_server(tmp_path) as server:
        assert not server.consoles()
        assert "console" not in [line["message"] for line in server.lines()]
        assert server.track("m1").status_code == 200
        config = server.config.read_text().replace("engage.db", str(server.database))
        with Alone(folder, f"{config}\n[console]\nport = {port}\n") as console:
            console.launch()
            wait_for(lambda: healthy(url), what="the console")
            with signed_in(server, url) as client:
                assert "m1" in client.get("events").text
            assert console.stop() == 0
            assert "engage console-link" in console.log()


def test_a_console_that_cannot_start_alone_says_why(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for section, message in (
            ("", "there is no [console] section"),
            (f"[console]\nport = {port}\n", f"cannot listen on 127.0.0.1:{port}"),
        ):
            with Alone(tmp_path, f"{config_text()}\n{section}") as console:
                console.launch()
                assert console.wait() == 1
                assert len(console.log().splitlines()) == 1
                assert message in console.log()


# ------------------------------------------------------------------------------------ announcements
@contextlib.contextmanager
def on_terminal(path: Path) -> Iterator[bytes]:
    """Run a server on a terminal, and yield what is there after the console was announced."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "engage", "serve", "--config", str(path)])
    shown = b""
    try:
        end = time.monotonic() + DEADLINE
        while not re.search(rb"/link\?t=\S+\r\n(.*\r\n)?\r\n|engage console-link.*\n", shown):
            assert time.monotonic() < end, shown
            shown += os.read(terminal, 65536)
        yield shown
    finally:
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("style", ["auto", "json"])
def test_a_link_is_printed_to_a_terminal_only(tmp_path: Path, style: str) -> None:
    path = tmp_path / "engage.toml"
    port = free_port()
    text = config_text().replace('format = "json"', f'format = "{style}"')
    path.write_text(f"{text}\n[console]\nport = {port}\n")
    with on_terminal(path) as shown:
        link = next((word for word in shown.decode().split() if "/link?t=" in word), None)
        if style == "json":
            assert link is None
            assert b"engage console-link" in shown
        else:
            assert link is not None
            assert re.fullmatch(rf"http://[0-9a-f]{{16}}\.localhost:{port}/link\?t=[\w-]+", link)
            token = link.partition("t=")[2]
            url = f"http://127.0.0.1:{port}"
            for status in (303, 403):
                answer = httpx.post(f"{url}/link", data={"t": token}, headers={"Origin": url})
                assert answer.status_code == status


def test_a_link_that_waits_for_the_storage_says_so(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml"
    text = config_text(
        storage=f"""
[storage]
backend = "mongo"
[storage.mongo]
url = "mongodb://127.0.0.1:{free_port()}/engage?serverSelectionTimeoutMS=500"
"""
    ).replace('format = "json"', 'format = "text"')
    path.write_text(f"{text}\n[console]\nport = 0\n")
    with on_terminal(path) as shown:
        assert re.search(rb"/link\?t=\S+\s+[(]as soon as the storage answers", shown)


def test_plain_http_beyond_this_machine_is_a_warning(tmp_path: Path) -> None:
    extra = '[console]\nport = 0\nhost = "0.0.0.0"\n'
    with start_server(tmp_path, config_extra=extra) as server:
        url = console_url(server)
        assert url.startswith("http://127.0.0.1:")
        (warning,) = messages(server, "without TLS")
        assert "0.0.0.0" in warning
        with signed_in(server, url) as client:  # It needs no password.
            assert client.get("audit").status_code == 200
