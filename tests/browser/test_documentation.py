# SPDX-License-Identifier: Apache-2.0
"""The browser examples of docs/clients.md are bundled and run unchanged."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.browser import WEB, Browser, Pages, eventually
from support.clients_page import example
from support.identity import hash_of, start_verifying
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
    open_page(engage, browser, pages, name, call)
    [event] = eventually(lambda: engage.export("events"), lambda e: len(e) >= 1)
    assert event["event"] == "Documented"
    assert browser.errors() == []


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("@segment/analytics-next", "userHash with @segment/analytics-next"),
        ("@rudderstack/analytics-js", "userHash with @rudderstack/analytics-js"),
        ("@dittofeed/sdk-web", "userHash in Node"),
    ],
)
def test_the_lines_for_verified_users_work(
    tmp_path: Path, browser: Browser, pages: Pages, name: str, lines: str
) -> None:
    user_hash = hash_of("u-1")
    with start_verifying(tmp_path) as engage:
        calls = f'const userHash = "{user_hash}";\n' + example(lines, engage)
        if name == "@dittofeed/sdk-web":
            calls = calls.replace("analytics.", "DittofeedSdk.")
        open_page(engage, browser, pages, name, calls)
        events = eventually(lambda: engage.export("events"), lambda e: len(e) >= 2)
        assert {(event["type"], event["userId"]) for event in events} == {
            ("identify", "u-1"),
            ("track", "u-1"),
        }
        assert all(event["context"]["engage"] == {"verified": True} for event in events)
        assert user_hash not in str(events)


def open_page(engage: Server, browser: Browser, pages: Pages, name: str, call: str) -> None:
    """Open a page with the example of an SDK and a call."""
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
