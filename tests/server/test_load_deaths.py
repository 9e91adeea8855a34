# SPDX-License-Identifier: Apache-2.0
"""Loaders that are killed all the time, on each kind of storage, while a server takes events.

Most die between a write and the commit of its places, others anywhere; FerretDB dies, too. In the
end, the store has each acknowledged event once and nothing else, and the profiles are the merge of
the stored events. The log is the one of docs/write-a-log.md; ``test_load_kafka.py`` has fewer
deaths on Kafka, where the group notices each only after six seconds.

``pytest tests/server/test_load_deaths.py --rounds 100`` has 100 deaths on each storage.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import mongo
from support.loader_process import ASSASSIN, TAPE, Loaders, judge, wait_until_stored
from support.server_process import SQLITE, Server, config_text
from support.traffic import Sender, Slowly, VerySlowly, send_all

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]

#: How probable it is that a loader dies after a write.
CHANCE = 0.3


@contextlib.contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[tuple[str, mongo.MongoServer | None]]:
    """Yield the config of an empty storage, and its server if a test may kill that."""
    if kind == "sqlite":
        yield SQLITE, None
        return
    with contextlib.ExitStack() as stack:
        durable = kind == mongo.durable_kind()
        found = stack.enter_context(mongo.own(folder)) if durable else mongo.shared(kind)
        url = found.url(options="serverSelectionTimeoutMS=2000")
        config = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
        yield config, found if durable else None


@pytest.mark.parametrize(
    ("kind", "deaths"),
    [
        pytest.param("sqlite", 10),
        *(pytest.param(kind, 6, marks=pytest.mark.mongo) for kind in mongo.kinds()),
    ],
)
def test_loaders_die_all_the_time(
    tmp_path: Path, pytestconfig: pytest.Config, kind: str, deaths: int
) -> None:
    deaths = max(deaths, pytestconfig.getoption("--rounds"))
    # Two clients that update one document at once lose some updates on FerretDB: see support.mongo.
    # A loader of the storage's server is alone there, and what it began ends before the next.
    alone = kind != "sqlite" and not mongo.can(kind, "atomic-updates")
    chance = random.Random()
    with contextlib.ExitStack() as stack:
        storage, database = stack.enter_context(storage_of(kind, tmp_path))
        (tmp_path / "assassin.py").write_text(ASSASSIN)
        log = TAPE.replace("files = [", 'files = ["assassin.py", ')
        deadly = f"{log}[observers.assassin]\nchance = {CHANCE}\n"
        config = config_text(storage=storage, config_extra=deadly)
        server = stack.enter_context(Server(tmp_path, config).start())
        address = ("127.0.0.1", server.port)
        traffic = VerySlowly if alone else Slowly
        sender = Sender(address, traffic(random.randrange(10**6)))
        team = [
            stack.enter_context(Loaders(server, name=f"load{number}"))
            for number in range(1 if alone else 2)
        ]
        sender.start()
        died = 0
        while died < deaths:
            for loaders in team:
                if loaders.process is None:
                    time.sleep(0.5 if alone else 0)
                    expel_the_dead(tmp_path / "events.tape")
                    loaders.launch()
                elif "died with status" in loaders.log() or chance.random() < 0.02:
                    # Its parent would wait longer after each death before it starts another.
                    died += 1
                    loaders.kill()
            time.sleep(chance.uniform(0.05, 0.3))
            if database is not None and chance.random() < 0.05:
                database.kill()
                database.start()
        sender.stop()
        for loaders in team:
            loaders.kill()
        assert not sender.wrong
        # As clients do. What is in the log already is stored once.
        send_all(address, sender.unanswered)
        requests = [*sender.acknowledged, *sender.unanswered]
        ids = {message_id for request in requests for message_id in request.message_ids}
        expel_the_dead(tmp_path / "events.tape")
        server.config.write_text(server.config.read_text().replace(f" {CHANCE}", " 0"))
        last = stack.enter_context(Loaders(server).start())
        wait_until_stored(server, lambda: ids)
        assert last.stop() == 0
        assert server.stop() == 0
        judge(server, ids, ids)


def expel_the_dead(tape: Path) -> None:
    """Have the log notice at once who is dead: who lives joins again with its next call."""
    if os.path.exists(tape):
        with contextlib.closing(sqlite3.connect(tape, timeout=120)) as db, db:
            db.execute("DELETE FROM members")
