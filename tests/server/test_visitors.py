# SPDX-License-Identifier: Apache-2.0
"""Visitors on a whole server: processes that are killed, and a flood with the public key."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from engage.api import Event, EventFilter
from engage.testing.factories import all_pages
from engage_plugins.sqlite.writer.sockets import AVAILABLE
from support.rules.visitors import people_of
from support.senders import Senders
from support.server_process import KEY, Server, start_server
from support.sqlite import open_store
from support.waiting import DEADLINE, wait_for

#: Ids that are those of a user and of a visitor, and others.
USERS = ("both", "u1", "u2", "u3")
VISITORS = ("both", "v1", "v2", "v3", "v4")


def bodies(choose: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of an event of some person."""
    user, visitor = {"userId": choose(USERS)}, {"anonymousId": choose(VISITORS)}
    traits = {"traits": {choose("ab"): choose(range(99)), "email": choose(["a@b.c", "x@b.c"])}}
    return choose(  # type: ignore[no-any-return]
        [
            ("identify", {**visitor, **traits}),
            ("identify", {**user, **traits}),
            ("identify", {**user, **visitor}),
            ("group", {**visitor, "groupId": choose("gh")}),
            ("alias", {**user, "previousId": visitor["anonymousId"]}),
        ]
    )


class Halves(Senders):
    """Threads that send the events of the same people; each until it is answered 200."""

    def __init__(self, server: Server) -> None:
        super().__init__(4)
        self._url = server.url
        self.stored = [0] * 4

    def _send(self, number: int) -> None:
        choose = random.Random(number).choice
        with httpx.Client(timeout=DEADLINE, auth=(KEY, "")) as client:
            while not self._stop.is_set():
                path, body = bodies(choose)
                body["messageId"] = f"{number}-{self.stored[number]}"
                body["timestamp"] = f"2026-01-01T00:00:0{choose(range(9))}Z"
                answer = None
                while answer != 200 and not self._stop.is_set():
                    with contextlib.suppress(httpx.TransportError):
                        answer = client.post(f"{self._url}/v1/{path}", json=body).status_code
                self.stored[number] += answer == 200

    def more(self) -> None:
        """Wait until each thread has stored more events."""
        before = list(self.stored)
        wait_for(
            lambda: all(now > old + 20 for now, old in zip(self.stored, before, strict=True)),
            what="more events to be stored",
        )


async def people_in(config: Path) -> tuple[list[Event], Any]:
    """Return the events, the users and the visitors of a store, as :func:`people_of` does."""
    async with open_store(config) as opened:
        store: Any = opened
        events = [*await all_pages(store.scan, EventFilter(workspace_id="acme"))]
        users = await all_pages(store.scan_users, "acme")
        visitors = await all_pages(store.scan_visitors, "acme")

    def view(one: Any, *more: Any) -> Any:
        return (dict(one.traits), *more, one.groups, one.created_at, one.updated_at)

    return events, (
        {user.user_id: view(user, user.certain, user.anonymous_ids) for user in users},
        {visitor.anonymous_id: view(visitor, visitor.user_id) for visitor in visitors},
    )


@pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")
def test_people_are_the_merge_of_their_events_after_kills(tmp_path: Path) -> None:
    with start_server(tmp_path, workers=2) as server:
        halves = Halves(server)
        with halves.running():
            halves.more()
            os.kill(server.helper, signal.SIGKILL)
            halves.more()
            os.kill(min(server.workers()), signal.SIGKILL)
            halves.more()
        server.kill()
        events, people = asyncio.run(people_in(server.config))
    assert len(events) >= sum(halves.stored)
    assert people == people_of(events)[:2]


def test_a_flood_of_visitors_is_bounded(tmp_path: Path) -> None:
    """Visitors whom a public key made give way, and one of a server key stays."""
    sha256 = hashlib.sha256(b"server-key-of-acme").hexdigest()
    key = f'[[workspaces.write_keys]]\nid = "backend"\nsha256 = "{sha256}"\nkind = "server"\n'
    extra = f"{key}[limits]\nvisitors = 20"
    with start_server(tmp_path, workers=2, server="metrics_port = 0", config_extra=extra) as server:
        sure = {"anonymousId": "sure", "traits": {"a": 1}}
        assert server.post("/v1/identify", sure, key="server-key-of-acme").status_code == 200
        for start in range(0, 90, 30):
            items = [
                {"type": "identify", "anonymousId": f"v{number}", "traits": {"a": number}}
                for number in range(start, start + 30)
            ]
            assert server.post("/v1/batch", {"batch": items}).status_code == 200
        known = {"anonymousId": "v60", "traits": {"a": "changed"}}
        assert server.post("/v1/identify", known).status_code == 200
        assert server.post("/v1/identify", {"userId": "u"}).status_code == 200
        # Those of one request do not give way to each other.
        dropped = 'engage_dropped_total{what="profile_change"} 33.0'
        wait_for(lambda: dropped in server.metrics(), what="the dropped changes to be counted")
        server.stop()
        events, (users, visitors) = asyncio.run(people_in(server.config))
    assert len(events) == 93
    assert sorted(visitors) == sorted(["sure", *(f"v{number}" for number in range(60, 79))])
    assert visitors["v60"][0] == {"a": "changed"}
    assert list(users) == ["u"]
