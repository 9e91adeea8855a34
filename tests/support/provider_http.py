# SPDX-License-Identifier: Apache-2.0
"""Config lines that switch webhook providers on, and deliveries sent to a server over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from engage.api import WebhookRequest
from support.http_client import Answer
from support.server_inprocess import Serving

PUBLIC_URL = "https://events.example.com"


def toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


def workspace(id: str, webhooks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a workspace of the config with these webhook providers."""
    lines = ["[[workspaces]]", f'id = "{id}"', f'name = "{id}"']
    for provider, options in webhooks.items():
        lines.append(f"[workspaces.webhooks.{provider}]")
        lines += [f"{name} = {toml(value)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


def public(url: str = PUBLIC_URL) -> str:
    """Return the line of ``[server]`` with the URL at which providers reach it."""
    return f'public_url = "{url}"'


async def deliver(server: Serving, request: WebhookRequest) -> Answer:
    """Send a delivery unchanged to the path and the query of its URL."""
    parts = urlsplit(request.url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [f"{request.method} {target} HTTP/1.1", "Host: elsewhere.example.com"]
    lines.append(f"Content-Length: {len(request.body)}")
    lines += [f"{name}: {value}" for name, value in request.headers]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    async with await server.connect() as client:
        await client.send(head + request.body)
        return await client.answer(method=request.method)
