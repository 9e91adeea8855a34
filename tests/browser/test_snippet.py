# SPDX-License-Identifier: Apache-2.0
"""The tracking snippet, ``GET /engage.js``, in Chromium, on a page of another origin."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from browser.snippet import shape, site, visit

from support.browser import Browser, Pages, eventually
from support.identity import hash_of, start_verifying
from support.reverse_proxy import reverse_proxy
from support.server_process import Server
from support.sqlite import locked

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

NO_STORAGE = """
Object.defineProperty(window, "localStorage", {get() { throw new DOMException("denied"); }});
"""
NO_COOKIES = """
Object.defineProperty(document, "cookie", {get() { return ""; }, set() {}});
"""


def test_every_call_is_stored(engage: Server, browser: Browser, pages: Pages) -> None:
    visit(browser, pages, site(engage), "/docs?q=1")
    browser.run("""
        engage.identify("u-1", {email: "a@b.co", nested: {a: [1, null]}});
        engage.track("Order", {revenue: 1.5});
        engage.page("Named", {x: 1});
        engage.group("g-1", {name: "Ünit"});
        engage.identify({plan: "pro"});
        engage.reset();
        engage.track("After");
    """)
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 7)
    assert [shape(event) for event in stored] == [
        ("page", None),
        ("identify", None),
        ("track", "Order"),
        ("page", "Named"),
        ("group", None),
        ("identify", None),
        ("track", "After"),
    ]
    first, identify, order, named, group, more, after = stored
    assert first["properties"]["url"] == pages.url + "/docs?q=1"
    assert first["properties"]["title"] == "Shop"
    assert first["context"]["library"]["name"] == "engage.js"
    assert first.get("userId") is None
    assert identify["userId"] == "u-1"
    assert identify["anonymousId"] == first["anonymousId"]
    assert identify["traits"] == {"email": "a@b.co", "nested": {"a": [1, None]}}
    assert order["userId"] == "u-1"
    assert order["properties"] == {"revenue": 1.5}
    assert named["properties"]["x"] == 1
    assert group["groupId"] == "g-1"
    assert more["traits"] == {"plan": "pro"}
    assert more["userId"] == "u-1"
    assert after.get("userId") is None
    assert after["anonymousId"] != first["anonymousId"]
    [user] = engage.export("users")
    assert user["anonymousIds"] == [first["anonymousId"]]
    assert browser.errors() == []


def test_the_hash_of_the_user_goes_with_the_user(
    tmp_path: Path, browser: Browser, pages: Pages
) -> None:
    """It is also there on the next page, before any call, and ends with the user."""
    with start_verifying(tmp_path) as engage:
        visit(browser, pages, site(engage))
        browser.run(f"""
            engage.setUserHash("{hash_of("u-1")}");
            engage.identify("u-1", {{plan: "pro"}});
        """)
        eventually(lambda: engage.export("events"), lambda e: len(e) >= 2)
        visit(browser, pages, site(engage), "/next")
        eventually(lambda: engage.export("events"), lambda e: len(e) >= 3)
        browser.run(f"""
            engage.setUserHash("{hash_of("u-2")}");
            engage.identify("u-2");
            engage.track("Second");
            engage.identify("u-3");
            engage.reset();
            engage.track("Last");
        """)
        stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 6)
        assert [(*shape(event), event.get("userId")) for event in stored] == [
            ("page", None, None),
            ("identify", None, "u-1"),
            ("page", None, "u-1"),
            ("identify", None, "u-2"),
            ("track", "Second", "u-2"),
            ("track", "Last", None),
        ]
        assert hash_of("u-1") not in str(stored)
        assert browser.run("return localStorage.getItem('engage_user_hash')") is None
        assert stored[3]["anonymousId"] != stored[2]["anonymousId"]


def test_the_snippet_causes_no_preflight(engage: Server, browser: Browser, pages: Pages) -> None:
    visit(browser, pages, site(engage))
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)
    assert "OPTIONS" not in engage.log()


@pytest.mark.parametrize("before", ["", NO_STORAGE], ids=["localStorage", "cookies"])
def test_a_visitor_keeps_the_anonymous_id_on_the_next_page(
    engage: Server, browser: Browser, pages: Pages, before: str
) -> None:
    for path in ("/one", "/two"):
        visit(browser, pages, site(engage, before=before), path)
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) == 2)
    assert len({event["anonymousId"] for event in stored}) == 1


def test_without_storage_the_anonymous_id_lasts_as_long_as_the_page(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    """The browser blocks localStorage and cookies."""
    visit(browser, pages, site(engage, before=NO_STORAGE + NO_COOKIES))
    browser.run('engage.track("A"); engage.identify("u"); engage.track("B");')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) == 4)
    assert len({event["anonymousId"] for event in stored}) == 1
    assert stored[-1]["userId"] == "u"
    assert browser.errors() == []


def test_another_user_gets_another_anonymous_id(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    visit(browser, pages, site(engage))
    browser.run('engage.identify("u-1"); engage.identify(2);')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) == 3)
    assert [event.get("userId") for event in stored] == [None, "u-1", "2"]
    assert stored[1]["anonymousId"] != stored[2]["anonymousId"]


def test_an_event_is_sent_again_after_an_error(
    short_timeout: Server, browser: Browser, pages: Pages
) -> None:
    with reverse_proxy(short_timeout.url) as proxy:
        proxy.retry_after = 1
        with locked(short_timeout.database):
            visit(browser, pages, site(short_timeout, url=proxy.url))
            eventually(browser.errors, lambda errors: any("503" in error for error in errors))
        stored = eventually(lambda: short_timeout.export("events"), lambda e: len(e) >= 1)
        assert len(stored) == 1
        browser.run('engage.track("Next");')
        stored = eventually(lambda: short_timeout.export("events"), lambda e: len(e) >= 2)
        assert [event["type"] for event in stored] == ["page", "track"]


def test_events_arrive_after_the_server_was_down(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    visit(browser, pages, site(engage))
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)
    port = engage.port
    engage.stop()
    browser.run('engage.track("While down");')
    eventually(browser.errors, bool)
    engage.start("--port", str(port))
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) == 2)
    assert stored[1]["event"] == "While down"


def test_the_last_event_before_leaving_the_page_arrives(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    visit(browser, pages, site(engage))
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)
    browser.run('engage.track("Last", {long: "x".repeat(2000)}); location.href = "about:blank";')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 2)
    assert stored[1]["event"] == "Last"


def test_events_that_a_beacon_cannot_carry_are_sent_from_a_later_page(
    short_timeout: Server, browser: Browser, pages: Pages
) -> None:
    before = 'if (location.pathname === "/one") navigator.sendBeacon = () => false;'
    visit(browser, pages, site(short_timeout, before=before), "/one")
    eventually(lambda: short_timeout.export("events"), lambda e: len(e) == 1)
    with locked(short_timeout.database):
        browser.run('engage.track("Kept");')
        pages.pages["/two"] = "<!doctype html>"
        browser.run('location.href = "/two";')
        eventually(lambda: browser.run("return location.pathname"), lambda p: p == "/two")
        assert "Kept" in browser.run('return localStorage.getItem("engage_queue")')
    visit(browser, pages, site(short_timeout), "/three")
    stored = eventually(lambda: short_timeout.export("events"), lambda e: len(e) >= 3)
    assert sorted(str(event.get("event")) for event in stored) == ["Kept", "None", "None"]


@pytest.mark.parametrize(
    "signal",
    [
        'Object.defineProperty(navigator, "globalPrivacyControl", {value: true});',
        'Object.defineProperty(navigator, "doNotTrack", {value: "1"});',
    ],
    ids=["gpc", "dnt"],
)
def test_privacy_signals_are_respected_where_the_page_asks_for_it(
    engage: Server, browser: Browser, pages: Pages, signal: str
) -> None:
    """Then nothing is sent and nothing is stored; otherwise the signal is ignored."""
    visit(browser, pages, site(engage, "data-respect-privacy", signal), "/silent")
    browser.run('engage.identify("u"); engage.track("E"); engage.reset();')
    assert browser.run("return Object.keys(localStorage)") == []
    assert browser.run("return document.cookie") == ""
    visit(browser, pages, site(engage, before=signal), "/loud")
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 1)
    assert [event["context"]["page"]["path"] for event in stored] == ["/loud"]


def test_a_page_that_respects_signals_sends_events_without_one(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    visit(browser, pages, site(engage, "data-respect-privacy"))
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)


@pytest.mark.parametrize(
    "left", ["{", "null", "7", '[null, 5, {"a": 1}]', '{"length": 3}'], ids=str
)
def test_an_unreadable_queue_in_storage_does_no_harm(
    engage: Server, browser: Browser, pages: Pages, left: str
) -> None:
    pages.pages["/"] = "<!doctype html>"
    browser.open(pages.url + "/")
    browser.run('localStorage.setItem("engage_queue", arguments[0])', left)
    visit(browser, pages, site(engage), "/next")
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)
    assert browser.errors() == []


def test_many_events_are_sent_in_several_requests(
    engage: Server, browser: Browser, pages: Pages
) -> None:
    visit(browser, pages, site(engage))
    browser.run('for (let n = 0; n < 250; n++) engage.track("E", {n, text: "é".repeat(300)});')
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= 251)
    assert [event["properties"]["n"] for event in stored[1:]] == list(range(250))
    assert browser.errors() == []


def test_the_snippet_is_small() -> None:
    """It has at most 3000 bytes as it is transferred."""
    script = (Path(__file__).resolve().parents[2] / "engage/handlers/static/engage.js").read_bytes()
    assert len(gzip.compress(script, 9)) <= 3000
