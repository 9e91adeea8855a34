# SPDX-License-Identifier: Apache-2.0
"""Long ids and names on every page: a row of a table stays one line or two, nothing is wider than
its card, and nothing is cut without a way to see all of it.

``ENGAGE_SCREENSHOTS=folder`` writes a picture of each page at each width in both themes.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from engage.api import Kind, Subject
from engage.subscriptions.links import subscription_hash
from support import console_data
from support.browser import Browser
from support.console import signed_in
from support.operator import Operator, operator
from support.server_process import Server
from support.waiting import wait_for

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: The second is the narrowest with a table that has columns.
WIDTHS = (1280, 1195, 768, 390, 320)
PICTURES = os.environ.get("ENGAGE_SCREENSHOTS", "")

KEY_ID = "website-of-the-second-largest-customer-in-the-north-of-the-land0"
assert len(KEY_ID) == 64
#: Event names of 1024 characters: one word, words, right to left, emoji. Then short ones.
NAMES = [
    *("W" * 1024, ("Checkout Completed " * 60)[:1024].strip()),
    *(("اكتمل الطلب " * 100)[:1024].strip(), ("🛒 🎉 " * 300)[:1024].strip(), "Order", "✓"),
]
PEOPLE = ["u" * 512, "ann@example.com", "מִשְׁתַּמֵּשׁ " * 20 + "!", "👩‍👩‍👧" * 60, "7", "a-" + "0f3b" * 9]
#: The message id of the longest event.
MESSAGE = "m" * 256
#: Of rejected events: the link comes from anywhere.
CAUSE = {"reason": "r" * 400, "pointer": "/" + "p" * 1600, "key": KEY_ID}

GROUP = "newsletter-" * 11
SUBSCRIPTIONS = "/api/public/subscription-management/user-subscriptions"

EXTRA = f"""
[[workspaces.write_keys]]
id = "{KEY_ID}"
key = "{"k" * 60}"

[workspaces.webhooks.segment]
secret = "a shared secret"

[[workspaces.subscription_groups]]
id = "{GROUP}"
name = "{"Newsletter of the spring and of the summer " * 5}"
channel = "email"
type = "opt_in"

[[workspaces]]
id = "other"
name = "{"Another workspace " * 12}"
[[workspaces.write_keys]]
id = "{KEY_ID[::-1]}"
key = "{"K" * 120}"

[console]
port = 0
"""

#: Returns what is wrong with the page that is shown, as lines.
CHECK = r"""
const wrong = [];
const say = (what, one) => wrong.push(
  `${what}: ${one.tagName.toLowerCase()}.${[...one.classList].join(".")} in `
  + `${one.closest("section, details, header, form")?.className}: ${one.innerText.slice(0, 30)}`);
const shown = (one) => one.checkVisibility({visibilityProperty: true}) && one.offsetWidth;
const over = document.documentElement.scrollWidth - innerWidth;
if (over > 0) wrong.push(`the page is ${over} px too wide`);

function inside(one, box) {
  const [a, b] = [one.getBoundingClientRect(), box.getBoundingClientRect()];
  if (a.right > b.right + 1 || a.left < b.left - 1) say("wider than its card", one);
}
for (const table of document.querySelectorAll(".table > table")) {
  if (!shown(table)) continue;
  inside(table, table.parentElement);
  for (const cell of table.querySelectorAll(":scope > * > tr:not(.detail) > :is(td, th)")) {
    if (!shown(cell)) continue;
    inside(cell, table.parentElement);
    const text = document.createRange();
    text.selectNodeContents(cell);
    const style = getComputedStyle(cell);
    const room = cell.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
    // A line of text or of small buttons has at most 25 px.
    if (Math.min(room, text.getBoundingClientRect().height) > 2 * 25) say("three lines", cell);
  }
}

for (const one of document.querySelectorAll("td :is(button, .button)")) {
  if (shown(one)) inside(one, one.closest("td"));
}

// All of a text that is cut is in its title, and behind its link or there when it is pressed.
const cut = (one) =>
  one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 4;
