# SPDX-License-Identifier: Apache-2.0
"""The server SDKs at twice the rate limit of their key for 30 seconds, and quiet afterwards.

The Node SDKs are made by the examples of docs/clients.md, the others with their default options.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from sdks.catalogue import SDKS, Sdk

from support.clients_page import example
from support.server_process import Server, start_server

pytestmark = [pytest.mark.sdk, pytest.mark.long, pytest.mark.timeout(400)]

#: Events a second. With fewer, the random pauses of two Python SDKs last another minute.
RATE: Final = 50
COUNT: Final = 2 * RATE * 30


def key_of(sdk: Sdk) -> str:
    return f"key-of-{sdk.name}"


def send(sdk: Sdk, server: Server) -> list[str]:
    """Send the events with an SDK, and return the errors that it reported."""
    documented = None
    if sdk.language == "node" and sdk.retries:
        documented = example(sdk.module, server).replace(server.key, key_of(sdk))
    calls = [
        {"call": "track", "userId": "u", "event": sdk.name, "properties": {"n": n}}
        for n in range(COUNT)
    ]
    default = dataclasses.replace(sdk, options={})
    return default.run(server.url, key_of(sdk), calls, example=documented, pause=0.5 / RATE)


def test_sdks_lose_nothing_at_twice_the_rate_limit(tmp_path: Path) -> None:
    """Except for the one that drops what was answered 429, see docs/clients.md."""
    config = f"[limits.rate]\nevents_per_second = {RATE}\n" + "".join(
        f'[[workspaces.write_keys]]\nid = "{sdk.name}"\nkey = "{key_of(sdk)}"\n' for sdk in SDKS
    )
    with start_server(tmp_path, config_extra=config) as server:
        with ThreadPoolExecutor(len(SDKS)) as pool:
            errors = list(pool.map(lambda sdk: send(sdk, server), SDKS))
        events = server.export("events")
        refused = {line["writeKeyId"] for line in server.lines() if line.get("status") == 429}
    assert refused == {sdk.name for sdk in SDKS}
    for sdk, reported in zip(SDKS, errors, strict=True):
        stored = sorted(event["properties"]["n"] for event in events if event["event"] == sdk.name)
        if sdk.retries:
            assert reported == [], sdk
            assert stored == list(range(COUNT)), sdk
        else:
            assert reported, sdk
            assert len(set(stored)) == len(stored) < COUNT, sdk
