# SPDX-License-Identifier: Apache-2.0
"""A server with something to see on every page of its console."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

import pytest

from support import mongo
from support.console import CONSOLE
from support.server_process import SQLITE, Server, start_server
from support.waiting import wait_for

#: Tables of the config.
EXTRA = f"""
[workspaces.webhooks.segment]
secret = "a shared secret"

[[workspaces.subscription_groups]]
id = "newsletter"
name = "Newsletter"
channel = "email"
type = "opt_in"

[[workspaces]]
id = "other"
name = "Another workspace"

{CONSOLE}
"""

#: The message id of a stored event, and the user of everything.
EVENT, USER = "m-order", "ann"

#: The storages of the tests that run on each.
STORAGES = ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)]


def tables(storage: str) -> str:
    """Return the tables of a new store for the config."""
    if storage == "sqlite":
        return SQLITE
    url = mongo.shared(mongo.kinds()[0]).url()
    return f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'


def start(
    folder: Path,
    *,
    storage: str = SQLITE,
    extra: str = EXTRA,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start a server with two workers and a console."""
    return start_server(
        folder, workers=2, storage=storage, config_extra=extra, environment=environment
    )


def fill(server: Server) -> None:
    """Send events of all kinds, some that are rejected, and requests that are refused."""
    track = {"userId": USER, "event": "Order", "properties": {"sku": "A-32", "price": 168.76}}
    batch = [
        {"type": "identify", "userId": USER, "traits": {"email": "ann@example.com", "plan": "pro"}},
        {"type": "group", "userId": USER, "groupId": "acme", "traits": {"size": 12}},
        {"type": "page", "anonymousId": "a-1", "name": "Home"},
        {"type": "identify", "anonymousId": "a-1", "traits": {"source": "newsletter"}},
        {"type": "alias", "userId": USER, "previousId": "a-1"},
        {"type": "track", **track, "messageId": EVENT},
        {"type": "track", **track, "properties": {"sku": "B-1", "price": 7}},
    ]
    assert server.post("/v1/batch", {"batch": batch}).status_code == 200
    # Each is rejected: two causes.
    assert server.post("/v1/track", {"userId": USER, "messageId": "m-no-name"}).status_code == 400
    assert server.post("/v1/identify", {"userId": USER, "traits": [1]}).status_code == 400
    assert server.post("/v1/track", track, key="a-key-of-another-server").status_code == 401
    assert server.post("/v1/track", b"{").status_code == 400


def letters(server: Server) -> list[str]:
    """Return the ids of the dead letters, oldest first; they are stored soon after the answer."""
    found = wait_for(lambda: server.export("dead-letters"), what="the dead letters")
    return [str(letter["id"]) for letter in found]


def pages(letter: str, event: str = EVENT, user: str = USER) -> dict[str, str]:
    """Return the pages: name → path and query, all with something to see.

    :param letter: the id of a dead letter.
    """
    query = urlencode({"workspace": "acme", "origin": "api", "id": event})
    return {
        "overview": "",
        "overview-14d": "?range=14d",
        "live": "live",
        "rejected": "rejected",
        "rejected-group": "rejected?" + urlencode({"reason": "invalid_payload", "ask": "replay"}),
        "letter": "letter?" + urlencode({"id": letter}),
        "replays": "replays",
        "events": "events",
        "event": f"event?{query}",
        "users": "users",
        "user": "user?" + urlencode({"id": user}),
        "user-unlink": "user?" + urlencode({"id": user, "unlink": "a-1"}),
        "visitor": "user?visitor=a-1",
        "erase": "erase?" + urlencode({"id": user}),
        "erase-requests": "erase",
        "keys": "keys",
        "webhooks": "webhooks",
        "subscriptions": "subscriptions?" + urlencode({"user": user}),
        "system": "system",
        "audit": "audit",
        "search": "search?q=nothing-has-this-id",
        "empty": "?workspace=other",
    }
