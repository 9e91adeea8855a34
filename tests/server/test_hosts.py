# SPDX-License-Identifier: Apache-2.0
"""Two servers and two loaders, each on a separate host, two of which are cut off in turn.

Nothing that was answered 2xx is lost or stored twice, and nothing else is stored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pymongo
import pytest

from support import hosts, kafka, mongo
from support.exactly_once import check_exactly_once
from support.exports import exported
from support.loader_process import Loaders
from support.senders import Senders
from support.server_process import KEY, Server, config_text
from support.waiting import wait_for

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.mongo,
    pytest.mark.long,
    pytest.mark.timeout(1800, func_only=True),
]

#: Seconds for which a host is cut off. Kafka gives a loader's partitions away after 6.
CUT = 10.0


class Clients(Senders):
    """Threads that send events, each until a server has answered 2xx, to one server in turn."""

    def __init__(self, urls: Sequence[str], count: int = 6) -> None:
        super().__init__(count)
        self._urls = urls
        #: How many batches of each thread were acknowledged.
        self.batches = [0] * count
        self.sent: set[str] = set()
        self.acknowledged: set[str] = set()
        #: Seconds that a request may take.
        self.patience = 60.0
        #: What became of requests that were not answered 2xx.
        self.failed: Counter[str] = Counter()

    def _send(self, number: int) -> None:
        servers = itertools.cycle([*self._urls[number % 2 :], *self._urls[: number % 2]])
        with contextlib.ExitStack() as stack:
            clients = {
                url: stack.enter_context(httpx.Client(base_url=url, auth=(KEY, "")))
                for url in self._urls
            }
            for turn in itertools.count():
                ids = [f"{number}-{turn}-{place}" for place in range(5)]
                self.sent.update(ids)
                batch = [
                    {"type": "track", "userId": f"u{turn % 40}", "event": "E", "messageId": one}
                    for one in ids
                ]
                while not self._post(clients[next(servers)], batch):
                    if self._stop.is_set():
                        return
                    time.sleep(0.05)
                self.acknowledged.update(ids)
                self.batches[number] += 1
                # Slower than FerretDB stores them on a busy machine.
                if self._stop.wait(0.3):
                    return

    def _post(self, client: httpx.Client, batch: Sequence[object]) -> bool:
        try:
            answer = client.post("/v1/batch", json={"batch": batch}, timeout=self.patience)
        except httpx.TransportError as error:
            self.failed[type(error).__name__] += 1
            return False
        if answer.status_code != 200:
            self.failed[str(answer.status_code)] += 1
        return answer.status_code == 200

    def more(self, count: int = 200) -> None:
        """Wait until that many further events were acknowledged."""
        wanted = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= wanted, what="acknowledged events")

    def more_of_each(self) -> None:
        """Wait until no thread is in a request that was sent before."""
        before = list(self.batches)
        wait_for(
            lambda: all(now >= old + 2 for now, old in zip(self.batches, before, strict=True)),
            what="acknowledged events of each client",
        )


def is_ready(server: Server) -> bool:
    return server.get("/readyz").status_code == 200


def test_a_host_is_cut_off(tmp_path: Path) -> None:
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(hosts.network(4))
        here = network.address
        nodes = stack.enter_context(kafka.own(here))
        store = stack.enter_context(mongo.own(tmp_path, "ferretdb", here))
        storage = f'[storage]\nwrite_timeout = 20\n[storage.mongo]\nurl = "{store.url("engage")}"\n'
        port = mongo.free_port()
        servers, loaders = [], []
        for number, host in enumerate(network.hosts):
            config = config_text(
                storage=storage,
                config_extra=f'[log]\nload_host = "{host.address}"\nload_port = {port}\n'
                f'[log.kafka]\nservers = "{nodes.servers()}"\n',
            ).replace('host = "127.0.0.1"\n', f'host = "{host.address}"\n', 1)
            folder = tmp_path / f"host-{number}"
            folder.mkdir()
            server = Server(folder, config, preexec=host.enter)
            if number < 2:
                servers.append(stack.enter_context(server.start()))
            else:
                loaders.append(stack.enter_context(Loaders(server).start()))

        client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(store.url("engage"))
        events = stack.enter_context(client).engage.events

        def is_stored(ids: set[str]) -> bool:
            time.sleep(0.5)
            found = events.find({}, {"_id": 0, "messageId": 1})
            return ids <= {event["messageId"] for event in found}

        clients = Clients([server.url for server in servers])
        with clients.running():
            clients.more()
            wait_for(lambda: events.find_one(), what="stored events")
            for host, loading in ((network.hosts[0], False), (network.hosts[2], True)):
                # Clients notice the loss of a server, and not that of a loader.
                clients.patience = 60.0 if loading else 8.0
                clients.more_of_each()
                before = Counter(clients.failed)
                host.cut()
                began = time.monotonic()
                clients.more()
                time.sleep(max(0.0, CUT - (time.monotonic() - began)))
                if not loading:
                    wait_for(lambda before=before: clients.failed != before, what="failures")  # type: ignore[misc]
                else:
                    assert clients.failed == before
                    # The other loader has taken over.
                    seen = set(clients.acknowledged)
                    taken = functools.partial(is_stored, seen)
                    wait_for(taken, what="the other loader", deadline=600)
                host.connect()
                clients.more()
            for server in servers:
                wait_for(functools.partial(is_ready, server), what="/readyz")
            for loader in loaders:
                wait_for(functools.partial(is_ready, loader), what="a loader to be ready")
            clients.more()
        everything = functools.partial(is_stored, clients.acknowledged)
        wait_for(everything, what="all events in the store", deadline=600)
        for server in servers:
            assert server.stop() == 0
        for loader in loaders:
            assert loader.stop() == 0, loader.log()[-4000:]
        found = [event["messageId"] for event in exported(servers[0].config, "events")]
    check_exactly_once(found, clients.acknowledged, clients.sent)
    broken = {"ConnectError", "ConnectTimeout", "ReadError", "ReadTimeout", "RemoteProtocolError"}
    broken |= {"WriteError", "WriteTimeout"}
    assert set(clients.failed) <= {"503", *broken}
