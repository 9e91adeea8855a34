# SPDX-License-Identifier: Apache-2.0
"""The storage of docs/write-a-plugin.md, installed with pip as a separate distribution."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from support.examples import check_conformance, engage, install
from support.server_process import KEY, Server

SOURCE = Path(__file__).resolve().parents[1] / "example_storage"


@pytest.fixture(scope="module")
def installed() -> Path:
    """Install the distribution, and return the folder to put on the path."""
    return install("example_storage")


@pytest.mark.slow
def test_the_example_passes_the_conformance_suite(installed: Path, tmp_path: Path) -> None:
    check_conformance(tmp_path, "example_storage/test_ledger.py", installed)


def test_the_server_runs_on_the_example(installed: Path, tmp_path: Path) -> None:
    # No subscriptions: this storage stores only events.
    config = f"""
        [server]
        port = 0
        [logging]
        format = "json"
        [storage]
        backend = "ledger"
        [storage.ledger]
        path = "ledger.db"
        [[workspaces]]
        id = "acme"
        [[workspaces.write_keys]]
        id = "website"
        key = "{KEY}"
    """
    with Server(tmp_path, config, environment={"PYTHONPATH": str(installed)}).start() as server:
        for _ in range(2):
            answer = httpx.post(
                f"{server.url}/api/public/apps/track",
                json={"userId": "ann", "event": "Signed Up", "messageId": "m1"},
                auth=(server.key, ""),
            )
            assert answer.json() == {"success": True, "messageId": "m1"}
    (line,) = engage(tmp_path, "export", "events", path=installed).splitlines()
    assert json.loads(line)["event"] == "Signed Up"
    assert (
        "storage\tledger\tledger\tengage-ledger 1.0\tused"
        in engage(tmp_path, "plugins", path=installed).splitlines()
    )
