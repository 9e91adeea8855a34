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
BOXES = """return Object.fromEntries([...document.querySelectorAll("input")].map(
    (box) => [box.parentNode.textContent.trim(), box.checked]))"""
STATUS = 'return document.querySelector("output").textContent'


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

    path = "/api/public/subscription-management/"
    [page] = dittofeed_page.blocks("html")
    pages.pages[path + "page"] = page.replace(f'"{path}', f'"{moved.url}{path}')
    [link] = sign(("v-1", ADDRESS))
    unsubscribe = {**link, "s": OPT_OUT, "sub": "0"}

    def shown(**parameters: str) -> dict[str, bool]:
        browser.open(f"{pages.url}{path}page?{urlencode(parameters)}")
        boxes: dict[str, bool] = eventually(lambda: browser.run(BOXES), bool)
        return boxes

    assert shown(**link) == {"Newsletter": True, "Offers": False}
    assert shown(**link, s=OPT_IN, sub="1") == {"Newsletter": True, "Offers": True}
    assert shown(**unsubscribe) == {"Newsletter": False, "Offers": False}
    assert moved.export("subscriptions") == []  # a scanner that opens the link changes nothing
    browser.run('document.querySelector("button").click()')
    eventually(lambda: browser.run(STATUS), lambda text: text == "Saved.")
    stored = {one["groupId"]: one["subscribed"] for one in moved.export("subscriptions")}
    assert stored == {OPT_OUT: False, OPT_IN: False}
    assert shown(**link) == {"Newsletter": False, "Offers": False}
    assert browser.errors() == []

    browser.open(f"{pages.url}{path}page?{urlencode({**link, 'h': '0' * 64})}")
    eventually(lambda: browser.run(STATUS), lambda text: text == "This link is not valid.")
    assert all("401" in error for error in browser.errors())
