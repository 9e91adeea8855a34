# SPDX-License-Identifier: Apache-2.0
"""Keys of two kinds on the page Keys: server keys are shown once, and options are kept."""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path

import httpx

from engage.keys.effective import Key, list_keys
from engage.keys.table import KeyTable
from engage.monitoring.history import History
from engage.monitoring.metrics import Metrics
from support.console import CONSOLE, Clock, console_here, sign_in_here
from support.memory_store import MemoryStore
from support.server_inprocess import serving
from support.server_process import KEY
from support.waiting import eventually

SECRET = "5e" * 16
SERVER_KEY = f"""
[[workspaces.write_keys]]
id = "backend"
kind = "server"
sha256 = "{hashlib.sha256(SECRET.encode()).hexdigest()}"
operations = ["track"]
"""
SHOP = """
[[workspaces.write_keys]]
id = "shop"
key = "key-of-shop"
origins = ["https://shop.example.com"]
operations = ["track"]
"""


def secret_of(page: httpx.Response) -> str:
    """Return the secret that a page shows."""
    match = re.search(r'<code id="secret">([0-9a-f]{32})</code>', page.text)
    assert match is not None
    return match[1]


async def test_a_server_key_is_shown_once(tmp_path: Path) -> None:
    store = MemoryStore()
    async with console_here(tmp_path, store) as (console, client):
        await sign_in_here(console, client)
        form = {"action": "create", "id": "jobs", "kind": "server", "operations": "track, page"}
        answer = await client.post("keys", data=form)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        secret = secret_of(answer)
        # As it is shown, it works: its hash is what is stored.
        digest = hashlib.sha256(secret.encode()).hexdigest()
        key = await made(console.app.keys, "jobs")
        assert (key.sha256, key.key, key.operations) == (digest, "", ("track", "page"))
        for path in ("", "keys", "keys?key=jobs", "audit"):
            page = await client.get(path)
            assert page.status_code == 200
            assert secret not in page.text
            assert digest not in page.text
        page = await client.get("keys?key=jobs")
        assert "track, page" in page.text
        # The snippets have a key that may be seen.
        assert f"curl -u {KEY}:" in page.text
        # A reload sends the form again, and makes no second key.
        again = await client.post("keys", data=form)
        assert again.status_code == 400
        assert "already has a key" in again.text


async def made(keys: KeyTable, key_id: str) -> Key:
    """Wait until the console knows a key, and return it."""

    def found() -> Key | None:
        return next((key for key in keys.of("acme") if key.id == key_id), None)

    await eventually(lambda: found() is not None)
    key = found()
    assert key is not None
    return key


async def test_a_rotated_key_keeps_its_options(tmp_path: Path) -> None:
    extra = f"{SERVER_KEY}{SHOP}{CONSOLE}"
    async with console_here(tmp_path, MemoryStore(), config_extra=extra) as (console, client):
        await sign_in_here(console, client)
        answer = await client.post("keys", data={"action": "rotate", "id": "backend"})
        assert answer.status_code == 200
        key = await made(console.app.keys, "backend-2")
        assert (key.kind, key.operations) == ("server", ("track",))
        assert key.sha256 == hashlib.sha256(secret_of(answer).encode()).hexdigest()
        answer = await client.post("keys", data={"action": "rotate", "id": "shop"})
        assert answer.status_code == 303
        key = await made(console.app.keys, "shop-2")
        assert (key.kind, key.origins) == ("public", ("https://shop.example.com",))
        page = (await client.get("keys")).text
        assert page.count("only https://shop.example.com, track") == 2


async def test_the_web_pages_of_a_key_must_be_those_of_cors(tmp_path: Path) -> None:
    extra = f'{CONSOLE}[cors]\norigins = ["https://a.example"]\n'
    async with console_here(tmp_path, MemoryStore(), config_extra=extra) as (console, client):
        await sign_in_here(console, client)
        form = {"action": "create", "id": "shop", "kind": "public", "origins": "https://b.example"}
        wrong = await client.post("keys", data=form)
        assert wrong.status_code == 400
        assert "origins[0]: add it to cors.origins too" in wrong.text
        form["origins"] = "https://a.example"
        assert (await client.post("keys", data=form)).status_code == 303


async def test_a_key_with_web_pages_is_created(tmp_path: Path) -> None:
    async with console_here(tmp_path, MemoryStore()) as (console, client):
        await sign_in_here(console, client)
        form = {"action": "create", "id": "shop", "kind": "public", "origins": "https://a.example/"}
        wrong = await client.post("keys", data=form)
        assert wrong.status_code == 400
        assert "origins[0]: must be an origin without a path" in html.unescape(wrong.text)
        form["origins"] = "https://a.example, http://localhost:3000"
        assert (await client.post("keys", data=form)).status_code == 303
        key = await made(console.app.keys, "shop")
        assert key.origins == ("https://a.example", "http://localhost:3000")


