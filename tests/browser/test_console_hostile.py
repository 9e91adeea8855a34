# SPDX-License-Identifier: Apache-2.0
"""What strangers send is shown as text, on every page: the write key is public."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from support import console_data
from support.browser import Browser
from support.operator import Operator, operator
from support.server_process import Server
from support.waiting import wait_for

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: Text → how the console shows it.
CORPUS = {
    "<img src=x onerror=alert(1)>": None,
    '"><script>alert(2)</script>': None,
    "'><svg/onload=alert(3)>": None,
    "javascript:alert(4)": None,
    "{{7*7}} {% raw 7*7 %} ${7*7}": None,
    "</textarea></pre><script>alert(5)</script>": None,
    "</title><iframe srcdoc='<script>alert(6)</script>'>": None,
    "&lt;b&gt; &amp;amp;": None,
    "evil\u202egnp.exe": r"evil\u202egnp.exe",
    "zero\u200bwidth\ufeff": r"zero\u200bwidth\ufeff",
    "bell\x07 tab\t line\n": r"bell\u0007 tab\u0009 line\u000a",
    "null\x00byte": r"null\u0000byte",
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server to which hostile text was sent in every field."""
    with console_data.start(tmp_path_factory.mktemp("hostile")) as server:
        for number, text in enumerate(CORPUS):
            event = {
                "type": "track",
                "userId": text,
                "event": text,
                "messageId": f"{number} {text}",
                "properties": {text: text, "url": text},
                "context": {"userAgent": text, "page": {"url": text, "title": text}},
            }
            identify = {"userId": text, "traits": {text: text, "email": f"{number}{text}"}}
            server.post("/v1/batch", {"batch": [event]}, headers={"User-Agent": "<b>agent"})
            server.post("/v1/identify", identify)
            # A visitor that belongs to the user.
            server.post("/v1/identify", {"anonymousId": f"{text}!", "traits": {text: text}})
            group = {"userId": text, "anonymousId": f"{text}!", "groupId": text}
            server.post("/v1/group", {**group, "traits": {text: text}})
            # Rejected: the event is not a text.
            server.post("/v1/track", {**event, "event": {text: text}, "messageId": f"bad {number}"})
            server.post("/v1/track", event, key=text.encode("ascii", "ignore").decode() or "x")
        large = {"userId": "large", "event": "L" * 65_536, "messageId": "large"}
        server.post("/v1/track", large)
        server.post("/v1/track", {**large, "event": "L" * 4000, "messageId": "large-2"})
        wait_for(lambda: len(server.export("dead-letters")) >= len(CORPUS), what="the dead letters")
        yield server


@pytest.fixture
def victim(browser: Browser, attacked: Server) -> Iterator[Operator]:
    with operator(browser, attacked) as watcher:
        watcher.browser.run("document.title = ''")
        yield watcher


def harmless(victim: Operator) -> None:
    """Assert that no element, attribute or address came from strangers."""
    found = victim.browser.run("""
      const links = [...document.querySelectorAll("[href], [src], [action], [formaction]")];
      const own = (one) => ["href", "src", "action", "formaction"].every((name) => {
        const value = one.getAttribute(name);
        return value === null || new URL(value, location.href).origin === location.origin;
      });
      const odd = document.querySelectorAll("main img, main iframe, main script, main b, "
        + "main svg[onload], [onerror], [srcdoc]");
      return [...links.filter((one) => !own(one)), ...odd].map((one) => one.outerHTML);
    """)
    assert found == []
    assert victim.problems() == []


def test_every_page_shows_it_as_text(victim: Operator, attacked: Server) -> None:
    letters = console_data.letters(attacked)
    for path in console_data.pages(letters[0]).values():
        victim.allowed.add(404)
        victim.open(path)
        victim.browser.run(
            "for (const one of document.querySelectorAll('details')) one.open = true;"
        )
        harmless(victim)
    victim.open("events")
    shown = victim.text("[data-expand]")
    for text, escaped in CORPUS.items():
        if "\x00" not in text:  # The server rejects it.
            assert " ".join((escaped or text).split()) in " ".join(shown.split())


@pytest.mark.parametrize("path", ["live", "events"])
def test_every_row_opens_to_text(victim: Operator, attacked: Server, path: str) -> None:
    victim.open(path)
    count = victim.browser.run("""
      const links = [...document.querySelectorAll("tr.row a")];
      for (const link of links) link.click();
      return links.length;
    """)
    assert count >= 3 * len(CORPUS) - 3
    victim.until(lambda: len(victim.texts("tr.detail")) == count)
    for button in ("raw", "curl", "pretty"):
        victim.browser.run(
            "const all = document.querySelectorAll(`[data-show=${arguments[0]}]`);"
            " for (const one of all) one.click()",
            button,
        )
        harmless(victim)
    everything = victim.text()
    assert r"evil\u202egnp.exe" in everything
    assert "<img src=x onerror=alert(1)>" in everything
    for character in "\u202e\u200b\ufeff\x07\x00":
        assert character not in everything


def test_every_event_user_and_letter_of_a_stranger_opens(
    victim: Operator, attacked: Server
) -> None:
    victim.allowed.add(404)
    for number, (text, escaped) in enumerate(CORPUS.items()):
        if "\x00" in text:
            continue
        victim.open("user", id=text)
        assert " ".join((escaped or text).split()) in " ".join(victim.text("h1").split())
        harmless(victim)
        for query in ({"visitor": f"{text}!"}, {"id": text, "unlink": f"{text}!"}):
            victim.open("user", **query)
            assert " ".join((escaped or text).split()) in " ".join(victim.text().split())
            harmless(victim)
        victim.open("event", origin="api", id=f"{number} {text}")
        harmless(victim)
        victim.open("search", q=text)
        harmless(victim)
    for letter in console_data.letters(attacked):
        victim.open("letter", id=letter)
        harmless(victim)
        if "Check" in victim.texts("main button"):
            victim.click("Check")
            harmless(victim)


def test_the_address_itself_is_hostile(victim: Operator) -> None:
    victim.allowed.update({400, 404})
    pages = ("live", "events", "rejected", "users", "keys", "audit", "event", "user", "")
    names = ("q", "name", "user", "key", "type", "id", "done", "range", "reason", "next")
    for text in CORPUS:
        query = urlencode(dict.fromkeys(names, text))
        for path in pages:
            victim.browser.open(f"{victim.url}/{path}?{query}")
        harmless(victim)
        victim.open("live", workspace=text)
        harmless(victim)


def test_the_name_of_a_key_is_text(victim: Operator) -> None:
    victim.open("keys")
    name = '"><script>alert(7)</script>\u202e'
    victim.browser.run("document.getElementById('new-name').value = arguments[0]", name)
    victim.fill("#new-id", "hostile")
    victim.click("Create key")
    victim.see("was created")
    assert r"<script>alert(7)</script>\u202e" in victim.text()
    harmless(victim)


def test_a_text_of_an_edited_letter_is_text(victim: Operator, attacked: Server) -> None:
    letter = console_data.letters(attacked)[-1]
    for text in CORPUS:
        victim.open("letter", id=letter)
        body = json.dumps({"userId": text, "event": text, "properties": {text: text}})
        victim.browser.run("document.getElementById('text').value = arguments[0]", body + text)
        victim.click("Check")
        harmless(victim)
