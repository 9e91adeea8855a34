# SPDX-License-Identifier: Apache-2.0
"""``engage load`` as processes, with a server, SQLite and the log of docs/write-a-log.md."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.loader_process import (
    TAPE,
    Loaders,
    judge,
    load_again,
    stored_ids,
    wait_until_stored,
)
from support.processes import alive
from support.server_process import SQLITE, Server, config_text
from support.waiting import DEADLINE, wait_for


def make_server(folder: Path, log: str = TAPE) -> Server:
    (folder / "disk").mkdir()
    config = config_text(
        storage=SQLITE.replace("engage.db", "disk/engage.db"),
        server="shutdown_grace = 600",
        config_extra=log,
    )
    return Server(folder, config)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start a server with a log and no loaders."""
    with make_server(tmp_path).start() as server:
        yield server


def send(server: Server, *names: str) -> None:
    for name in names:
        answer = server.track(name, userId=f"u{name}")
        assert answer.status_code == 200, answer.text


def test_the_loaders_store_what_the_server_accepts(server: Server) -> None:
    send(server, "a", "b", "b")
    with Loaders(server).start("--workers", "2") as loaders:
        wait_until_stored(server, lambda: ["a", "b"])
        send(server, "c")
        wait_until_stored(server, lambda: ["a", "b", "c"])
        assert len(loaders.processes()) == 2
        answer = loaders.readyz()
        assert answer.json() == {
            "success": True,
            "storage": "available",
            "log": "available",
            "loaders": 2,
            "paused": [],
        }
        assert answer.headers["cache-control"] == "no-store"
        # What is written is counted a moment later.
        wait_for(lambda: "engage_write_events_sum 4" in loaders.metrics(), what="the writes")
        lines = loaders.metrics().splitlines()
        assert 'engage_loaded_records_total{outcome="stored"} 3.0' in lines
        assert 'engage_loaded_records_total{outcome="duplicate"} 1.0' in lines
        assert 'engage_loaded_records_total{outcome="refused"} 0.0' in lines
        assert "engage_log_paused_partitions 0.0" in lines
        assert "engage_log_gap_records_total 0.0" in lines
        assert "engage_log_errors_total 0.0" in lines
        restarts = 'engage_process_restarts{process="loader"} %.1f'
        assert restarts % 0 in lines
        os.kill(min(loaders.processes()), signal.SIGKILL)
        wait_for(lambda: restarts % 1 in loaders.metrics(), what="a loader to be started again")
        assert any(line.startswith("engage_log_backlog_records") for line in lines)
        assert any(line.startswith("engage_log_backlog_seconds") for line in lines)
        [line] = [line for line in loaders.lines() if line["message"] == "loading"]
        assert (line["group"], line["loaders"]) == ("engage", 2)
        assert loaders.stop() == 0
        messages = [line["message"] for line in loaders.lines()]
        assert messages[-1] == "stopped"
        assert "draining" in messages
    judge(server, ["a", "b", "c"], ["a", "b", "c"])


@pytest.mark.long
def test_a_loader_that_dies_is_replaced(server: Server) -> None:
    with Loaders(server).start() as loaders:
        send(server, "a")
        wait_until_stored(server, lambda: ["a"])
        [pid] = loaders.processes()
        os.kill(pid, signal.SIGKILL)
        send(server, "b")
        wait_for(lambda: loaders.processes() - {pid}, what="another loader")
        wait_until_stored(server, lambda: ["a", "b"])
        wait_for(lambda: loaders.readyz().status_code == 200, what="/readyz to be 200")
        assert "loader 0 died with status -9" in loaders.log()


def test_the_loaders_wait_while_the_store_is_away(server: Server, tmp_path: Path) -> None:
    """It is on a disk that goes away; the server goes on, starts go on, a drain does not wait."""
    send(server, "a")
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    with Loaders(server).start(ready=False) as loaders:
        wait_for(lambda: "storage is unavailable" in loaders.log(), what="a failed write")
        wait_for(lambda: loaders.readyz().json()["log"] == "available", what="the log")
        answer = loaders.readyz()
        assert answer.status_code == 503
        assert answer.json()["success"] is False
        assert answer.json()["storage"] == "unavailable"
        assert loaders.stop() == 0
        send(server, "b")
        loaders.start(ready=False)
        (tmp_path / "elsewhere").rename(tmp_path / "disk")
        wait_until_stored(server, lambda: ["a", "b"])
        wait_for(lambda: loaders.readyz().status_code == 200, what="/readyz to be 200")
        assert loaders.stop() == 0


