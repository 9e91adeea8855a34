# SPDX-License-Identifier: Apache-2.0
"""The page of webhook providers: how each verifies, and how to enable the others."""

from __future__ import annotations

import html
import re
import time
from pathlib import Path

from engage.api import Count
from engage.monitoring.history import MINUTE, WEBHOOKS
from support.console import CONSOLE, console_here, sign_in_here
from support.exports import registry
from support.memory_store import MemoryStore

ENABLED = f"""
[workspaces.webhooks.segment]
secret = "a shared secret"
[workspaces.webhooks.amplitude]
value = "a value that is long enough"
{CONSOLE}
"""


async def test_each_provider_says_what_verifies_it_and_how_to_enable_it(tmp_path: Path) -> None:
    async with console_here(tmp_path, MemoryStore(), config_extra=ENABLED) as (console, client):
        await sign_in_here(console, client)
        page = " ".join(html.unescape((await client.get("webhooks")).text).split())
    cards = re.findall(r"<h2>(\w+)</h2>.*?<p class=\"muted small\">(.*?)</p>", page)
    signed = "Each delivery is verified by its signature."
    secret = "Each delivery is verified by a secret in its header authorization; it is not signed."
    assert dict(cards) == {"segment": signed, "amplitude": secret}
    others = re.findall(r"<summary>([a-z-]+)</summary>(.*?)</details>", page)
    assert {name for name, _ in others} == set(registry().webhooks) - {"segment", "amplitude"}
    for name, steps in others:
        assert f"webhooks/{name}?workspaceId=acme" in steps
        assert "1. " in steps
        assert f"[workspaces.webhooks.{name}]" in steps


async def test_tests_are_shown_and_are_no_problem(tmp_path: Path) -> None:
    store = MemoryStore()
    now = time.time_ns() // 1_000_000
    await store.put_counts(
        [
            Count(
                step=MINUTE,
                at=now - now % 60_000,
                process="p",
                name=WEBHOOKS,
                workspace_id="",
                labels=(provider, outcome),
                value=value,
            )
            for provider, outcome, value in (
                ("segment", "test", 3),
                ("segment", "not_understood", 2),
                ("amplitude", "untranslated", 1),
            )
        ]
    )
    async with console_here(tmp_path, store, config_extra=ENABLED) as (console, client):
        await sign_in_here(console, client)
        page = " ".join(html.unescape((await client.get("webhooks")).text).split())
    cards = dict(re.findall(r"<h2>(\w+)</h2>(.*?)</section>", page))
    assert 'class="status ok">test: 3<' in cards["segment"]
    assert 'class="status ok">not understood: 2<' in cards["segment"]
    assert "problem" not in cards["segment"]
    assert "1 problem in 24 hours" in cards["amplitude"]
