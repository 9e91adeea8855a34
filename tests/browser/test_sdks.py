# SPDX-License-Identifier: Apache-2.0
"""The published browser SDKs, unmodified, in Chromium, on a page of another origin."""

from __future__ import annotations

import pytest
from browser.catalogue import KINDS, Kind
from browser.snippet import shape

from support.browser import Browser, Pages, eventually
from support.server_process import Server
from support.sqlite import locked

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_call_arrives(engage: Server, browser: Browser, pages: Pages, kind: Kind) -> None:
    """Each call is stored once with the right fields; nothing fails or is logged on the console."""
    pages.pages["/"] = kind.page(engage)
    browser.open(pages.url + "/")
    browser.run(kind.calls)
    stored = eventually(lambda: engage.export("events"), lambda e: len(e) >= len(kind.expected))
    assert sorted(map(shape, stored), key=str) == sorted(kind.expected, key=str)
    by_type = {event["type"]: event for event in stored}
    assert by_type["identify"]["userId"] == "u-1"
    assert by_type["identify"]["traits"]["email"] == "a@b.co"
    assert by_type["identify"]["traits"]["n"] == 1
    assert by_type["track"]["userId"] == "u-1"
    properties = by_type["track"]["properties"]
    assert properties["revenue"] == 12.5
    # RudderStack's SDK leaves out what is null.
    assert properties["a.b"] == [1, {} if kind.bundle == "rudder" else {"c": None}]
    assert properties["text"] == "ünï ✓"
    assert by_type["page"]["properties"]["x"] == 1
    if "group" in by_type:
        assert by_type["group"]["groupId"] == "g-1"
        assert by_type["group"]["traits"]["name"] == "Unit"
    if "alias" in by_type:
        # Segment's SDK puts the current user in place of the new one (docs/clients.md).
        expected = "u-1" if kind.bundle == "segment" else "u-2"
        assert by_type["alias"]["userId"] == expected
        assert by_type["alias"]["previousId"] == "u-1"
    assert all("writeKey" not in event for event in stored)
    assert browser.errors() == []
    assert engage.export("dead-letters") == []


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.bundle != "dittofeed"], ids=lambda kind: kind.name
)
def test_a_visitor_without_identify_is_anonymous(
    engage: Server, browser: Browser, pages: Pages, kind: Kind
) -> None:
    """Without identify, events have the SDK's anonymous id and no user id."""
    pages.pages["/"] = kind.page(engage)
    browser.open(pages.url + "/")
    browser.run('sdk.track("Seen");')
    [event] = eventually(lambda: engage.export("events"), lambda e: len(e) >= 1)
    assert event["anonymousId"]
    assert event.get("userId") is None
    assert browser.errors() == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_last_event_before_leaving_the_page_arrives(
    engage: Server, browser: Browser, pages: Pages, kind: Kind
) -> None:
    """The SDK sends it with ``keepalive`` or ``sendBeacon``, or keeps it for the next page."""
    pages.pages["/"] = kind.page(engage)
    browser.open(pages.url + "/")
    first = kind.last.replace("Last", "First")
    browser.run(first)
    eventually(lambda: engage.export("events"), lambda e: len(e) == 1)
    browser.run(kind.last + 'location.href = "about:blank";')
    eventually(lambda: browser.run("return location.href"), lambda url: url == "about:blank")
    if kind.bundle == "rudder":
        # It keeps what it could not send in localStorage, for the next page of the site.
        browser.open(pages.url + "/")
    eventually(lambda: {e["event"] for e in engage.export("events")}, lambda names: "Last" in names)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.retries], ids=lambda kind: kind.name
)
def test_an_event_is_sent_again_after_an_error(
    short_timeout: Server, browser: Browser, pages: Pages, kind: Kind
) -> None:
    """The answer is 503 while the storage is locked; afterwards each event is stored once."""
    pages.pages["/"] = kind.page(short_timeout)
    browser.open(pages.url + "/")
    browser.run('sdk.track("First");')
    eventually(lambda: short_timeout.export("events"), lambda e: len(e) == 1)
    browser.errors()
    with locked(short_timeout.database):
        browser.run('sdk.track("Again");')
        eventually(browser.errors, lambda errors: any("503" in error for error in errors))
    stored = eventually(lambda: short_timeout.export("events"), lambda e: len(e) >= 2)
    assert [event["event"] for event in stored] == ["First", "Again"]
