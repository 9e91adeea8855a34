# SPDX-License-Identifier: Apache-2.0
"""The plugins of docs/write-a-….md: as files that a config names, and installed with pip."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import re
import runpy
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from engage import api
from engage.testing import event
from support.commands import run
from support.examples import TESTS, check_conformance, engage, install
from support.loader_process import TAPE
from support.server_process import KEY, Server, config_text, start_server

ROOT = TESTS.parent
LEDGER = TESTS / "example_storage/engage_ledger.py"
ACME_MAIL = TESTS / "example_provider/engage_acme_mail.py"
SECRET = "secret-of-acme"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "test", "distribution"),
    [
        ("example_storage", "test_ledger.py", "engage-ledger 1.0"),
        ("example_log", "test_tape.py", "engage-tape 1.0"),
        ("example_provider", "test_acme_mail.py", "engage-acme-mail 1.0"),
        ("example_mailgun", "test_mailgun.py", "engage-mailgun 1.0"),
    ],
)
def test_an_installed_example_passes_the_conformance_suite(
    tmp_path: Path, name: str, test: str, distribution: str
) -> None:
    installed = install(name)
    (tmp_path / "engage.toml").write_text(config_text())
    assert f"\t{distribution}\t" in engage(tmp_path, "plugins", path=installed)
    check_conformance(tmp_path, f"{name}/{test}", installed)


def files(*paths: Path | str) -> str:
    return f"[plugins]\nfiles = {json.dumps([*map(str, paths)])}\n"


def test_the_server_appends_to_the_example(tmp_path: Path) -> None:
    with start_server(tmp_path, config_extra=TAPE) as server:
        event = {"userId": "ann", "event": "Signed Up", "messageId": "m1"}
        answer = server.post("/api/public/apps/track", event)
        assert answer.json() == {"success": True, "messageId": "m1"}
        with contextlib.closing(sqlite3.connect(tmp_path / "events.tape")) as db:
            ((key, value),) = db.execute("SELECT key, value FROM records")
    assert key == b"acme:ann"
    assert json.loads(value)["event"] == "Signed Up"


def test_the_server_accepts_deliveries_of_the_example(tmp_path: Path) -> None:
    options = f'[workspaces.webhooks.acme-mail]\nsecret = "{SECRET}"\n'
    body = json.dumps(
        {"events": [{"id": "e1", "kind": "bounced", "email": "A@example.com", "permanent": True}]}
    ).encode()
    now = str(int(time.time()))
    signature = hmac.new(SECRET.encode(), now.encode() + b"." + body, "sha256").hexdigest()
    headers = {"acme-timestamp": now, "acme-signature": signature}
    with start_server(tmp_path, config_extra=options + files(ACME_MAIL)) as server:
        url = "/api/public/webhooks/acme-mail"
        answer = server.post(url, body, key=None, headers=headers)
        assert answer.json() == {"success": True, "accepted": 1, "ignored": 0}
        assert server.post(url, body + b" ", key=None, headers=headers).status_code == 401
        [event] = server.export()
    assert event["event"] == "Email Bounced"
    assert event["anonymousId"] == "email:a@example.com"
    assert event["source"] == "webhook:acme-mail"
    assert event["properties"]["bounceType"] == "hard"
    said = run("webhook-url", "acme-mail", "--config", server.config).stdout
    assert "/api/public/webhooks/acme-mail?workspaceId=acme" in said
    assert "Acme Mail > Settings" in said


def test_the_server_runs_on_the_example(tmp_path: Path) -> None:
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
        {files(LEDGER)}
    """
    with Server(tmp_path, config).start() as server:
        event = {"userId": "ann", "event": "Signed Up", "messageId": "m1"}
        for _ in range(2):
            answer = server.post("/api/public/apps/track", event)
            assert answer.json() == {"success": True, "messageId": "m1"}
    line = run("export", "events", "--config", server.config).stdout
    assert json.loads(line)["event"] == "Signed Up"
    listed = run("plugins", "--config", server.config).stdout
    assert re.search(rf"(?m)^storage\tledger\t.*{re.escape(str(LEDGER))}.*\tused$", listed)


async def test_an_event_may_have_more_fields_in_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = api.StorageContext(base_dir=tmp_path, identifiers={}, write_timeout=60)
    options = {"path": "ledger.db"}
    await runpy.run_path(str(LEDGER))["LedgerStore"](options, context).open(create=True)
    added: list[Any] = [("added", str, "")]
    later = dataclasses.make_dataclass("Event", added, bases=(api.Event,), kw_only=True)
    now = event("m1")
    fields = {field.name: getattr(now, field.name) for field in dataclasses.fields(now)}
    monkeypatch.setattr(api, "Event", later)
    store = runpy.run_path(str(LEDGER))["LedgerStore"](options, context)
    await store.open(create=True)
    (outcome,) = await store.write([later(**fields, added="x")])
    assert outcome.status is api.Status.STORED
    found = await store.find(*now.identity)
    assert found.body == now.body
    await store.close()


def test_the_server_runs_a_transform_of_one_file(tmp_path: Path) -> None:
    shown = blocks("write-a-plugin.md")
    (source,) = [block for block in shown if "def engage_register_transform(" in block]
    (config,) = [block for block in shown if "[[transforms]]" in block]
    (tmp_path / "drop.py").write_text(source, "utf-8")
    with start_server(tmp_path, config_extra=config) as server:
        assert server.track("Heartbeat", event="Heartbeat").status_code == 200
        assert server.track("other").status_code == 200
        assert [event["messageId"] for event in server.export()] == ["other"]


def blocks(page: str) -> list[str]:
    """Return the fenced blocks of a page."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


#: Lines that a file of an example may have, by page.
LINES = {
    "write-a-provider.md": {
        "example_provider/pyproject.toml": 20,
        "example_provider/engage_acme_mail.py": 99,
        "example_provider/test_acme_mail.py": 19,
        "example_mailgun/engage_mailgun.py": 79,
        "example_mailgun/test_mailgun.py": 20,
    },
    "write-a-plugin.md": {
        "example_storage/pyproject.toml": 20,
        "example_storage/engage_ledger.py": 200,
        "example_storage/test_ledger.py": 20,
    },
    "write-a-log.md": {
        "example_log/pyproject.toml": 20,
        "example_log/engage_tape.py": 240,
        "example_log/test_tape.py": 26,
    },
}


@pytest.mark.checkout
@pytest.mark.parametrize("page", LINES)
def test_the_page_shows_these_files_and_they_are_short(page: str) -> None:
    for path, lines in LINES[page].items():
        text = (TESTS / path).read_text("utf-8")
        assert text in blocks(page), path
        assert len(text.splitlines()) <= lines, path
