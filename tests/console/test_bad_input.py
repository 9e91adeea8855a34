# SPDX-License-Identifier: Apache-2.0
"""Addresses and forms that no page of the console made."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from engage.console.headers import HEADERS
from engage.store.facade import Storage
from engage.testing.factories import event, identify, letter
from support import console_data
from support.console import browser, console_url, make_link
from support.each import each
from support.exports import on_store
from support.server_process import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with console_data.start(tmp_path_factory.mktemp("console")) as one:
        console_data.fill(one)
        console_data.letters(one)
        yield one


@each("cursor", ["", " ", "\0", "zz", "[1.5]", "[18446744073709551615,1]", "a\0b", "1.z", "é"])
@each(
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


@each("name", ["q", "workspace", "id", "name"])
def test_a_query_that_is_not_utf_8_gets_a_page(client: httpx.Client, name: str) -> None:
    for route in ("search", "events", "event", "user"):
        answer = client.get(f"{route}?{name}=%ff")
        assert answer.status_code in (200, 400, 404)
        assert "</html>" in answer.text


@each(
    "target, location",
    [
        *(("keys?route=1&self=2&query=3", "keys?route=1&self=2&query=3"), ("//[", "./")),
        *(("http://[", "./"), ("ключ", "./"), ("//evil.example/keys", "./"), ("https:keys", "./")),
        *(("https://evil.example", "./"), ("javascript:x", "./")),
        *(("letter/check", "./"), ("\\\\evil.example", "./")),
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


@each("name", STRANGE)
def test_an_id_of_a_client_can_be_opened(server: Server, client: httpx.Client, name: str) -> None:
    event = {"userId": name, "messageId": name, "event": name}
    assert server.post("/v1/track", event).status_code == 200
    assert server.post("/v1/identify", {"userId": name}).status_code == 200
    for path, parameter in (("event", "id"), ("event.json", "id"), ("user", "id")):
        assert client.get(path, params={parameter: name}).status_code == 200, path
    found = client.get("search", params={"q": name}).text
    for path in ("event", "user", "events"):
        assert f'href="{path}?workspace=acme&amp;' in found
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
    match = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)
    assert match is not None
    text = html.unescape(match[1])
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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (r'{"a\ud83d":1,"a\ude00":2}', r"a\ud83d"),
        ("12345678901234567890", "12345678901234567890"),
        ("1e400", "1e400"),
        ("[" * 2000 + "]" * 2000, "nested too deeply"),
    ],
    ids=["two keys", "integer", "double", "levels"],
)
def test_a_value_that_cannot_be_stored_is_shown_on_every_page(
    server: Server, client: httpx.Client, value: str, shown: str
) -> None:
    """As it was sent, and it is refused again."""
    fault = f'{{"type":"track","userId":"u\\ud83d","event":"e","properties":{{"v":{value}}}}}'
    answer = server.post("/v1/batch", f'{{"batch":[{fault}]}}'.encode())
    assert len(answer.json()["rejected"]) == 1
    letter = server.export("dead-letters")[-1]
    query = {"workspace": "acme", "id": letter["id"]}
    for route in ("letter", "rejected", "events", "live", ""):
        assert client.get(route, params=query).status_code == 200
    page = html.unescape(client.get("letter", params=query).text)
    assert shown in page
    assert client.get("event.json", params={"letter": letter["id"]}).status_code == 200
    if value.startswith("["):
        return  # Its deepest levels were not kept, so it cannot be edited.
    text = re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)
    assert text is not None
    checked = client.post("letter/check", data={**query, "text": text[1]})
    assert checked.status_code == 200
    assert "half of a surrogate pair" in checked.text


DEEP = 60
#: Items and bodies that another program may have written, and the traits of a user: JSON with far
#: more indentation than text, deeper than a parser goes, with many lines, with invisible text.
WIDE = b"[" * DEEP + b",".join([b"1"] * 25_000) + b"]" * DEEP
ITEMS = {
    "wide": WIDE,
    "very-deep": b"[" * 100_000 + b"]" * 100_000,
    "open": b"[" * 100_000,
    "deep-and-wide": b"[" * 900 + b",".join([b"1"] * 100_000) + b"]" * 900,
    "large": b'"' + b"x" * 2_000_000 + b'"',
    "lines": b"\n" * 200_000,
    "invisible": b"\x01" * 300_000,
}
ENVELOPES = {
    "list": b"[]",
    "number": b"1",
    "no-json": b"{",
    "bytes": b"\xff",
    "context": b'{"context":[1]}',
    "integrations": b'{"integrations":"x"}',
    "sent": b'{"sentAt":[]}',
    "deep": b'{"context":{"a":' + b"[" * 900 + b"]" * 900 + b"}}",
}


@pytest.fixture(scope="module")
def strangers(server: Server) -> Server:
    """A server whose store has letters, events and a user that its clients cannot make."""
    letters = [letter(f"api-{name}", item=item, envelope=b"{}") for name, item in ITEMS.items()]
    letters += [
        letter(f"hook-{name}", item=item, origin="stripe", operation=None)
        for name, item in ITEMS.items()
    ]
    letters += [
        letter(f"env-{name}", item=b'{"userId":"u","event":"E"}', operation="track", envelope=one)
        for name, one in ENVELOPES.items()
    ]
    events = [
        dataclasses.replace(event(f"m-{name}"), body=b'{"a":' + body + b"}")
        for name, body in ITEMS.items()
        if name in ("wide", "large", "deep-and-wide")
    ]
    traits = identify("m-user", "wide", traits={"a": json.loads(WIDE)})

    async def fill(store: Storage) -> None:
        assert all(await store.keep(letters))
        await store.write([*events, traits])

    on_store(server.config, fill)
    return server


@each("name", ENVELOPES)
@each("route", ["letter/check", "letter/replay"])
def test_a_damaged_envelope_gets_a_page(
    strangers: Server, client: httpx.Client, name: str, route: str
) -> None:
    form = {"id": f"env-{name}", "workspace": "acme"}
    answer = client.post(route, data=form)
    assert answer.status_code == 200
    assert "</html>" in answer.text
    letter_page = client.get("letter", params=form)
    assert (letter_page.status_code, letter_page.text.count("</html>")) == (200, 1)


#: MiB of the largest answer: the text in lines, as it is, and as a command, each of at most 1 MiB
#: of characters and as much indentation, escaped for JSON or HTML.
MOST = 8


@each("name", ITEMS)
@each("kind", ["api", "hook"])
def test_what_a_letter_shows_is_bounded_with_its_indentation(
    strangers: Server, client: httpx.Client, kind: str, name: str
) -> None:
    query = {"workspace": "acme", "letter": f"{kind}-{name}"}
    answer = client.get("event.json", params=query)
    assert answer.status_code == 200
    assert len(answer.content) < MOST * 2**20
    view = answer.json()
    shown = "".join(text for line in view["lines"] for _, text in line["tokens"])
    assert shown or name == "lines"
    if name in ("wide", "deep-and-wide", "large", "lines", "invisible"):
        assert "… the rest is not shown here" in shown
    page = client.get("letter", params={"workspace": "acme", "id": f"{kind}-{name}"})
    assert page.status_code == 200
    # The field to edit has the whole item, which is never larger than a record of the log.
    assert len(page.content) < MOST * 2**20 + 7 * len(ITEMS[name])


@each("name", ["wide", "large", "deep-and-wide"])
def test_what_an_event_and_a_user_show_is_bounded_with_its_indentation(
    strangers: Server, client: httpx.Client, name: str
) -> None:
    for route in ("event.json", "event"):
        answer = client.get(route, params={"workspace": "acme", "id": f"m-{name}"})
        assert answer.status_code == 200
        assert len(answer.content) < MOST * 2**20
    user = client.get("user", params={"workspace": "acme", "id": "wide"})
    assert user.status_code == 200
    assert len(user.content) < MOST * 2**20


@each("at", [9 * 10**15, -(10**14), -1])
def test_a_letter_with_an_impossible_time_gets_pages(
    strangers: Server, client: httpx.Client, at: int
) -> None:
    odd = letter(f"at{at}", received_at=at, operation="track", envelope=b"{}", user_id="timeless")

    async def fill(store: Storage) -> None:
        assert all(await store.keep([odd]))

    on_store(strangers.config, fill)
    query = {"workspace": "acme", "id": odd.id}
    for route in ("letter", "rejected", "events", "live", ""):
        assert client.get(route, params=query).status_code == 200
    assert client.get("event.json", params={"letter": odd.id}).status_code == 200
    assert client.post("letter/check", data=query).status_code == 200


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("Content-Type: multipart/form-data", "x"),
        ("Content-Type: multipart/form-data; boundary=b", "--b\r\nfoo\r\n--b--"),
        ("Content-Type: application/x-www-form-urlencoded", "a&" * 2000),
        ("Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 99999999", ""),
        ("Content-Length: x", ""),
        ("Transfer-Encoding: chunked", "zz\r\n"),
        ("no colon", ""),
    ],
)
@pytest.mark.parametrize("path", ["letter/replay", "login"])
def test_a_form_that_cannot_be_read_is_refused_with_the_policy(
    client: httpx.Client, path: str, head: str, body: str
) -> None:
    url = client.base_url
    lines = [
        f"POST {url.path}{path} HTTP/1.1",
        f"Host: {url.host}:{url.port}",
        f"Origin: http://{url.host}:{url.port}",
        "Connection: close",
        "Cookie: " + "; ".join(f"{name}={value}" for name, value in client.cookies.items()),
        head,
    ]
    if "Content-Length" not in head and "Transfer-Encoding" not in head:
        lines.append(f"Content-Length: {len(body)}")
    with socket.create_connection(("127.0.0.1", url.port or 80), 30) as connection:
        connection.sendall("\r\n".join([*lines, "", body]).encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    status, _, rest = answer.partition("\r\n")
    assert status == "HTTP/1.1 400 Bad Request"
    sent = dict(line.split(": ", 1) for line in rest.partition("\r\n\r\n")[0].splitlines())
    assert {**sent, **HEADERS} == sent
    assert sent["Referrer-Policy"] == "same-origin"
