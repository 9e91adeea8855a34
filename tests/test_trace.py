# SPDX-License-Identifier: Apache-2.0
"""The ways of one track call, one webhook delivery and one preferences page stay within their
bounds, and architecture.md describes the first."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engage.app import build
from engage.config import load
from engage.monitoring.metrics import Metrics
from support.exports import registry
from support.http_client import listening
from support.preferences import GROUPS, members, page_of
from support.server_inprocess import Serving
from support.server_process import config_text
from support.waiting import eventually

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
OURS = f"{ROOT}/engage/", f"{ROOT}/plugins/"

#: Requests before the counted ones, and counted requests. The least of these is free of timers.
WARM, COUNTED = 20, 20
#: Calls of one GET of the preferences page.
MOST_OF_PAGE = 160


def tracer() -> Any:
    """Return ``benchmarks/trace.py``; the standard library also has a module of this name."""
    spec = importlib.util.spec_from_file_location("engage_trace", ROOT / "benchmarks/trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented() -> list[str]:
    """Return the functions in the table of architecture.md, in their order."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    table = text.partition("## The calls of one track request")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")]
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row[3])]


def has_in_order(names: Iterable[str], called: Iterable[str]) -> bool:
    """Return whether the names occur among the calls in this order."""
    rest = iter(called)
    return all(name in rest for name in names)


@contextlib.asynccontextmanager
async def served(folder: Path, config: str = "") -> AsyncIterator[Serving]:
    """Serve in this process, with the part of the storage that writes in a thread: as in a server,
    which has a process for each, the two talk over a socket."""
    path = folder / "engage.toml"
    path.write_text(config_text(config_extra=config))
    app = build(load(path), registry(), Metrics(), supervised=True)
    helper = app.store.helper()
    assert helper is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=helper, args=(theirs,))
        thread.start()
        await app.open()
        try:
            await eventually(lambda: app.keys.loaded)
            sock = listening()
            await app.serve(sock)
            yield Serving(app, sock.getsockname()[1])
        finally:
            await app.close()
            ours.close()
            await asyncio.to_thread(thread.join)


@contextlib.contextmanager
def recorded(calls: list[Any], call: Any) -> Iterator[None]:
    """Record each call of a function of engage in the threads that start meanwhile, and in this."""

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        if not code.co_name.startswith("<") or code.co_name == "<lambda>":
            path = code.co_filename.removeprefix(f"{ROOT}/")
            calls.append(call(time.monotonic(), 0, path, code.co_qualname, threading.get_ident()))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def check(trace: Any, kind: str, requests: Sequence[list[Any]]) -> None:
    """Check that the request with the fewest calls is within the bounds of its kind."""
    level = trace.levels(ROOT)
    least = min(trace.measure(traced, level) for traced in requests[WARM:])
    assert all(getattr(least, name) <= most for name, most in trace.BOUNDS[kind].items()), least


async def test_one_track_call_stays_within_its_bounds_and_is_as_documented(tmp_path: Path) -> None:
    trace = tracer()
    names = documented()
    assert len(names) > 30
    calls: list[Any] = []
    requests = []
    with recorded(calls, trace.Call):
        async with served(tmp_path) as server, await server.connect() as client:
            for number in range(WARM + COUNTED):
                calls.clear()
                answer = await server.track(client, messageId=f"message {number}")
                assert answer.status == 200
                # What follows the answer belongs to the request.
                await asyncio.sleep(0.01)
                requests.append(list(calls))
    check(trace, "track", requests)
    assert any(has_in_order(names, (call.name for call in traced)) for traced in requests[WARM:]), (
        "the calls differ from the table in docs/architecture.md"
    )


async def test_one_webhook_delivery_stays_within_its_bounds(tmp_path: Path) -> None:
    trace = tracer()
    calls: list[Any] = []
    requests = []
    with recorded(calls, trace.Call):
        async with served(tmp_path, trace.WEBHOOK) as server, await server.connect() as client:
            path = "/api/public/webhooks/standard-webhooks"
            for number in range(WARM + COUNTED):
                body, headers = trace.delivery(number)
                calls.clear()
                answer = await server.send(path, body, headers=headers, key=None, client=client)
                assert answer.status == 200
                await asyncio.sleep(0.01)
                requests.append(list(calls))
    check(trace, "webhook", requests)


async def test_a_preferences_page_stays_within_its_bound(tmp_path: Path) -> None:
    calls: list[Any] = []
    counts = []
    with recorded(calls, tracer().Call):
        async with served(tmp_path, GROUPS) as server, await server.connect() as client:
            await server.track(client)
            for _ in range(WARM + COUNTED):
                link = page_of(members("u"))
                calls.clear()
                answer = await server.send(link, method="GET", key=None, client=client)
                assert answer.status == 200
                counts.append(len(calls))
    assert min(counts[WARM:]) <= MOST_OF_PAGE
