# SPDX-License-Identifier: Apache-2.0
"""Overview, Live, Events, Event and Search over HTTP, on a real server; and what they weigh."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import httpx

from support.server_process import Server
from support.waiting import wait_for


def rows(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.get("live.json", params={"after": 0, **query}).json()[
        "rows"
    ]
    return rows


def arrived(client: httpx.Client, **wanted: str) -> dict[str, Any]:
    """Wait until Live has a row with these values, and return it."""

    def found() -> dict[str, Any] | None:
        for row in rows(client):
            if all(row[name] == value for name, value in wanted.items()):
                return row
        return None

    row: dict[str, Any] = wait_for(found, what=f"a row with {wanted}")
    return row


def weight(client: httpx.Client, path: str) -> int:
    """Return the gzipped bytes of a page with all that it loads."""
    html = client.get(path).text
    files = re.findall(r'<(?:script[^>]* src|link rel="stylesheet" href)="([^"]+)"', html)
    assert files
    assert len({name.partition("?")[0] for name in files}) == len(files)
    return len(gzip.compress(html.encode())) + sum(
        len(gzip.compress(client.get(name).content)) for name in files
    )


def test_a_server_without_events_shows_how_to_send_one(
    server: Server, client: httpx.Client
) -> None:
    page = client.get("").text
    assert "Waiting for the first event" in page
    assert server.key in page
    for name in ("curl", "Web page", "Node", "Python", "Segment", "RudderStack"):
        assert f">{name}</label>" in page
    assert weight(client, "") <= 45 * 1024
    assert len(re.findall(r"<script|stylesheet", page)) <= 4


def test_rejected_events_leave_the_lines_that_send_a_valid_one(
    server: Server, client: httpx.Client
) -> None:
    assert server.post("/api/public/apps/track", {"userId": "ann"}).status_code == 400
    arrived(client, status="rejected")
    page = client.get("").text
    assert "Waiting for the first event" in page
    assert "event: is required" in page


def test_what_is_stored_rejected_and_refused_is_there(server: Server, client: httpx.Client) -> None:
    assert server.track("m-1", event="Order Completed", properties={"price": 12}).status_code == 200
    row = arrived(client, id="m-1")
    assert (row["status"], row["type"], row["name"]) == ("stored", "track", "Order Completed")
    assert row["preview"] == "price 12"
    bad = server.post("/api/public/apps/track", {"userId": "ann"})
    assert bad.status_code == 400
    row = arrived(client, status="rejected")
    assert row["preview"] == "event: is required"
    view = client.get("event.json", params={"letter": row["id"]}).json()
    assert view["reasons"] == ["event: is required"]
    assert view["links"]["letter"].startswith("letter?")
    refused = httpx.post(
        f"http://127.0.0.1:{server.port}/api/public/apps/track", json={}, auth=("wrong-key", "")
    )
    assert refused.status_code == 401
    found = wait_for(
        lambda: client.get("live.json?after=0").json()["refused"], what="the refused request"
    )
    assert found[0]["status"] == 401
    assert found[0]["key"] == "wron…"


def test_the_event_is_shown_with_its_numbers_as_sent(server: Server, client: httpx.Client) -> None:
    server.track("m-2", properties={"big": 9007199254740993, "one": 1.0})
    arrived(client, id="m-2")
    page = client.get("event", params={"id": "m-2", "origin": "api"})
    assert page.status_code == 200
    assert "9007199254740993" in page.text
    assert "no time, so it is the time of arrival" in page.text
    file = client.get("event", params={"id": "m-2", "download": "1"})
    assert file.headers["Content-Disposition"].startswith("attachment")
    assert json.loads(file.content)["properties"]["big"] == 9007199254740993
    missing = client.get("event", params={"id": "nothing"})
    assert missing.status_code == 404
    assert "not stored" in missing.text


def test_events_are_filtered_and_paged(server: Server, client: httpx.Client) -> None:
    batch = [
        {"type": "track", "userId": "pager", "event": "Paged", "messageId": f"p-{number}"}
        for number in range(70)
    ]
    assert server.post("/api/public/apps/batch", {"batch": batch}).status_code == 200
    first = client.get("events", params={"user": "pager"}).text
    shown = re.findall(r"id=(p-\d+)", first)
    assert shown == [f"p-{number}" for number in range(69, 19, -1)]
    older = re.search(r'href="(events\?[^"]*before=[^"]*)"', first)
    assert older is not None
    second = client.get(older[1].replace("&amp;", "&")).text
    assert re.findall(r"id=(p-\d+)", second) == [f"p-{number}" for number in range(19, -1, -1)]
    file = client.get("events.ndjson", params={"user": "pager"})
    assert file.headers["Content-Disposition"].startswith("attachment")
    assert len(file.content.splitlines()) == 70
    assert "Nothing fits" in client.get("events", params={"name": "nothing"}).text
    assert "p-69" not in client.get("events", params={"until": "2020-01-01T00:00"}).text
    assert "p-69" in client.get("events", params={"user": "pager", "until": "rubbish"}).text


def test_the_overview_has_numbers_and_weighs_little(server: Server, client: httpx.Client) -> None:
    def counted() -> Any:
        data = client.get("overview.json?range=1h").json()
        return data if sum(data["outcomes"]["stored"]) >= 70 else None

    data = wait_for(counted, what="the counters")
    assert len(data["at"]) == 60
    page = client.get("").text
    assert "Events per minute" in page
    assert weight(client, "") <= 45 * 1024
    assert weight(client, "live") <= 20 * 1024


def test_an_unknown_workspace_is_not_there(client: httpx.Client) -> None:
    for path in ("live", "events", "live.json", "overview.json"):
        assert client.get(path, params={"workspace": "nothing"}).status_code == 404


def test_a_poll_without_news_is_small(server: Server, client: httpx.Client) -> None:
    assert server.track("polled").status_code == 200
    wait_for(lambda: client.get("live.json?after=0").json()["rows"], what="a row")
    known = client.get("live.json?after=0").json()
    size = 0

    def has_no_news() -> bool:
        nonlocal known, size
        seen = {"after": known["after"], "refused": known["refusedVersion"]}
        answer = client.get("live.json", params=seen)
        known, size = answer.json(), len(answer.content)
        return not known["rows"]

    wait_for(has_no_news, what="the events of the tests before to arrive")
    assert size < 200
    after = client.get("live.json?after=999999999").json()
    assert after["rows"], "a page of an earlier process begins again"
    for wrong in ("x", "-5", "1e9"):
        assert client.get("live.json", params={"after": wrong}).status_code == 200
