# SPDX-License-Identifier: Apache-2.0
"""The provider of docs/write-a-provider.md, installed with pip as a separate distribution."""

from __future__ import annotations

import hmac
import json
import re
import time
from pathlib import Path

import httpx
import pytest

from support.examples import check_conformance, engage, install
from support.server_process import Server, config_text

ROOT = Path(__file__).resolve().parents[2]
SECRET = "secret-of-acme"


@pytest.fixture(scope="module")
def installed() -> Path:
    """Install the distribution, and return the folder to put on the path."""
    return install("example_provider")


@pytest.mark.long
def test_the_example_passes_the_conformance_suite(installed: Path, tmp_path: Path) -> None:
    check_conformance(tmp_path, "example_provider/test_acme_mail.py", installed)


def test_the_server_accepts_deliveries_of_the_example(installed: Path, tmp_path: Path) -> None:
    config = config_text(workspace=f'[workspaces.webhooks.acme-mail]\nsecret = "{SECRET}"\n')
    body = json.dumps(
        {"events": [{"id": "e1", "kind": "bounced", "email": "A@example.com", "permanent": True}]}
    ).encode()
    now = str(int(time.time()))
    signature = hmac.new(SECRET.encode(), now.encode() + b"." + body, "sha256").hexdigest()
    with Server(tmp_path, config, environment={"PYTHONPATH": str(installed)}).start() as server:
        url = f"{server.url}/api/public/webhooks/acme-mail"
        headers = {"acme-timestamp": now, "acme-signature": signature}
        answer = httpx.post(url, content=body, headers=headers)
        assert answer.json() == {"success": True, "accepted": 1, "ignored": 0}
        assert httpx.post(url, content=body + b" ", headers=headers).status_code == 401
    (line,) = engage(tmp_path, "export", "events", path=installed).splitlines()
    event = json.loads(line)
    assert event["event"] == "Email Bounced"
    assert event["anonymousId"] == "email:a@example.com"
    assert event["source"] == "webhook:acme-mail"
    assert event["properties"]["bounceType"] == "hard"
    said = engage(tmp_path, "webhook-url", "acme-mail", path=installed)
    assert "/api/public/webhooks/acme-mail?workspaceId=acme" in said
    assert "Acme Mail > Settings" in said


@pytest.mark.long
def test_the_example_with_a_signature_in_the_body_passes_the_conformance_suite(
    tmp_path: Path,
) -> None:
    check_conformance(tmp_path, "example_mailgun/test_mailgun.py", install("example_mailgun"))


def test_the_page_shows_these_files_and_they_are_short() -> None:
    page = (ROOT / "docs/write-a-provider.md").read_text("utf-8")
    shown = re.findall(r"^```[a-z]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for path, lines in (
        ("example_provider/pyproject.toml", 20),
        ("example_provider/engage_acme_mail.py", 99),
        ("example_provider/test_acme_mail.py", 19),
        ("example_mailgun/engage_mailgun.py", 79),
        ("example_mailgun/test_mailgun.py", 20),
    ):
        text = (ROOT / "tests" / path).read_text("utf-8")
        assert text in shown, path
        assert len(text.splitlines()) <= lines, path
