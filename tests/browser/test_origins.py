# SPDX-License-Identifier: Apache-2.0
"""A key that only certain web pages may use, in Chromium: other pages and frames."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser.snippet import site, visit

from support.browser import Browser, Pages, eventually
from support.commands import run
from support.server_process import Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

EVENT = '{"userId": "u", "event": "E"}'
FETCH = """
const [url, key, done] = arguments;
fetch(url, {method: "POST", body: JSON.stringify({userId: "u", event: "E", writeKey: key})})
  .then(async (answer) => done([answer.status, await answer.json()]), (e) => done([String(e), {}]));
"""
#: What a page in a frame sends, and how it tells the outer page.
FRAME = """<!doctype html><script>
fetch(%s, {method: "POST", body: JSON.stringify({userId: "u", event: "E", writeKey: %s})})
  .then(async (answer) => parent.postMessage([answer.status, await answer.json()], "*"));
</script>"""


@pytest.fixture
def key(engage: Server, pages: Pages) -> str:
    """Return a key that only the pages of the test may use."""
    names = ("--workspace", "acme", "--id", "shop", "--origins", pages.url)
    result = run("keys", "add", "--config", engage.config, *names)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def elsewhere() -> Iterator[Pages]:
    """Return a web server of another origin."""
    pages = Pages()
    yield pages
    pages.close()


def posted(browser: Browser, url: str, key: str) -> Any:
    return browser.driver.execute_async_script(FETCH, url, key)


def snippet_with(engage: Server, key: str) -> str:
    return site(engage).replace(f'"{engage.key}"', f'"{key}"')


def test_pages_of_the_origin_use_the_key(
    engage: Server, browser: Browser, pages: Pages, key: str
) -> None:
    """With the snippet, and with a beacon, which has the key in the query."""
    visit(browser, pages, snippet_with(engage, key))
    browser.run(
        "return navigator.sendBeacon(arguments[0], arguments[1])",
        f"{engage.url}/beacon/v1/batch?writeKey={key}",
        f'{{"batch": [{{"type": "track", {EVENT[1:]}]}}',
    )
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) == 2)
    assert {event["writeKeyId"] for event in stored} == {"shop"}
    assert posted(browser, engage.url + "/v1/track", key)[0] == 200
    assert browser.errors() == []


def test_another_page_is_refused_and_can_read_why(
    engage: Server, browser: Browser, elsewhere: Pages, key: str
) -> None:
    visit(browser, elsewhere, snippet_with(engage, key))
    status, body = posted(browser, engage.url + "/v1/track", key)
    assert (status, body["code"]) == (403, "origin_not_allowed")
    assert elsewhere.url in body["message"]
    browser.run(
        "navigator.sendBeacon(arguments[0], '{\"batch\": []}')",
        f"{engage.url}/beacon/v1/batch?writeKey={key}",
    )
    eventually(lambda: engage.log().count('"code":"origin_not_allowed"'), lambda count: count >= 3)
    assert engage.export("events") == []
    assert engage.export("dead-letters") == []


def test_a_sandboxed_frame_of_the_page_is_refused(
    engage: Server, browser: Browser, pages: Pages, key: str
) -> None:
    """Its ``Origin`` is ``null``, although the page may use the key."""
    pages.pages["/frame"] = FRAME % (json.dumps(engage.url + "/v1/track"), json.dumps(key))
    for sandbox, expected in (("allow-scripts", 403), ("allow-scripts allow-same-origin", 200)):
        pages.pages["/"] = (
            "<!doctype html><script>addEventListener('message', (e) => (window.got = e.data));"
            f"</script><iframe sandbox='{sandbox}' src='/frame'></iframe>"
        )
        browser.open(pages.url + "/")
        status, body = eventually(lambda: browser.run("return window.got"), bool)
        assert status == expected, body
        if expected == 403:
            assert body["code"] == "origin_not_allowed"
            assert "the Origin null" in body["message"]
    assert len(engage.export("events")) == 1
