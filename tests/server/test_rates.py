# SPDX-License-Identifier: Apache-2.0
"""Rate limits that the workers of a server share, and quotas that all hosts share."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import httpx
import pytest

from support import mongo
from support.connections import Connection, one_to_each_worker
from support.http_client import RawClient
from support.server_inprocess import BASIC
from support.server_process import KEY, SQLITE, Server, config_text, start_server
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RATE: Final = 100
#: Seconds in which the events are counted.
SECONDS: Final = 10.0
BODY: Final = b'{"userId": "u", "event": "E"}'
REQUEST: Final = (
    b"POST /v1/track HTTP/1.1\r\nHost: x\r\nAuthorization: %s\r\nContent-Length: %d\r\n\r\n%s"
    % (BASIC.encode(), len(BODY), BODY)
)


async def accepted(port: int, connections: int) -> int:
    """Send events for :data:`SECONDS` after the burst, and return how many were stored.

    The connections together try to send far more than the limit.
    """
    counting = False
    found = 0

    async def send(client: RawClient, pause: float) -> None:
        nonlocal found
        while True:
            await client.send(REQUEST)
            answer = await client.answer()
            if answer.status == 200:
                found += counting
            else:
                assert answer.status == 429
                assert int(answer.headers["retry-after"]) >= 1
                await asyncio.sleep(pause)

    clients = [await RawClient.connect(port) for _ in range(connections)]
    tasks = [asyncio.create_task(send(client, connections / (4 * RATE))) for client in clients]
    await asyncio.sleep(3)  # The burst is spent.
    counting = True
    began = time.monotonic()
    await asyncio.sleep(SECONDS)
    counting, seconds = False, time.monotonic() - began
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        assert task.cancelled(), task.exception()
    for one in clients:
        one.writer.close()
    # What the limit allows in the time that has passed, if the machine was busy.
    return round(found * SECONDS / seconds)


@pytest.mark.long
@pytest.mark.parametrize("connections", [1, 256])
async def test_four_workers_accept_together_what_the_limit_says(
    tmp_path: Path, connections: int
) -> None:
    limit = f"[limits.rate]\nevents_per_second = {RATE}\n"
    with start_server(tmp_path, workers=4, config_extra=limit) as server:
        found = await accepted(server.port, connections)
        assert 0.9 * RATE * SECONDS <= found <= 1.1 * RATE * SECONDS


def test_all_workers_refuse_a_key_that_one_has_served(tmp_path: Path) -> None:
    limit = "[limits.rate]\nevents_per_second = 0.001\n"
    with start_server(tmp_path, workers=2, config_extra=limit) as server:
        with one_to_each_worker(server) as workers:
            connections = list(workers.values())
            first = connections[0].status(KEY), connections[0].status(KEY)
            assert first[0] == 200
            assert connections[0].status(KEY) == connections[1].status(KEY) == 429
        # A worker that takes the place of another one does not begin with a full bucket.
        server.restart()
        with one_to_each_worker(server) as workers:
            victim = next(iter(workers))
            assert [worker.status(KEY) for worker in workers.values()].count(200) >= 1
            before = server.workers()
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(now := server.workers()) == len(before) and victim not in now)
        with one_to_each_worker(server) as workers:
            [worker.status(KEY) for worker in workers.values()]
            assert [worker.status(KEY) for worker in workers.values()] == [429, 429]


@pytest.mark.parametrize("storage", ["sqlite", *mongo.PARAMETERS])
def test_two_hosts_share_a_quota(tmp_path: Path, storage: str) -> None:
    tables = SQLITE
    if storage != "sqlite":
        url = mongo.shared(storage).url()
        tables = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
    tables = tables.replace("engage.db", str(tmp_path / "engage.db"))
    quota = "[limits.quota]\nevents_per_day = 100\n"
    text = config_text(workers=2, storage=tables, config_extra=quota)
    servers = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            servers.append(Server(tmp_path / name, text).start())
        batch = {"batch": [{"type": "track", "userId": "u", "event": "E"} for _ in range(50)]}
        for server in servers:
            assert server.post("/v1/batch", batch).status_code == 200
        # A process knows what it stored itself at once, and the rest within a minute, or when it
        # starts.
        for server in servers:
            server.stop()
        for server in servers:
            server.start()
            refused = wait_for(functools.partial(_refused, server), what="a 429")
            assert refused.json()["code"] == "quota_exceeded"
            assert 0 < int(refused.headers["Retry-After"]) <= 86400
            with one_to_each_worker(server) as workers:
                for worker in workers.values():
                    wait_for(functools.partial(_is_refused, worker), what="a 429 of each worker")
            lines = [line for line in server.lines() if "has used up 100 events" in line["message"]]
            assert len(lines) == 1
    finally:
        for server in servers:
            server.kill()


def _refused(server: Server) -> httpx.Response | None:
    answer = server.track(f"m-{time.monotonic_ns()}")
    return answer if answer.status_code == 429 else None


def _is_refused(worker: Connection) -> bool:
    return worker.status(KEY) == 429
