# SPDX-License-Identifier: Apache-2.0
"""The browser SDKs and engage.js at twice the rate limit of their key for 30 seconds, then quiet.

Each has a frame of one page, and a key of its own.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from browser.catalogue import KINDS, RUDDER, Kind
from browser.snippet import site

from support.browser import Browser, Pages
from support.server_process import KEY, Server, start_server

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(400)]

#: Events a second.
RATE: Final = 5
COUNT: Final = 2 * RATE * 30

#: Sends COUNT events, and keeps in ``calls`` what was asked of the server and answered: the times
#: of both, the status, and ``Retry-After``.
SENDING = """
window.failures = [];
if (window.sdk && sdk.on) sdk.on("error", (error) => failures.push(String(error.code)));
window.calls = [];
const send = window.fetch;
window.fetch = async (...request) => {
  const call = {asked: performance.now()};
  calls.push(call);
  const answer = await send(...request);
  call.answered = performance.now();
  call.status = answer.status;
  call.after = Number(answer.headers.get("Retry-After"));
  return answer;
};
const start = performance.now();
let n = 0;
const timer = setInterval(() => {
  for (; n < COUNT && performance.now() - start >= n * PAUSE; n++) TRACK;
  if (n === COUNT) clearInterval(timer);
}, 10);
"""
#: Without batches, its queue of 100 requests is too short: see docs/clients.md.
BATCHES = RUDDER.replace("MORE", ", queueOptions: {batch: {enabled: true}}")
SDKS: Final = [
    *(kind for kind in KINDS if kind.name != "rudder"),
    Kind("rudder-batches", "rudder", BATCHES, "", ()),
]


def key_of(name: str) -> str:
    return f"key-of-{name}"


def frame(page: str, track: str) -> str:
    """Return a page that sends the events."""
    script = SENDING.replace("COUNT", str(COUNT)).replace("PAUSE", str(500 / RATE))
    return page.replace("</body>", f"<script>{script.replace('TRACK', track)}</script></body>")


def page_of(kind: Kind, server: Server) -> str:
    track = f'sdk.track("{kind.name}", {{n}})'
    if kind.bundle == "dittofeed":
        track = f'sdk.track({{userId: "u", event: "{kind.name}", properties: {{n}}}})'
    return frame(kind.page(server, key_of(kind.name)), track)


def stored(server: Server) -> Mapping[str, list[int]]:
    """Return the number of each stored event, by the name of what sent it."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for event in server.export("events"):
        if event["type"] == "track":
            found[event["event"]].append(event["properties"]["n"])
    return found


def test_sdks_lose_nothing_at_twice_the_rate_limit(
    tmp_path: Path, browser: Browser, pages: Pages
) -> None:
    """Except for those that drop what was answered 429, see docs/clients.md."""
    names = [*(kind.name for kind in SDKS), "snippet"]
    keeping = {"snippet", *(kind.name for kind in SDKS if kind.retries)}
    config = f"[limits.rate]\nevents_per_second = {RATE}\n" + "".join(
        f'[[workspaces.write_keys]]\nid = "{name}"\nkey = "{key_of(name)}"\n' for name in names
    )
    with start_server(tmp_path, config_extra=config) as server:
        for kind in SDKS:
            pages.pages[f"/{kind.name}"] = page_of(kind, server)
        snippet = site(server).replace(KEY, key_of("snippet"))
        pages.pages["/snippet"] = frame(snippet, 'engage.track("snippet", {n})')
        frames = "".join(f'<iframe id="{name}" src="/{name}"></iframe>' for name in names)
        pages.pages["/"] = f"<!doctype html><title>Shop</title>{frames}"
        browser.open(pages.url + "/")
        time.sleep(50)
        deadline = time.monotonic() + 100
        while any(len(found[name]) < COUNT for found in [stored(server)] for name in keeping):
            assert time.monotonic() < deadline, {k: len(v) for k, v in stored(server).items()}
            time.sleep(2)
        found = stored(server)
        refused = {line.get("writeKeyId") for line in server.lines() if line.get("status") == 429}
    assert refused == set(names)
    for name in names:
        assert len(found[name]) == len(set(found[name])), name
        assert (len(found[name]) == COUNT) == (name in keeping), name

    def read(name: str, what: str) -> Any:
        return browser.run(f"return document.getElementById({name!r}).contentWindow.{what}")

    assert [read(name, "failures") for name in keeping] == [[]] * len(keeping)
    calls = read("snippet", "calls")
    assert [call for call in calls if "status" not in call] == []
    for call, following in itertools.pairwise(calls):
        if call["status"] == 429:
            # A timer may be a little early.
            assert following["asked"] - call["answered"] > 1000 * call["after"] - 10 > 900
