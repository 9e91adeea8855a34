# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/clients.md, ready to run against a test server."""

from __future__ import annotations

import re
from pathlib import Path

from support.server_process import Server

PAGE = Path(__file__).resolve().parents[2] / "docs/clients.md"


def example(heading: str, engage: Server) -> str:
    """Return the code under a heading of docs/clients.md, with the server's URL and write key."""
    text = PAGE.read_text()
    match = re.search(
        rf"^### {re.escape(heading)}\n+```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    assert match, f"docs/clients.md has no example of {heading}"
    address = engage.url.removeprefix("http://")
    code = match[1].replace("https://events.example.com", engage.url)
    code = code.replace(
        '"events.example.com/v1"',
        f'"{address}/v1", protocol: "http"',
    )
    assert "example.com" not in code
    return code.replace("YOUR_WRITE_KEY", engage.key)
