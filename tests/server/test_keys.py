# SPDX-License-Identifier: Apache-2.0
"""Write keys that are created and disabled while servers run: every worker and host follows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from support import mongo
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


def engage(server: Server, *arguments: str) -> str:
    """Run a command with the server's config, and return what it prints."""
    command = [sys.executable, "-m", "engage", *arguments, "--config", str(server.config)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=server.environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def add_key(server: Server, key_id: str) -> str:
    key = engage(server, "keys", "add", "--workspace", "acme", "--id", key_id)
    assert re.fullmatch("[0-9a-f]{32}", key)
    return key


def change(server: Server, action: str, key_id: str) -> float:
    """Disable or enable a key, and return when that was durable."""
    engage(server, "keys", action, "--workspace", "acme", key_id)
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
        assert [one.status(key) for one in connections] == [200] * 4
        # In the body, too.
        second = add_key(servers[1], "android")
        for one in connections:
            assert one.send(f"/v1/track?writeKey={second}", None)[0] == 200
        settings = f"/v1/projects/{key}/settings"
        assert all(one.send(settings, None, "GET")[0] == 200 for one in connections)
        # A disabled key is refused everywhere, the settings included.
        since = change(servers[1], "disable", "ios")
        assert until_refused(connections, key, since) < IN_EFFECT
        assert [one.send(settings, None, "GET")[0] for one in connections] == [404] * 4
        path = f"/sourceConfig?writeKey={key}"
        assert [one.send(path, None, "GET")[0] for one in connections] == [401] * 4
        assert [one.status(second) for one in connections] == [200] * 4
        # A worker that starts later refuses it from its first request on.
        before = servers[0].workers()
        victim = next(pid for pid in stack.enter_context(one_to_each_worker(servers[0])))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(now := servers[0].workers()) == len(before) and victim not in now)
        with one_to_each_worker(servers[0]) as fresh:
            assert victim not in fresh
            assert [one.status(key) for one in fresh.values()] == [403, 403]
        # So does a server that starts later. The key of the config is accepted as before.
        servers[0].restart()
        with one_to_each_worker(servers[0]) as fresh:
            assert [one.status(key) for one in fresh.values()] == [403, 403]
            assert [one.status(second) for one in fresh.values()] == [200, 200]
            assert [one.status(KEY) for one in fresh.values()] == [200, 200]
        # An enabled key is accepted again.
        change(servers[0], "enable", "ios")
        wait_for(lambda: connections[-1].status(key) == 200, what="a 200")


def test_a_key_of_the_config_that_is_disabled_stays_so(tmp_path: Path, storage: str) -> None:
    with running(tmp_path / "one", storage, workers=2) as server:
        with one_to_each_worker(server) as workers:
            since = change(server, "disable", "website")
            assert until_refused(list(workers.values()), KEY, since) < IN_EFFECT
        server.kill()
        server.start()
        with one_to_each_worker(server) as workers:
            assert [one.status(KEY) for one in workers.values()] == [403, 403]
        server.stop()
        # A server that is stopped does not matter either.
        change(server, "enable", "website")
        server.start()
        with one_to_each_worker(server) as workers:
            assert [one.status(KEY) for one in workers.values()] == [200, 200]


def test_keys_of_the_store_are_masked_in_the_log(tmp_path: Path) -> None:
    with running(tmp_path / "one", SQLITE, workers=1) as server:
        key = add_key(server, "ios")
        assert server.post("/v1/track", {"userId": "u", "event": "E"}, key=key).status_code == 200
        path = f"/v1/track?writeKey={key}"
        assert httpx.post(server.url + path, content=b"{", timeout=240).status_code == 400
        wait_for(lambda: any(line.get("writeKeyId") == "ios" for line in server.lines()))
        assert key not in server.log()


@pytest.mark.mongo
def test_with_the_store_away_at_the_start_no_key_is_refused(tmp_path: Path) -> None:
    """A worker starts while MongoDB is away: 503, because a 401 would lose events."""
    with (
        mongo.own(tmp_path) as away,
        running(tmp_path / "one", mongo_tables(away.url("keys")), workers=2) as server,
    ):
        key = add_key(server, "ios")
        change(server, "disable", "website")
        before = server.workers()
        away.kill()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(server.workers() - before) == 2)

        def status(key: str) -> int:
            try:
                answer = server.post("/v1/track", {"userId": "u", "event": "E"}, key=key)
            except httpx.TransportError:
                return 0
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) > 0
            return answer.status_code

        wait_for(lambda: status(KEY) == 503)
        for sent in (key, KEY, "unknown"):
            assert status(sent) == 503
        path = f"{server.url}/v1/projects/{key}/settings"
        assert httpx.get(path, timeout=240).status_code == 503
        away.start()
        wait_for(lambda: status(key) == 200)
        assert status(KEY) == 403
        assert status("unknown") == 401
        # Away later: the last table stays.
        away.kill()
        wait_for(lambda: status("unknown") == 503)
        assert status(KEY) == 403
