# SPDX-License-Identifier: Apache-2.0
"""The tracking snippet with full storage, odd data, a server that is away, or loaded twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser.snippet import site, visit

from support.browser import Browser, Pages, eventually
from support.server_process import KEY, Server, start_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

FULL_STORAGE = """
Storage.prototype.setItem = function () { throw new DOMException("full", "QuotaExceededError"); };
"""
#: As in a frame with the attribute ``sandbox``.
SANDBOX = """
for (const [where, name] of [[window, "localStorage"], [document, "cookie"]]) {
    const denied = () => { throw new DOMException("denied", "SecurityError"); };
    Object.defineProperty(where, name, {get: denied, set: denied});
}
"""


def names(events: list[dict[str, Any]]) -> list[str | None]:
    return [event.get("event") for event in events if event["type"] == "track"]


@pytest.mark.parametrize("before", [FULL_STORAGE, SANDBOX], ids=["full", "sandbox"])
def test_the_snippet_works_with_full_storage(
    engage: Server, browser: Browser, pages: Pages, before: str
) -> None:
    """Events still have one anonymous id, and later calls know the user id."""
    visit(browser, pages, site(engage, before=before))
    browser.run('engage.track("A"); engage.identify("u"); engage.track("B");')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 4)
    assert len({event["anonymousId"] for event in stored}) == 1
    assert [event.get("userId") for event in stored] == [None, None, "u", "u"]
    browser.run('engage.reset(); engage.track("C");')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 5)
    assert "userId" not in stored[4]
    assert stored[4]["anonymousId"] != stored[0]["anonymousId"]


def test_an_event_that_cannot_be_sent_does_not_stop_others(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    visit(browser, pages, site(engage))
    browser.run("""
        const ring = {}; ring.ring = ring;
        engage.track("first");
        engage.track("a ring", {ring});
        const face = "\U0001f600";
        engage.track("half an emoji", {cut: face.slice(0, 1), whole: face + " \\\\ud83d"});
        engage.track("beyond 64 bits", {n: 2 ** 64});
        let deep = 1;
        for (let n = 0; n < 70; n++) deep = [deep];
        engage.track("too deep", {deep});
        for (let n = 0; n < 20; n++) engage.track("after " + n);
        engage.identify("");
        engage.identify(null, {plan: "pro"});
        engage.page(null, {x: 1});
    """)
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 27)
    after = [f"after {n}" for n in range(20)]
    assert names(stored) == ["first", "half an emoji", "beyond 64 bits", *after]
    assert stored[2]["properties"] == {"cut": "\ufffd", "whole": "\U0001f600 \\ud83d"}
    assert stored[3]["properties"] == {"n": 2.0**64}
    assert stored[-2]["traits"] == {"plan": "pro"}
    assert stored[-1]["properties"]["x"] == 1


def test_an_event_is_copied_at_the_call(engage: Server, browser: Browser, pages: Pages) -> None:
    visit(browser, pages, site(engage))
    browser.run('const cart = {items: [1]}; engage.track("Cart", cart); cart.items.push(2);')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 2)
    assert stored[1]["properties"] == {"items": [1]}


def test_a_steady_stream_of_events_is_sent_before_it_ends(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    """The calls follow each other faster than the pause after which a request is sent."""
    visit(browser, pages, site(engage))
    browser.run('window.stream = setInterval(() => engage.track("Moved"), 5);')
    eventually(lambda: engage.export("events"), lambda e: "Moved" in names(e))
    browser.run("clearInterval(window.stream);")


def test_events_of_a_page_left_while_the_server_is_away_arrive(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    """The browser accepts the beacon and cannot deliver it; the next page sends its events."""
    visit(browser, pages, site(engage), "/one")
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)
    port = engage.port
    engage.stop()
    browser.run('engage.track("Waited");')
    eventually(browser.errors, bool)
    browser.run('engage.track("At once"); engage.track("Big", {text: "x".repeat(70000)});')
    pages.pages["/two"] = "<!doctype html>"
    browser.open(pages.url + "/two")
    engage.start("--port", str(port))
    visit(browser, pages, site(engage), "/three")
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 4)
    assert sorted(map(str, names(stored))) == ["At once", "Waited"]
    eventually(lambda: browser.run('return localStorage.getItem("engage_queue")'), lambda q: not q)


@pytest.mark.parametrize(
    ("key", "reason"),
    [("of-nobody", "it is unknown"), ("old", "it is disabled")],
)
def test_a_refused_key_is_reported_once(
    tmp_path: Path, browser: Browser, pages: Pages, key: str, reason: str
) -> None:
    old = '[[workspaces.write_keys]]\nid = "old"\nkey = "old"\ndisabled = true\n'
    with start_server(tmp_path, config_extra=old) as server:
        warnings: list[str] = []

        def arrived() -> int:
            log = browser.driver.get_log("browser")  # type: ignore[no-untyped-call]
            warnings.extend(one["message"] for one in log if one["level"] == "WARNING")
            return len([line for line in server.lines() if line.get("route") == "batch"])

        visit(browser, pages, site(server).replace(KEY, key))
        eventually(arrived, lambda found: found == 1)
        browser.run('engage.track("Again");')
        eventually(arrived, lambda found: found == 2)
        browser.run('engage.track("And again");')
        # When this one is sent, the answers to the others were handled.
        eventually(arrived, lambda found: found == 3)
        [warning] = warnings
        assert f'"engage:" "invalid write key: {reason}' in warning


def test_events_of_another_tab_stay_in_storage(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    visit(browser, pages, site(engage), "/one")
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)
    left = browser.run("""
        const timestamp = new Date().toISOString();
        const left = {type: "track", event: "Left", userId: "u", messageId: "left-1", timestamp};
        const old = {...left, messageId: "old-1", timestamp: "2020-01-01T00:00:00Z"};
        localStorage.setItem("engage_queue", JSON.stringify([left, old]));
        return left;
    """)
    browser.run('engage.track("Here"); dispatchEvent(new Event("pagehide"));')
    eventually(lambda: engage.export("events"), lambda e: len(e) == 2)
    kept = eventually(
        lambda: json.loads(browser.run('return localStorage.getItem("engage_queue")') or "[]"),
        lambda queue: len(queue) == 1,
    )
    assert kept == [left]
    visit(browser, pages, site(engage), "/two")
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 4)
    assert sorted(map(str, names(stored))) == ["Here", "Left"]


def test_a_snippet_that_is_loaded_twice_sends_events_once(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    """A script of the page adds the same lines again, and another one kept a stub."""
    hold = "<script>window.held = engage.track;</script>"
    once = site(engage).replace("</head>", hold + "</head>")
    visit(browser, pages, once)
    lines = [part.split("</script>")[0] for part in once.split("<script>")]
    again = next(part for part in lines if "engage.page()" in part)
    browser.run(
        """
        for (const code of [arguments[0], null]) {
            const script = document.createElement("script");
            if (code) script.text = code;
            else {
                script.src = document.querySelector("script[src]").src;
                script.dataset.writeKey = document.querySelector("script[src]").dataset.writeKey;
                script.onload = () => { window.twice = true; };
            }
            document.head.append(script);
        }
        """,
        again,
    )
    eventually(lambda: browser.run("return window.twice"), bool)
    browser.run('engage.track("Once"); window.held("Held");')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 4)
    assert [event.get("event") for event in stored] == [None, None, "Once", "Held"]
    assert browser.errors() == []
