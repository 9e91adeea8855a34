# SPDX-License-Identifier: Apache-2.0
"""Overview, Live, Events, Event and Search over HTTP, on a real server; and what they weigh."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.console import CONSOLE, signed_in
from support.server_process import Server, start_server
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the console is a child process")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("pages"), config_extra=CONSOLE) as started:
        yield started


@pytest.fixture(scope="module")
def console(server: Server) -> Iterator[httpx.Client]:
    with signed_in(server) as client:
        yield client


def rows(console: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = console.get("live.json", params={"after": 0, **query}).json()[
        "rows"
    ]
    return found


def arrived(console: httpx.Client, **wanted: str) -> dict[str, Any]:
    """Wait until Live has a row with these values, and return it."""

    def found() -> dict[str, Any] | None:
        for row in rows(console):
            if all(row[name] == value for name, value in wanted.items()):
                return row
        return None

    row: dict[str, Any] = wait_for(found, what=f"a row with {wanted}")
    return row


def weight(console: httpx.Client, path: str) -> int:
    """Return the gzipped bytes of a page with all that it loads."""
    html = console.get(path).text
    files = re.findall(r'<(?:script[^>]* src|link rel="stylesheet" href)="([^"]+)"', html)
    assert files
    assert len({name.partition("?")[0] for name in files}) == len(files)
    return len(gzip.compress(html.encode())) + sum(
        len(gzip.compress(console.get(name).content)) for name in files
    )


def test_a_server_without_events_shows_how_to_send_one(
    server: Server, console: httpx.Client
) -> None:
    page = console.get("").text
    assert "Waiting for the first event" in page
    assert server.key in page
    for name in ("curl", "Web page", "Node", "Python", "Segment", "RudderStack"):
        assert f">{name}</label>" in page
    assert weight(console, "") <= 45 * 1024
    assert len(re.findall(r"<script|stylesheet", page)) <= 4


def test_rejected_events_leave_the_lines_that_send_a_valid_one(
    server: Server, console: httpx.Client
) -> None:
    assert server.post("/api/public/apps/track", {"userId": "ann"}).status_code == 400
    arrived(console, status="rejected")
    page = console.get("").text
    assert "Waiting for the first event" in page
    assert "event: is required" in page


def test_what_is_stored_rejected_and_refused_is_there(
    server: Server, console: httpx.Client
) -> None:
    assert server.track("m-1", event="Order Completed", properties={"price": 12}).status_code == 200
    row = arrived(console, id="m-1")
    assert (row["status"], row["type"], row["name"]) == ("stored", "track", "Order Completed")
    assert row["preview"] == "price 12"
    bad = server.post("/api/public/apps/track", {"userId": "ann"})
    assert bad.status_code == 400
    row = arrived(console, status="rejected")
    assert row["preview"] == "event: is required"
    view = console.get("event.json", params={"letter": row["id"]}).json()
    assert view["reasons"] == ["event: is required"]
    assert view["links"]["letter"].startswith("letter?")
    refused = httpx.post(
        f"http://127.0.0.1:{server.port}/api/public/apps/track", json={}, auth=("wrong-key", "")
    )
    assert refused.status_code == 401
    found = wait_for(
        lambda: console.get("live.json?after=0").json()["refused"], what="the refused request"
    )
    assert found[0]["status"] == 401
    assert found[0]["key"] == "wron…"


def test_the_event_is_shown_with_its_numbers_as_sent(server: Server, console: httpx.Client) -> None:
    server.track("m-2", properties={"big": 9007199254740993, "one": 1.0})
    arrived(console, id="m-2")
    page = console.get("event", params={"id": "m-2", "origin": "api"})
    assert page.status_code == 200
    assert "9007199254740993" in page.text
    assert "no time, so it is the time of arrival" in page.text
    file = console.get("event", params={"id": "m-2", "download": "1"})
    assert file.headers["Content-Disposition"].startswith("attachment")
    assert json.loads(file.content)["properties"]["big"] == 9007199254740993
    missing = console.get("event", params={"id": "nothing"})
    assert missing.status_code == 404
    assert "not stored" in missing.text


def test_events_are_filtered_and_paged(server: Server, console: httpx.Client) -> None:
    batch = [
        {"type": "track", "userId": "pager", "event": "Paged", "messageId": f"p-{number}"}
        for number in range(70)
    ]
    assert server.post("/api/public/apps/batch", {"batch": batch}).status_code == 200
    first = console.get("events", params={"user": "pager"}).text
    shown = re.findall(r"id=(p-\d+)", first)
    assert shown == [f"p-{number}" for number in range(69, 19, -1)]
    older = re.search(r'href="(events\?[^"]*before=[^"]*)"', first)
    assert older is not None
    second = console.get(older[1].replace("&amp;", "&")).text
    assert re.findall(r"id=(p-\d+)", second) == [f"p-{number}" for number in range(19, -1, -1)]
    file = console.get("events.ndjson", params={"user": "pager"})
    assert file.headers["Content-Disposition"].startswith("attachment")
    assert len(file.content.splitlines()) == 70
    assert "Nothing fits" in console.get("events", params={"name": "nothing"}).text
    assert "p-69" not in console.get("events", params={"until": "2020-01-01T00:00"}).text
    assert "p-69" in console.get("events", params={"user": "pager", "until": "rubbish"}).text


def test_search_goes_to_what_it_finds(server: Server, console: httpx.Client) -> None:
    server.post(
        "/api/public/apps/identify",
        {"userId": "a/b%c", "traits": {"email": "Ann@Example.com"}, "messageId": "find-me"},
    )
    arrived(console, id="find-me")
    for text, target in (
        ("find-me", "event?"),
        (" find-me ", "event?"),
        ("a/b%c", "user?"),
        ("ANN@EXAMPLE.COM", "user?"),
    ):
        answer = console.get("search", params={"q": text})
        assert answer.status_code == 303, text
        assert answer.headers["Location"].startswith(target), text
    assert "Nothing was found for “nobody”" in console.get("search", params={"q": "nobody"}).text
    assert console.get("search").status_code == 200


def test_the_overview_has_numbers_and_weighs_little(server: Server, console: httpx.Client) -> None:
    def counted() -> Any:
        data = console.get("overview.json?range=1h").json()
        return data if sum(data["outcomes"]["stored"]) >= 70 else None

    data = wait_for(counted, what="the counters")
    assert len(data["at"]) == 60
    page = console.get("").text
    assert "Events per minute" in page
    assert weight(console, "") <= 45 * 1024
    assert weight(console, "live") <= 20 * 1024


def test_an_unknown_workspace_is_not_there(console: httpx.Client) -> None:
    for path in ("live", "events", "live.json", "overview.json"):
        assert console.get(path, params={"workspace": "nothing"}).status_code == 404


def test_a_poll_without_news_is_small(console: httpx.Client) -> None:
    first = console.get("live.json?after=0").json()
    answer = console.get(
        "live.json", params={"after": first["after"], "refused": first["refusedVersion"]}
    )
    assert answer.json()["rows"] == []
    assert len(answer.content) < 200
    after = console.get("live.json?after=999999999").json()
    assert after["rows"], "a page of an earlier process begins again"
    for wrong in ("x", "-5", "1e9"):
        assert console.get("live.json", params={"after": wrong}).status_code == 200
