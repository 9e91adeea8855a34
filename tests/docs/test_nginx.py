# SPDX-License-Identifier: Apache-2.0
"""The configs of nginx in docs/running.md and docs/console.md, with a real nginx."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from engage.api import Kind, Subject
from engage.config import Limits, ServerConfig
from engage.testing.memory_store import MemoryStore
from support.console import console_here, sign_in_here
from support.nginx import ROOT, blocks, nginx
from support.preferences import GROUPS, PAGE, members, page_of
from support.server_inprocess import BASIC, serving

pytestmark = [pytest.mark.checkout, pytest.mark.long]

(EVENTS,) = blocks("running.md")
CONSOLE, CONSOLE_PATH = blocks("console.md")
#: The address of a client that is not nginx.
CLIENT = "127.0.0.45"


def _documented() -> str:
    """Return the settings of ``[server]`` that docs/running.md shows beside the config of nginx."""
    text = (ROOT / "docs/running.md").read_text("utf-8")
    toml = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in toml if "trusted_proxies" in block]
    server: dict[str, Any] = tomllib.loads(block)["server"]
    return "\n".join(f"{name} = {value!r}" for name, value in server.items())


async def test_a_choice_has_the_address_of_the_person(tmp_path: Path) -> None:
    async with serving(
        tmp_path, server=_documented(), workspace="keep_addresses = true", config_extra=GROUPS
    ) as server:
        with nginx(EVENTS, {"127.0.0.1:8080": server.port}) as proxy:
            async with proxy.client(CLIENT) as client:
                answer = await client.post(
                    page_of(members("ann"), sub="0"),
                    content="List-Unsubscribe=One-Click",
                    headers={"Content-Type": "application/x-www-form-urlencoded"},
                )
        assert answer.status_code == 200, answer.text
        store: Any = server.app.store
        records = (
            await store.history("acme", Subject(Kind.USER, "ann"), after=None, limit=9)
        ).items
    assert {record.address for record in records} == {CLIENT}


async def test_links_are_in_no_log(tmp_path: Path) -> None:
    """Also when engage does not answer: then nginx would log the request as an error."""
    links = [page_of(members("ann"))]
    links += [page_of(members("ann"), "/dashboard/public/subscription-management")]
    links += [page_of(members("ann"), PAGE.replace("/page", "/user-subscriptions"))]
    async with serving(tmp_path, server=_documented(), config_extra=GROUPS) as server:
        with nginx(EVENTS, {"127.0.0.1:8080": server.port}) as proxy:
            async with proxy.client() as client:
                for link in links:
                    assert (await client.get(link)).status_code == 200
                event = {"userId": "ann", "event": "E"}
                answer = await client.post(
                    "/v1/track", json=event, headers={"Authorization": BASIC}
                )
                assert answer.status_code == 200
                assert (await client.get("/healthz")).headers["X-Request-Id"]
                await server.app.close()
                for path in (*links, "/healthz"):
                    assert (await client.get(path)).status_code == 502
            logs = proxy.log("access") + proxy.log("error")
    assert '"POST /v1/track HTTP/1.1" 200' in logs
    assert re.search(r"connecting to upstream.*GET /healthz", logs)
    assert members("ann")["h"] not in logs


def test_its_limits_fit_those_of_engage() -> None:
    (size,) = re.findall(r"client_max_body_size (\d+)m;", EVENTS)
    assert int(size) << 20 == Limits().body_bytes
    (seconds,) = re.findall(r"proxy_read_timeout (\d+)s;", EVENTS)
    assert int(seconds) > ServerConfig().request_timeout


@pytest.mark.parametrize("path", ["", "/engage"])
async def test_the_console_is_reached_through_nginx(tmp_path: Path, path: str) -> None:
    config = CONSOLE
    if path:
        config = re.sub(r"    location .*?\n    \}\n", CONSOLE_PATH, CONSOLE, flags=re.DOTALL)
        assert "location /engage/" in config
    public = f'[console]\npublic_url = "https://ops.example.com{path}"\n'
    async with console_here(
        tmp_path,
        MemoryStore(),
        config_extra=public,
        server='trusted_proxies = ["127.0.0.1"]',
    ) as (console, direct):
        port = direct.base_url.port
        assert port is not None
        with nginx(config, {"127.0.0.1:8081": port}) as proxy:
            async with proxy.client(CLIENT) as client:
                client.base_url = client.base_url.join(f"{path}/")
                client.headers["Host"] = "ops.example.com"
                client.headers["Origin"] = "https://ops.example.com"
                await sign_in_here(console, client)
                answer = await client.get("audit")
                assert answer.status_code == 200, answer.text
                assert CLIENT in answer.text
