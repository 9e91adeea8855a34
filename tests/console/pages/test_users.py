# SPDX-License-Identifier: Apache-2.0
"""The pages of users and of visitors, and the links between them."""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engage.store.facade import Storage
from engage.testing.factories import event, identify, store_all
from support.console import CONSOLE, console_here, sign_in_here
from support.sqlite import config_file, open_store


@contextlib.asynccontextmanager
async def console(
    folder: Path, store: Storage, config_extra: str = CONSOLE
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a console on a storage, and sign in."""
    async with console_here(folder, store, config_extra=config_extra) as (served, client):
        await sign_in_here(served, client)
        yield client


@contextlib.asynccontextmanager
async def sqlite(folder: Path, **limits: int) -> AsyncIterator[tuple[Storage, httpx.AsyncClient]]:
    path = config_file(folder, "store")
    extra = "\n".join(["\n[limits]", *(f"{name} = {value}" for name, value in limits.items())])
    path.write_text(path.read_text() + extra)
    async with open_store(path) as store, console(folder, store, CONSOLE + extra) as client:
        yield store, client


def visit(message_id: str, anonymous_id: str, at: int = 0, **traits: Any) -> Any:
    return event(message_id, type="identify", anonymous_id=anonymous_id, at=at, traits=traits)


def link(user: str, anonymous_id: str, at: int = 0) -> Any:
    return event(f"{user} {anonymous_id}", user_id=user, anonymous_id=anonymous_id, at=at)


def text_of(answer: httpx.Response) -> str:
    """Return the text of the main part of a page."""
    main = answer.text.partition('tabindex="-1">')[2].partition("</main>")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", main)).split())


@contextlib.contextmanager
def reads(store: Any) -> Iterator[list[str]]:
    """Record the plans that read people and choices."""
    names, read = list[str](), store.read

    async def recorded(plan: Any, *arguments: Any) -> Any:
        if plan.name.partition(".")[0] in ("people", "choices", "identifiers"):
            names.append(plan.name)
        return await read(plan, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read", recorded)
        yield names


def links_of(answer: httpx.Response) -> list[str]:
    return [html.unescape(one) for one in re.findall(r'href="(user\?[^"]*)"', answer.text)]


def anonymous_ids(answer: httpx.Response) -> list[tuple[str, str]]:
    """Return the anonymous ids of a user, each with the words beside it."""
    _, _, card = answer.text.partition('id="ids"')
    rows = re.findall(r"<tr>(.*?)</tr>", card.partition("</section>")[0], re.DOTALL)
    words = [
        [" ".join(re.sub("<[^>]*>", " ", one).split()) for one in row.split("</td>")]
        for row in rows
    ]
    return [(html.unescape(name), html.unescape(rest)) for name, rest, _ in words]


async def test_a_visitor_has_a_page(tmp_path: Path) -> None:
    async with sqlite(tmp_path) as (store, client):
        await store_all(
            store,
            visit("1", "v", plan="free"),
            event("2", type="group", anonymous_id="v", groupId="acme", at=1),
            event("3", anonymous_id="v", event="Looked", at=2),
            event("4", anonymous_id="v2", event="Elsewhere", at=3),
        )
        for query in ({"id": "v"}, {"visitor": "v"}):
            answer = await client.get("user", params=query)
            assert answer.status_code == 200
            page = text_of(answer)
            assert page.startswith("v visitor")
            assert "This visitor belongs to no user. It is deleted when no event" in page
            for words in ("plan free", "Groups acme", "Looked", "first event 2025-01-01"):
                assert words in page, words
            for words in ("Elsewhere", "No profile", "There is no such user", "Anonymous ids"):
                assert words not in page, words
        # Its user, as soon as there is one.
        await store_all(store, identify("5", "ann", 4), link("ann", "v", 5))
        answer = await client.get("user?id=v")
        assert "This visitor belongs to the user ann ." in text_of(answer)
        assert "user?workspace=acme&id=ann" in links_of(answer)
        assert "user?workspace=acme&id=ann&unlink=v" in links_of(answer)
        for query in ({"id": "v2"}, {"visitor": "v2"}):
            answer = await client.get("user", params=query)
            assert answer.status_code == 200
            assert "No profile yet; 1 event has this anonymous id" in text_of(answer)
            assert "Elsewhere" in text_of(answer)
        answer = await client.get("user?visitor=nobody")
        assert (answer.status_code, "No visitor has this" in text_of(answer)) == (404, True)
        answer = await client.get("event?id=3")
        assert "user?workspace=acme&visitor=v" in links_of(answer)


async def test_a_user_has_its_anonymous_ids(tmp_path: Path) -> None:
    async with sqlite(tmp_path) as (store, client):
        await store_all(
            store,
            *(identify(f"i{user}", user) for user in ("ann", "bob", "both")),
            visit("v1", "v", 1, plan="pro"),
            visit("w1", "w"),
            visit("both1", "both"),
            *(link("ann", one, 2) for one in ("v", "w", "x")),
            link("bob", "w", 1),
        )
        answer = await client.get("user?id=ann")
        assert anonymous_ids(answer) == [
            ("v", "visitor Unlink"),
            ("w", "not merged Unlink"),
            ("x", "Unlink"),
        ]
        assert "user?workspace=acme&visitor=v" in links_of(answer)
        assert "user?workspace=acme&visitor=x" not in links_of(answer)
        page = text_of(answer)
        assert "plan pro" in page
        assert "are merged when they are read" in page
        assert "no room" not in page
        # An id that is that of a user and that of a visitor.
        answer = await client.get("user?id=both")
        assert "also the anonymous id of a visitor" in text_of(answer)
        assert text_of(await client.get("user?visitor=both")).startswith("both visitor")


async def test_very_many_anonymous_ids_are_shown_in_pages(tmp_path: Path) -> None:
    async with sqlite(tmp_path) as (store, client):
        ids = [f"v{number:03}" for number in range(110)]
        await store_all(store, identify("i", "ann"), *(link("ann", one) for one in ids))
        path, seen = "user?id=ann", list[str]()
        for _ in range(3):
            answer = await client.get(path)
            seen += [one for one, _ in anonymous_ids(answer)]
            path = next((one for one in links_of(answer) if "after=" in one), "")
        assert (seen, path) == (ids, "")


async def test_what_has_no_room_is_told(tmp_path: Path) -> None:
    async with sqlite(tmp_path, user_traits=2) as (store, client):
        await store_all(store, identify("i", "ann", traits={"a": 1}))
        await store_all(store, visit("v", "v", b=1, c=1), visit("w", "w", d=1))
        await store_all(store, *(visit(f"x{n}", f"x{n}") for n in range(99)))
        await store_all(store, link("ann", "v"), *(link("ann", f"x{n}") for n in range(99)))
        page = text_of(await client.get("user?id=ann"))
        assert "There is no room for 1 trait or group of the visitors of this user" in page
        assert "Of the visitors" not in page
        await store_all(store, visit("v2", "v", 1, e=1), link("ann", "w", 1))
        page = text_of(await client.get("user?id=ann"))
        assert "There is no room for 2 traits and groups of the visitors" in page
        assert "Of the visitors, the 100 that were linked first count" in page


async def test_a_link_is_undone_and_restored(tmp_path: Path) -> None:
    async with sqlite(tmp_path) as (store, client):
        await store_all(
            store,
            *(identify(f"i{user}", user) for user in ("ann", "bob")),
            visit("v1", "v", plan="pro"),
            *(link(user, "v", at) for at, user in enumerate(("ann", "bob"))),
        )

        async def post(**form: str) -> httpx.Response:
            return await client.post("user?id=ann", data=form)

        question = await client.get("user?id=ann&unlink=v")
        assert "Unlink v from this user?" in text_of(question)
        assert "from this user?" not in text_of(await client.get("user?id=ann&unlink=w"))
        answer = await post(action="unlink", anonymous_id="v")
        assert answer.status_code == 303
        page = await client.get(answer.headers["Location"])
        assert "v is not linked to this user any more. Link it again" in text_of(page)
        assert (anonymous_ids(page), "plan pro" in text_of(page)) == ([], False)
        assert "belongs to the user bob" in text_of(await client.get("user?id=v"))
        # Pressed twice.
        again = await post(action="unlink", anonymous_id="v")
        assert again.status_code == 400
        assert "'v' is not an anonymous id of the user 'ann'" in text_of(again)
        answer = await post(action="link", anonymous_id="v")
        page = await client.get(answer.headers["Location"])
        assert "v is linked to this user." in text_of(page)
        assert anonymous_ids(page) == [("v", "visitor Unlink")]
        for form in (
            {"action": "link", "anonymous_id": " "},
            {"action": "link", "anonymous_id": "ann"},
            {"action": "unlink"},
            {"action": "explode"},
        ):
            assert (await post(**form)).status_code == 400, form
        audit = text_of(await client.get("audit"))
        for action in ("linked", "unlinked"):
            assert audit.count(f"anonymous-id-{action} workspace acme user ann") == 1
        foreign = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
        unlink = {"action": "unlink", "anonymous_id": "v"}
        answer = await client.post("user?id=ann", data=unlink, headers=foreign)
        assert answer.status_code == 403
        assert anonymous_ids(await client.get("user?id=ann")) == [("v", "visitor Unlink")]


async def test_a_console_that_only_shows_has_no_buttons(tmp_path: Path) -> None:
    async with (
        open_store(config_file(tmp_path, "store")) as store,
        console(tmp_path, store, CONSOLE + "read_only = true\n") as client,
    ):
        await store_all(store, identify("i", "ann"), visit("v1", "v"), link("ann", "v"))
        pages = [await client.get(f"user?id=ann{more}") for more in ("", "&unlink=v")]
        for answer in (*pages, await client.get("user?id=v")):
            assert "nlink" not in text_of(answer)
            assert "<button" not in answer.text.partition("<main")[2].partition('id="row"')[0]
        assert anonymous_ids(pages[0]) == [("v", "visitor")]
        unlink = {"action": "unlink", "anonymous_id": "v"}
        assert (await client.post("user?id=ann", data=unlink)).status_code == 403


async def test_a_page_shows_a_person_at_one_moment(tmp_path: Path) -> None:
    """Each page reads all that it shows of people at once."""
    async with sqlite(tmp_path) as (store, client):
        await store_all(
            store,
            *(
                identify(f"m{name}", name, traits={"email": f"{name}@x.org"})
                for name in ("u", "uv")
            ),
            *(visit(f"v{name}", name, city="Ulm") for name in "abcd"),
            *(link("u", name) for name in "abcd"),
        )
        with reads(store) as names:
            page = await client.get("user?id=u")
            assert [name for name, _ in anonymous_ids(page)] == [*"abcd"]
            assert names == ["choices.person"]
        with reads(store) as names:
            assert (await client.get("user?visitor=a")).status_code == 200
            assert names == ["choices.person"]
        with reads(store) as names:
            text = text_of(await client.get("search?q=U"))
            assert "u@x.org" in text
            assert "uv@x.org" in text
            assert names[-1:] == ["people.people"]
            assert names.count("people.people") == names.count("identifiers.named") == 1
