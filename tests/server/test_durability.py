# SPDX-License-Identifier: Apache-2.0
"""Acknowledged events are stored once, whenever the server is killed.

``pytest tests/server/test_durability.py --rounds 100`` kills it a hundred times.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.exactly_once import check_exactly_once
from support.server_process import SQLITE, Server, start_server
from support.traffic import Sender, Traffic, expected_groups, expected_users, send_all
from support.waiting import wait_for

#: Workers, where they write, and what is killed: the ``server`` with all of its processes, the
#: ``writer`` process, or a ``worker``.
CASES = [
    (2, "auto", "server"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            (1, "thread", "server"),
            (1, "process", "server"),
            (2, "auto", "writer"),
            (2, "auto", "worker"),
        )
    ),
]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("workers", "writer", "victim"), CASES, ids=str)
def test_acknowledged_events_survive_kills_and_are_stored_once(
    tmp_path: Path, pytestconfig: pytest.Config, workers: int, writer: str, victim: str
) -> None:
    rounds: int = pytestconfig.getoption("--rounds")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    stored: Counter[str] = Counter()
    sent: set[str] = set()
    storage = f'{SQLITE}writer = "{writer}"\n'
    with start_server(tmp_path, workers=workers, storage=storage) as server:
        for number in range(rounds):
            sender = Sender(("127.0.0.1", server.port), Traffic(seed * 1000 + number))
            sender.start()
            sender.wait_for(acknowledged=chance.randrange(1, 40))
            time.sleep(chance.random() * 0.3)
            _kill(server, victim, chance)
            if victim == "server":
                sender.join()
                assert sender.unanswered, "the kill came too late to cut anything off"
                server.start()
            elif victim == "writer":
                sender.wait_for(acknowledged=len(sender.acknowledged) + chance.randrange(1, 20))
                sender.stop()
            else:
                # The connections of the other worker go on, if it has any.
                time.sleep(chance.random() * 0.3)
                sender.stop()
                wait_for(lambda: len(server.workers()) == workers, what="another worker")
            if victim == "writer":
                # It takes longer, but no client gets an error.
                assert not sender.unanswered
            assert not sender.wrong

            acknowledged = _ids(sender.acknowledged)
            unanswered = _ids(sender.unanswered)
            after_kill = Counter(event["messageId"] for event in server.export()) - stored
            check_exactly_once(after_kill.elements(), acknowledged, acknowledged | unanswered)

            send_all(("127.0.0.1", server.port), sender.unanswered)
            sent |= acknowledged | unanswered
            stored = _check(server, sent)
            if victim == "worker" and number % 6 == 5:
                # It gives up when ten workers have died within a minute.
                assert server.stop() == 0
                server.start()
        assert server.stop() == 0
        _check(server, sent)


def _kill(server: Server, victim: str, chance: random.Random) -> None:
    if victim == "server":
        server.kill()
    elif victim == "writer":
        os.kill(server.helper, signal.SIGKILL)
    else:
        os.kill(chance.choice(sorted(server.workers())), signal.SIGKILL)


def _ids(requests: list[Any]) -> set[str]:
    return {message_id for request in requests for message_id in request.message_ids}


def _check(server: Server, sent: set[str]) -> Counter[str]:
    """Check that the store has each sent event once, and that the profiles are their merge."""
    events = server.export()
    stored = Counter(event["messageId"] for event in events)
    assert stored == Counter(sent)
    users = sorted(server.export("users"), key=lambda user: str(user["userId"]))
    assert users == expected_users(events)
    groups = sorted(server.export("groups"), key=lambda group: str(group["groupId"]))
    assert groups == expected_groups(events)
    return stored
