# SPDX-License-Identifier: Apache-2.0
"""Rejected events: one number on every page, and work on all events of a cause."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx
import pytest

from support.commands import run
from support.console import CONSOLE, signed_in
from support.server_process import Server, start_server
from support.waiting import wait_for


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("rejected"), config_extra=CONSOLE) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with signed_in(server) as one:
        yield one


def words(page: str) -> str:
    """Return the text of a page, with single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def badge(page: str) -> str:
    match = re.search(r'<span class="badge bad" title="([^"]*)">([^<]*)<', page)
    return "" if match is None else f"{match[2]}: {match[1]}"


def test_every_page_tells_rejections_from_different_events(
    server: Server, client: httpx.Client
) -> None:
    server.track("m-stored")
    for _ in range(3):
        server.post("/v1/track", {"userId": "same"})
    server.post("/v1/track", {"userId": "other"})
    wait_for(lambda: "4 rejections in" in words(client.get("rejected").text), what="the counters")
    rejected, overview = client.get("rejected").text, client.get("?range=1h").text
    assert "2 different events kept · 4 rejections in 24 hours" in words(rejected)
    assert badge(rejected) == "2: 2 different events kept"
    assert 'data-total="rejected">4</span>' in " ".join(overview.split())
    assert "2 different events kept" in words(overview)

    # The number is that of now also after a deletion, in which nothing of it is used again.
    deleted = client.post("rejected", data={"action": "delete"})
    assert deleted.status_code == 303
    rejected = client.get(deleted.headers["Location"]).text
    assert "2 deleted." in rejected
    assert badge(rejected) == ""
    assert "No rejected events" in rejected


def test_what_needs_attention_has_actions_and_says_how_much_more_there_is(
    server: Server, client: httpx.Client
) -> None:
    server.track("m-stored")
    for field in ("properties", "context", "integrations", "timestamp", "userId", "event"):
        server.post("/v1/track", {"userId": "u", "event": "E", field: [1]})
    server.post("/v1/track", {"userId": "u", "event": "E"}, key="a-key-of-another-server")
    page = wait_for(
        lambda: text if "1 more cause" in (text := client.get("?range=1h").text) else None,
        what="six causes",
    )
    links = re.findall(r'<a\s+href="([^"]*)">([^<]*)</a>\s*</li>', page)
    assert {text for _, text in links} == {"Show", "Show all"}
    assert sum(href.endswith("#cause") for href, _ in links) == 5
    assert "(1 event, key website)" in words(page)


def test_events_that_change_no_subscription_need_attention(
    server: Server, client: httpx.Client
) -> None:
    for number in (1, 2):
        server.track(f"m-{number}", event="DFSubscriptionChange")
    server.post("/v1/page", {"userId": "u", "name": "DFSubscriptionChange"})
    notice = "Events DFSubscriptionChange change no subscription (2 in {}): send PUT /api/public/"
    shown = notice.format("the last hour")
    page = wait_for(
        lambda: text if shown in words(text := client.get("?range=1h").text) else None,
        what="the counters",
    )
    link = re.search(r'<a\s+href="(events[^"]*DFSubscriptionChange[^"]*)">Show</a>', page)
    assert link is not None
    assert "m-2" in client.get(html.unescape(link[1])).text
    result = run("check", "--config", server.config)
    assert f"\nwarning\tacme: {notice.format('24 hours')}" in result.stdout


def test_the_audit_is_formatted(server: Server, client: httpx.Client) -> None:
    server.post("/v1/track", {"userId": "u"})
    client.post("rejected", data={"action": "replay"})
    wait_for(lambda: "letters-replayed" in client.get("audit").text, what="the replay to end")
    page = words(client.get("audit").text)
    assert re.search(r"until 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC", page)
    assert "newIds no" in page
    assert re.search(r"session [\w-]{6} ", page)


def test_events_get_new_ids_only_after_a_question_with_their_number(
    server: Server, client: httpx.Client
) -> None:
    def conflict(number: int) -> None:
        for name in ("A", "B"):
            server.post("/v1/track", {"userId": "u", "messageId": f"m-{number}", "event": name})

    conflict(1)
    conflict(2)
    page = wait_for(
        lambda: text if "Show 2" in (text := client.get("rejected").text) else None,
        what="two conflicts",
    )
    ask = re.search(r'href="(rejected[^"]*ask=replay)#cause"', page)
    assert ask is not None
    asked = client.get(html.unescape(ask[1])).text
    assert "2 events will be stored under new message ids." in words(asked)
    assert '<tr aria-current="true">' in asked
    assert len(server.export("events")) == 2

    # Those that arrive after the question were not asked about.
    conflict(3)
    form = re.search(r'<form method="post" action="(rejected[^"]*)".*?</form>', asked, re.DOTALL)
    assert form is not None
    fields = dict(re.findall(r'<input type="hidden"\s+name="(\w+)"\s+value="([^"]*)"', form[0]))
    answer = client.post(html.unescape(form[1]), data={**fields, "action": "replay"})
    assert answer.status_code == 303
    wait_for(lambda: "2 stored, 0" in client.get("replays").text, what="the replay to end")
    wait_for(lambda: ">done<" in client.get("replays").text, what="the replay to end")
    assert len(server.export("events")) == 5
    assert badge(client.get("rejected").text) == "1: 1 event kept"


def test_a_replay_is_tried_before_it_is_asked_for(server: Server, client: httpx.Client) -> None:
    for number in range(3):
        server.post("/v1/track", {"userId": f"u{number}"})
    server.post("/v1/track", {"userId": "u", "event": ""})
    page = wait_for(
        lambda: text if "Show 3" in (text := client.get("rejected").text) else None,
        what="the causes",
    )
    # One field, two rules.
    assert "event: is required" in words(page)
    assert "event: must not be empty" in words(page)
    links = re.findall(r'href="(rejected[^"]*ask=replay)#cause"', page)
    assert len(links) == 2
    asked = client.get(html.unescape(links[0])).text
    question = words(asked[asked.index("will be processed again") :])
    assert "Of the newest 3, 3 would fail again: event: is required" in question
    assert "new message ids" not in question
    form = re.search(r'<form method="post" action="(rejected[^"]*)".*?</form>', asked, re.DOTALL)
    assert form is not None
    client.post(html.unescape(form[1]), data={"action": "delete"})
    page = client.get("rejected").text
    assert "event: is required" not in words(page)
    assert "event: must not be empty" in words(page)
