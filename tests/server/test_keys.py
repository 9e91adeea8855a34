# SPDX-License-Identifier: Apache-2.0
"""Write keys that are created and disabled while servers run: every worker and host follows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from support import mongo
from support.commands import run
from support.connections import Connection, one_to_each_worker
from support.server_process import KEY, SQLITE, Server, config_text
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

#: Seconds within which a disabled key is refused everywhere: 2.5, and more for a busy machine. It
#: would be 30, if a process did not look for changes.
IN_EFFECT: Final = 15.0


@pytest.fixture(params=["sqlite", *mongo.PARAMETERS])
def storage(request: pytest.FixtureRequest) -> str:
    """Return the tables of a storage: all servers of a test share the store."""
    if request.param == "sqlite":
        return SQLITE
    return mongo_tables(mongo.shared(request.param).url())


def mongo_tables(url: str) -> str:
    return f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'


def add_key(server: Server, key_id: str) -> str:
    """Create a key with a command, and return it."""
    done = run("keys", "add", "--workspace", "acme", "--id", key_id, "--config", server.config)
    assert re.fullmatch("[0-9a-f]{32}", done.stdout.strip()), done.output
    return done.stdout.strip()


def change(server: Server, action: str, key_id: str) -> float:
    """Disable or enable a key, and return when that was durable."""
    done = run("keys", action, "--workspace", "acme", key_id, "--config", server.config)
    assert done.exit_code == 0, done.stderr
    return time.monotonic()


@contextlib.contextmanager
def running(
    folder: Path, storage: str, *, workers: int, database: Path | None = None
) -> Iterator[Server]:
    folder.mkdir()
    text = storage if database is None else storage.replace("engage.db", str(database))
    with Server(folder, config_text(workers=workers, storage=text)) as server:
        yield server.start()


@contextlib.contextmanager
def two_hosts(tmp_path: Path, storage: str) -> Iterator[list[Server]]:
    """Two servers with two workers each on one store."""
    database = tmp_path / "engage.db"
    with (
        running(tmp_path / "one", storage, workers=2, database=database) as one,
        running(tmp_path / "two", storage, workers=2, database=database) as two,
    ):
        yield [one, two]


def until_refused(connections: list[Connection], key: str, since: float) -> float:
    """Send with a key to each until all refuse it with 403; return how long that took."""
    left = list(connections)
    while left:
        left = [one for one in left if one.status(key) != 403]
        assert not left or time.monotonic() - since < 240
    return time.monotonic() - since


def test_keys_are_followed_by_each_worker_of_each_host(tmp_path: Path, storage: str) -> None:
    with two_hosts(tmp_path, storage) as servers, contextlib.ExitStack() as stack:
        connections = [
            connection
            for server in servers
            for connection in stack.enter_context(one_to_each_worker(server)).values()
        ]
        assert len(connections) == 4
        # A new key works at its first use with each process.
        key = add_key(servers[0], "ios")
        assert [connection.status(key) for connection in connections] == [200] * 4
        # In the body, too.
        second = add_key(servers[1], "android")
        for one in connections:
            assert one.send(f"/v1/track?writeKey={second}", None)[0] == 200
        settings = f"/v1/projects/{key}/settings"
        assert all(connection.send(settings, None, "GET")[0] == 200 for connection in connections)
        # A disabled key is refused everywhere, the settings included; so is one of the config.
        change(servers[1], "disable", "website")
        since = change(servers[1], "disable", "ios")
        for disabled in (key, KEY):
            assert until_refused(connections, disabled, since) < IN_EFFECT
        assert [one.send(settings, None, "GET")[0] for one in connections] == [404] * 4
        path = f"/sourceConfig?writeKey={key}"
        assert [connection.send(path, None, "GET")[0] for connection in connections] == [401] * 4
        assert [connection.status(second) for connection in connections] == [200] * 4
        # A worker that starts later refuses it from its first request on.
        before = servers[0].workers()
        victim = next(pid for pid in stack.enter_context(one_to_each_worker(servers[0])))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(now := servers[0].workers()) == len(before) and victim not in now)
        with one_to_each_worker(servers[0]) as fresh:
            assert victim not in fresh
            assert [one.status(key) for one in fresh.values()] == [403, 403]
            assert [one.status(KEY) for one in fresh.values()] == [403, 403]
        # So does a server that starts later.
        servers[0].restart()
        with one_to_each_worker(servers[0]) as fresh:
            assert [one.status(key) for one in fresh.values()] == [403, 403]
            assert [one.status(second) for one in fresh.values()] == [200, 200]
            assert [one.status(KEY) for one in fresh.values()] == [403, 403]
