# SPDX-License-Identifier: Apache-2.0
"""What an operator does first: sign in, send an event, copy and change write keys, search."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from engage.config import ConsoleConfig
from engage.console.sign_in.links import link_url
from support import console_data
from support.browser import Browser
from support.console import console_url, free_port, make_link
from support.operator import Operator
from support.server_process import KEY, Server
from support.waiting import wait_for

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: Seconds until an event is visible that a 200 acknowledged: 2, and more for a busy machine.
VISIBLE = 15.0


class Terminal:
    """``engage serve`` as a person starts it in a terminal."""

    def __init__(self, folder: Path) -> None:
        self.text = ""
        arguments = [sys.executable, "-m", "engage", "serve"]
        self._terminal, other = pty.openpty()
        self._process = subprocess.Popen(
            arguments, cwd=folder, stdin=other, stdout=other, stderr=other, start_new_session=True
        )
        os.close(other)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 65536):
                self.text += data.decode("utf-8", "replace")
        except OSError:  # How Linux reports that the other side was closed.
            pass

    def link(self) -> str:
        """Return the link that it prints."""
        found = wait_for(
            lambda: re.search(r"http://\S+/link\?t=\S+", self.text), what="the link for signing in"
        )
        return str(found[0])

    def close(self) -> None:
        """Kill it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._terminal)
        self._reader.join()


@pytest.fixture(params=console_data.STORAGES)
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """Run ``engage init`` and ``engage serve`` on free ports."""
    command = [sys.executable, "-m", "engage", "init"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    config = tmp_path / "engage.toml"
    text = config.read_text().replace("port = 8080", f"port = {free_port()}\nworkers = 2")
    text = text.replace("port = 8081", f"port = {free_port()}")
    if request.param == "mongo":
        text = re.sub(
            r"\[storage\].*?(?=\[\[)", console_data.tables("mongo"), text, flags=re.DOTALL
        )
    config.write_text(text)
    started = Terminal(tmp_path)
    yield started
    started.close()


def shell(line: str) -> bytes:
    """Run a line in a shell, and return what it prints."""
    done = subprocess.run(["bash", "-c", line], check=True, capture_output=True, timeout=60)
    return done.stdout


def test_the_first_minute_by_keyboard(terminal: Terminal, browser: Browser) -> None:
    """From the printed link to the event on the page, with the line that the page shows."""
    link = terminal.link()
    watcher = Operator(browser, link.partition("/link")[0])
    try:
        browser.open(link)
        watcher.keys(Keys.ENTER)  # The button has the focus.
        watcher.see("Waiting for the first event", "h2")
        watcher.until(lambda: "listening" in watcher.text("#state"))
        watcher.tab_to("Copy")
        line = watcher.text(".panel pre")
        assert line.startswith("curl -u ")
        wrong = re.sub("-u [0-9a-f]{4}", "-u beef", line)
        assert b'"success":false' in shell(wrong)
        watcher.until(lambda: "401" in watcher.text("#refused"))
        assert "beef" in watcher.text("#refused")
        browser.run("window.loaded = true")
        answer = shell(line)
        answered = time.monotonic()
        assert b'"success":true' in answer
        watcher.until(lambda: "Signed Up" in watcher.text("#live"))
        assert time.monotonic() - answered < VISIBLE
        assert browser.run("return window.loaded"), "the page was loaded again"
        assert not watcher.text("#waiting")
        [row] = watcher.rows()
        assert row[1:6] == ["stored", "track", "Signed Up", "ann", "first"]
        # Then the page loads again by itself, with figures and plots.
        watcher.until(lambda: watcher.texts("#events-plot canvas"))
        assert watcher.problems() == []
    finally:
        watcher.close()


def test_a_printed_link_signs_in_at_a_host_of_its_own(browser: Browser, console: Server) -> None:
    """The browser finds the name without help, and other hosts do not get the cookie."""
    plain = console_url(console)
    own = link_url(ConsoleConfig(), plain, make_link(console.config))
    assert ".localhost:" in own
    watcher = Operator(browser, own.partition("/link")[0])
    try:
        browser.open(own)
        watcher.click("Sign in")
        watcher.until(lambda: watcher.text("#rail"))
        assert browser.run("return location.host") == own.split("/")[2]
        browser.open(f"{plain}/keys")
        assert browser.run("return location.pathname") == "/login"
    finally:
        watcher.close()


#: What the first hours with a server may take: clicks of the mouse, and seconds.
MOST_CLICKS, MOST_SECONDS = 25, 240

#: Runs before the scripts of each page: counts what a person clicks on, on all pages.
COUNT = """
addEventListener("click", (event) => {
  if (event.isTrusted) localStorage.clicks = 1 + Number(localStorage.clicks ?? 0);
}, true);
"""


@pytest.mark.parametrize("terminal", ["sqlite"], indirect=True)
def test_the_first_hours_take_few_clicks(terminal: Terminal, browser: Browser) -> None:
    """From the printed link to what people do first. No page but the link is opened by its URL."""
    began = time.monotonic()
    link = terminal.link()
    watcher = Operator(browser, link.partition("/link")[0])
    counting = browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=COUNT)
    try:
        browser.open(link)
        watcher.click("Sign in")
        # An event from the page itself.
        watcher.see("Waiting for the first event", "h2")
        check_size(browser, FIRST_PAGE)
        line = watcher.text(".panel pre")
        watcher.click("Send a test event")
        watcher.see("The server accepted the test event", "[role=status]")
        watcher.click("Show it", "[role=status]")
        watcher.see("Test Event")
        # An event from a client, with the line of the page.
        watcher.click("Live")
        watcher.until(lambda: "live" in watcher.text("#state"))
        assert b'"success":true' in shell(line)
        watcher.until(lambda: "Signed Up" in watcher.text("#live"))
        # One that is rejected, because a name in it is misspelt.
        assert b"did you mean" in shell(line.replace('"event"', '"evnt"'))
        watcher.until(lambda: "rejected" in watcher.text("#live"))
        watcher.click("Rejected", "#rail")
        watcher.see("you sent `evnt`")
        watcher.click("Open")
        text = str(watcher.one("#text").get_property("value"))
        watcher.fill("#text", text.replace('"evnt"', '"event"'))
        watcher.click("Check")
        watcher.see("This text is valid", "[role=status]")
        watcher.click("Replay", "form.split")
        watcher.see("was replayed: it is stored", "[role=status]")
        # The user of these events, who has no profile yet, and then one.
        watcher.fill(".search [type=search]", "an")
        watcher.keys(Keys.ENTER)
        watcher.see("events have this user id", "main")
        watcher.see("Signed Up", "main")
        identify = line.replace('"event": "Signed Up"', '"traits": {"email": "ann@example.com"}')
        assert b'"success":true' in shell(identify.replace("/track", "/identify"))
        watcher.fill(".search [type=search]", "ann@example.com")
        watcher.keys(Keys.ENTER)
        watcher.see("ann@example.com", "main")
        assert watcher.path.startswith("user?")
        # A key of one's own.
        watcher.click("Keys", "#rail")
        watcher.fill("#new-id", "ios")
        watcher.click("Create key")
        watcher.see("was created", "[role=status]")
        row = row_of(watcher, "ios")
        own = re.sub("[0-9a-f]{32}", watcher.text(f"{row} code"), line)
        assert b'"success":true' in shell(own)
        watcher.click("Disable", row_of(watcher, "ios"))
        confirm(watcher)
        watcher.see("was disabled", "[role=status]")
        wait_for(lambda: b"is disabled" in shell(own), what="the key to be refused")
        clicks = int(browser.run("return localStorage.clicks"))
        assert 5 < clicks <= MOST_CLICKS
        assert time.monotonic() - began < MOST_SECONDS
        assert watcher.problems() == []
    finally:
        browser.cdp("Page.removeScriptToEvaluateOnNewDocument", **counting)
        watcher.close()


