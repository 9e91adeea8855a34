# SPDX-License-Identifier: Apache-2.0
"""The browser examples of docs/clients.md are bundled and run unchanged."""

from __future__ import annotations

import subprocess

import pytest

from support.browser import WEB, Browser, Pages, eventually
from support.clients_page import example
from support.node import node, node_project
from support.server_process import Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("@segment/analytics-next", 'analytics.track("Documented");'),
        ("@rudderstack/analytics-js", 'analytics.track("Documented");'),
        ("@dittofeed/sdk-web", 'DittofeedSdk.track({ userId: "u", event: "Documented" });'),
    ],
)
def test_the_example_works(
    engage: Server, browser: Browser, pages: Pages, name: str, call: str
) -> None:
    project = node_project(WEB)
    done = subprocess.run(
        [
            *(node(), project / "node_modules/esbuild/bin/esbuild", "--bundle"),
            *("--format=esm", "--log-level=warning", "--loader=js"),
        ],
        input=example(name, engage) + call,
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    script = done.stdout.replace("</script", "<\\/script")
    pages.pages["/"] = (
        "<!doctype html><html><head><meta charset=utf-8><title>Shop</title></head><body>"
        f'<script type="module">{script}</script></body></html>'
    )
    browser.open(pages.url + "/")
    [event] = eventually(lambda: engage.export("events"), lambda e: len(e) >= 1)
    assert event["event"] == "Documented"
    assert browser.errors() == []
