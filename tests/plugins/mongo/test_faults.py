# SPDX-License-Identifier: Apache-2.0
"""A whole server on MongoDB while the database, the network or the server itself fails.

After each fault every acknowledged event is stored exactly once, the profiles are the merge of the
stored events, and no process needs a restart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import operator
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.testing.harness import eventually
from support import mongo
from support.exactly_once import check_exactly_once
from support.exports import read_store
from support.mongo_proxy import CLOSE, CUT, LOSE_REPLY, NOT_PRIMARY, SILENCE, Proxy
from support.server_process import Server, config_text, start_server
from support.traffic import Sender, Traffic, expected_groups, expected_users, send_all
from support.waiting import wait_for

pytestmark = [pytest.mark.mongo, pytest.mark.long]

#: For tests that kill nothing, the database need not be durable.
KIND = mongo.proxied_kind()
#: Short time limits, so that the tests need not wait long for faults.
IMPATIENT = "timeoutMS=3000&serverSelectionTimeoutMS=2000"


def storage(url: str, *, write_timeout: float = 10) -> str:
    return f"""
[storage]
backend = "mongo"
write_timeout = {write_timeout}

[storage.mongo]
url = "{url}"
"""


def database() -> str:
    return f"engage_test_{os.urandom(6).hex()}"


def run(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``engage`` with the config of this server."""
    command = [sys.executable, "-m", "engage", *arguments, "--config", str(server.config)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a store has."""

    events: list[dict[str, Any]]
    users: list[dict[str, Any]]
    groups: list[dict[str, Any]]

    @property
    def ids(self) -> Counter[str]:
        return Counter(event["messageId"] for event in self.events)

    @property
    def merged(self) -> bool:
        """Return whether the profiles are the merge of the stored events."""
        return self.users == expected_users(self.events) and self.groups == expected_groups(
            self.events
        )


def look(server: Server) -> Snapshot:
    async def read() -> Snapshot:
        events, users, groups = await read_store(server.config, "events", "users", "groups")
        users.sort(key=operator.itemgetter("userId"))
        groups.sort(key=operator.itemgetter("groupId"))
        return Snapshot(events, users, groups)

    # The config's time limit is short, and a server that was just killed may need longer.
    return asyncio.run(eventually(read, StorageUnavailable))


# ------------------------------------------------------------------------------ down at start-up
def test_the_server_starts_before_the_database(tmp_path: Path) -> None:
    mongod = mongo.MongoServer(mongo.durable_kind(), tmp_path / "mongo")
    text = config_text(storage=storage(mongod.url("x", IMPATIENT)))
    with Server(tmp_path, text) as server:
        try:
            server.start(ready=False)
            # A server is ready for ten seconds after the database answered; it never did.
            response = server.track("m1")
            assert response.status_code == 503
            assert response.json()["code"] == "storage_unavailable"
            assert 5 <= int(response.headers["Retry-After"]) <= 30
            wait_for(lambda: server.get("/readyz").status_code == 503, what="/readyz to fail")
            assert server.get("/healthz").status_code == 200
            done = run(server, "check")
            assert done.returncode == 1
            line = done.stderr.strip().splitlines()[-1]
            assert f"127.0.0.1:{mongod.port}" in line
            assert "Traceback" not in done.stderr

            mongod.start()
            wait_for(lambda: server.get("/readyz").status_code == 200, what="/readyz")
            assert server.track("m1").status_code == 200
            assert run(server, "check").returncode == 0
            assert look(server).ids == Counter(["m1"])
            assert server.stop() == 0
        finally:
            mongod.kill()


def test_commands_report_a_missing_store(tmp_path: Path) -> None:
    url = mongo.shared(KIND).url(options=IMPATIENT)
    server = Server(tmp_path, config_text(storage=storage(url)))
    for command, status in ((["check"], 0), (["export", "events"], 1)):
        done = run(server, *command)
        assert done.returncode == status
        assert "no engage store" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_check_warns_of_weak_acknowledgement(tmp_path: Path) -> None:
    weak = mongo.shared(KIND).url(options="w=1")
    text = storage(weak)
    server = Server(tmp_path, config_text(storage=text))
    done = run(server, "check")
    assert done.returncode == 1
    assert "allow_weak_acknowledgement" in done.stderr
    with start_server(tmp_path, storage=text + "allow_weak_acknowledgement = true\n") as server:
        assert any("a failover may lose it" in line["message"] for line in server.lines())
        done = run(server, "check")
        assert done.returncode == 0
        assert "a failover may lose it" in done.stderr


# -------------------------------------------------------------------------- the network misbehaves
class Every:
    """A rule of the proxy: each ``count``-th of these commands gets ``action``."""

    def __init__(self, count: int, action: Any, *names: str) -> None:
        self.count, self.action, self.names = count, action, names
        self.seen = 0
        #: How many commands got the action.
        self.faults = 0

    def __call__(self, name: str, _: Any) -> Any:
        if name not in self.names:
            return None
        self.seen += 1
        if self.seen % self.count:
            return None
        self.faults += 1
        return self.action

    def wait_for(self, *, faults: int) -> None:
        """Wait until this number of commands got the action."""
        wait_for(lambda: self.faults >= faults, what="faults")


WRITES = ("insert", "update")
FAULTS = {
    "cut in the middle of a reply": Every(4, CUT, *WRITES),
    "cut in the middle of any reply": Every(7, CUT, *WRITES, "find", "ismaster"),
    "a reply is lost": Every(4, LOSE_REPLY, *WRITES),
    "hung up before it was passed on": Every(4, CLOSE, *WRITES),
    "not primary": Every(4, NOT_PRIMARY, *WRITES),
    "interrupted at shutdown": Every(
        4, {"ok": 0.0, "code": 11600, "errmsg": "interrupted"}, *WRITES
    ),
    "write concern failed": Every(
        4, {"ok": 1.0, "n": 1, "writeConcernError": {"code": 91, "errmsg": "x"}}, "insert"
    ),
}


def test_events_survive_faults_of_the_network(tmp_path: Path) -> None:
    """One worker lives through all faults."""
    with Proxy(mongo.shared(KIND).address) as proxy:
        text = storage(proxy.url(database(), IMPATIENT))
        with start_server(tmp_path, storage=text) as server:
            process = server.worker
            for number, (fault, rule) in enumerate(FAULTS.items()):
                before = look(server).ids
                sender = Sender(("127.0.0.1", server.port), Traffic(number), connections=4)
                proxy.rule = rule
                sender.start()
                rule.wait_for(faults=4)
                sender.wait_for(acknowledged=4)
                proxy.rule = None
                # The server recovers by itself, and the other requests can be sent again.
                sender.wait_for(acknowledged=len(sender.acknowledged) + 4)
                sender.stop()
                check(server, sender, before, fault)
            assert server.worker == process


def check(server: Server, sender: Sender, before: Counter[str], fault: str) -> None:
    """Check that acknowledged events are stored once; send the rest again; check the profiles."""
    assert not sender.wrong, fault
    acknowledged = {one for request in sender.acknowledged for one in request.message_ids}
    unanswered = {one for request in sender.unanswered for one in request.message_ids}
    found = look(server).ids - before
    check_exactly_once(found.elements(), acknowledged, acknowledged | unanswered)
    send_all(("127.0.0.1", server.port), sender.unanswered)
    after = look(server)
    assert after.ids - before == Counter(acknowledged | unanswered), fault
    assert after.merged, fault


def test_a_database_that_never_answers_is_503(tmp_path: Path) -> None:
    with Proxy(mongo.shared(KIND).address) as proxy:
        text = storage(proxy.url(database(), IMPATIENT))
        with start_server(tmp_path, storage=text) as server:
            assert server.track("before").status_code == 200
            proxy.rule = lambda *_: SILENCE
            start = time.monotonic()
            response = server.track("during")
            assert response.status_code == 503
            # At the configured time limit.
            assert time.monotonic() - start > 0.5
            wait_for(lambda: server.get("/readyz").status_code == 503, what="/readyz to fail")
            proxy.rule = None
            proxy.cut()
            wait_for(lambda: server.track("during").status_code == 200, what="recovery")
            assert look(server).ids == Counter(["before", "during"])


# ------------------------------------------------------------------------------ killed, with -9
@pytest.mark.timeout(0)
@pytest.mark.parametrize("victim", ["engage", "mongo", "both"])
def test_events_survive_kills(tmp_path: Path, pytestconfig: pytest.Config, victim: str) -> None:
    rounds: int = pytestconfig.getoption("--rounds")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with mongo.own(tmp_path) as mongod:
        text = storage(mongod.url("engage", IMPATIENT))
        with start_server(tmp_path, storage=text) as server:
            for number in range(rounds):
                before = look(server).ids
                sender = Sender(
                    ("127.0.0.1", server.port), Traffic(seed * 1000 + number), connections=4
                )
                sender.start()
                sender.wait_for(acknowledged=chance.randrange(1, 15))
                time.sleep(chance.random() * 0.2)
                if victim != "engage":
                    mongod.kill()
                if victim == "mongo":
                    # The server answers 503 meanwhile, and recovers without a restart.
                    wait_for(sender.unanswered.copy, what="a 503")
                    mongod.start()
                    sender.wait_for(acknowledged=len(sender.acknowledged) + 3)
                    sender.stop()
                else:
                    server.kill()
                    sender.join()
                    if victim == "both":
                        mongod.start()
                    server.start()
                check(server, sender, before, f"round {number}")
            assert server.stop() == 0
            assert look(server).merged


# ------------------------------------------------------------------------ several behave as one
def test_four_processes_on_one_store_behave_as_one(tmp_path: Path) -> None:
    """Each event is sent to two of them: one stores it, and the profiles are right."""
    url = mongo.shared(KIND).url()
    servers: list[Server] = []
    try:
        for number in range(4):
            folder = tmp_path / str(number)
            folder.mkdir()
            servers.append(start_server(folder, storage=storage(url, write_timeout=60)))
        traffic = Traffic(5)
        requests = [traffic.request() for _ in range(60)]
        order = random.Random(5)
        for _ in range(2):
            order.shuffle(requests)
            for index, server in enumerate(servers):
                send_all(("127.0.0.1", server.port), requests[index::4], connections=3)
        wanted = Counter({one: 1 for request in requests for one in request.message_ids})
        found = look(servers[0])
        assert found.ids == wanted
        assert found.merged or not mongo.can(KIND, "atomic-updates")
    finally:
        for server in servers:
            server.kill()
