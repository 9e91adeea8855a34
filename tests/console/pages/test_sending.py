# SPDX-License-Identifier: Apache-2.0
"""The button *Send a test event*: what it sends, and each answer in words."""

from __future__ import annotations

import asyncio
import html
import re
import sys
from pathlib import Path

import httpx
import pytest

from engage.api import StorageUnavailable
from support.console import CONSOLE, console_here, sign_in_here, signed_in
from support.http_client import listening
from support.memory_store import MemoryStore
from support.server_inprocess import Valve, serving
from support.server_process import KEY, start_server

OLD = '[[workspaces.write_keys]]\nid = "old"\nkey = "old-key"\ndisabled = true\n'


def notice(answer: httpx.Response) -> str:
    """Return the first notice of a page, without its tags."""
    assert answer.status_code == 200
    match = re.search(r'<p class="notice (?:ok|bad)".*?</p>', answer.text, re.DOTALL)
    assert match is not None
    return " ".join(html.unescape(re.sub("<.*?>", "", match[0])).split())


@pytest.mark.skipif(sys.platform == "win32", reason="the console is a child process")
def test_a_test_event_is_stored_and_shown(tmp_path: Path) -> None:
    """It goes to the listener: the public URL may be that of a proxy elsewhere."""
    public = 'public_url = "https://events.invalid"'
    with start_server(tmp_path, server=public, config_extra=CONSOLE) as server:
        with signed_in(server) as client:
            for path in ("", "keys"):
                assert "Send a test event" in client.get(path).text
                form = {"action": "test", "write_key": KEY}
                answer = client.post(path, data=form, follow_redirects=True)
                assert answer.history, "a reload would send another event"
                assert notice(answer).startswith("The server accepted the test event. Show it")
                link = re.search(r'href="(event\?[^"]*)"', answer.text)
                assert link is not None
                shown = client.get(html.unescape(link[1]))
                assert "Test Event" in shown.text
                assert "the console of engage" in shown.text
            assert "test-event-sent" in client.get("audit").text
        stored = server.export("events")
    assert [(one["type"], one["event"], one["writeKeyId"]) for one in stored] == [
        ("track", "Test Event", "website")
    ] * 2


async def test_each_answer_is_shown_in_words(tmp_path: Path) -> None:
    valve = Valve("write")
    served, shown = tmp_path / "served", tmp_path / "shown"
    served.mkdir()
    shown.mkdir()
    async with console_here(shown, MemoryStore()) as (console, client):
        await sign_in_here(console, client)

        async def answered(path: str, key: str) -> str:
            form = {"action": "test", "write_key": key}
            return notice(await client.post(path, data=form))

        with listening() as unused:
            console.events_url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "There was no answer from http://127.0.0.1:" in await answered("", KEY)
        async with serving(served, config_extra=OLD, meddle=valve) as server:
            console.events_url = f"http://127.0.0.1:{server.port}"
            for path in ("", "keys"):
                assert await answered(path, "old-key") == (
                    "The answer was 403: invalid write key: it is disabled"
                )
                unknown = await answered(path, "of-nobody")
                assert unknown.startswith("The answer was 401: invalid write key")
            valve.error = StorageUnavailable("away")
            said = await answered("", KEY)
            assert said.startswith("The answer was 503: the storage is unavailable")
            # Something else at this address.
            console.events_url += "/elsewhere"
            assert "404: there is nothing at this path" in await answered("", KEY)
            assert await server.events() == []


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"messageId": "\\ud800"}', b"[1]"])
async def test_an_answer_that_is_not_of_engage_is_shown(tmp_path: Path, body: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with (
        console_here(tmp_path, MemoryStore()) as (console, client),
        await asyncio.start_server(answer, "127.0.0.1", 0) as other,
    ):
        await sign_in_here(console, client)
        console.events_url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        form = {"action": "test", "write_key": KEY}
        assert notice(await client.post("keys", data=form)) == "The answer was 200: OK"


async def test_a_console_that_only_shows_has_no_button(tmp_path: Path) -> None:
    extra = f"{CONSOLE}read_only = true\n"
    async with console_here(tmp_path, MemoryStore(), config_extra=extra) as (console, client):
        await sign_in_here(console, client)
        for path in ("", "keys"):
            assert "Send a test event" not in (await client.get(path)).text
            assert (await client.post(path, data={"action": "test"})).status_code == 403
