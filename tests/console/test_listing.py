# SPDX-License-Identifier: Apache-2.0
"""What the pages that list have in common: no rows, a store that is down, links to other rows."""

from __future__ import annotations

import html
import re
from pathlib import Path

from engage.api import StorageUnavailable
from engage.audit import Actor, record_audit
from engage.console.display.formats import ROWS
from engage.testing.factories import event, identify, letter, store_all
from support.console import BrokenStore, console_here, sign_in_here

#: Page → what it says without a row, the beginning of a link in a row, and the words of its links.
LISTS = {
    "events": ("No events are stored yet", "event?workspace=acme&origin", "Newest", "Older"),
    "rejected": ("No rejected events", "letter?workspace=acme&id", "Newest", "Older"),
    "users": ("No user has a profile yet", "user?workspace=acme&id=u", "First page", "More"),
    "audit": ("", "", "Newest", "Older"),
}


def links_of(page: str) -> dict[str, str]:
    """Return the text of each link of the page → where it leads."""
    matches = re.findall(r'<a[^>]*href="([^"]*)"[^>]*>([^<]*)<', page.partition("<main")[2])
    return {text.strip(): html.unescape(href) for href, text in matches}


async def test_a_page_that_lists_leads_to_all_its_rows(tmp_path: Path) -> None:
    store = BrokenStore()
    async with console_here(tmp_path, store) as (console, client):
        await sign_in_here(console, client)
        for path, (nothing, *_) in LISTS.items():
            assert nothing in (await client.get(path)).text, path
        rows = ROWS + 1
        await store_all(store, *(event(f"m-{n}", user_id=f"u{n}", at=n) for n in range(rows)))
        await store_all(store, *(identify(f"i-{n}", f"u{n}", rows) for n in range(rows)))
        await store.keep([letter(f"l-{n}") for n in range(rows)])
        for n in range(rows):
            actor = Actor(who="ann", origin="here")
            await record_audit(store, actor, "tried", {"number": n}, now=n)
        for path, (_, linked, first, further) in LISTS.items():
            page = (await client.get(path)).text
            links = links_of(page)
            assert first not in links, path
            older = (await client.get(links[further])).text
            assert linked in html.unescape(older), path
            assert links_of(older)[first] == f"{path}?workspace=acme"
        store.error = StorageUnavailable("the disk is gone")
        for path in LISTS:
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "cannot be read now" in answer.text, path
            assert "The store does not answer: the disk is gone" in " ".join(answer.text.split())
