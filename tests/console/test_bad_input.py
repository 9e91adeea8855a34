# SPDX-License-Identifier: Apache-2.0
"""Addresses and forms that no page of the console made."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator

import httpx
import pytest

from support import console_data
from support.console import browser, console_url, make_link, signed_in
from support.server_process import Server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the console is a child process")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with console_data.start(tmp_path_factory.mktemp("console")) as one:
        console_data.fill(one)
        console_data.letters(one)
        yield one


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with signed_in(server) as one:
        yield one


@pytest.mark.parametrize("cursor", ["zz", "[1]", "[18446744073709551615,1]", "a\0b", "1.z", "é"])
@pytest.mark.parametrize(
    "path",
    ["events?before=", "events.ndjson?before=", "rejected?before=", "users?after=", "audit?after="],
)
def test_a_cursor_that_the_store_did_not_make_is_an_error_of_the_link(
    client: httpx.Client, path: str, cursor: str
) -> None:
    name, _, parameter = path.partition("?")
    answer = client.get(name, params={parameter.rstrip("="): cursor})
    assert answer.status_code == 400
    assert "not one of the console" in answer.text


@pytest.mark.parametrize("name", ["q", "workspace", "id", "name"])
def test_a_query_that_is_not_utf_8_gets_a_page(client: httpx.Client, name: str) -> None:
    for route in ("search", "events", "event", "user"):
        answer = client.get(f"{route}?{name}=%ff")
        assert answer.status_code in (200, 400, 404)
        assert "</html>" in answer.text


@pytest.mark.parametrize(
    ("target", "location"),
    [
        ("keys?route=1&self=2&query=3", "keys?route=1&self=2&query=3"),
        ("//[", "./"),
        ("http://[", "./"),
        ("ключ", "./"),
        ("//evil.example/keys", "./"),
        ("https:keys", "./"),
        ("letter/check", "./"),
        ("\\\\evil.example", "./"),
        ("keys?id=%0d%0aSet-Cookie:a=b", "keys?id=%0D%0ASet-Cookie%3Aa%3Db"),
        ("events.ndjson?user=ann", "events.ndjson?user=ann"),
    ],
)
def test_signing_in_leads_to_a_page_of_the_console(
    server: Server, client: httpx.Client, target: str, location: str
) -> None:
    with browser(console_url(server)) as new:
        form = {"t": make_link(server.config), "next": target}
        answer = new.post("link", data=form)
        assert (answer.status_code, answer.headers["Location"]) == (303, location)
    answer = client.get("login", params={"next": target})
    assert (answer.status_code, answer.headers["Location"]) == (303, location)


def test_a_file_with_a_null_byte_in_its_name_is_not_there(server: Server) -> None:
    with browser(console_url(server)) as anyone:
        for path in ("static/%00", "static/console.css%00", "static/..%00/base.py"):
            assert anyone.get(path).status_code == 404
        assert anyone.get("static/..%2fbase.py").status_code in (403, 404)
    assert "embedded null byte" not in server.log()


STRANGE = [" a", "a ", "a\x01b", "a\tb", "a\u202eb", "x\u2028", "%00", "a+b&c=d", "../x"]


@pytest.mark.parametrize("name", STRANGE)
def test_an_id_of_a_client_can_be_opened(server: Server, client: httpx.Client, name: str) -> None:
    event = {"userId": name, "messageId": name, "event": name}
    assert server.post("/v1/track", event).status_code == 200
    assert server.post("/v1/identify", {"userId": name}).status_code == 200
    for path, parameter in (("event", "id"), ("event.json", "id"), ("user", "id")):
        assert client.get(path, params={parameter: name}).status_code == 200, path
    assert client.get("search", params={"q": name}).status_code == 303
    for parameter in ("user", "name"):
        assert "event?" in client.get("events", params={parameter: name}).text


def test_a_group_of_rejected_events_with_a_strange_pointer_has_its_letters(
    server: Server, client: httpx.Client
) -> None:
    reason = "invalid_event"
    found = client.get("rejected", params={"reason": reason, "pointer": "/a\x01b"}).text
    assert "Nothing fits" in found
    assert "/a\\u0001b" in found


def test_the_editor_shows_characters_that_reorder_text_as_escapes(
    server: Server, client: httpx.Client
) -> None:
    """They are not an edit: the letter is replayed as it is."""
    strange = "a\u202eb\u2028\u200b\x85c"
    assert server.post("/v1/track", {"userId": strange}).status_code == 400
    letter = console_data.letters(server)[-1]
    page = client.get("letter", params={"id": letter}).text
    found = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)
    assert found is not None
    text = html.unescape(found[1])
    assert not set(text) & set("\u202e\u2028\u200b\x85")
    assert "a\\u202eb\\u2028\\u200b\\u0085c" in text
    # The text of a link is not that of the form.
    linked = client.get("letter", params={"id": letter, "text": "another text"}).text
    assert "another text" not in linked
    text = text.replace("{", '{"event": "Fixed",', 1)
    form = {"id": letter, "text": text.replace("\n", "\r\n")}
    checked = client.post("letter/check", data=form).text
    assert "This text is valid" in checked
    proof = re.search(r'name="checked" value="(\w+)"', checked)
    assert proof is not None
    assert client.post("letter/replay", data={**form, "checked": proof[1]}).status_code == 303
    assert server.export()[-1]["userId"] == strange