async def test_a_key_with_a_rate_is_created_and_rotated(tmp_path: Path) -> None:
    async with console_here(tmp_path, MemoryStore()) as (console, client):
        await sign_in_here(console, client)
        form = {"action": "create", "id": "kiosk", "kind": "public", "rate": "fast"}
        wrong = await client.post("keys", data=form)
        assert wrong.status_code == 400
        assert "rate: 'fast' must end with a number" in html.unescape(wrong.text)
        wrong = await client.post("keys", data={**form, "rate": "5,speed=1"})
        assert (wrong.status_code, "speed: unknown key" in wrong.text) == (400, True)
        form["rate"] = "50, burst=200"
        assert (await client.post("keys", data=form)).status_code == 303
        rate = {"events_per_second": 50, "burst": 200}
        assert (await made(console.app.keys, "kiosk")).rate == rate
        await client.post("keys", data={"action": "rotate", "id": "kiosk"})
        assert (await made(console.app.keys, "kiosk-2")).rate == rate
        page = (await client.get("keys")).text
        assert page.count("at most events_per_second=50, burst=200") == 2


async def test_a_quota_that_is_used_up_needs_attention(tmp_path: Path) -> None:
    store = MemoryStore()
    extra = f"{CONSOLE}[limits.quota]\nevents_per_day = 10\n"
    async with console_here(tmp_path, store, config_extra=extra) as (console, client):
        await sign_in_here(console, client)
        metrics = Metrics()
        history = History(metrics)
        for count, shown in ((9, False), (1, True)):
            metrics.event("track", "stored", count, "acme", "website")
            metrics.stored(count, 100 * count, "acme", "website")
            history.turn(console.now())
            await history.write_to(store)
            await eventually(lambda: console.now() % 1000 > 0)
            page = html.unescape((await client.get("?range=1h")).text)
            warning = "The write key 'website' of the workspace 'acme' has used up 10 events a day"
            assert (warning in page) == shown


async def test_a_test_event_comes_from_a_page_of_the_key(tmp_path: Path) -> None:
    served, shown = tmp_path / "served", tmp_path / "shown"
    served.mkdir()
    shown.mkdir()
    extra = f"{SHOP}{CONSOLE}"
    async with (
        console_here(shown, MemoryStore(), config_extra=extra) as (console, client),
        serving(served, config_extra=SHOP) as server,
    ):
        await sign_in_here(console, client)
        console.events_url = f"http://127.0.0.1:{server.port}"
        form = {"action": "test", "write_key": "key-of-shop"}
        answer = await client.post("keys?key=shop", data=form)
        assert answer.status_code == 303, answer.text
        assert [event.document()["writeKeyId"] for event in await server.events()] == ["shop"]


async def test_a_workspace_with_a_server_key_alone_has_no_snippets(tmp_path: Path) -> None:
    """Its first page asks for a public key."""
    async with console_here(tmp_path, MemoryStore(), config_extra=CONSOLE) as (console, client):
        await sign_in_here(console, client)
        assert f"curl -u {KEY}:" in (await client.get("")).text
        await client.post("keys", data={"action": "create", "id": "jobs", "kind": "server"})
        await client.post("keys", data={"action": "disable", "id": "website"})
        await made(console.app.keys, "jobs")
        page = (await client.get("keys")).text
        assert "YOUR_WRITE_KEY" in page
        assert KEY not in (await client.get("")).text


async def test_a_key_in_use_is_disabled_after_a_question(tmp_path: Path) -> None:
    """With the figures; a key without use for a day is disabled at once."""
    clock = Clock()
    idle = '[[workspaces.write_keys]]\nid = "idle"\nkey = "key-of-idle"\n'
    extra = f"{idle}{CONSOLE}"
    async with console_here(tmp_path, MemoryStore(), config_extra=extra, clock=clock) as (
        console,
        client,
    ):
        await sign_in_here(console, client)
        metrics = Metrics()
        history = History(metrics)
        for key, hours, events in (("idle", 26, 500), ("website", 0, 131)):
            history.turn(console.now() - hours * 3_600_000)
            metrics.event("track", "stored", events, "acme", key)
            await history.write_to(console.store)

        async def disabled(key: str) -> bool:
            keys = await list_keys(console.store, console.config.workspaces)
            return next(one.disabled for one in keys.keys if one.id == key)

        answer = await client.post("keys", data={"action": "disable", "id": "website"})
        assert answer.status_code == 303
        assert not await disabled("website")
        page = (await client.get(answer.headers["location"])).text
        text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
        assert "Disable the key website?" in text
        assert "26.2 events a minute come with it" in text
        (form,) = re.findall(r"<form.*?</form>", page[page.index("Disable the key") :], re.S)[:1]
        fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form))
        assert fields.keys() == {"id", "version", "sure"}
        answer = await client.post("keys", data={"action": "disable", **fields})
        assert await disabled("website")
        # An old link to the question asks nothing.
        assert "Disable the key" not in (await client.get("keys?ask=website")).text
        assert "Disable the key" not in (await client.get("keys?ask=other")).text
        await client.post("keys", data={"action": "disable", "id": "idle"})
        assert await disabled("idle")
