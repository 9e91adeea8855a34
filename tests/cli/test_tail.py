# SPDX-License-Identifier: Apache-2.0
"""``engage tail``: it follows a store to which a server writes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import pytest

from engage.api import Event
from engage.testing.factories import event, identify
from support.commands import run
from support.console_data import tables
from support.exports import on_store
from support.server_process import start_server
from support.sqlite import new_store
from support.waiting import wait_for

STORAGES = ["sqlite", pytest.param("mongo", marks=[pytest.mark.mongo, pytest.mark.long])]


class Tail:
    """``engage tail`` as a process, and the lines that it has printed."""

    def __init__(self, config: Path, *arguments: str, output: int = subprocess.PIPE) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engage", "tail", "--config", str(config), *arguments],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        pipes = ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        self._readers = [
            threading.Thread(target=_read, args=(pipe, to)) for pipe, to in pipes if pipe
        ]
        for reader in self._readers:
            reader.start()

    def has(self, count: int) -> bool:
        return len(self.lines) == count

    def wait(self) -> int:
        status = self.process.wait(120)
        for reader in self._readers:
            reader.join()
        return status

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.wait()


def _read(pipe: IO[str], to: list[str]) -> None:
    with pipe:
        for line in pipe:
            to.append(line)  # noqa: PERF402 - a test looks at the list meanwhile


def write(path: Path, *events: Event) -> None:
    on_store(path, lambda store: store.write(events))


@pytest.mark.parametrize("storage", STORAGES)
def test_events_are_printed_as_they_arrive_and_once(tmp_path: Path, storage: str) -> None:
    with start_server(tmp_path, storage=tables(storage)) as server:
        track = "/api/public/apps/track"
        server.post(track, {"userId": "ann", "event": "Early", "messageId": "m-0"})
        with Tail(server.config) as seen, Tail(server.config, "--json", "--user", "bob") as bob:
            wait_for(lambda: seen.lines, what="the event of before")
            for number in range(1, 4):
                user = "bob" if number == 2 else "ann"
                body = {"userId": user, "event": f"N{number}\x1b[31m", "messageId": f"m-{number}"}
                assert server.post(track, body).status_code == 200
                count = number + 1
                wait_for(functools.partial(seen.has, count), what="the next event")
            assert server.post(track, {"userId": "ann", "event": 5}).status_code == 400
            wait_for(lambda: len(seen.lines) == 5, what="the rejected event")
            wait_for(lambda: bob.lines, what="the event of bob")
            assert (seen.interrupt(), bob.interrupt()) == (0, 0)
        assert (seen.errors, bob.errors) == ([], [])
    cells = [line.rstrip("\n").split("\t") for line in seen.lines]
    assert [row[2:6] for row in cells[:4]] == [
        ["stored", "track", "Early", "ann"],
        ["stored", "track", r"N1\u001b[31m", "ann"],
        ["stored", "track", r"N2\u001b[31m", "bob"],
        ["stored", "track", r"N3\u001b[31m", "ann"],
    ]
    assert cells[4][2] == "rejected"
    assert "must be a string" in cells[4][7]
    (line,) = bob.lines
    assert (json.loads(line)["messageId"], json.loads(line)["event"]) == ("m-2", "N2\x1b[31m")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Make a config whose store has 20 events of two workspaces."""
    return new_store(
        tmp_path,
        *(event(f"m{n}", user_id="ann", at=n, received=n) for n in range(18)),
        identify("i", "bob", 18, received=18, traits={"plan": "\x1b[31mpro"}),
        event("o", workspace="other", user_id="bob", at=19, received=19),
    )


def first(path: Path, count: int, *arguments: str) -> list[str]:
    """Return the first lines, and check that no more follow them."""
    with Tail(path, *arguments) as seen:
        wait_for(lambda: len(seen.lines) >= count, what="the lines of before")
        assert seen.interrupt() == 0
    assert len(seen.lines) == count
    return seen.lines


def test_the_filters_select_events(stored: Path) -> None:
    assert len(first(stored, 10)) == 10
    (line,) = first(stored, 1, "--type", "identify", "--user", "b", "--key", "api", "-n", "500")
    assert "\tidentify\t\tbob\t" in line
    lines = first(stored, 2, "--user", '"bob"', "--json", "-n", "3")
    assert [json.loads(one)["messageId"] for one in lines] == ["i", "o"]
    assert [json.loads(one)["workspaceId"] for one in lines] == ["acme", "other"]
    result = run("tail", "--config", stored, "--workspace", "nope")
    assert result.exit_code == 1
    assert "does not contain a workspace 'nope'" in result.stderr


def test_what_cannot_be_shown_in_time_is_said(stored: Path) -> None:
    with Tail(stored, "-n", "1") as seen:
        wait_for(lambda: seen.lines, what="the newest event")
        write(stored, *(event(f"b{n}", user_id="u", at=n, received=50) for n in range(700)))
        wait_for(lambda: seen.errors, what="the notice")
        wait_for(lambda: len(seen.lines) > 200, what="the newest of the events")
        write(stored, event("last", user_id="last", at=1, received=60))
        wait_for(lambda: any("\tlast\t" in line for line in seen.lines), what="the last event")
        assert seen.interrupt() == 0
    left_out = "engage: more events arrived than can be shown; some were left out\n"
    assert set(seen.errors) == {left_out}
    assert sum("\tlast\t" in line for line in seen.lines) == 1


def test_it_ends_when_its_reader_has_gone(stored: Path) -> None:
    reading, writing = os.pipe()
    with Tail(stored, output=writing) as seen:
        os.close(writing)
        assert os.read(reading, 1)
        os.close(reading)
        # No event arrives that it could not print.
        assert seen.wait() == 0
    assert seen.errors == []


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """Yield a terminal, and what it shows."""
    leader, follower = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        # Linux raises EIO when the last writer of a terminal has gone.
        with contextlib.suppress(OSError):
            while data := os.read(leader, 65536):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    yield follower, shown
    os.close(follower)
    reader.join()
    os.close(leader)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_terminal_gets_no_control_characters(stored: Path, options: tuple[Any, ...]) -> None:
    with terminal() as (follower, shown):
        arguments = ("--type", "identify", *options)
        with Tail(stored, *arguments, output=follower) as seen:
            wait_for(lambda: b"pro" in b"".join(shown), what="the event")
            assert seen.interrupt() == 0
    assert rb"\u001b[31mpro" in b"".join(shown)
    assert b"\x1b[31m" not in b"".join(shown)


def test_a_storage_that_stops_answering_is_reported(stored: Path) -> None:
    with Tail(stored, "-n", "1") as seen:
        wait_for(lambda: seen.lines, what="the newest event")
        database = stored.with_name("engage.db")
        database.rename(stored.with_name("away"))
        wait_for(lambda: seen.errors, what="the error")
        stored.with_name("away").rename(database)
        wait_for(lambda: len(seen.errors) == 2, what="the end of the error")
        assert seen.interrupt() == 0
    assert seen.errors[0].startswith("engage: the storage does not answer: ")
    assert seen.errors[1] == "engage: it answers again\n"
    assert len(seen.lines) == 1
