# SPDX-License-Identifier: Apache-2.0
"""A server whose system's clock is set while it runs, in a real process."""

from __future__ import annotations

import time
from pathlib import Path

from engage.api.times import parse_time
from support.server_process import Server, start_server
from support.system_clock import SystemClock

YEARS = 2 * 365 * 86_400


def age(server: Server, message_id: str) -> float:
    """Return how many seconds ago an event was received."""
    (event,) = [one for one in server.export() if one["messageId"] == message_id]
    received = parse_time(event["receivedAt"])
    assert received is not None
    assert event["timestamp"] == event["receivedAt"]
    return time.time() - received / 1000


def test_a_step_of_the_clock_is_logged_and_followed(tmp_path: Path) -> None:
    system_clock = SystemClock(tmp_path)
    folder = tmp_path / "server"
    folder.mkdir()
    with start_server(folder, workers=2, environment=system_clock.environment) as server:
        server.track("before")
        system_clock.set(YEARS)
        for number in range(10):
            server.track(f"ahead {number}")
        system_clock.set(0)
        for number in range(10):
            server.track(f"after {number}")
        for message_id in ("before", "after 0", "after 9"):
            assert -1 < age(server, message_id) < 60
        for message_id in ("ahead 0", "ahead 9"):
            assert -1 < age(server, message_id) + YEARS < 60
        assert "was set ahead by 6307" in server.log()
        assert "was set back by 6307" in server.log()
