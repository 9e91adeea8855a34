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

from engage.api import EventStore
from engage.console.display.formats import iso
from engage.console.pages import events as events_page
from engage.testing.factories import TIME, event, store_all
from engage_plugins.mongo import events as mongo_events
from engage_plugins.sqlite.tables import paging
from support import mongo
from support.console import console_here, sign_in_here
from support.console_data import STORAGES
from support.sqlite import config_file, open_store


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[EventStore]:
    """Open a store that finds users by their e-mail address."""
    if kind == "sqlite":
        async with open_store(config_file(folder, "store")) as store:
            yield store
    else:
        url = mongo.shared(mongo.kinds()[0]).url()
        async with mongo.opened(folder, url, identifiers={"acme": ("email",)}) as store:
            yield store


@contextlib.asynccontextmanager
async def console_on(
    kind: str, folder: Path
) -> AsyncIterator[tuple[EventStore, httpx.AsyncClient]]:
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
    monkeypatch.setattr(events_page, "SEARCH_SECONDS", -1.0)
    monkeypatch.setattr(paging, "MAX_ROWS", 10)
    monkeypatch.setattr(mongo_events, "_WINDOWS", (10,))


def text_of(answer: httpx.Response) -> str:
    """Return the text of the main part of a page."""
    main = answer.text.partition("<main")[2].partition("</main>")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", main)).split())


def ids_of(answer: httpx.Response) -> list[str]:
    """Return the message ids of the events on a page."""
    found = re.findall(r'href="event\?[^"]*;id=([^"&]*)"', answer.text)
    return [unquote_plus(one) for one in found]


def link_named(answer: httpx.Response, words: str) -> str | None:
    """Return where a link leads."""
    found = re.search(rf'href="([^"]*)"\s*>{words}<', answer.text)
    return None if found is None else html.unescape(found[1])


#: A message id → the user id, the anonymous id and the name of the event.
SENT: dict[str, tuple[str | None, str | None, str]] = {
    "m-order": ("Ann", "visit-1", "Order Completed"),
    "m-other": ("anna", None, "Заказ"),
    "m-nul": ("a\0b", None, "order\u202eelif"),
    "m-right": ("שלום עולם", "Visit-2", "<img src=x>"),
    "m-quote": ('"Ann"', None, "50%_off"),
}


async def send(store: EventStore) -> None:
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
            ("name", "order", ["m-nul", "m-order"]),
            ("name", "ORDER C", ["m-order"]),
            ("name", "заказ", ["m-other"]),
            ("name", "completed", []),
            ("name", '"order"', []),
            ("name", '"Order Completed"', ["m-order"]),
            ("name", "50%", ["m-quote"]),
            ("name", "50_", []),
            ("name", "order\u202eelif", ["m-nul"]),
            ("name", "<", ["m-right"]),
            ("name", "O", ["m-nul", "m-order"]),
            ("name", "x" * 20_000, []),
            ("user", "aNN", ["m-other", "m-order"]),
            ("user", '"Ann"', ["m-order"]),
            ("user", '"', ["m-quote"]),
            ("user", '""Ann""', ["m-quote"]),
            ("user", "visit-", ["m-right", "m-order"]),
            ("user", "שלום", ["m-right"]),
            ("user", "A\0", ["m-nul"]),
            ("user", " ", []),
            ("user", "", [*reversed(SENT)]),
        ):
            answer = await client.get("events", params={field: typed})
            assert (answer.status_code, ids_of(answer)) == (200, wanted), (field, typed)
            assert "<img" not in answer.text
        page = (await client.get("live?user=ANN&name=order")).text
        assert "Order Completed" in page.partition("<tbody")[2]
        found = (await client.get('live.json?after=0&user="Ann"')).json()["rows"]
        assert [row["id"] for row in found] == ["m-order"]


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