@pytest.mark.long
def test_an_unknown_record_shows_in_readyz(server: Server, tmp_path: Path) -> None:
    send(server, "a")
    tape = contextlib.closing(sqlite3.connect(tmp_path / "events.tape"))
    with tape as db, db:
        db.execute("UPDATE records SET headers = replace(headers, 'event/1', 'event/2')")
    with Loaders(server).start(ready=False) as loaders:
        wait_for(lambda: loaders.readyz().json()["paused"], what="a paused partition")
        answer = loaders.readyz()
        assert answer.status_code == 503
        assert answer.json()["storage"] == answer.json()["log"] == "available"
        wait_for(lambda: "partitions of the log are not loaded" in loaders.log(), what="the error")
        done = load_again(server, "2020-01-01")
        assert done.exit_code == 1
        assert "was not read to the end: a record of the kind b'event/2'" in done.stderr


def test_a_part_of_the_log_is_loaded_again(server: Server, tmp_path: Path) -> None:
    """The store was restored from a backup that is older than some events."""
    send(server, "old")
    with Loaders(server).start() as loaders:
        wait_until_stored(server, lambda: ["old"])
        time.sleep(0.01)
        since = time.time()
        send(server, "a", "b", "c")
        wait_until_stored(server, lambda: ["old", "a", "b", "c"])
        assert loaders.stop() == 0
        assert server.stop() == 0
        for file in (tmp_path / "disk").iterdir():
            file.unlink()
        server.start()
        tape = contextlib.closing(sqlite3.connect(tmp_path / "events.tape"))
        with tape as db:
            offsets = db.execute("SELECT * FROM offsets ORDER BY partition").fetchall()
            assert {team for team, _, _ in offsets} == {"engage"}
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since))
            done = load_again(server, f"{at}.{int(since % 1 * 1000):03}Z")
            assert (done.exit_code, done.stdout) == (0, "stored=3\n"), done.stderr
            assert sorted(stored_ids(server)) == ["a", "b", "c"]
            everything = load_again(server, "2020-01-01")
            assert everything.stdout == "duplicate=3\tstored=1\n"
            now = db.execute("SELECT * FROM offsets WHERE team = 'engage' ORDER BY partition")
            assert now.fetchall() == offsets
    judge(server, ["old", "a", "b", "c"], ["old", "a", "b", "c"])


def test_what_is_past_the_retention_is_not_loaded_again(tmp_path: Path) -> None:
    log = TAPE + "[retention]\nevents_days = 1\n"
    with make_server(tmp_path, log).start() as server:
        send(server, "a", "b")
        tape = contextlib.closing(sqlite3.connect(tmp_path / "events.tape"))
        with tape as db, db:
            old = int(time.time() * 1000) - 2 * 86_400_000
            [headers] = db.execute("SELECT headers FROM records LIMIT 1").fetchone()
            received = headers.partition("receivedAt")[2].partition(":")[2].partition(",")[0]
            db.execute(
                "UPDATE records SET headers = replace(headers, ?, ?) WHERE headers LIKE ?",
                (received, str(old), f"%{received}%"),
            )
        done = load_again(server, "2020-01-01")
        assert done.exit_code == 0, done.stderr
        assert "skipped=" in done.stdout
        assert len(stored_ids(server)) == 2 - int(done.stdout.partition("skipped=")[2][0])


def test_a_time_before_all_others_is_the_beginning(server: Server) -> None:
    send(server, "a")
    done = load_again(server, "0001-01-01T00:00:00+23:00")
    assert (done.exit_code, done.stdout) == (0, "stored=1\n"), done.stderr
    assert stored_ids(server) == ["a"]


def test_loading_again_ends_with_a_signal(server: Server, tmp_path: Path) -> None:
    """Here it waits for the store. It names what is to be done."""
    send(server, "a")
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    with Loaders(server) as again:
        again.launch("--from", "2020-01-01")
        wait_for(lambda: "storage is unavailable" in again.log(), what="a failed write")
        assert again.stop() == 1
        assert "engage: stopped by a signal before the end; run the command again" in again.log()
        assert "Traceback" not in again.log()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals to stop a process")
def test_a_second_signal_ends_it_at_once(server: Server) -> None:
    with Loaders(server).start() as loaders:
        assert loaders.process is not None
        [pid] = loaders.processes()
        os.kill(pid, signal.SIGSTOP)  # otherwise it would drain first
        loaders.process.send_signal(signal.SIGINT)
        wait_for(lambda: '"draining"' in loaders.log(), what="the drain")
        loaders.process.send_signal(signal.SIGINT)
        assert loaders.process.wait(DEADLINE) == 1
        assert loaders.lines()[-1]["message"] == "ended at once by a second signal"
        wait_for(lambda: not alive(pid), what="the loader to end")
