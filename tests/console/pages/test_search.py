# SPDX-License-Identifier: Apache-2.0
"""Finding events and users: filters, suggestions and the search, on each storage."""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote_plus

import httpx
import pytest

from engage.api import StorageUnavailable
from engage.console import listing
from engage.console.display.formats import iso
from engage.console.pages import search
from engage.store import events
from engage.store.facade import Storage
from engage.testing.factories import TIME, event, identify, letter, store_all
from engage_plugins.mongo import stored_events as mongo_events
from support import mongo
from support.console import BrokenStore, console_here, sign_in_here
from support.console_data import STORAGES
from support.sqlite import config_file, open_store


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Storage]:
    """Open a store that finds users by their e-mail address."""
    if kind == "sqlite":
        async with open_store(config_file(folder, "store")) as store:
            yield store
    else:
        url = mongo.shared(mongo.kinds()[0]).url()
        async with mongo.opened(folder, url, identifiers={"acme": ("email",)}) as store:
            yield store


@contextlib.asynccontextmanager
async def console_on(kind: str, folder: Path) -> AsyncIterator[tuple[Storage, httpx.AsyncClient]]:
    """Serve a console on a storage, and sign in."""
    async with (
        opened(kind, folder) as store,
        console_here(folder, store) as (console, client),
    ):
        await sign_in_here(console, client)
        yield store, client


