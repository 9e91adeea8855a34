# SPDX-License-Identifier: Apache-2.0
"""Live in a browser: many events at once, readers who must not be disturbed, hidden tabs."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator

import httpx
import pytest

from support.browser import Browser, Pages, eventually
from support.console import CONSOLE, console_url
from support.operator import Operator, operator
from support.reverse_proxy import reverse_proxy
from support.server_process import KEY, Server, start_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

RING = 500


@pytest.fixture
def watcher(browser: Browser, starred: Server) -> Iterator[Operator]:
    with operator(browser, starred) as watcher:
        yield watcher


def send(server: Server, name: str, count: int, writers: int = 3) -> None:
    """Send events with that name by several writers at once, each with connections of its own."""

    def write(writer: int) -> None:
        with httpx.Client(base_url=server.url, auth=(KEY, ""), timeout=60) as client:
            for start in range(writer, count, writers * 5):
                numbers = range(start, min(start + writers * 5, count), writers)
                batch = [
                    {"type": "track", "userId": "u", "event": name, "messageId": f"{name}-{n}"}
                    for n in numbers
                ]
                assert client.post("/v1/batch", json={"batch": batch}).status_code == 200

    with concurrent.futures.ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))


def seen(operator: Operator, name: str) -> tuple[int, bool]:
    """Return how many rows have that name, and whether the page says that more are not shown."""
    rows = operator.rows()
    return (
        sum(len(row) > 3 and row[3] == name for row in rows),
        any(row[0].startswith("More came") for row in rows),
    )


def test_500_events_in_a_second_and_a_reader(watcher: Operator, starred: Server) -> None:
    watcher.size(1280, 600)
    send(starred, "Before", 60)
    watcher.open("live")
    watcher.until(lambda: seen(watcher, "Before")[0] == 60)
    watcher.click("Pause")
    watcher.browser.run("scrollTo(0, 700)")
    place = "return [scrollY, document.querySelector('#live tbody').textContent]"
    before = watcher.browser.run(place)
    assert before[0] > 0
    send(starred, "Many", 500)
    watcher.until(lambda: (int(watcher.browser.run(PILL)) or 0) >= 200)
    for _ in range(5):
        assert watcher.browser.run(place) == before, "the page moved under the reader"
        time.sleep(0.3)
    # Under a reader who has scrolled, the table would not take what a slow store returns later.
    watcher.browser.run("scrollTo(0, 0)")
    watcher.browser.run("document.getElementById('pause').click()")
    eventually(lambda: seen(watcher, "Many"), lambda found: found[1] or found[0] >= RING - 60)
    assert len(watcher.rows()) <= RING
    # Newest first, whatever came when.
    times = watcher.browser.run(
        "return [...document.querySelectorAll('#live tr.row')].map((row) => +row.dataset.at)"
    )
    assert times == sorted(times, reverse=True)


PILL = "return document.getElementById('pill').textContent.split(' ')[0]"


def test_rows_do_not_move_under_the_pointer_a_selection_or_the_focus(
    watcher: Operator, starred: Server
) -> None:
    send(starred, "First", 5)
    watcher.open("live")
    watcher.until(lambda: "First" in watcher.text("#live"))
    link = watcher.one("#live tr.row a")
    watcher.browser.run("arguments[0].focus()", link)
    send(starred, "Second", 3)
    watcher.until(lambda: seen(watcher, "Second")[0] == 3)
    assert watcher.browser.run("return document.activeElement === arguments[0]", link)
    watcher.browser.run("getSelection().selectAllChildren(arguments[0])", link)
    first = watcher.rows()[0]
    send(starred, "Third", 3)
    watcher.until(lambda: int(watcher.browser.run(PILL) or 0) == 3)
    assert watcher.rows()[0] == first
    watcher.click("3 new ▲")
    assert seen(watcher, "Third")[0] == 3


def test_an_open_row_stays_open_while_the_page_is_paused(
    watcher: Operator, starred: Server
) -> None:
    starred.track("big", event="Opened", properties={"big": 9007199254740993})
    watcher.open("live", name="Opened")
    watcher.until(lambda: seen(watcher, "Opened")[0] == 1)
    watcher.click("Opened", "#live")
    watcher.see("9007199254740993", ".detail pre")
    watcher.one(".detail [data-show=curl]").click()
    assert watcher.text(".detail pre").startswith("curl -u ")
    watcher.browser.run("document.activeElement.blur()")
    watcher.keys(" ")
    assert watcher.text("#state") == "paused"
    send(starred, "Opened", 3)
    watcher.until(lambda: watcher.text("#pill") == "3 new ▲")
    assert seen(watcher, "Opened")[0] == 1
    watcher.one("#pause").click()
    assert seen(watcher, "Opened")[0] == 4
    assert watcher.text(".detail pre").startswith("curl -u ")


def test_theme_and_time_zone_are_remembered(watcher: Operator, starred: Server) -> None:
    starred.track("timed")
    watcher.browser.cdp("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    watcher.open("live")
    watcher.until(watcher.rows)
    local = watcher.text("#live time")
    watcher.one("#utc").click()
    assert "UTC" in watcher.text("#live time")
    assert (int(local[:2]) - int(watcher.text("#live time")[:2])) % 24 == 9
    watcher.one("#theme").click()
    theme = watcher.browser.run("return document.documentElement.dataset.theme")
    watcher.open("events")
    assert watcher.browser.run("return document.documentElement.dataset.theme") == theme
    assert watcher.browser.run("return document.documentElement.hasAttribute('data-utc')")


# ------------------------------------------------------------------------ rejected and refused
@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that accepts browsers of one site only."""
    extra = f'[cors]\norigins = ["https://shop.example"]\n{CONSOLE}'
    folder = tmp_path_factory.mktemp("strict")
    with start_server(folder, workers=2, config_extra=extra) as server:
        yield server


