# SPDX-License-Identifier: Apache-2.0
"""The console's live pages in a browser: rows come, wait for the reader, open in place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engage.config import ConsoleConfig
from engage.console.sign_in.links import link_url
from support.browser import Browser, eventually
from support.console import CONSOLE, console_url, make_link
from support.server_process import Server, start_server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform == "win32", reason="the console is a child process"),
]

HOSTILE = '<img src=x onerror="document.title=1">'
#: Reports what the Content-Security-Policy stops, from before the page's own scripts run.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  violations.push(event.violatedDirective + " " + event.blockedURI + " " + event.sample));
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with start_server(tmp_path, config_extra=CONSOLE) as started:
        yield started


@pytest.fixture
def console(server: Server, browser: Browser) -> Iterator[str]:
    """Sign the browser in, and return the console's URL."""
    url = console_url(server)
    browser.cdp("Network.enable")
    added = browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    browser.open(f"{url}/link?t={make_link(server.config)}")
    browser.run("document.querySelector('form button').click()")
    eventually(lambda: browser.run("return !!document.getElementById('rail')"), bool)
    yield url
    browser.cdp("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def names(browser: Browser) -> list[str]:
    """Return the names in the rows of Live."""
    script = "return [...document.querySelectorAll('#live tr.row .main')].map(e => e.textContent)"
    found: list[str] = browser.run(script)
    return found


def visible(browser: Browser, selector: str) -> bool:
    shown: bool = browser.run(
        "const e = document.querySelector(arguments[0]); return !!e && e.checkVisibility()",
        selector,
    )
    return shown


def click(browser: Browser, selector: str) -> None:
    browser.run("document.querySelector(arguments[0]).click()", selector)


def assert_clean(browser: Browser, url: str) -> None:
    """Assert that nothing was blocked, failed, or requested from another origin."""
    assert browser.run("return window.violations") == []
    assert browser.errors() == []
    requested = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith(url) for name in requested), requested


def test_the_first_event_turns_the_waiting_card_into_a_list(
    server: Server, browser: Browser, console: str
) -> None:
    browser.open(console)
    assert visible(browser, "#waiting")
    server.client.post("/v1/track", json={}, auth=("wrong", ""))
    eventually(lambda: visible(browser, "#refused"), bool)
    server.track("first", event="Signed Up")
    eventually(lambda: names(browser), lambda found: found == ["Signed Up"])
    assert not visible(browser, "#waiting")
    # The page loads again by itself, now with figures and plots.
    eventually(lambda: visible(browser, "#events-plot canvas"), bool)
    browser.run("document.getElementById('events-plot').focus()")
    assert_clean(browser, console)


def test_rows_come_open_in_place_and_wait_for_the_reader(
    server: Server, browser: Browser, console: str
) -> None:
    browser.open(f"{console}/live")
    server.track("one", event=HOSTILE, properties={"big": 9007199254740993})
    server.post("/v1/track", {"userId": "ann"})
    eventually(lambda: names(browser), lambda found: len(found) == 2)
    assert HOSTILE in names(browser)
    assert not browser.run("return document.querySelectorAll('main img').length")

    click(browser, "#live tr.row:has(.rejected) a")
    reason = "return document.querySelector('.detail .reasons')?.textContent"
    eventually(lambda: browser.run(reason), lambda text: text == "event: is required")
    click(browser, "#live tr.row:has(.rejected) a")
    click(browser, "#live tr.row:has(.stored) a")
    shown = "return document.querySelector('.detail pre')?.textContent ?? ''"
    eventually(lambda: browser.run(shown), lambda text: "9007199254740993" in text)
    click(browser, ".detail [data-show=curl]")
    assert browser.run(shown).startswith("curl -u ")

    browser.run("document.activeElement.blur()")
    browser.run(
        "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: ' ', bubbles: true}))"
    )
    assert browser.run("return document.getElementById('state').textContent") == "paused"
    before = names(browser)
    for number in range(3):
        server.track(f"later-{number}", event=f"Later {number}")
    eventually(
        lambda: browser.run("return document.getElementById('pill').textContent"), _is("3 new ▲")
    )
    assert names(browser) == before
    click(browser, "#pause")
    assert names(browser) == ["Later 2", "Later 1", "Later 0", *before]
    assert browser.run(shown), "the open row stays open"
    assert_clean(browser, console)


def test_theme_and_time_zone_are_remembered(browser: Browser, console: str, server: Server) -> None:
    server.track("timed")
    browser.open(f"{console}/live")
    eventually(lambda: names(browser), lambda found: len(found) == 1)
    browser.cdp("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    browser.open(f"{console}/live")
    time = "return document.querySelector('#live time').textContent"
    local = browser.run(time)
    click(browser, "#utc")
    assert browser.run(time) == eventually(lambda: browser.run(time), lambda text: "UTC" in text)
    assert (int(local[:2]) - int(browser.run(time)[:2])) % 24 == 9
    click(browser, "#theme")
    theme = browser.run("return document.documentElement.dataset.theme")
    browser.open(f"{console}/events")
    assert browser.run("return document.documentElement.dataset.theme") == theme
    assert browser.run("return document.documentElement.hasAttribute('data-utc')")
    browser.cdp("Emulation.setTimezoneOverride", timezoneId="")
    assert_clean(browser, console)


def _is(wanted: Any) -> Any:
    return lambda value: value == wanted


def test_a_printed_link_signs_in_at_a_host_of_its_own(server: Server, browser: Browser) -> None:
    """The browser finds the name without help, and other hosts do not get the cookie."""
    plain = console_url(server)
    own = link_url(ConsoleConfig(), plain, make_link(server.config))
    assert ".localhost:" in own
    browser.open(own)
    browser.run("document.querySelector('form button').click()")
    eventually(lambda: browser.run("return !!document.getElementById('rail')"), bool)
    assert browser.run("return location.host") == own.split("/")[2]
    browser.open(f"{plain}/keys")
    assert browser.run("return location.pathname") == "/login"
