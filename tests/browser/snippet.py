# SPDX-License-Identifier: Apache-2.0
"""Pages with the tracking snippet, for tests in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.browser import Browser, Pages, eventually
from support.server_process import Server

ROOT = Path(__file__).resolve().parents[2]


def snippet(engage: Server, attributes: str = "", url: str | None = None) -> str:
    """Return the lines of docs/snippet.md with the write key and the URL of a server.

    :param url: instead of the server's.
    """
    text = (ROOT / "docs/snippet.md").read_text()
    [lines] = re.findall(r"```html\n(.*?)```", text, re.DOTALL)
    lines = str(lines).replace("https://events.example.com", url or engage.url)
    return lines.replace('"YOUR_WRITE_KEY"', f'"{engage.key}" {attributes}')


def site(engage: Server, attributes: str = "", before: str = "", url: str | None = None) -> str:
    """Return a page with the snippet; ``before`` is a script in front of it."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Shop</title>"
        f"<script>{before}</script>{snippet(engage, attributes, url)}</head><body></body></html>"
    )


def visit(browser: Browser, pages: Pages, html: str, path: str = "/") -> None:
    """Open a page, and wait until the snippet has loaded."""
    pages.pages[path.split("?")[0]] = html
    browser.open(pages.url + path)
    eventually(lambda: browser.run("return typeof window.engage.push"), lambda t: t == "undefined")


def shape(event: dict[str, Any]) -> tuple[str, str | None]:
    """Return the type and the name of a stored event."""
    return event["type"], event.get("event") or event.get("name")
