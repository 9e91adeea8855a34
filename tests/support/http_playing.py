# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of ``http_corpus``, and notes what a server does with each.

:func:`play` returns the answers, log lines and metrics, with dates, ids, times and hashes replaced
by names. ``contract/test_corpus.py`` compares that with ``tests/data/http_corpus.json``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import logging
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

from engage.api import StorageUnavailable
from engage.audit import Actor
from engage.keys.changes import create_key
from engage.monitoring.logs import ACCESS
from engage.monitoring.metrics import Metrics
from engage.monitoring.sampler import Refusal
from engage.pipeline.pipeline import Pipeline
from support.http_client import DEADLINE, RawClient
from support.http_corpus import HALF_CLOSE, HANG_UP, PAUSE, READ, READ_HEAD, WAIT, Group
from support.server_inprocess import Serving, Valve, serving
from support.server_process import KEY
from support.waiting import eventually

__all__ = ["play"]


class _Recording(Metrics):
    """Notes what is counted, and what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[list[Any]] = []

    def request(self, route: str, status: int, seconds: float) -> None:
        assert 0 <= seconds < DEADLINE
        self.effects.append(["request", route, status])

    def event(
        self,
        kind: str,
        outcome: str,
        count: int = 1,
        workspace_id: str = "",
        write_key_id: str | None = None,
    ) -> None:
        self.effects.append(["event", kind, outcome, count, workspace_id, write_key_id])

    def refused(self, refusal: Refusal) -> None:
        self.effects.append(["refused", dataclasses.asdict(refusal)])

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        if name == "webhook_deliveries":
            self.effects.append(["webhook", *labels])


class _Lines(logging.Handler):
    """Notes the lines of the log among the metrics."""

    def __init__(self, effects: list[list[Any]]) -> None:
        super().__init__()
        self._effects = effects

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == ACCESS:
            names = ("method", "route", "status", "workspace", "writeKeyId", "code", "events")
            fields = {name: getattr(record, name) for name in names if hasattr(record, name)}
            self._effects.append(["log", fields, _plain(record.requestId)])  # type: ignore[attr-defined]
        elif record.name.startswith("engage.handlers"):
            self._effects.append(["log", record.levelname, record.getMessage()])


@contextlib.contextmanager
def _logged(effects: list[list[Any]]) -> Iterator[None]:
    handler = _Lines(effects)
    root, access = logging.getLogger(), logging.getLogger(ACCESS)
    # A test before may have configured the log.
    level, propagates, handlers = access.level, access.propagate, access.handlers
    root.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate, access.handlers = True, []
    try:
        yield
    finally:
        root.removeHandler(handler)
        access.setLevel(level)
        access.propagate, access.handlers = propagates, handlers


_NAMES: Final = (
    (re.compile(r"\r\nDate: [^\r]*"), "\r\nDate: <date>"),
    (re.compile(r"\b[0-9a-f]{24}\b"), "<id>"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}"), "<uuid>"),
    (re.compile(r'(?<=Etag: )(W/)?"[0-9a-f]{16}'), r'\1"<hash>'),
    (re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]*Z"), "<time>"),
    (re.compile(r"Retry-After: \d+"), "Retry-After: <seconds>"),
)


def _plain(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


async def _answer(client: RawClient, method: str) -> str:
    """Read an answer as it is; an empty text is the end of the connection."""
    async with asyncio.timeout(DEADLINE):
        try:
            data = await client.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return ""
        length = re.search(rb"\r\nContent-Length: (\d+)", data)
        status = int(data[9:12])
        if length is not None and method != "HEAD" and status >= 200 and status not in (204, 304):
            data += await client.reader.readexactly(int(length[1]))
        text = _plain(data.decode("latin-1"))
        # The pages and scripts have other lengths with each change.
        return re.sub(r"(<hash>[\s\S]*Content-Length: )\d+", r"\1<length>", text)


async def _play(server: Serving, steps: Sequence[bytes | str], valve: Valve) -> list[str]:
    listener = server.app.listener
    assert listener is not None

    def busy() -> bool:
        return any(connection.serving for connection in listener.connections)

    answers = []
    if HANG_UP in steps:
        valve.gate.clear()
    async with await server.connect() as client:
        for step in steps:
            if isinstance(step, bytes):
                await client.send(step)
            elif step in (READ, READ_HEAD):
                answers.append(await _answer(client, "HEAD" if step == READ_HEAD else "POST"))
            elif step == HALF_CLOSE:
                client.half_close()
            elif step == HANG_UP:
                peer = client.writer.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.writer.transport.abort()
            elif step == WAIT:
                await eventually(busy)
            elif step == PAUSE:
                await asyncio.sleep(0.05)
        if HANG_UP not in steps:
            try:
                async with asyncio.timeout(0.05):
                    rest = await client.reader.read(100)
                    answers.append(f"more: {rest!r}" if rest else "closed")
            except TimeoutError:
                answers.append("open")
            except ConnectionError:
                answers.append("reset")
    if HANG_UP in steps:
        await asyncio.sleep(0.05)
        valve.gate.set()
        await asyncio.sleep(0.3)
    await eventually(lambda: not listener.connections)
    return answers


@contextlib.contextmanager
def _state(server: Serving, group: Group, valve: Valve) -> Iterator[None]:
    """Keep a server in the state that a group wants."""
    if group.before == "crash":
        crash = mock.AsyncMock(side_effect=RuntimeError("a secret"))
        with mock.patch.multiple(Pipeline, event=crash, subscriptions=crash):
            yield
        return
    if group.before == "no storage":
        valve.error = StorageUnavailable("down")
    elif group.before == "drain":
        server.app.start_draining()
    yield


async def play(folder: Path, group: Group) -> dict[str, Any]:
    """Send the requests of a group to a server, one after the other.

    :return: name of a request → its answers, and the metrics and log lines that it caused.
    """
    metrics = _Recording()
    valve = Valve("write")
    happened: dict[str, Any] = {}
    async with serving(
        folder,
        server=group.server,
        config_extra=group.config_extra,
        metrics=metrics,
        meddle=valve,
    ) as server:
        with _state(server, group, valve), _logged(metrics.effects):
            for name, steps in group.cases.items():
                metrics.effects.clear()
                sent, key = steps, KEY
                if group.before == "new keys":
                    sent, key = await _with_new_key(server, name, steps)
                try:
                    answers = await _play(server, sent, valve)
                except Exception as error:
                    raise AssertionError(f"the request {name!r} failed") from error
                answers = [answer.replace(key, "<key>") for answer in answers]
                effects = json.loads(
                    json.dumps(metrics.effects).replace(key[:4] + "\\u2026", "<key>")
                )
                happened[name] = {"answers": answers, "effects": effects}
        valve.error = None
        happened["stored"] = sorted(_plain(event.message_id) for event in await server.events())
    return happened


async def _with_new_key(
    server: Serving, name: str, steps: Sequence[bytes | str]
) -> tuple[list[bytes | str], str]:
    """Create a key in the store, put it into the requests of a case, and return both."""
    made = await create_key(
        server.app.store,
        server.app.config.workspaces,
        "acme",
        name.replace(" ", "-"),
        actor=Actor(who="ann", origin="test"),
        now=1_795_253_400_000,
    )
    basic = base64.b64encode(f"{made.key}:".encode())
    sent: list[bytes | str] = []
    for step in steps:
        if isinstance(step, bytes):
            step = re.sub(rb"Basic NEW-KEY-\d+", b"Basic " + basic, step)
            step = re.sub(rb"NEW-KEY-\d+", made.key.encode(), step)
            body = step.partition(b"\r\n\r\n")[2]
            step = step.replace(b"Length: NAMED", b"Length: %d" % len(body))
        sent.append(step)
    return sent, made.key
