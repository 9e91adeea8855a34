# SPDX-License-Identifier: Apache-2.0
"""Processes that hang are killed and replaced; those that work for long, or wait, are not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from engage.server.supervisor import MAX_DEATHS
from support.console import CONSOLE, console_url
from support.exactly_once import check_exactly_once
from support.loader_process import TAPE, Loaders, stored_ids, wait_until_stored
from support.recorded_disk import Fault, Recorder
from support.senders import Senders
from support.server_process import KEY, Server, config_text, start_server
from support.waiting import DEADLINE, wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

#: The least that the config takes.
SECONDS = 3
HANG = f"hang_timeout = {SECONDS}"

LOOP = """
import time
from engage.api import hookimpl

@hookimpl
def engage_register_transform(register):
    def make(options):
        def transform(event):
            while event["event"] == "Loop":
                pass
            while event["event"] == "Sleep":
                time.sleep(1000)
            return event
        return transform
    register("loops", make)
"""
LOOPS = '[plugins]\nfiles = ["loops.py"]\n[[transforms]]\nname = "loops"\n'


class Clients(Senders):
    """Clients that send each event until it is acknowledged, over a new connection if one ends."""

    def __init__(self, server: Server, count: int = 4) -> None:
        super().__init__(count)
        self._url = f"{server.url}/v1/track?writeKey={KEY}"
        self.acknowledged: list[str] = []

    def _send(self, number: int) -> None:
        with httpx.Client(timeout=DEADLINE) as client:
            count = 0
            while not self._stop.is_set():
                name = f"{number}-{count}"
                event = {"userId": "u", "event": "E", "messageId": name}
                with contextlib.suppress(httpx.TransportError):
                    if client.post(self._url, json=event).status_code == 200:
                        self.acknowledged.append(name)
                        count += 1

    def more(self) -> None:
        """Wait until more events are acknowledged."""
        enough = len(self.acknowledged) + 50
        wait_for(lambda: len(self.acknowledged) >= enough, what="more events")


def killed(server: Server) -> list[int]:
    """Return the ids of the processes that were killed because they hung."""
    return [line["pid"] for line in server.lines() if "has hung" in line["message"]]


def running(server: Server, pids: set[int]) -> set[int]:
    """Return those of some processes that the server still has."""
    return pids & server.children()


def hang(server: Server, pid: int) -> None:
    """Stop a process, and wait until its parent has killed it."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: pid not in server.children(), what="the end of the stopped process")
    assert pid in killed(server)


def wait_for_number(server: Server, processes: Callable[[Server], set[int]], number: int) -> None:
    """Wait until so many processes run."""
    wait_for(lambda: len(processes(server)) == number, what=f"{number} processes")


KINDS: dict[str, Callable[[Server], set[int]]] = {
    "worker": Server.workers,
    "helper": lambda server: server.children() - server.workers() - server.consoles(),
    "console": Server.consoles,
}


@pytest.mark.parametrize("workers", [1, 2])
def test_stopped_processes_are_replaced_under_load(tmp_path: Path, workers: int) -> None:
    """Each in turn. No acknowledged event is lost."""
    with start_server(tmp_path, workers=workers, server=HANG, config_extra=CONSOLE) as server:
        console_url(server)
        clients = Clients(server)
        with clients.running():
            for kind, processes in KINDS.items():
                clients.more()
                victim = min(processes(server))
                hang(server, victim)
                number = {"worker": workers}.get(kind, 1)
                wait_for_number(server, processes, number)
                clients.more()
        wait_for(lambda: server.log().count('"message":"console"') == 2, what="another console")
        assert len(killed(server)) == 3
        stored = [event["messageId"] for event in server.export()]
        check_exactly_once(stored, clients.acknowledged)
        assert server.stop() == 0


def test_a_stopped_loader_is_replaced(tmp_path: Path) -> None:
    with (
        start_server(tmp_path, server=HANG, config_extra=TAPE) as server,
        Loaders(server).start() as loaders,
    ):
        assert server.track("a").status_code == 200
        wait_until_stored(server, lambda: ["a"])
        [pid] = loaders.processes()
        hang(loaders, pid)
        assert server.track("b").status_code == 200
        wait_until_stored(server, lambda: ["a", "b"])
        assert loaders.stop() == 0
        assert stored_ids(server) == ["a", "b"]


@pytest.mark.parametrize("event", ["Loop", "Sleep"])
def test_a_plugin_that_does_not_return_is_named(tmp_path: Path, event: str) -> None:
    """The log says where the worker was, and other clients are served again."""
    (tmp_path / "loops.py").write_text(LOOP)
    with start_server(tmp_path, server=HANG, config_extra=LOOPS) as server:
        with pytest.raises(httpx.TransportError):
            server.track("loops", event=event)
        wait_for(lambda: server.track("after").status_code == 200, what="another worker")
        [line] = [line for line in server.lines() if "has hung" in line["message"]]
        # More seconds on a busy machine: those without a processor do not count.
        assert re.match(r"worker has hung for \d+ s and is killed; it was at File", line["message"])
        assert "loops.py" in line["message"]
        assert "in transform" in line["message"]
        assert len(line["stack"]) > 5
        assert [one["messageId"] for one in server.export()] == ["after"]


