# SPDX-License-Identifier: Apache-2.0
"""``engage serve`` and ``engage load`` on three Kafka nodes, while anything dies.

Each test is judged in the same way: every id that got a 200 is in the store exactly once, nothing
that was never sent is there, and the profiles are the merge of the stored events.

``pytest tests/server/test_load_kafka.py --rounds 30`` runs them at full length: 30 deaths, and a
minute where the name says so. By default they are shorter.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import NewPartitions

from support import mongo
from support.loader_process import ASSASSIN, Loaders, judge, stored_ids, wait_until_stored
from support.server_process import SQLITE, Server, config_text
from support.traffic import Request, Sender, Slowly, VerySlowly, send_all
from support.waiting import wait_for

if TYPE_CHECKING:
    from support.kafka import Cluster

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(900, func_only=True)]

TOPIC = "engage.events"


class InPhases(Slowly):
    """Requests that a test can hold back."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._gate = threading.Event()
        self._gate.set()

    def request(self) -> Request:
        self._gate.wait()
        return super().request()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make no request in the block."""
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()


@pytest.fixture
def rounds(pytestconfig: pytest.Config) -> int:
    found: int = pytestconfig.getoption("--rounds")
    return found


@pytest.fixture
def minute(rounds: int) -> float:
    """Seconds of what should last a minute."""
    return 60.0 if rounds >= 30 else 10.0


def make_server(
    folder: Path,
    nodes: Cluster,
    *,
    workers: int = 2,
    storage: str = SQLITE,
    server: str = "",
    extra: str = "",
) -> Server:
    log = f'[log]\nload_port = 0\n[log.kafka]\nservers = "{nodes.servers()}"\ntopic = "{TOPIC}"\n'
    (folder / "assassin.py").write_text(ASSASSIN)
    extra += '[plugins]\nfiles = ["assassin.py"]\n'
    config = config_text(workers=workers, storage=storage, server=server, config_extra=log + extra)
    return Server(folder, config)


@contextlib.contextmanager
def load_of(server: Server, traffic: type[Slowly] = Slowly) -> Iterator[Sender]:
    """Send random requests until the block ends; then send again what was not acknowledged."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    address = ("127.0.0.1", server.port)
    sender = Sender(address, traffic(seed))
    sender.start()
    try:
        yield sender
    finally:
        sender.stop()
    assert not sender.wrong
    # As clients do. What is in the log already is stored once.
    send_all(address, sender.unanswered)


def more(sender: Sender, count: int = 60) -> None:
    """Wait until that many further requests were acknowledged."""
    sender.wait_for(acknowledged=len(sender.acknowledged) + count)


def sent_by(sender: Sender) -> set[str]:
    requests = [*sender.acknowledged, *sender.unanswered]
    return {message_id for request in requests for message_id in request.message_ids}


def check(server: Server, sender: Sender, loaders: Loaders, *, profiles: bool = True) -> None:
    """Wait until all is loaded, drain, and judge the store."""
    ids = sent_by(sender)
    wait_until_stored(server, lambda: ids)
    wait_for(
        lambda: any(
            line.startswith("engage_log_backlog_records 0.0")
            for line in loaders.metrics().splitlines()
        ),
        what="an empty backlog",
    )
    assert loaders.stop() == 0
    assert server.stop() == 0
    judge(server, ids, ids, profiles=profiles)


def test_nodes_are_killed_under_load(tmp_path: Path, kafka_nodes: Cluster) -> None:
    """First a leader: no request fails. Then a second node: only 503. Then both are back."""
    nodes = kafka_nodes
    # The other nodes of a busy machine may need long to agree on new leaders.
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 20")
    made = make_server(tmp_path, nodes, storage=storage)
    with made.start() as server, Loaders(server) as loaders:
        loaders.start("--workers", "2")
        with load_of(server) as sender:
            more(sender)
            first, second = list(dict.fromkeys(nodes.leaders(TOPIC).values()))[:2]
            nodes.kill(first)
            more(sender, 10)
            wait_for(lambda: first not in nodes.leaders(TOPIC).values(), what="other leaders")
            more(sender)
            assert not sender.unanswered
            loaded = len(stored_ids(server))
            wait_for(lambda: len(stored_ids(server)) > loaded, what="the loaders to go on")
            nodes.kill(second)
            wait_for(lambda: len(sender.unanswered) >= 6, what="a 503 for each client")
            wait_for(lambda: server.get("/readyz").status_code == 503, what="/readyz to be 503")
            nodes.start(first)
            nodes.start(second)
            nodes.wait()
            more(sender)
        wait_for(lambda: loaders.readyz().status_code == 200, what="the loaders to be ready")
        check(server, sender, loaders)


