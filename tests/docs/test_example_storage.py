# SPDX-License-Identifier: Apache-2.0
"""The storage of docs/write-a-plugin.md, installed with pip as a separate distribution."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support.cache import cached
from support.server_process import KEY, Server

SOURCE = Path(__file__).resolve().parents[1] / "example_storage"


@pytest.fixture(scope="module")
def installed() -> Path:
    """Install the distribution, and return the folder to put on the path."""
    ingredients = b"".join(path.read_bytes() for path in sorted(SOURCE.glob("*.*")))

    def make(folder: Path) -> None:
        source = folder / "source"  # a build leaves folders beside the sources
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__", "build"))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--no-deps", "--target", folder / "site", source],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return cached("example-storage", ingredients, make) / "site"


def engage(installed: Path, folder: Path, *arguments: str) -> str:
    """Run a command of ``engage``, and return what it writes."""
    done = subprocess.run(
        [sys.executable, "-m", "engage", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_passes_the_conformance_suite(installed: Path, tmp_path: Path) -> None:
    shutil.copy(SOURCE / "test_ledger.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_ledger.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


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
    (line,) = engage(installed, tmp_path, "export", "events").splitlines()
    assert json.loads(line)["event"] == "Signed Up"
    assert (
        "storage\tledger\tledger\tengage-ledger 1.0\tused"
        in engage(installed, tmp_path, "plugins").splitlines()
    )
