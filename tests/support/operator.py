# SPDX-License-Identifier: Apache-2.0
"""A person who uses the console in a real browser, and what may never happen meanwhile."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from support.browser import Browser, eventually
from support.console import console_url, signed_in
from support.server_process import Server

#: Runs before the scripts of each page. The messages end up in the log of the browser.
WATCH = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
window.alert = window.prompt = (text) => console.error(`alert: ${text}`);
"""

#: Returns what the element with the focus may be called, and whether it shows that it has it.
FOCUS = """
const one = document.activeElement;
const tab = one.matches(".tabset > input");
const style = getComputedStyle(tab ? one.nextElementSibling : one);
const names = [one.innerText?.trim(), one.id, one.getAttribute("aria-label"), one.name, one.value];
const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
return [names, ring || one === document.body];
"""


class Operator:
    """A browser that shows the console.

    :param url: of the console, without a slash at the end.
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url
        #: Statuses of answers that the test provokes.
        self.allowed: set[int] = set()
        self._watch = browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        browser.requested.clear()

    def close(self) -> None:
        """Stop watching, and restore what tests change in the browser."""
        cdp = self.browser.cdp
        cdp("Page.removeScriptToEvaluateOnNewDocument", **self._watch)
        cdp("Emulation.setEmulatedMedia", media="", features=[])
        cdp("Emulation.setScriptExecutionDisabled", value=False)
        cdp("Emulation.clearDeviceMetricsOverride")
        cdp("Emulation.setTimezoneOverride", timezoneId="")

    def problems(self) -> list[str]:
        """Return the errors of all pages since the last call, and requests to another origin."""
        found = self.browser.errors()
        for status in self.allowed:
            found = [
                one for one in found if not re.search(rf"^{status} |status of {status}\b", one)
            ]
        own = urlsplit(self.url).netloc
        for page, url in self.browser.requested:
            if urlsplit(page).netloc == own and urlsplit(url).netloc not in (own, ""):
                found.append(f"{page} requested {url}")
        self.browser.requested.clear()
        return found

    # ---------------------------------------------------------------------------------- sessions
    def sign_in(self, server: Server, age: float = 0.0) -> None:
        """Get a session by a one-time link, without the browser, and give it the cookie.

        :param age: how many seconds the clock of the server is behind.
        """
        with signed_in(server, self.url, age=age) as client:
            for cookie in client.cookies.jar:
                self.set_cookie(cookie.name, cookie.value or "")

    def set_cookie(self, name: str, value: str) -> None:
        """Give the browser a cookie for the console."""
        self.browser.cdp(
            "Network.setCookie", name=name, value=value, url=f"{self.url}/", httpOnly=True
        )

    # ------------------------------------------------------------------------------------- pages
    def open(self, path: str = "", **query: str) -> None:
        """Open a page of the console."""
        self.browser.open(f"{self.url}/{path}" + (f"?{urlencode(query)}" if query else ""))

    @property
    def path(self) -> str:
        """The path and the query of the page, relative to the console."""
        return self.browser.driver.current_url.removeprefix(f"{self.url}/")

    def text(self, selector: str = "main") -> str:
        """Return the text that is visible in an element; ``""`` if there is none."""
        found: str = self.browser.run(
            "const one = document.querySelector(arguments[0]);"
            " return one?.checkVisibility() ? one.innerText : ''",
            selector,
        )
        return found

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element."""
        found: list[str] = self.browser.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)",
            selector,
        )
        return found

    def one(self, selector: str) -> WebElement:
        """Return the first element."""
        return self.browser.driver.find_element(By.CSS_SELECTOR, selector)

    def named(self, text: str, within: str = "body") -> WebElement:
        """Return the visible button, link or label with exactly this text."""
        for element in self.one(within).find_elements(By.CSS_SELECTOR, "button, a, summary, label"):
            if element.text.strip() == text and element.is_displayed():
                return element
        raise AssertionError(f"there is no {text!r} in {self.text(within)[:2000]}")

    def click(self, text: str, within: str = "body") -> None:
        """Click on a button, a link or a label."""
        element = self.named(text, within)
        # The driver does not know that the top of the page covers what is below it.
        self.browser.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field as a person does."""
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def keys(self, *keys: str) -> None:
        """Press keys; they reach the element that has the focus."""
        for key in keys:
            self.browser.driver.switch_to.active_element.send_keys(key)

    def tab_to(self, text: str, limit: int = 80) -> None:
        """Press Tab until the element with a text, a name or an id has the focus, and shows it."""
        for _ in range(limit):
            self.keys(Keys.TAB)
            name, ring = self.browser.run(FOCUS)
            assert ring, f"the focus is not visible on {name}"
            if text in name:
                return
        raise AssertionError(f"{text!r} cannot be reached by the keyboard")

    def media(self, **features: str) -> None:
        """Set media features such as ``prefers_color_scheme="dark"``."""
        self.browser.cdp(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
            ],
        )

    def size(self, width: int, height: int = 900, scale: float = 1) -> None:
        """Set the size of the page in CSS pixels."""
        self.browser.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def rows(self, selector: str = "#live") -> list[list[str]]:
        """Return the texts of a table's cells, without rows that are opened."""
        found: list[list[str]] = self.browser.run(
            "return [...document.querySelectorAll(arguments[0] + ' > tbody > tr:not(.detail)')]"
            ".map((row) => [...row.cells].map((cell) => cell.innerText))",
            selector,
        )
        return found

    def see(self, text: str, within: str = "body") -> str:
        """Wait until a text is on the page, and return the text of the page."""
        return str(eventually(lambda: self.text(within), lambda found: text in found))

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition is true."""
        return eventually(condition, bool)


@contextlib.contextmanager
def operator(
    browser: Browser, server: Server, url: str | None = None, *, age: float = 0.0
) -> Iterator[Operator]:
    """Yield an operator who is signed in; in the end, no page may have had an error."""
    watcher = Operator(browser, url or console_url(server))
    try:
        watcher.sign_in(server, age)
        yield watcher
        problems = watcher.problems()
        assert not problems, problems
    finally:
        watcher.close()