def test_partitions_are_added_and_a_node_is_killed(tmp_path: Path, kafka_nodes: Cluster) -> None:
    """Two loaders read meanwhile, and divide the partitions again."""
    nodes = kafka_nodes
    with (
        make_server(tmp_path, nodes, workers=1, server="metrics_port = 0").start() as server,
        Loaders(server).start("--workers", "2") as loaders,
    ):
        with load_of(server, InPhases) as sender:
            more(sender)
            away = nodes.leaders(TOPIC)[0]
            added = nodes.admin.create_partitions([NewPartitions(TOPIC, 24)], operation_timeout=60)
            added[TOPIC].result()
            nodes.kill(away)
            more(sender)
            # A server looks for partitions when it is asked whether it is ready, unless an event
            # has just shown that. Otherwise, a minute passes.
            assert isinstance(sender.traffic, InPhases)
            with sender.traffic.held():
                wait_for(
                    lambda: (
                        server.get("/readyz").status_code == 200
                        and "engage_log_topic_partitions 24.0" in server.metrics()
                    ),
                    what="the server to know the new partitions",
                )
            more(sender)
            nodes.start(away)
            nodes.wait()
            more(sender)
        assert not sender.unanswered
        check(server, sender, loaders)
    assert {record.partition() for record in nodes.records(TOPIC)} & set(range(12, 24))


@pytest.mark.parametrize("store", ["sqlite", "mongo"])
def test_loaders_die_between_write_and_commit(
    tmp_path: Path, kafka_nodes: Cluster, rounds: int, store: str
) -> None:
    """By themselves, at that place; with all others of their host; and with their store."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(mongo.own(tmp_path)) if store == "mongo" else None
        storage = SQLITE
        if database is not None:
            short_timeout = "serverSelectionTimeoutMS=2000"
            url = database.url("engage", short_timeout)
            storage = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
        server = stack.enter_context(
            make_server(
                tmp_path, kafka_nodes, storage=storage, extra="[observers.assassin]\nchance = 0.1\n"
            ).start()
        )
        loaders = stack.enter_context(Loaders(server))
        chance = random.Random()
        traffic = Slowly if database is None else VerySlowly
        with load_of(server, traffic) as sender:
            deaths = 0
            turn = 0
            while deaths < rounds:
                turn += 1
                if loaders.process is not None and loaders.process.poll() is not None:
                    loaders.kill()  # too many have died; a service manager starts them again
                if loaders.process is None:
                    loaders.start("--workers", "2", ready=False)
                time.sleep(chance.uniform(0.5, 3))
                if turn % 3 == 1:
                    # All may be dead now, until they are replaced.
                    living = sorted(loaders.processes())
                    for pid in chance.sample(living, min(1, len(living))):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                elif turn % 3 == 2:
                    deaths += loaders.log().count("died with status")
                    loaders.kill()
                    deaths += 1
                elif database is not None:
                    database.kill()
                    time.sleep(chance.uniform(0, 1))
                    database.start()
                    deaths += 1
            loaders.kill()
        server.config.write_text(server.config.read_text().replace("chance = 0.1", "chance = 0"))
        loaders = stack.enter_context(Loaders(server, name="last")).start("--workers", "2")
        # FerretDB loses concurrent updates of one profile: see support.mongo.
        check(server, sender, loaders, profiles=database is None)
        print(f"{deaths} deaths")


def test_loaders_come_and_go_for_a_minute(
    tmp_path: Path, kafka_nodes: Cluster, minute: float
) -> None:
    """Some drain, others are killed. In the end, what is sent is stored within seconds."""
    with make_server(tmp_path, kafka_nodes).start() as server, contextlib.ExitStack() as stack:
        stays = stack.enter_context(Loaders(server, name="stays")).start()
        with load_of(server) as sender:
            end = time.monotonic() + minute
            turn = 0
            while time.monotonic() < end:
                turn += 1
                with Loaders(server, name=f"guest{turn}").start(
                    "--workers", "2", ready=False
                ) as guest:
                    time.sleep(3)
                    if turn % 3:
                        assert guest.stop() == 0, guest.log()
        last = f"last-{os.getpid()}"
        wait_until_stored(server, lambda: sent_by(sender))
        began = time.monotonic()
        assert server.track(last, userId="user-1").status_code == 200
        wait_for(lambda: last in stored_ids(server), what="one more event")
        print(f"an event was in the store after {time.monotonic() - began:.2f} s")
        sender.acknowledged.append(Request("/v1/track", b"", (last,)))
        check(server, sender, stays)


def test_the_store_is_away_for_a_minute(
    tmp_path: Path, kafka_nodes: Cluster, minute: float
) -> None:
    """Another process has it locked. No client notices."""
    with make_server(tmp_path, kafka_nodes).start() as server, Loaders(server) as loaders:
        # Of the loaders only: the nodes of a busy machine may need longer for a request.
        config = server.config.read_text()
        server.config.write_text(config.replace("write_timeout = 60", "write_timeout = 3"))
        loaders.start()
        with load_of(server) as sender:
            more(sender)
            with contextlib.closing(
                sqlite3.connect(server.database, isolation_level=None, timeout=20)
            ) as db:
                db.execute("BEGIN IMMEDIATE")
                end = time.monotonic() + minute
                wait_for(lambda: loaders.readyz().status_code == 503, what="/readyz")
                assert loaders.readyz().json()["storage"] == "unavailable"
                while time.monotonic() < end:
                    assert server.get("/readyz").status_code == 200
                    time.sleep(0.5)
                more(sender)
                db.execute("ROLLBACK")
            more(sender)
        assert not sender.unanswered
        check(server, sender, loaders)
