# SPDX-License-Identifier: Apache-2.0
"""The set-up steps of every provider work in the order in which they are written.

Each test follows the steps that ``engage webhook-url`` prints: it writes the config only where a
step says so, restarts the server only where a step says so, and has a secret only when the service
has shown it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from engage.app import build
from engage.config import load
from support.commands import run
from support.exports import registry
from support.http_client import Answer, RawClient, listening
from support.provider_senders import SENDERS, Header, webhooks_table
from support.server_inprocess import serving

#: Services that show their secret only after the URL is entered there.
SHOWS_SECRET_LATER = set("customerio mailchimp resend sendgrid standard-webhooks stripe".split())
BASE = """
[server]
public_url = "https://events.example.com"
[storage]
backend = "sqlite"
[storage.sqlite]
path = "engage.db"
[[workspaces]]
id = "acme"
name = "Acme"
"""


def call(config: Path, method: str, url: str, headers: list[Header], body: bytes) -> Answer:
    """Start a server with a config, send it one request, and stop it."""
    parts = urlsplit(url)

    async def served() -> Answer:
        app = build(load(config), registry())
        await app.open()
        try:
            sock = listening()
            await app.serve(sock)
            async with await RawClient.connect(sock.getsockname()[1]) as client:
                lines = [f"{method} {parts.path}?{parts.query} HTTP/1.1".encode(), b"Host: x"]
                lines += [name.encode() + b": " + value for name, value in headers]
                lines += [b"Content-Length: %d" % len(body), b"", b""]
                await client.send(b"\r\n".join(lines) + body)
                return await client.answer(method=method)
        finally:
            await app.close()

    return asyncio.run(served())


def options_in(step: str, options: Mapping[str, Any]) -> bool:
    """Return whether a step of the set-up writes the options."""
    return any(re.search(rf"\boptions? {name}\b", step) for name in options)


@pytest.mark.parametrize("provider", sorted(SENDERS))
def test_the_steps_work_in_their_order(provider: str, tmp_path: Path) -> None:
    """No set-up is a circle: no step needs what a later step provides."""
    sender = SENDERS[provider]
    config, table, running = tmp_path / "engage.toml", "", ""
    config.write_text(BASE)
    setup: str = getattr(registry().webhooks[provider].factory, "setup", "")
    numbers = re.findall(r"^(\d+)\. ", setup, re.MULTILINE)
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    url = None
    for step in re.split(r"^\d+\. ", setup, flags=re.MULTILINE)[1:]:
        step = " ".join(step.split())
        if "URL" in step and url is None:
            printed = run("webhook-url", provider, "--config", config)
            assert printed.exit_code == 0, printed.stderr
            assert setup in printed.stdout
            url = printed.stdout.splitlines()[0].partition("\t")[2]
            config.write_text(BASE + running)
            # Some services try the URL before they accept it.
            assert call(config, "HEAD", url, [], b"").status == 200
            if provider not in SHOWS_SECRET_LATER:
                # From now on the service delivers; some do not repeat what is refused.
                assert delivered(config, provider, url).status == 200
        if options_in(step, sender.options):
            assert url is not None or provider not in SHOWS_SECRET_LATER, "there is no secret yet"
            table = webhooks_table(providers={provider: sender})
            assert "restart engage" in step
        if "restart engage" in step:
            running = table
            config.write_text(BASE + running)
            asyncio.run(create(config))
            checked = run("check", "--config", config)
            assert checked.exit_code == 0, checked.stderr
    assert url is not None
    assert running
    answer = delivered(config, provider, url)
    assert answer.status == 200, answer
    result = run("webhook-url", provider, "--config", config)
    assert result.stdout.startswith(f"acme\t{url}\n")
    assert "Missing in" not in result.stdout


async def create(config: Path) -> None:
    """Create the store, as ``engage serve`` does."""
    app = build(load(config), registry())
    await app.open()
    await app.close()


def delivered(config: Path, provider: str, url: str) -> Answer:
    """Send a genuine delivery."""
    parts = urlsplit(url)
    headers, body = SENDERS[provider].deliver(f"{parts.path}?{parts.query}", time.time())
    return call(config, "POST", url, headers, body)


async def test_a_delivery_before_the_table_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A provider that no workspace has is not a problem of the workspace in the URL."""
    async with serving(tmp_path) as server:
        for provider in SENDERS:
            path = f"/api/public/webhooks/{provider}"
            answer = await server.send(f"{path}?a=b", {}, key=None)
            assert (answer.status, answer.json["code"]) == (400, "workspace_required")
            assert "no workspace of this server" in answer.json["message"]
            assert "?workspaceId=" not in json.dumps(answer.json)
            # With a workspace, the answer does not depend on whether the workspace exists.
            for name in ("acme", "nobody"):
                answer = await server.send(f"{path}?workspaceId={name}", {}, key=None)
                assert answer.json["code"] == "invalid_signature"
