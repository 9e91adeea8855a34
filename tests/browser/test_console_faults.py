# SPDX-License-Identifier: Apache-2.0
"""The console while the storage is away, and with foreign pages and proxies around it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engage.console.application import ROUTES
from engage.console.base import ConsoleHandler
from support import console_data, mongo
from support.browser import Browser, Pages
from support.console import console_url, free_port, make_link
from support.operator import Operator, operator
from support.reverse_proxy import reverse_proxy
from support.server_process import SQLITE, Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: Seconds until a page shows that the storage is away: 3, and more for a busy machine.
SHOWN = 20.0


# ------------------------------------------------------------------------------ no storage for now
class Outage:
    """A storage that can be taken away and brought back."""

    def __init__(self, folder: Path, server: mongo.MongoServer | None) -> None:
        self._server = server
        #: Whether each call of the storage fails only after some time.
        self.slow = server is not None
        away = "away.db" if server is None else ""
        self._files = [
            (folder / f"engage.db{end}", folder / f"{away}{end}") for end in ("", "-wal", "-shm")
        ]

    def begin(self) -> None:
        if self._server is not None:
            self._server.kill()
            return
        for here, away in self._files:
            if here.exists():
                here.rename(away)

    def end(self) -> None:
        if self._server is not None:
            self._server.start()
            return
        for here, away in self._files:
            if away.exists():
                away.rename(here)


@pytest.fixture(params=console_data.STORAGES)
def breakable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Outage]]:
    """Return a server whose storage can be taken away."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path / "server"
        folder.mkdir()
        storage, own = SQLITE, None
        if request.param == "mongo":
            own = stack.enter_context(mongo.own(tmp_path))
            storage = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{own.url("a")}"\n'
        storage = storage.replace("[storage]", "[storage]\nwrite_timeout = 1", 1)
        server = stack.enter_context(console_data.start(folder, storage=storage))
        console_data.fill(server)
        yield server, Outage(folder, own)


def test_pages_stay_open_while_the_storage_is_away(
    browser: Browser, breakable: tuple[Server, Outage]
) -> None:
    server, outage = breakable
    with operator(browser, server) as watcher:
        letter = console_data.letters(server)[0]
        watcher.open("live")
        watcher.until(lambda: len(watcher.rows()) >= 6)
        rows = watcher.rows()
        browser.run("window.loaded = true")
        outage.begin()
        since = time.monotonic()
        bar = watcher.until(lambda: watcher.text("#outage"))
        assert time.monotonic() - since < SHOWN
        assert "does not answer" in bar
        assert watcher.rows() == rows, "what was there stays"
        # Every page opens and says it: none is an error of the console.
        driver = browser.driver
        first = driver.current_window_handle
        driver.switch_to.new_window("tab")
        try:
            # overview.json has nothing to answer.
            watcher.allowed.update({404, 503})
            pages = console_data.pages(letter)
            if outage.slow:
                pages = {name: pages[name] for name in ("overview", "rejected", "letter", "user")}
            for name, path in pages.items():
                watcher.open(path)
                assert watcher.text("h1"), name
                assert "Status 500" not in watcher.text(), name
                if name not in ("keys", "webhooks", "empty", "replays"):
                    assert watcher.text("#outage") or "does not answer" in watcher.text(), name
            # A change is refused with the reason, and nothing else.
            watcher.open("keys")
            if watcher.texts("#new-id"):
                watcher.fill("#new-id", "lost")
                watcher.click("Create key")
                watcher.see("The storage does not answer")
        finally:
            driver.close()
            driver.switch_to.window(first)
        outage.end()
        watcher.until(lambda: not watcher.text("#outage"))
        assert server.post("/v1/track", {"userId": "u", "event": "Back"}).status_code == 200
        watcher.see("Back", "#live")
        assert browser.run("return window.loaded"), "the page was loaded again"
        lines = [line for line in watcher.problems() if not line.startswith("failed: ")]
        assert lines == []
        assert "a page failed" not in server.log()


