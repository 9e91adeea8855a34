# SPDX-License-Identifier: Apache-2.0
"""The storage of docs/write-a-plugin.md, installed with pip as a separate distribution."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import httpx
import pytest

from engage import api
from engage.testing import event
from support.examples import check_conformance, engage, install
from support.server_process import KEY, Server

SOURCE = Path(__file__).resolve().parents[1] / "example_storage"


@pytest.fixture(scope="module")
def installed() -> Path:
    """Install the distribution, and return the folder to put on the path."""
    return install("example_storage")


@pytest.mark.long
def test_the_example_passes_the_conformance_suite(installed: Path, tmp_path: Path) -> None:
    check_conformance(tmp_path, "example_storage/test_ledger.py", installed)


async def test_an_event_may_have_more_fields_in_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = api.StorageContext(base_dir=tmp_path, identifiers={}, write_timeout=60)
    options = {"path": "ledger.db"}
    source = str(SOURCE / "engage_ledger.py")
    await runpy.run_path(source)["LedgerStore"](options, context).open(create=True)
    added: list[Any] = [("added", str, "")]
    later = dataclasses.make_dataclass("Event", added, bases=(api.Event,), kw_only=True)
    now = event("m1")
    fields = {field.name: getattr(now, field.name) for field in dataclasses.fields(now)}
    monkeypatch.setattr(api, "Event", later)
    store = runpy.run_path(source)["LedgerStore"](options, context)
    await store.open(create=True)
    (outcome,) = await store.write([later(**fields, added="x")])
    assert outcome.status is api.Status.STORED
    found = await store.find(*now.identity)
    assert found.body == now.body
    await store.close()


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