def row_of(watcher: Operator, key_id: str) -> str:
    """Return a selector of the row of a key."""
    ids = [text.split()[0] for text in watcher.texts("main table:first-of-type tbody tr td.main")]
    return f"main table tbody tr:nth-child({ids.index(key_id) + 1})"


def confirm(one: Operator) -> None:
    """Answer the question whether to disable a key; there is none until its use is counted."""
    one.until(lambda: "?" in one.path and ("ask=" in one.path or "done=" in one.path))
    if "ask=" in one.path:
        assert "Disable the key ios?" in one.text("main")
        one.click("Disable ios", "main")


def test_the_buttons_copy_the_exact_key_header_and_line(
    operator: Operator, console: Server
) -> None:
    browser = operator.browser
    browser.cdp(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )

    def copied() -> str:
        script = "navigator.clipboard.readText().then(arguments[arguments.length - 1])"
        return str(browser.driver.execute_async_script(script))

    def copy(text: str, within: str) -> str:
        operator.click(text, within)
        operator.until(lambda: "Copied" in operator.text(within))
        operator.until(lambda: "Copied" not in operator.text(within))
        return copied()

    operator.open("keys")
    row = row_of(operator, "website")
    assert copy("Copy", row) == KEY
    header = copy("As header", row)
    assert header == console.authorization
    command = [
        *("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"Authorization: {header}"),
        *("-H", "Content-Type: application/json", "-d", '{"userId": "u", "event": "E"}'),
        f"{console.url}/v1/track",
    ]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"200"
    line = copy("Copy", "#snippets .tabset .panel")
    assert line == operator.text("#snippets .panel pre")
    # Without the API of secure contexts: plain http under another name.
    browser.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    operator.click("As header", row)
    operator.open("keys")
    assert copied() == header


# --------------------------------------------------------------------------------------- budgets
#: Bytes of the first page with all its files, compressed; of Live.
FIRST_PAGE, LIVE_PAGE = 45_000, 20_000


#: The files of the page and their sizes as sent; the icon is only loaded by browsers with a window.
FILES = """
const icon = document.querySelector("link[rel=icon]").href;
await (await fetch(icon)).text();
while (!performance.getEntriesByName(icon).length) await new Promise((go) => setTimeout(go, 10));
const all = ["navigation", "resource"].flatMap((type) => performance.getEntriesByType(type));
return all.filter((one) => !/\\.json/.test(one.name))
  .map((one) => [one.name, one.encodedBodySize, one.renderBlockingStatus]);
"""


def check_size(browser: Browser, limit: int) -> None:
    """Check that all files of the page together are small, and that no script delays the page."""
    files = browser.run(f"return (async () => {{{FILES}}})()")
    assert sum(size for _, size, _ in files) <= limit, files
    assert all(size for _, size, _ in files), files
    for ending in (".css", ".js", ".svg"):
        assert any(ending in name for name, _, _ in files), files
    assert [name for name, _, blocking in files if ".js" in name and blocking == "blocking"] == []


@pytest.mark.parametrize(("path", "limit"), [("", FIRST_PAGE), ("live", LIVE_PAGE)])
def test_a_page_is_small(operator: Operator, console: Server, path: str, limit: int) -> None:
    operator.browser.cdp("Network.clearBrowserCache")
    operator.open(path)
    check_size(operator.browser, limit)