# ---------------------------------------------------------------------------------- foreign pages
FORMS = sorted(
    path.lstrip("/")
    for path, handler in ROUTES.items()
    if getattr(handler, "post", None) not in (None, getattr(ConsoleHandler, "post", None))
)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_foreign_page_cannot_send_a_form(
    operator: Operator, console: Server, pages: Pages, host: str
) -> None:
    """One on another port of this machine, and one on another site."""
    token = make_link(console.config)
    operator.open("audit")
    before = operator.texts("main tbody tr")
    url = operator.url
    page = "<!doctype html><title>Foreign</title>"
    for form in FORMS:
        page += f"""<form id="to-{form}" method="post" action="{url}/{form}">
          <input name="t" value="{token}"><input name="id" value="stolen">
          <input name="action" value="create"></form>"""
    pages.pages["/"] = page
    foreign = pages.url.replace("127.0.0.1", host)
    operator.allowed.add(403)
    for form in FORMS:
        operator.browser.open(foreign)
        operator.browser.run("document.getElementById(arguments[0]).submit()", f"to-{form}")
        operator.see("did not come from a page of the console")
    # With the cookie, by script: refused before anything is read.
    operator.browser.open(foreign)
    script = f"""
      const done = arguments[0];
      fetch("{url}/keys", {{method: "POST", credentials: "include", mode: "no-cors",
        body: new URLSearchParams({{action: "create", id: "stolen"}})}}).then(
        (answer) => done(answer.type), () => done("refused"));
    """
    assert operator.browser.driver.execute_async_script(script) in ("opaque", "refused")
    operator.problems()
    operator.open("audit")
    assert operator.texts("main tbody tr") == before
    operator.open("keys")
    assert "stolen" not in operator.text()


def test_a_foreign_page_cannot_show_or_read_the_console(operator: Operator, pages: Pages) -> None:
    pages.pages["/"] = f'<!doctype html><iframe id="f" src="{operator.url}/keys"></iframe>'
    operator.browser.open(pages.url)
    read = f"""
      const done = arguments[0];
      fetch("{operator.url}/live.json", {{credentials: "include"}}).then(
        () => done("read"), () => done("refused"));
    """
    assert operator.browser.driver.execute_async_script(read) == "refused"
    frame = operator.one("#f")
    operator.browser.driver.switch_to.frame(frame)
    assert "website" not in operator.browser.driver.page_source
    operator.browser.driver.switch_to.default_content()
    messages = " ".join(operator.problems())
    assert "frame-ancestors" in messages or "ERR_BLOCKED_BY_RESPONSE" in messages


# ----------------------------------------------------------------------------- behind a proxy
@pytest.mark.parametrize("strips", [True, False])
def test_scripts_forms_and_files_work_under_a_path_of_a_proxy(
    browser: Browser, tmp_path: Path, strips: bool
) -> None:
    with reverse_proxy("") as proxy:
        proxy.strip = "/engage" if strips else ""
        url = f"{proxy.url}/engage"
        port = free_port()
        proxy.target = f"http://127.0.0.1:{port}"
        extra = console_data.EXTRA.replace("[console]\nport = 0", f"[console]\nport = {port}")
        extra += f'public_url = "{url}"\n'
        with console_data.start(tmp_path, extra=extra) as server:
            console_data.fill(server)
            assert console_url(server) == url
            with operator(browser, server, url) as watcher:
                for path in console_data.pages(console_data.letters(server)[0]).values():
                    watcher.open(path)
                    assert watcher.path.split("?")[0] == path.split("?")[0]
                    links = browser.run("""
                      const all = document.querySelectorAll("a[href], form, link, script[src]");
                      const of = (one, name) => one.getAttribute(name);
                      return [...all].map((one) =>
                        of(one, "href") ?? of(one, "action") ?? of(one, "src")).map((link) =>
                        new URL(link, document.baseURI).href);
                    """)
                    assert {urlsplit(link).path.split("/")[1] for link in links} == {"engage"}
                    watcher.allowed.add(404)
                watcher.open("live")
                watcher.until(lambda: "live" in watcher.text("#state"))
                server.track("m-proxy", event="Behind")
                watcher.see("Behind", "#live")
                watcher.click("Behind", "#live")
                watcher.until(lambda: watcher.text("tr.detail pre"))
                watcher.one("#utc").click()
                watcher.click("Open the event")
                watcher.until(lambda: "UTC" in watcher.text("main"))
                watcher.open("keys")
                watcher.fill("#new-id", "proxied")
                watcher.click("Create key")
                watcher.see("was created")
                watcher.click("Sign out")
                watcher.until(lambda: watcher.path.startswith("login"))
        paths = {request[1].split("?")[0] for request in proxy.requests}
        assert all(path.startswith("/engage") for path in paths), paths