@pytest.fixture
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page look at ten events only, as if the store were slow."""
    monkeypatch.setattr(listing, "SEARCH_SECONDS", -1.0)
    monkeypatch.setattr(events, "MAX_ROWS", 10)
    monkeypatch.setattr(mongo_events, "_WINDOWS", (10,))


def text_of(answer: httpx.Response) -> str:
    """Return the text of the main part of a page."""
    main = answer.text.partition("<main")[2].partition("</main>")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", main)).split())


def ids_of(answer: httpx.Response) -> list[str]:
    """Return the message ids of the events on a page."""
    matches = re.findall(r'href="event\?[^"]*;id=([^"&]*)"', answer.text)
    return [unquote_plus(match) for match in matches]


def link_named(answer: httpx.Response, words: str) -> str | None:
    """Return where a link leads."""
    match = re.search(rf'href="([^"]*)"\s*>{words}<', answer.text)
    return None if match is None else html.unescape(match[1])


#: A message id → the user id, the anonymous id and the name of the event.
SENT: dict[str, tuple[str | None, str | None, str]] = {
    "m-order": ("Ann", "visit-1", "Order Completed"),
    "m-other": ("anna", None, "Заказ"),
    "m-nul": ("a\0b", None, "order\u202eelif"),
    "m-right": ("שלום עולם", "Visit-2", "<img src=x>"),
    "m-quote": ('"Ann"', None, "50%_off"),
}


async def send(store: Storage) -> None:
    await store_all(
        store,
        *(
            event(message, user_id=user, anonymous_id=visitor, event=name, at=number)
            for number, (message, (user, visitor, name)) in enumerate(SENT.items())
        ),
    )


@pytest.mark.parametrize("kind", STORAGES)
async def test_a_filter_finds_the_beginning_of_a_name_or_an_id(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        await send(store)
        for field, typed, wanted in (
            *(("name", "order", ["m-nul", "m-order"]), ("name", "ORDER C", ["m-order"])),
            *(("name", "заказ", ["m-other"]), ("name", "completed", []), ("name", '"order"', [])),
            *(("name", '"Order Completed"', ["m-order"]), ("name", "50%", ["m-quote"])),
            *(("name", "50_", []), ("name", "order\u202eelif", ["m-nul"])),
            *(("name", "<", ["m-right"]), ("name", "O", ["m-nul", "m-order"])),
            *(("name", "x" * 20_000, []), ("user", "aNN", ["m-other", "m-order"])),
            *(("user", '"Ann"', ["m-order"]), ("user", '"', ["m-quote"])),
            *(("user", '""Ann""', ["m-quote"]), ("user", "visit-", ["m-right", "m-order"])),
            *(("user", "שלום", ["m-right"]), ("user", "A\0", ["m-nul"]), ("user", " ", [])),
            ("user", "", [*reversed(SENT)]),
        ):
            answer = await client.get("events", params={field: typed})
            assert (answer.status_code, ids_of(answer)) == (200, wanted), (field, typed)
            assert "<img" not in answer.text
        page = (await client.get("live?user=ANN&name=order")).text
        assert "Order Completed" in page.partition("<tbody")[2]
        rows = (await client.get('live.json?after=0&user="Ann"')).json()["rows"]
        assert [row["id"] for row in rows] == ["m-order"]


@pytest.mark.parametrize("kind", STORAGES)
async def test_the_fields_suggest_what_was_seen_lately(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        assert "<option>" not in (await client.get("system")).text
        await send(store)
        for page in ("events", "live"):
            answer = (await client.get(page)).text
            lists = {
                name: [html.unescape(one) for one in re.findall("<option>(.*?)</option>", options)]
                for name, options in re.findall(
                    r'<datalist id="([^"]*)">(.*?)</datalist>', answer, re.DOTALL
                )
            }
            # What cannot be read as it is would not be what one chooses.
            names = ["50%_off", "<img src=x>", "Заказ", "Order Completed"]
            users = ['"Ann"', "שלום עולם", "anna", "Ann"]
            assert lists == {"seen-names": names, "seen-users": users, "seen": names + users}
            assert answer.count('list="seen') == 3
        assert "<option>Order Completed" in (await client.get("system")).text


@pytest.mark.usefixtures("_short_reads")
@pytest.mark.parametrize("kind", STORAGES)
async def test_a_search_says_how_far_it_looked_and_goes_on(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        await store_all(
            store, *(event(f"m{number}", user_id=f"u{number}", at=number) for number in range(35))
        )
        path = "events?user=U3"
        pages: list[list[str]] = []
        while True:
            answer = await client.get(path)
            pages.append(ids_of(answer))
            further = link_named(answer, "Look further")
            if further is None:
                break
            assert "back to" in text_of(answer)
            assert f'datetime="{iso(TIME + 34 - 10 * len(pages))}"' in answer.text
            path = further
        assert pages == [["m34", "m33", "m32", "m31", "m30"], [], [], ["m3"]]
        # A file cannot say how far it looked, so it looks further.
        file = await client.get("events.ndjson?user=U3")
        assert len(file.content.splitlines()) == 6


def results(answer: httpx.Response) -> list[tuple[str, str, str]]:
    """Return what a search found: the kind, the text and the details."""
    rows = re.findall(r"<tr>\s*((?:<td(?:(?!</tr>).)*?</td>\s*){3})</tr>", answer.text, re.DOTALL)
    found = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [(_plain(kind), _plain(text), _plain(note)) for kind, text, note in found]


def _plain(cell: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]*>", "", cell).split()))


@pytest.mark.parametrize("kind", STORAGES)
async def test_the_search_goes_to_the_only_thing_that_it_finds(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        await send(store)
        await store_all(
            store,
            identify("m-known", "Known", traits={"email": "Known@Example.com"}),
            event("m-space", user_id=" indented", event="E"),
        )
        for text, target in (
            ("m-order", "event?workspace=acme&origin=api&id=m-order"),
            (" m-order ", "event?workspace=acme&origin=api&id=m-order"),
            ("M-ORD", "event?workspace=acme&origin=api&id=m-order"),
            ("Known", "user?workspace=acme&id=Known"),
            ("known", "user?workspace=acme&id=Known"),
            ("known@example.COM", "user?workspace=acme&id=Known"),
            ("KNOWN@", "user?workspace=acme&id=Known"),
            ("anna", "user?workspace=acme&id=anna"),
            ("order c", "events?workspace=acme&name=%22Order+Completed%22"),
            ("visit-1", "events?workspace=acme&user=visit-1"),
            ("a\0", "user?workspace=acme&id=a%00b"),
            ("שלום", "user?workspace=acme&id=%D7%A9%D7%9C%D7%95%D7%9D+%D7%A2%D7%95%D7%9C%D7%9D"),
            (" ind", "user?workspace=acme&id=+indented"),
            (" anna", "user?workspace=acme&id=anna"),
            (" order c", "search?workspace=acme&q=order+c"),
        ):
            answer = await client.get("search", params={"q": text})
            assert (answer.status_code, answer.headers["Location"]) == (303, target), text
            assert (await client.get(target)).status_code in (200, 303)
        page = text_of(await client.get("user?id=anna"))
        assert "No profile yet; 1 event has this user id" in page


@pytest.mark.parametrize("kind", STORAGES)
async def test_the_search_lists_everything_that_it_finds(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        await send(store)
        await store_all(
            store,
            identify("m-known", "order-user", traits={"email": "o@example.com", "plan": "pro"}),
            *(
                event(f"m{n}", user_id="Order-guest", event="Order Completed", at=10)
                for n in range(3)
            ),
            event("order-9", anonymous_id="order-visit", event="E", at=10),
        )
        await store.keep(
            [letter("l-1", user_id="orderly"), letter("l-2", message_id="Lost-Message-1")]
        )
        assert results(await client.get("search?q=ORDER")) == [
            ("User", "order-user", "email o@example.com · plan pro"),
            ("User", "Order-guest", "No profile yet; 3 events have this user id"),
            ("Event name", "Order Completed", "4 events have this name"),
            ("Event name", "order\\u202eelif", "1 event has this name"),
            ("Anonymous id", "order-visit", "1 event has this anonymous id"),
            ("Rejected event", "l-1", "userId: too long"),
            ("Event", "order-9", "track · E · order-visit"),
        ]
        await store_all(store, *(event(f"x{n}", user_id="u", at=20 + n) for n in range(300)))
        answer = await client.get("search", params={"q": "lost-message"})
        assert answer.headers["Location"] == "letter?workspace=acme&id=l-2"
        # A user whose id is also the name of an event.
        await store_all(store, identify("m-name", "E"))
        kinds = [kind for kind, _, _ in results(await client.get("search?q=E"))]
        assert kinds == ["User", "Event name"]


@pytest.mark.parametrize("kind", STORAGES)
async def test_the_search_finds_visitors(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        visits = {"v": "v@example.com", "w": "shared@example.com", "x": "x@example.com"}
        await store_all(
            store,
            *(
                event(f"m{one}", type="identify", anonymous_id=one, traits={"email": email})
                for one, email in visits.items()
            ),
            identify("m-ann", "ann", traits={"email": "shared@example.com"}),
            identify("m-bob", "bob"),
            event("m-link", user_id="bob", anonymous_id="x", at=1),
            event("m-name", user_id="u", event="x", at=1),
        )
        for text, target in (
            ("v", "user?workspace=acme&visitor=v"),
            ("V@example.com ", "user?workspace=acme&visitor=v"),
            # A visitor that belongs to a user is found as this user.
            ("x@example.com", "user?workspace=acme&id=bob"),
        ):
            answer = await client.get("search", params={"q": text})
            assert (answer.status_code, answer.headers["Location"]) == (303, target), text
            assert (await client.get(target)).status_code == 200
        found = results(await client.get("search?q=shared@example.com"))
        assert found == [
            ("User", "ann", "email shared@example.com"),
            ("Visitor", "w", "email shared@example.com"),
        ]
        # The id of a visitor and of a user.
        await store_all(store, identify("m-x", "w", 2))
        assert results(await client.get("search?q=w"))[:2] == [
            ("User", "w", "1 event has this user id"),
            ("Visitor", "w", "email shared@example.com"),
        ]
        assert ("Visitor", "x", "belongs to the user bob · email x@example.com") in results(
            await client.get("search?q=x")
        )


@pytest.mark.parametrize("kind", STORAGES)
async def test_the_search_explains_what_it_cannot_find(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        await send(store)
        for text, words in (
            *(("", "What are you looking for?"), (" \t ", "What are you looking for?")),
            *(("nothing", "Nothing was found for “nothing”"), ("z", "Nothing was found for “z”")),
            *(("%", "Nothing was found for “%”"), (".*", "Nothing was found for “.*”")),
            *(("<b>x", "Nothing was found for “<b>x”"), ("\0", "Nothing was found for “\\u0000”")),
            ("\u202ez", "Nothing was found for “\\u202ez”"),
            ("ж" * 6_000, "Nothing was found for"),
        ):
            answer = await client.get("search", params={"q": text})
            assert answer.status_code == 200, text
            assert words in text_of(answer)
            assert "<b>" not in answer.text


async def test_the_search_says_if_it_did_not_look_at_all_rejected_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PAGE", 1)
    async with console_on("sqlite", tmp_path) as (store, client):
        await store.keep([letter("l-1", user_id="ann"), letter("l-2", user_id="bob")])
        assert "Only the newest" not in text_of(await client.get("search?q=nobody"))
        monkeypatch.setattr(search, "LETTER_SECONDS", -1.0)
        page = text_of(await client.get("search?q=ann"))
        assert "Nothing was found" in page
        assert "Only the newest of the rejected events were looked at" in page
        assert (await client.get("search?q=bob")).status_code == 200


@pytest.mark.usefixtures("_short_reads")
@pytest.mark.parametrize("kind", STORAGES)
async def test_the_search_goes_on_where_it_stopped(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        await store_all(store, event("needle", user_id="needle", event="Needle"))
        await store_all(store, *(event(f"m{n}", user_id="u", at=n) for n in range(1, 25)))
        path, seen = "search?q=needl", list[int]()
        while True:
            answer = await client.get(path)
            seen.append(len(results(answer)))
            further = link_named(answer, "Look further")
            if further is None:
                break
            assert "so far" in text_of(answer)
            assert "back to" in text_of(answer)
            path = further
        assert seen == [0, 0, 3]
        # A single thing so far may not be the only one.
        answer = await client.get("search?q=M24")
        assert results(answer) == [("Event", "m24", "track · Clicked · u")]
        assert link_named(answer, "Look further") is not None


async def test_a_store_that_does_not_answer_is_not_an_empty_one(tmp_path: Path) -> None:
    store = BrokenStore()
    async with console_here(tmp_path, store) as (console, client):
        await sign_in_here(console, client)
        await store_all(store, event("m-1", user_id="ann"))
        store.error = StorageUnavailable("the disk is gone")
        answer = await client.get("search?q=ann")
        assert "The store does not answer" in text_of(answer)
        assert "Nothing" not in text_of(answer)


@pytest.mark.parametrize("kind", STORAGES)
async def test_users_begins_with_those_of_the_newest_events(kind: str, tmp_path: Path) -> None:
    async with console_on(kind, tmp_path) as (store, client):
        await store_all(
            store,
            identify("m1", "old", 1, traits={"email": "old@example.com"}),
            *(event(f"m{at}", user_id=f"u{at}", event="Clicked", at=at) for at in range(2, 13)),
            event("m13", user_id="old", event="Came back", at=13),
            event("m14", anonymous_id="visitor", event="Looked", at=14),
        )
        tables = (await client.get("users")).text.split("<table>")[1:]
        latest, known = (
            [_plain(row) for row in re.findall("<tr>(.*?)</tr>", table, re.DOTALL)[1:]]
            for table in tables
        )
        assert [row.split()[0] for row in latest] == ["old", *(f"u{at}" for at in range(12, 3, -1))]
        assert "email old@example.com Came back" in latest[0]
        assert "No profile yet Clicked" in latest[1]
        assert [row.split()[0] for row in known] == ["old"]