def test_rejected_events_stand_beside_their_neighbours_and_refused_requests_above(
    browser: Browser, strict: Server, pages: Pages
) -> None:
    with operator(browser, strict) as watcher:
        watcher.open("live")
        good = {"type": "track", "userId": "u", "event": "Good"}
        batch = [good, {"type": "track", "userId": "u", "properties": 7, "event": "Bad"}, good]
        strict.post("/v1/batch", {"batch": batch})
        watcher.until(lambda: len(watcher.rows()) == 3)
        rows = {row[3]: row for row in watcher.rows()}
        assert rows["Good"][1] == "stored"
        assert rows["Bad"][1] == "rejected"
        assert "properties: " in rows["Bad"][6]
        watcher.click("Bad", "#live")
        watcher.until(lambda: "properties: " in watcher.text(".detail .reasons"))
        assert watcher.texts(".detail mark")

        strict.track("wrong", key=None, headers={})
        strict.post("/v1/track", good, key="0123456789abcdef")
        watcher.until(lambda: watcher.text("#refused"))
        watcher.one("#refused summary").click()
        watcher.see("0123", "#refused tbody")
        assert "0123456789" not in watcher.text("#refused")
        assert "401" in watcher.text("#refused tbody")
        # A web page of another origin, in this browser.
        address = watcher.url
        pages.pages["/"] = "<!doctype html><title>Foreign</title>"
        browser.open(pages.url)
        script = f"""
          const done = arguments[0];
          fetch("{strict.url}/v1/track", {{method: "POST", body: "{{}}",
            headers: {{"Content-Type": "application/json"}}}}).then(done, () => done("refused"));
        """
        assert browser.driver.execute_async_script(script) == "refused"
        browser.errors()
        browser.open(f"{address}/live")
        watcher.until(lambda: watcher.texts("#refused tbody tr"))
        watcher.browser.run("document.getElementById('refused').open = true")
        watcher.see(pages.url, "#refused tbody")


# ---------------------------------------------------------------------------------- what it costs
def test_a_hidden_tab_asks_for_nothing(browser: Browser, console: Server) -> None:
    with (
        reverse_proxy(console_url(console)) as proxy,
        operator(browser, console, proxy.url) as watcher,
    ):

        def polls() -> int:
            return sum("live.json" in request[1] for request in proxy.requests)

        watcher.open("live")
        watcher.until(lambda: polls() > 1)
        first = browser.driver.current_window_handle
        browser.driver.switch_to.new_window("tab")
        second = browser.driver.current_window_handle
        try:
            time.sleep(3)  # The last answers may be on their way.
            before = polls()
            time.sleep(3)
            assert polls() == before
        finally:
            browser.driver.close()
            browser.driver.switch_to.window(first)
        assert second != first
        since = polls()
        browser.cdp("Page.bringToFront")
        watcher.until(lambda: polls() > since)
        console.track("m-after-hidden", event="After")
        watcher.see("After", "#live")
