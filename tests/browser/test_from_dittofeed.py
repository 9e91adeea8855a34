# SPDX-License-Identifier: Apache-2.0
"""A website that moves from Dittofeed: its SDK in the browser, and the page for links in old
mails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from support import dittofeed_page
from support.browser import Browser, Pages, eventually
from support.dittofeed_page import AUTHORIZATION, OPT_IN, OPT_OUT, sign
from support.server_process import Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

ADDRESS = "ann@example.com"
BOXES = """return Object.fromEntries([...document.querySelectorAll("input[type=checkbox]")].map(
    (box) => [box.parentNode.textContent.trim(), box.checked]))"""
STATUS = 'return document.querySelector("[role=status]")?.textContent'
BUTTONS = "return [...document.querySelectorAll('button')].map((one) => one.textContent)"
DONE = "You are unsubscribed from everything."


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[Server]:
    with dittofeed_page.start(tmp_path) as server:
        yield server


def test_a_visitor_signs_up_and_unsubscribes_by_an_old_link(
    moved: Server, browser: Browser, pages: Pages
) -> None:
    """The link was sent to the visitor; the choice is the user's."""
    pages.pages["/"] = '<!doctype html><title>Shop</title><script src="/dittofeed.js"></script>'
    browser.open(pages.url + "/")
    browser.run(
        f"""
window.ready = DittofeedSdk.init({{ writeKey: "{AUTHORIZATION}", host: "{moved.url}" }});
ready.then(() => {{
  DittofeedSdk.identify({{ anonymousId: "v-1", traits: {{ email: "{ADDRESS}" }} }});
  DittofeedSdk.track({{ anonymousId: "v-1", event: "Subscribed" }});
  DittofeedSdk.flush();
}});"""
    )
    [visitor] = eventually(lambda: moved.export("visitors"), lambda found: len(found) == 1)
    assert visitor["traits"] == {"email": ADDRESS}
    browser.run(
        """ready.then(() => {
  DittofeedSdk.identify({ userId: "u-1", anonymousId: "v-1" });
  DittofeedSdk.page({ userId: "u-1", name: "Welcome" });
  DittofeedSdk.flush();
});"""
    )
    [user] = eventually(lambda: moved.export("users"), lambda found: len(found) == 1)
    assert (user["userId"], user["traits"]) == ("u-1", {"email": ADDRESS})
    eventually(lambda: moved.export("events"), lambda found: len(found) == 4)

    [link] = sign(("v-1", ADDRESS))
    unsubscribe = {**link, "s": OPT_OUT, "sub": "0"}

    def shown(path: str = "/api/public/subscription-management/page", **query: str) -> None:
        browser.open(f"{moved.url}{path}?{urlencode(query)}")

    shown(**link)
    assert browser.run(BOXES) == {"Newsletter": True, "Offers": False}
    shown(**link, s=OPT_IN, sub="1")
    assert browser.run(BUTTONS)[0] == "Subscribe to Offers"
    shown("/dashboard/public/subscription-management", **unsubscribe)
    assert browser.run(BUTTONS)[:2] == [
        "Unsubscribe from everything by e-mail",
        "Unsubscribe from Newsletter",
    ]
    assert moved.export("subscriptions") == []  # a scanner that opens the link changes nothing
    browser.run('document.querySelector("button").click()')
    eventually(lambda: browser.run(STATUS), lambda text: text == DONE)
    stored = {one["groupId"]: one["subscribed"] for one in moved.export("subscriptions")}
    assert stored == {OPT_OUT: False, OPT_IN: False}
    shown(**link)
    assert browser.run(BOXES) == {"Newsletter": False, "Offers": False}
    assert browser.errors() == []

    # The one-click header of the same e-mail.
    answer = moved.client.post(
        f"/api/public/subscription-management/page?{urlencode(unsubscribe)}",
        data={"List-Unsubscribe": "One-Click"},
    )
    assert answer.status_code == 200

    shown(**{**link, "h": "0" * 64})
    assert browser.run("return document.querySelector('h1').textContent") == (
        "This link is not valid"
    )
    assert all("401" in error for error in browser.errors())
