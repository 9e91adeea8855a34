# SPDX-License-Identifier: Apache-2.0
"""Addresses and forms that no page of the console made."""

from __future__ import annotations

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
