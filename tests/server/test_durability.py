# SPDX-License-Identifier: Apache-2.0
"""Acknowledged events are stored once, whenever the server is killed.

``pytest tests/server/test_durability.py --rounds 100`` kills it a hundred times.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.server_process import SQLITE, Server, start_server
from support.traffic import Sender, Traffic, expected_groups, expected_users, send_all


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("workers", "writer"), [(1, "thread"), (1, "process"), (2, "auto")], ids=str
)
def test_acknowledged_events_survive_kills_and_are_stored_once(
    tmp_path: Path, pytestconfig: pytest.Config, workers: int, writer: str
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
            server.kill()
            sender.join()
            assert not sender.wrong

            acknowledged = _ids(sender.acknowledged)
            unanswered = _ids(sender.unanswered)
            assert sender.unanswered, "the kill came too late to cut anything off"
            server.start()
            after_kill = Counter(event["messageId"] for event in server.export()) - stored
            assert not [name for name, count in after_kill.items() if count > 1]
            assert acknowledged <= after_kill.keys(), "acknowledged, and lost"
            assert after_kill.keys() <= acknowledged | unanswered, "stored, and never sent"

            send_all(("127.0.0.1", server.port), sender.unanswered)
            sent |= acknowledged | unanswered
            stored = _check(server, sent)
        assert server.stop() == 0
        _check(server, sent)


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
