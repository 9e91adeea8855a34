# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/console.md.

``ENGAGE_PICTURES=1 pytest tests/browser/test_console_pictures.py`` writes them again. Otherwise the
test only shows that each page can still be photographed, and that the files are there and small.
"""

from __future__ import annotations

import base64
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engage.api import Count
from engage.store.facade import Storage
from support import console_data
from support.browser import Browser
from support.console_data import letters
from support.exports import on_store
from support.operator import Operator, operator
from support.png import small
from support.server_process import Server, start_server

pytestmark = [pytest.mark.browser, pytest.mark.checkout, pytest.mark.timeout(300)]

IMAGES = Path(__file__).resolve().parents[2] / "docs/images"
#: Bytes of a picture.
LIMIT = 60_000
#: Name → page, width, height, theme.
PICTURES = {
    "console-overview": ("?range=1h", 1200, 760, "light"),
    "console-live": ("live", 1200, 640, "light"),
    "console-letter": ("letter", 1200, 700, "light"),
    "console-keys": ("keys", 1200, 700, "light"),
    "console-dark": ("?range=1h", 1200, 760, "dark"),
    "console-narrow": ("live", 390, 760, "light"),
}
MINUTE = 60_000

NAMES = ["Order Completed", "Product Viewed", "Signed Up", "Cart Updated", "Coupon Applied"]
PEOPLE = ["ann", "bob", "carla", "dmitri", "eva", "farid", "grace", "hugo"]


def history(server: Server) -> None:
    """Write an hour of traffic, with a restart."""
    pick = random.Random(7)
    this = int(time.time() * 1000) // MINUTE * MINUTE
    rows: list[Count] = []

    def add(at: int, name: str, workspace: str, labels: tuple[str, ...], value: int) -> None:
        if value:
            rows.append(
                Count(
                    step=60,
                    at=at,
                    process="picture",
                    name=name,
                    workspace_id=workspace,
                    labels=labels,
                    value=value,
                )
            )

    for ago in range(1, 60):
        at = this - ago * MINUTE
        if 21 <= ago <= 24:
            continue
        stored = round(620 + 240 * math.sin(ago / 9) + pick.gauss(0, 40))
        add(at, "up", "", ("0.9",), 1)
        add(at, "events", "acme", ("website", "track", "stored"), stored)
        add(at, "events", "acme", ("ios", "track", "stored"), stored // 4)
        add(at, "events", "acme", ("website", "track", "duplicate"), pick.randrange(20))
        add(at, "events", "acme", ("ios", "track", "invalid_payload"), 60 if 8 <= ago <= 12 else 0)
        for bucket, share in (("0.005", 0.8), ("0.01", 0.17), ("0.025", 0.03)):
            add(at, "requests", "", (bucket,), round(stored * share))
        add(at, "queue", "", (), pick.randrange(30, 90))

    async def write(store: Storage) -> None:
        await store.put_counts(rows)

    on_store(server.config, write)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return the server of a shop."""
    extra = console_data.EXTRA.replace("[[workspaces]]", KEYS + "[[workspaces]]", 1)
    with start_server(
        tmp_path_factory.mktemp("shop"),
        server='public_url = "https://events.example.com"',
        workers=2,
        config_extra=extra,
    ) as server:
        history(server)
        pick = random.Random(3)
        for _ in range(26):
            event = {
                "userId": pick.choice(PEOPLE),
                "event": pick.choice(NAMES),
                "properties": {"sku": f"A-{pick.randrange(90)}", "price": pick.randrange(900) / 10},
            }
            key = pick.choice([server.key, server.key, "9c1f4a7be02d4c5f8a6b3d1e7f905a42"])
            server.post("/v1/track", event, key=key)
        bad = {"userId": "ann", "properties": {"sku": "A-32", "price": 168.76, "order": 2**60 + 1}}
        server.post("/v1/track", bad)
        server.post("/v1/track", {"userId": "bob", "event": "Signed Up"}, key="5e1f0c99")
        letters(server)
        # The counters of these events are in the picture.
        time.sleep(6)
        yield server


KEYS = """
[[workspaces.write_keys]]
id = "ios"
key = "9c1f4a7be02d4c5f8a6b3d1e7f905a42"

"""


@pytest.fixture
def visitor(browser: Browser, shop: Server) -> Iterator[Operator]:
    with operator(browser, shop) as watcher:
        yield watcher


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture(visitor: Operator, shop: Server, name: str) -> None:
    path, width, height, theme = PICTURES[name]
    if path == "letter":
        path = f"letter?id={letters(shop)[0]}"
    visitor.browser.cdp("Emulation.setTimezoneOverride", timezoneId="Europe/Berlin")
    visitor.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    visitor.size(width, height)
    visitor.open(path)
    if path.startswith("?"):
        visitor.until(lambda: visitor.texts("#queue-plot canvas"))
    if name == "console-live":
        visitor.click("Product Viewed", "#live")
        visitor.until(lambda: visitor.text(".detail"))
    visitor.browser.cdp("Emulation.setScrollbarsHidden", hidden=True)
    shot = visitor.browser.cdp("Page.captureScreenshot", format="png")
    visitor.browser.cdp("Emulation.setScrollbarsHidden", hidden=False)
    picture = small(base64.b64decode(shot["data"]))
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < LIMIT
    file = IMAGES / f"{name}.png"
    if os.environ.get("ENGAGE_PICTURES"):
        IMAGES.mkdir(exist_ok=True)
        file.write_bytes(picture)
    assert file.stat().st_size < LIMIT
