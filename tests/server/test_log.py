# SPDX-License-Identifier: Apache-2.0
"""``engage serve`` with Kafka in front of its storage: nodes die, and the storage is away."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.exactly_once import check_exactly_once
from support.server_process import KEY, SQLITE, Server, start_server
from support.waiting import wait_for

if TYPE_CHECKING:
    from support.kafka import Cluster
from support.senders import Senders

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(600, func_only=True)]

TOPIC = "engage.events"


def log_section(nodes: Cluster) -> str:
    """Return the config of a log on the nodes."""
    return f'[log]\n[log.kafka]\nservers = "{nodes.servers()}"\ntopic = "{TOPIC}"\n'


def ids_in(nodes: Cluster) -> list[str]:
    """Return the message ids in the topic, read by another client."""
    return [json.loads(record.value())["messageId"] for record in nodes.records(TOPIC)]


class Clients(Senders):
    """Threads that send one event after the other, each over one connection."""

    def __init__(self, server: Server, count: int = 6) -> None:
        super().__init__(count)
        self._url = server.url
        #: Message ids that got a 200, and the other answers.
        self.acknowledged: list[str] = []
        self.refused: list[httpx.Response] = []
        #: The longest time that an answer took, in seconds; a test sets it to 0.
        self.longest = 0.0

    def _send(self, number: int) -> None:
        with httpx.Client(base_url=self._url, auth=(KEY, ""), timeout=60) as client:
            sent = 0
            while not self._stop.is_set():
                sent += 1
                message_id = f"{number} {sent}"
                event = {"userId": f"u{sent % 50}", "event": "E", "messageId": message_id}
                began = time.monotonic()
                answer = client.post("/v1/track", json=event)
                self.longest = max(self.longest, time.monotonic() - began)
                if answer.status_code == 200:
                    self.acknowledged.append(message_id)
                else:
                    self.refused.append(answer)
                    time.sleep(0.05)

    def more(self, count: int = 100) -> None:
        """Wait until that many further events were acknowledged."""
        wanted = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= wanted, what="acknowledged events")


def test_nodes_die_under_load(tmp_path: Path, kafka_nodes: Cluster) -> None:
    """One that dies costs time and no error; with two, every answer is a 503; nothing is lost."""
    nodes = kafka_nodes
    # The other nodes of a busy machine may need long to agree on new leaders.
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 20")
    extra = log_section(nodes)
    with start_server(tmp_path, workers=2, storage=storage, config_extra=extra) as server:
        assert server.get("/readyz").json()["storage"] == "available"
        clients = Clients(server)
        with clients.running():
            clients.more()
            (first, second) = list(dict.fromkeys(nodes.leaders(TOPIC).values()))[:2]
            nodes.kill(first)
            clients.more(1)
            wait_for(lambda: first not in nodes.leaders(TOPIC).values(), what="other leaders")
            clients.more(200)
            assert [answer.text for answer in clients.refused] == []
            nodes.kill(second)
            wait_for(lambda: len(clients.refused) >= 6, what="a 503 for each client")
            wait_for(lambda: server.get("/readyz").status_code == 503, what="/readyz to be 503")
            assert server.get("/healthz").status_code == 200
            nodes.start(first)
            nodes.start(second)
            nodes.wait()
            clients.more(200)
            wait_for(lambda: server.get("/readyz").status_code == 200, what="/readyz to be 200")
        for answer in clients.refused:
            assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
            assert answer.json()["message"].startswith("the event log in front of the storage is")
            assert int(answer.headers["retry-after"]) > 0
        assert server.workers()
        assert server.stop() == 0
    check_exactly_once(ids_in(nodes), clients.acknowledged)


def test_a_server_that_starts_without_its_store_waits_for_it(
    tmp_path: Path, kafka_nodes: Cluster
) -> None:
    """The store is on a disk that is not there. Its keys are not known."""
    disk = tmp_path / "disk"
    disk.mkdir()
    server = start_server(
        tmp_path,
        workers=2,
        storage=SQLITE.replace("engage.db", "disk/engage.db"),
        config_extra=log_section(kafka_nodes),
    )
    with server:
        assert server.post("/v1/track", event("a")).status_code == 200
        assert server.stop() == 0
        disk.rename(tmp_path / "elsewhere")
        server.start(ready=False)
        answer = server.post("/v1/track", event("b"))
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        (tmp_path / "elsewhere").rename(disk)
        wait_for(lambda: server.get("/readyz").status_code == 200, what="the keys")
        assert server.post("/v1/track", event("b")).status_code == 200
        assert server.stop() == 0
    assert sorted(ids_in(kafka_nodes)) == ["a", "b"]


def event(message_id: str) -> dict[str, Any]:
    return {"userId": "u", "event": "E", "messageId": message_id}
