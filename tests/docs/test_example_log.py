# SPDX-License-Identifier: Apache-2.0
"""The log of docs/write-a-log.md, installed with pip as a separate distribution."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import httpx
import pytest

from support.examples import check_conformance, engage, install
from support.server_process import Server, config_text


@pytest.fixture(scope="module")
def installed() -> Path:
    """Install the distribution, and return the folder to put on the path."""
    return install("example_log")


@pytest.mark.long
@pytest.mark.timeout(320)
def test_the_example_passes_the_conformance_suite(installed: Path, tmp_path: Path) -> None:
    check_conformance(tmp_path, "example_log/test_tape.py", installed)


def test_the_server_appends_to_the_example(installed: Path, tmp_path: Path) -> None:
    lines = '[log]\nbackend = "tape"\n[log.tape]\npath = "events.tape"\n'
    config = config_text(config_extra=lines)
    with Server(tmp_path, config, environment={"PYTHONPATH": str(installed)}).start() as server:
        answer = httpx.post(
            f"{server.url}/api/public/apps/track",
            json={"userId": "ann", "event": "Signed Up", "messageId": "m1"},
            auth=(server.key, ""),
        )
        assert answer.json() == {"success": True, "messageId": "m1"}
        with contextlib.closing(sqlite3.connect(tmp_path / "events.tape")) as db:
            ((key, value),) = db.execute("SELECT key, value FROM records")
    assert key == b"acme:ann"
    assert json.loads(value)["event"] == "Signed Up"
    assert "log\ttape\ttape\tengage-tape 1.0\tused" in engage(tmp_path, "plugins", path=installed)