for (const one of document.querySelectorAll("body *")) {
  const style = getComputedStyle(one);
  if (!["hidden", "clip"].includes(style.overflowX) || style.clipPath !== "none") continue;
  if (!one.innerText?.trim() || !shown(one) || !cut(one)) continue;
  one.dispatchEvent(new Event("pointerover", {bubbles: true}));
  if (one.title !== one.innerText) say("no title", one);
  if (one.closest("tr.row")) continue;
  one.click();
  if (cut(one)) say("cut", one);
  one.classList.remove("whole");
}
for (const field of document.querySelectorAll("input[type=datetime-local], button, select")) {
  if (!shown(field)) continue;
  if (field.scrollWidth > field.clientWidth + 1) say("cut", field);
  if (field.type === "datetime-local" && field.offsetWidth < 13 * 15) say("cut", field);
  if (field.tagName === "SELECT" && field.offsetWidth > 16 * 15) say("too wide", field);
}
for (const button of document.querySelectorAll(".filters > :is(button, .button)")) {
  const first = button.closest(".filters").querySelector(".field > :is(input, select)");
  const [low, field] = [button, first].map((one) => one?.getBoundingClientRect());
  const beside = field && low.top < field.bottom && field.top < low.bottom;
  if (beside && Math.abs(low.bottom - field.bottom) > 1) say("not in line with its field", button);
}
// One line for each kind.
return [...new Map(wrong.map((line) => [line.replace(/ in .*/s, ""), line])).values()];
"""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with long text in every field."""
    with console_data.start(tmp_path_factory.mktemp("crowded"), extra=EXTRA) as server:
        for number, user in enumerate(PEOPLE):
            name = NAMES[number]
            properties = {"sku": name, name[:100]: "A-32", "price": 168.76}
            message = MESSAGE if number == 0 else f"m-{number}"
            track = {"type": "track", "event": name, "userId": user, "properties": properties}
            traits: dict[str, object] = {
                "email": "same@example.com",
                "phone": f"+49{number}",
                "about": name,
            }
            traits[name[:200]] = [name, number]
            batch = [
                {**track, "messageId": message},
                {"type": "identify", "userId": user, "traits": traits},
                {"type": "group", "userId": user, "groupId": "g" * 512, "traits": traits},
                {"type": "page", "anonymousId": "a" * 512, "name": name},
                {"type": "alias", "userId": user, "previousId": f"previous {user}"[:512]},
            ]
            for key in (server.key, "k" * 60):
                assert server.post("/v1/batch", {"batch": batch}, key=key).status_code == 200
            # Rejected: five causes.
            server.post("/v1/track", {**track, "event": None, "messageId": f"b-{number}"})
            for bad in ({"properties": name}, {"messageId": 300 * name}, {"event": 7}):
                answer = server.post("/v1/track", {**track, "messageId": "b", **bad}, key="k" * 60)
                assert answer.status_code == 400, (name, bad)
            server.post("/v1/batch", {"batch": [{**track, "type": name}]}, key="k" * 60)
            server.post("/v1/track", track, key=f"{number} unknown key {KEY_ID}")
        server.post("/v1/track", b"{" + b"x" * 900)
        signed = subscription_hash(
            server.secret,
            subject=Subject(Kind.USER, PEOPLE[0]),
            workspace_id="acme",
            identifier="+490",
            identifier_key="phone",
        )
        link = {"workspaceId": "acme", "identifier": "+490", "identifierKey": "phone"}
        for choice in (True, False):
            choices = {**link, "hash": signed, "changes": {GROUP: choice}}
            answer = server.client.put(SUBSCRIPTIONS, json=choices)
            assert answer.is_success, answer.text
        wait_for(lambda: len(server.export("dead-letters")) >= 12, what="the dead letters")
        with signed_in(server) as client:
            for action in ("create", "disable"):
                made = {"action": action, "id": "w" * 64, "name": "W" * 256, "version": "1"}
                client.post("keys", data=made)
            client.post("keys", data={"action": "rotate", "id": KEY_ID})
            client.post("rejected", data={"action": "delete", **CAUSE})
            client.post("rejected", data={"action": "replay", **CAUSE})
        yield server