def test_a_loop_is_noticed_on_a_busy_machine(tmp_path: Path) -> None:
    """Although the process has a small part of a processor, and waits for it most of the time."""
    (tmp_path / "loops.py").write_text(LOOP)
    with start_server(tmp_path, server=HANG, config_extra=LOOPS) as server:
        worker = server.worker
        schedule = Path(f"/proc/{worker}/schedstat")
        processor = min(os.sched_getaffinity(worker))
        os.sched_setaffinity(worker, {processor})
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        try:
            for other in others:
                os.sched_setaffinity(other.pid, {processor})
            before = schedule.read_text().split()
            event = {"userId": "u", "event": "Loop"}
            with pytest.raises(httpx.TransportError):
                httpx.post(f"{server.url}/v1/track?writeKey={KEY}", json=event, timeout=1)
            after = before
            while worker in server.children():
                with contextlib.suppress(OSError):
                    after = schedule.read_text().split()
                time.sleep(0.05)
        finally:
            for other in others:
                other.kill()
                other.wait()
        assert killed(server) == [worker]
        # It was killed before it had a processor for that time.
        assert (int(after[0]) - int(before[0])) / 1e9 < 0.8 * SECONDS


def test_processes_that_hang_do_not_end_the_server(tmp_path: Path) -> None:
    """As many as would end it if they died."""
    with start_server(tmp_path, workers=MAX_DEATHS, server=HANG) as server:
        workers = wait_for(lambda: len(now := server.workers()) == MAX_DEATHS and now)
        # Those that are not ready then have longer.
        time.sleep(8)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        wait_for_number(server, partial(running, pids=workers), 0)
        wait_for(lambda: server.track("after").status_code == 200, what="another worker")
        assert len(killed(server)) == MAX_DEATHS
        assert "giving up" not in server.log()
        assert server.stop() == 0


@pytest.mark.parametrize("everyone", [False, True])
def test_a_server_that_was_stopped_kills_no_process(tmp_path: Path, everyone: bool) -> None:
    """Only its parent was, or all of its processes, as with ``docker pause``."""
    with start_server(tmp_path, workers=2, server=HANG, config_extra=CONSOLE) as server:
        console_url(server)
        children = wait_for(lambda: len(now := server.children()) == 4 and now)
        assert server.process is not None
        send = os.killpg if everyone else os.kill
        send(server.process.pid, signal.SIGSTOP)
        time.sleep(2 * SECONDS)
        send(server.process.pid, signal.SIGCONT)
        time.sleep(SECONDS)
        assert not killed(server)
        assert server.track("m").status_code == 200
        assert server.children() == children
        assert server.stop() == 0


def test_a_parent_that_was_late_begins_again(tmp_path: Path) -> None:
    """A process that was silent before that has the whole time again."""
    with start_server(tmp_path, server="hang_timeout = 12") as server:
        assert server.process is not None
        worker = server.worker
        os.kill(worker, signal.SIGSTOP)
        time.sleep(7)
        server.signal(signal.SIGSTOP)
        time.sleep(2)
        server.signal(signal.SIGCONT)
        time.sleep(8)
        assert not killed(server)
        os.kill(worker, signal.SIGCONT)
        assert server.track("m").status_code == 200
        assert server.worker == worker


def test_a_writer_that_waits_for_a_lock_does_not_hang(tmp_path: Path) -> None:
    with start_server(tmp_path, server=HANG) as server:
        assert server.track("before").status_code == 200
        writer = server.helper
        with contextlib.closing(sqlite3.connect(server.database)) as db:
            db.execute("BEGIN IMMEDIATE")
            with Clients(server, 1).running():
                time.sleep(3 * SECONDS)
        assert server.track("after").status_code == 200
        assert not killed(server)
        assert server.helper == writer


def test_long_work_of_a_writer_is_not_a_hang(tmp_path: Path) -> None:
    """On a slow disk: an index for a new identifier, and a checkpoint after an error."""
    disk = Recorder(tmp_path)
    config = config_text(server=HANG)
    with Server(tmp_path, config, environment=disk.environment).start() as server:
        users = [
            {"type": "identify", "userId": f"u{n}", "traits": {"code": f"{n}-{n:0100}"}}
            for n in range(2000)
        ]
        assert server.post("/v1/batch", {"batch": users}).status_code == 200
        server.stop()
        indexed = 'subscription_identifiers = ["code"]\n'
        server.config.write_text(config_text(server=HANG, workspace=indexed))
        disk.set(0, Fault("log write", times=0, delay=50_000))
        began = time.monotonic()
        server.start()
        assert time.monotonic() - began > 2 * SECONDS
        writer = server.helper
        disk.set(0, Fault("log sync"))
        disk.set(1, Fault("database write", times=0, delay=50_000))
        answer = server.track("first")
        began = time.monotonic()
        wait_for(lambda: server.track("second").status_code == 200, what="the checkpoint")
        assert disk.failed == 1, answer
        assert time.monotonic() - began > 2 * SECONDS
        assert not killed(server)
        assert server.helper == writer
