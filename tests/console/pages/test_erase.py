# SPDX-License-Identifier: Apache-2.0
"""A user is erased in the console, and everything about it is downloaded."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engage.api import StorageUnavailable
from engage.console.data.reader import AT_ONCE
from engage.store.profiles import USER
from engage.testing import MemoryStore
from engage.testing.factories import event
from support.console import CONSOLE, console_here, sign_in_here
from support.memory_store import events_of, profiles_of, records_of
from support.people import KEY, fill, traces

ERASURES = f'[erasures]\nkey = "{KEY}"\n'
PAGE = "erase?workspace=acme&id=ann"


@contextlib.asynccontextmanager
async def console(
    folder: Path, store: Any, extra: str = ERASURES
) -> AsyncIterator[httpx.AsyncClient]:
    async with console_here(folder, store, config_extra=CONSOLE + extra) as (served, client):
        object.__setattr__(served.config.storage, "write_timeout", 0.1)
        await sign_in_here(served, client)
        yield client


async def until(client: httpx.AsyncClient, text: str) -> str:
    """Return the page when it has a text."""
    for _ in range(600):
        page = (await client.get(PAGE)).text
        if text in page:
            return page
        await asyncio.sleep(0.1)
    raise AssertionError(page)


async def test_a_user_is_erased_when_its_id_is_typed_again(tmp_path: Path) -> None:
    store = MemoryStore()
    await fill(store)
    async with console(tmp_path, store) as client:
        user = await client.get("user?workspace=acme&id=ann")
        assert 'href="erase?workspace=acme&amp;id=ann"' in user.text
        form = await client.get(PAGE)
        assert "This cannot be undone" in form.text
        assert "<code>ann@x.org</code>" in form.text
        assert "<code>+49123</code>" in form.text
        for wrong in ("", "Ann", "ann "):
            answer = await client.post(PAGE, data={"confirm": wrong})
            assert answer.status_code == 400
            assert "Type the user id to confirm" in answer.text
        assert ("acme", USER, "ann") in profiles_of(store)
        answer = await client.post(PAGE, data={"confirm": "ann", "address": "ann@x.org\nann"})
        assert answer.status_code == 400
        assert "neither an e-mail address nor a phone number" in answer.text
        assert ">ann@x.org\nann</textarea>" in answer.text
        typed = " Ann@x.org \r\n\r\n+49 123"
        answer = await client.post(PAGE, data={"confirm": "ann", "address": typed})
        assert answer.status_code == 303
        running = await client.get(PAGE)
        assert 'http-equiv="refresh"' in running.text
        assert (await client.post("erase?workspace=acme&id=b", data={"confirm": "b"})).is_error
        receipt = await until(client, "The user is erased")
        assert 'http-equiv="refresh"' not in receipt
        assert "<dt>events</dt><dd>8</dd>" in receipt
        assert "<dt>Addresses</dt><dd>ann@x.org, +49123</dd>" in receipt
        assert "Addresses that are left" not in receipt
        assert await traces(store) == []
        audit = await client.get("audit?workspace=acme")
        assert "user-erased" in audit.text
        assert ">ann<" not in audit.text
        # The form is there again for another id.
        assert "This cannot be undone" in (await client.get("erase?workspace=acme&id=bob")).text


async def test_visitors_are_ticked_to_be_erased_and_never_to_be_downloaded(tmp_path: Path) -> None:
    store = MemoryStore()
    await fill(store)
    hostile = '"><b>v'
    mark: Any = {"context": {"engage": {"foundBy": "email:ann@x.org"}}}
    await store.write(
        [
            event("x1", user_id="ann", anonymous_id=hostile, at=5),
            event("x2", type="identify", anonymous_id=hostile, at=6, traits={"age": 1}),
            event("x3", anonymous_id="ann", at=7),
            event("x4", user_id="ann", origin="sendgrid", at=8, **mark),
        ]
    )
    async with console(tmp_path, store) as client:
        form = (await client.get(PAGE)).text
        boxes = re.findall(
            r'<input type="checkbox" name="(\w+)"\s+value="(.*?)"[^>]*?(\schecked)?>', form
        )
        escaped = html.escape(hostile)
        assert {(name, value) for name, value, ticked in boxes if ticked} == {("visitor", escaped)}
        assert sorted((name, value) for name, value, _ in boxes) == sorted(
            (name, value) for name in ("download", "visitor") for value in (escaped, "ann", "b1")
        )
        assert "no, same text" in form
        assert "1 deliveries that were found by <code>email:ann@x.org</code>" in form
        # What was ticked is kept.
        again = (await client.post(PAGE, data={"confirm": "", "visitor": ["b1"]})).text
        boxes = re.findall(r'name="visitor"\s+value="(.*?)"[^>]*?(\schecked)?>', again)
        assert {value for value, ticked in boxes if ticked} == {"b1"}
        # The form sends both; each takes its own.
        form_ = {"user": "ann", "visitor": [hostile], "download": ["b1"]}
        answer = await client.get(
            "user.ndjson?workspace=acme", params=form_ | {"workspace": "acme"}
        )
        documents = [json.loads(line) for line in answer.text.splitlines()]
        taken = {one["anonymousId"] for one in documents if one["record"] == "visitors"}
        assert taken == {"a1", "b1"}
        data = {"confirm": "ann", "visitor": [hostile, "ann"], "download": ["b1"]}
        await client.post(PAGE, data=data)
        receipt = await until(client, "The user is erased")
        assert "Visitors that are left" in receipt
        assert "b1 (" in receipt
        left = {one.message_id for one in events_of(store).values()}
        assert left & {"x1", "x2", "x3", "m7"} == {"m7"}


async def test_nothing_is_erased_without_a_key(tmp_path: Path) -> None:
    store = MemoryStore()
    await fill(store)
    async with console(tmp_path, store, "") as client:
        answer = await client.post(PAGE, data={"confirm": "ann"})
        assert answer.status_code == 400
        assert "the config has no key for erasures" in answer.text
    assert ("acme", USER, "ann") in profiles_of(store)


async def test_an_erasure_that_fails_says_why(tmp_path: Path) -> None:
    store = MemoryStore()
    await fill(store)
    (tmp_path / "engage.toml.erasures").mkdir()
    async with console(tmp_path, store) as client:
        await client.post(PAGE, data={"confirm": "ann"})
        page = await until(client, "cannot be read")
        assert "This cannot be undone" in page
        assert "Nothing was erased: " in page
        assert "in part" not in page
        system = await client.get("system")
        assert "people cannot be erased: " in system.text
        assert "cannot be read: Is a directory" in system.text
    assert ("acme", USER, "ann") in profiles_of(store)


async def test_a_console_that_only_reads_erases_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    await fill(store)
    async with console(tmp_path, store, f"read_only = true\n{ERASURES}") as client:
        assert (await client.post(PAGE, data={"confirm": "ann"})).status_code == 403
        assert "read-only" in (await client.get(PAGE)).text
        assert ">Erase<" not in (await client.get("user?workspace=acme&id=ann")).text
    assert ("acme", USER, "ann") in profiles_of(store)


async def test_everything_about_a_user_is_downloaded(tmp_path: Path) -> None:
    store = MemoryStore()
    await fill(store)
    async with console(tmp_path, store) as client:
        answer = await client.get("user.ndjson?workspace=acme&id=ann")
        assert answer.headers["Content-Disposition"] == 'attachment; filename="user.ndjson"'
        kinds = [json.loads(line)["record"] for line in answer.text.splitlines()]
        assert (kinds.count("events"), kinds.count("suppressions")) == (7, 0)
        # As the form sends it.
        form = {"workspace": "acme", "user": "ann", "confirm": "", "address": "ann@x.org\r\n+49123"}
        answer = await client.get("user.ndjson", params=form)
        kinds = [json.loads(line)["record"] for line in answer.text.splitlines()]
        assert (kinds.count("events"), kinds.count("suppressions")) == (8, 2)
        entries = [
            json.loads(record.body)
            for record in records_of(store).values()
            if b"user-downloaded" in record.body
        ]
        assert [entry["details"] for entry in entries] == [
            {"workspace": "acme", "user": "ann", "addresses": number, "visitors": 0}
            for number in (0, 2)
        ]
        assert all(entry["who"].startswith("session ") for entry in entries)
        wrong = await client.get("user.ndjson?workspace=acme&id=ann&address=@")
        assert (wrong.status_code, "Content-Disposition" in wrong.headers) == (400, False)
        assert (await client.get("user.ndjson?workspace=acme&id=nobody")).text == ""


async def test_a_download_needs_a_session_that_cannot_have_ended(tmp_path: Path) -> None:
    """As every page: a session that was ended elsewhere reads nothing while the store fails."""
    store = MemoryStore()
    await fill(store)

    async def fails(*_: Any, **_options: Any) -> Any:
        raise StorageUnavailable("the disk is gone")

    async with console_here(tmp_path, store, config_extra=CONSOLE + ERASURES) as (served, client):
        await sign_in_here(served, client)
        assert (await client.get("user.ndjson?workspace=acme&id=ann")).status_code == 200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.sessions, "check", fails)
            answer = await client.get("user.ndjson?workspace=acme&id=ann")
        assert answer.status_code == 503
        assert "ann" not in answer.text


async def test_a_download_takes_turns_with_the_pages(tmp_path: Path) -> None:
    """Each of its calls of the store is bounded as those of the pages are."""
    store = MemoryStore()
    await fill(store)
    running = most = 0
    scan = store.scan

    async def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return await scan(*arguments, **options)

    store.scan = slow  # type: ignore[method-assign]
    async with console(tmp_path, store) as client:
        answers = await asyncio.gather(
            *(client.get("user.ndjson?workspace=acme&id=ann") for _ in range(6))
        )
    assert [answer.text.count('"record":"events"') for answer in answers] == [7] * 6
    assert most == AT_ONCE


class Failing(MemoryStore):
    """A store that fails when the second page of what is sent of its events is read."""

    begun = 0

    async def scan(self, *arguments: Any, after: str | None, **options: Any) -> Any:
        self.begun += after is None
        # They are read before, for what belongs to the user, and for what is left out.
        if self.begun > 2 and after is not None:
            raise StorageUnavailable("the disk is gone")
        return await super().scan(*arguments, after=after, **options)


async def test_a_download_that_fails_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engage.reading.scans.PAUSE", 0)
    store = Failing()
    await store.write([event(f"n{number}", user_id="ann") for number in range(2000)])
    async with console(tmp_path, store) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("user.ndjson?workspace=acme&id=ann")


async def test_the_requests_of_providers_are_listed(tmp_path: Path) -> None:
    store = MemoryStore()
    hostile = '<b>"ann'
    name = "Customer Redaction Requested"
    await store.write([event("r1", origin="shopify", user_id=hostile, event=name)])
    webhook = '[workspaces.webhooks.shopify]\nclient_secret = "s"\n'
    async with console(tmp_path, store, webhook + ERASURES) as client:
        page = await client.get("erase?workspace=acme")
        assert html.escape(hostile) in page.text
        assert "None of them proves who asks" in page.text
    async with console(tmp_path, store) as client:
        assert "No request is left" in (await client.get("erase?workspace=acme")).text