@pytest.fixture
def visitor(browser: Browser, crowded: Server) -> Iterator[Operator]:
    with operator(browser, crowded) as watcher:
        watcher.allowed.update({404})
        yield watcher


def paths(server: Server) -> dict[str, str]:
    """Return the pages: name → path and query; each of the table of routes is one of them."""
    return console_data.pages(console_data.letters(server)[0], event=MESSAGE, user=PEOPLE[0]) | {
        "search-found": "search?q=same@example.com",
        "user-words": "user?" + urlencode({"id": PEOPLE[2]}),
        "user-unknown": f"user?id={'x' * 512}",
        "event-unknown": "event?id=x",
        "live-filtered": f"live?name={'W' * 1024}&key={KEY_ID}",
        "keys-created": f"keys?done=create&id={KEY_ID}&key={KEY_ID}",
        "rejected-cause": "rejected?" + urlencode(CAUSE),
        "rejected-ask": "rejected?reason=invalid_payload&ask=replay",
        "error": "nowhere",
    }


def first_empty(read: Callable[[], list[str]]) -> list[str]:
    """Read lines until there are none, and return what is left after some seconds."""
    deadline = time.monotonic() + 5
    while (lines := read()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return lines


def look(visitor: Operator, page: str) -> list[str]:
    """Look at a page at each width in both themes."""
    found = []
    for width in WIDTHS:
        visitor.size(width)
        # Plots follow the width a moment later.
        lines = first_empty(lambda: visitor.browser.run(CHECK))
        found += [f"{page}, {width} px: {line}" for line in lines]
        for theme in ("light", "dark") if PICTURES else ():
            visitor.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
            size = visitor.browser.cdp("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": width, "height": min(size["height"], 3000), "scale": 1}
            shot = visitor.browser.cdp(
                "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
            )
            file = Path(PICTURES) / f"{page}-{width}-{theme}.png"
            file.write_bytes(base64.b64decode(shot["data"]))
    return found


def test_long_text_fits_and_can_be_read_on_every_page(visitor: Operator, crowded: Server) -> None:
    found = []
    for page, path in paths(crowded).items():
        visitor.size(WIDTHS[0])
        visitor.open(path)
        visitor.browser.run(
            "for (const one of document.querySelectorAll('main details')) one.open = true"
        )
        found += look(visitor, page)
    visitor.open(paths(crowded)["letter"])
    visitor.click("Check")
    found += look(visitor, "letter-checked")
    visitor.open("live")
    visitor.one("tr.row a").click()
    visitor.until(lambda: visitor.text("tr.detail"))
    found += look(visitor, "live-open")
    visitor.browser.cdp("Network.clearBrowserCookies")
    for path in ("login", "link?t=x"):
        visitor.open(path)
        found += look(visitor, path.partition("?")[0])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", ["live", "events"])
def test_filters_fold_on_a_phone_only(visitor: Operator, page: str) -> None:
    visitor.size(1280)
    visitor.open(page)
    assert visitor.one("#f-name").is_displayed()
    assert not visitor.one(".fold > summary").is_displayed()
    visitor.size(390)
    visitor.open(page)
    assert not visitor.one("#f-name").is_displayed()
    visitor.click("Filters")
    visitor.fill("#f-name", "Order")
    visitor.click("Filter")
    visitor.until(lambda: "name=Order" in visitor.path)
    assert visitor.one("#f-name").is_displayed()


def test_the_json_of_an_event_is_whole_on_its_page(visitor: Operator, crowded: Server) -> None:
    visitor.open(paths(crowded)["event"])
    whole, shown = visitor.browser.run(
        "const json = document.querySelector('pre.json');"
        " return [json.scrollHeight, json.clientHeight];"
    )
    assert whole == shown > 600


def test_without_scripts_nothing_is_cut(visitor: Operator) -> None:
    visitor.browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    visitor.open("user", id=PEOPLE[0])
    assert len(visitor.texts("td")) > 20
    found = visitor.browser.run("""
      return [...document.querySelectorAll("h1, td")].filter(
        (one) => one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 4
      ).map((one) => one.innerText);
    """)
    assert found == []
