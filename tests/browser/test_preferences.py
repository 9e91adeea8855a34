# SPDX-License-Identifier: Apache-2.0
"""The preferences page in a real browser: with and without scripts, at every size, by keyboard.

``ENGAGE_PICTURES=1 pytest tests/browser/test_preferences.py -k picture`` writes the pictures of
docs/subscriptions.md again.
"""

from __future__ import annotations

import base64
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from support.axe import accessible
from support.browser import Browser, Pages
from support.operator import Operator
from support.png import small
from support.preferences import AT_FIRST, GROUPS, choices, ledger, members, page_of
from support.server_process import Server, start_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

IMAGES = Path(__file__).resolve().parents[2] / "docs/images"
LOGO = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 215 44">
<rect width="44" height="44" rx="11" fill="#0b6b57"/>
<path d="M13 31V13l18 18V13" stroke="#fff" stroke-width="4" fill="none" stroke-linejoin="round"/>
<text x="56" y="31" font-family="system-ui,sans-serif" font-size="26" font-weight="700"
 fill="#12211d">Northwind</text></svg>
"""
LOOKS = """
[workspaces.preferences_page]
name = "Northwind"
logo = "logo.svg"
color = "#0b6b57"
imprint = "http://127.0.0.1:{port}/imprint"
privacy = "http://127.0.0.1:{port}/privacy"
"""
#: The workspace of the pictures.
SHOP = """
[[workspaces]]
id = "shop"
subscription_secret = "secret-of-the-shop"
[workspaces.preferences_page]
name = "Northwind"
logo = "logo.svg"
color = "#0b6b57"
imprint = "https://www.example.com/imprint"
privacy = "https://www.example.com/privacy"
""" + "".join(
    f'[[workspaces.subscription_groups]]\nid = "g{n}"\nname = "{name}"\n'
    f'channel = "{channel}"\ntype = "{kind}"\n'
    for n, (name, channel, kind) in enumerate(
        [
            ("Newsletter", "email", "opt_out"),
            ("Offers and vouchers", "email", "opt_in"),
            ("Product updates", "email", "opt_out"),
            ("Delivery news", "sms", "opt_out"),
        ]
    )
)
EXPIRED = 1_000_000_000
SIZES = (320, 390, 768, 1280)
#: The largest part of an element of the page that lies outside of the window, in pixels.
OVERFLOW = """return Math.max(...[...document.querySelectorAll("body *")].map((one) => {
  const box = one.getBoundingClientRect();
  return Math.max(box.right - innerWidth, -box.left);
}))"""
#: What one presses: its text and its size.
TARGETS = """return [...document.querySelectorAll("button, label, a")].map((one) => {
  const box = one.getBoundingClientRect();
  return [one.innerText, box.width, box.height];
})"""

#: The left edges of the first and the last character of a text.
ENDS = """const all = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (all.nextNode().data.trim() != arguments[0]);
const left = (start) => {
  const range = new Range();
  range.setStart(all.currentNode, start);
  range.setEnd(all.currentNode, start + 1);
  return range.getBoundingClientRect().left;
};
return [left(0), left(all.currentNode.length - 1)];"""


class Elsewhere(http.server.ThreadingHTTPServer):
    """Another website, to which the page links. It keeps the headers of its requests."""

    daemon_threads = True

    def __init__(self) -> None:
        seen: list[dict[str, str]] = []
        self.seen = seen

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "favicon" not in self.path:
                    seen.append(dict(self.headers))
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b"<!doctype html><title>Elsewhere</title>")

            def log_message(self, *arguments: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def engage(tmp_path_factory: pytest.TempPathFactory, elsewhere: Elsewhere) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("preferences")
    (folder / "logo.svg").write_text(LOGO)
    looks = LOOKS.format(port=elsewhere.server_address[1])
    with start_server(folder, config_extra=looks + GROUPS + SHOP) as server:
        yield server


@pytest.fixture
def person(browser: Browser, engage: Server) -> Iterator[Operator]:
    """Return a person with a browser; in the end, no page may have had an error, a violation of its
    policy, or a request to another origin."""
    watcher = Operator(browser, engage.url)
    try:
        yield watcher
        problems = watcher.problems()
        assert not problems, problems
    finally:
        watcher.close()


def follow(person: Operator, link: dict[str, str], **more: str) -> None:
    person.browser.open(person.url + page_of(link, **more))


#: What is on the page → the link that leads there, and a button to press.
VIEWS: dict[str, tuple[dict[str, str], str]] = {
    "choices": ({}, ""),
    "unsubscribe": ({"s": "news", "sub": "0"}, ""),
    "subscribe": ({"s": "offers", "sub": "1"}, ""),
    "saved": ({}, ".save"),
    "unsubscribed": ({"s": "news", "sub": "0"}, "[name=unsubscribe]"),
    "expired": ({"e": str(EXPIRED), "s": "news"}, ""),
    "not valid": ({"h": "0"}, ""),
    "Arabic": ({"s": "news", "sub": "0", "lang": "ar"}, ""),
}


def show(person: Operator, view: str, user: str) -> None:
    query, button = VIEWS[view]
    link = members(user, expires=EXPIRED if "e" in query else None)
    follow(person, {**link, **query})
    if button:
        person.one(button).click()
        person.until(lambda: person.text("[role=status]"))


@pytest.mark.parametrize("view", VIEWS)
def test_a_page_is_accessible_in_both_themes_and_at_every_size(person: Operator, view: str) -> None:
    person.allowed = {401}
    found = {}
    for theme in ("light", "dark"):
        person.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        for width in SIZES:
            person.size(width)
            show(person, view, f"axe {view} {theme} {width}")
            found[theme, width] = accessible(person.browser)
            assert person.browser.run(OVERFLOW) <= 0, (theme, width)
    assert {where: lines for where, lines in found.items() if lines} == {}


def test_at_400_percent_nothing_is_cut_off(person: Operator) -> None:
    """A window of 1280 by 1024 pixels then has 320 by 256 CSS pixels; and with large letters."""
    for size in ("16px", "32px"):
        person.size(320, 256, scale=4)
        follow(person, members("zoom"), s="news", sub="0")
        person.browser.run("document.documentElement.style.fontSize = arguments[0]", size)
        assert person.browser.run(OVERFLOW) <= 0
        cut = "return [...document.querySelectorAll('button, label, p, h1, h2')]"
        assert person.browser.run(f"{cut}.filter((one) => one.scrollWidth > one.clientWidth)") == []


def test_what_one_presses_is_large(person: Operator) -> None:
    person.size(320)
    follow(person, members("large"), s="news", sub="0")
    targets = person.browser.run(TARGETS)
    assert len(targets) == 4 + len(AT_FIRST) + 2
    for name, width, height in targets:
        assert width >= 44, name
        assert height >= 44, name


def test_a_name_in_latin_letters_has_its_order_in_arabic(person: Operator) -> None:
    follow(person, members("reader"), lang="ar")
    assert "Offers & <more>" in person.texts("label")
    ends = person.browser.run(ENDS, "Offers & <more>")
    assert ends[0] < ends[1]


def test_forced_colours_show_the_buttons(person: Operator) -> None:
    person.media(forced_colors="active")
    follow(person, members("forced"), s="news", sub="0")
    widths = person.browser.run(
        "return [...document.querySelectorAll('button')].map("
        "(one) => getComputedStyle(one).borderTopWidth)"
    )
    assert set(widths) == {"1px"}


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
def test_a_person_chooses(person: Operator, engage: Server, scripts: bool) -> None:
    person.browser.cdp("Emulation.setScriptExecutionDisabled", value=not scripts)
    driver = person.browser.driver
    user = f"chooses {scripts}"
    link = members(user)
    follow(person, link, lang="de")
    assert person.one("h1").text == "Ihre Abonnements"
    for name in ("Rundbrief", "Offers & <more>"):
        person.click(name)
    person.click("Auswahl speichern")
    person.until(lambda: "ist gespeichert" in driver.page_source)
    assert person.one("[role=status]").text.endswith("Ihre Auswahl ist gespeichert.")
    assert driver.title.startswith("Ihre Auswahl ist gespeichert.")
    assert choices(engage, link) == {**AT_FIRST, "news": False, "offers": True}
    boxes = driver.find_elements("css selector", "input[type=checkbox]")
    ticked = {box.get_attribute("value") for box in boxes if box.is_selected()}
    assert ticked == {"offers", "product", "delivery"}
    person.click("Alles abbestellen")
    person.until(lambda: "alles abbestellt" in driver.page_source)
    assert not any(choices(engage, link).values())
    assert {entry["how"] for entry in ledger(engage, user)} == {"page"}
    assert "Chrome" in ledger(engage, user)[0]["userAgent"]


def test_the_link_of_a_message_unsubscribes_after_one_press(
    person: Operator, engage: Server
) -> None:
    link = members("presses")
    follow(person, link, s="news", sub="0")
    assert ledger(engage, "presses") == []
    person.click("Unsubscribe from Newsletter")
    person.see("You are unsubscribed from Newsletter.")
    # A screen reader begins with the sentence.
    focused = "return document.activeElement.getAttribute('role')"
    assert person.browser.run(focused) == "status"
    assert choices(engage, link) == {**AT_FIRST, "news": False}
    person.browser.driver.refresh()
    follow(person, link, s="news", sub="0")
    assert "Do you want" not in person.text()


def test_the_page_works_by_keyboard(person: Operator, engage: Server) -> None:
    link = members("keyboard")
    follow(person, link, s="news", sub="0")
    for name in ("news", "offers", "product", "delivery"):
        person.tab_to(name)
        if name in ("offers", "product"):
            person.keys(Keys.SPACE)
    person.tab_to("Save my choices")
    person.keys(Keys.ENTER)
    person.see("Your choices are saved.")
    assert choices(engage, link) == {**AT_FIRST, "offers": True, "product": False}


def test_no_other_website_learns_of_the_link(
    person: Operator, engage: Server, elsewhere: Elsewhere, pages: Pages
) -> None:
    link = members("secret")
    follow(person, link)
    person.click("Imprint")
    person.until(lambda: person.browser.driver.title == "Elsewhere")
    assert len(elsewhere.seen) == 1
    assert "Referer" not in elsewhere.seen[0]
    # Nothing else was requested of another origin, and the form sends no URL with it either.
    person.browser.requested.clear()
    follow(person, link)
    person.click("Save my choices")
    person.see("Your choices are saved.")
    assert person.browser.run("return document.referrer") == ""
    assert person.problems() == []
    # No page can show it in a frame.
    frame = f'<!doctype html><title>Evil</title><iframe src="{engage.url}{page_of(link)}"></iframe>'
    pages.pages["/"] = frame
    person.browser.open(pages.url + "/")
    person.until(lambda: any("frame-ancestors" in line for line in person.browser.errors()))
    person.browser.requested.clear()


@pytest.mark.checkout
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture(person: Operator, theme: str) -> None:
    cdp = person.browser.cdp
    person.media(prefers_color_scheme=theme)
    cdp("Emulation.setScrollbarsHidden", hidden=True)
    person.size(390, 1010)
    link = members("picture", workspace="shop", secret="secret-of-the-shop")
    follow(person, link, s="g0", sub="0")
    picture = small(base64.b64decode(cdp("Page.captureScreenshot", format="png")["data"]))
    cdp("Emulation.setScrollbarsHidden", hidden=False)
    file = IMAGES / f"preferences-{theme}.png"
    if os.environ.get("ENGAGE_PICTURES"):
        file.write_bytes(picture)
    assert picture.startswith(b"\x89PNG")
    assert max(len(picture), file.stat().st_size) < 60_000
