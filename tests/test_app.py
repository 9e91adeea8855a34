# SPDX-License-Identifier: Apache-2.0
"""The composition of the server; ``contract/`` tests what it serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engage.api import DROP, Event
from engage.app import build
from engage.config import Config, load
from support.exports import registry
from support.http_client import listening
from support.server_inprocess import Meddling, Serving
from support.server_process import config_text
from support.waiting import eventually


def configured(folder: Path, **arguments: Any) -> Config:
    """Return the config of ``start_server``."""
    path = folder / "engage.toml"
    path.write_text(config_text(**arguments))
    return load(path)


class Plugged(Meddling):
    """The installed plugins with an observer and a transform."""

    def __init__(self) -> None:
        super().__init__(lambda store: None)
        self.told: list[str] = []

    async def observe(self, events: Sequence[Event]) -> None:
        """See :data:`engage.api.Observer`."""
        self.told += [event.message_id for event in events]

    def make_observers(self, config: Config) -> Any:
        """See :meth:`engage.registry.Registry.make_observers`."""
        return [("teller", self.observe)]

    def make_transforms(self, config: Config) -> Any:
        """See :meth:`engage.registry.Registry.make_transforms`."""
        return [("dropper", lambda event: DROP if event["event"] == "secret" else event)]


async def test_an_app_opens_serves_and_closes(tmp_path: Path) -> None:
    """On several sockets. It may be closed twice, or without being opened."""
    app = build(configured(tmp_path), registry())
    await app.close()
    app = build(configured(tmp_path), registry())
    await app.open()
    socks = [listening(), listening()]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        await app.serve(sock)
    for port in ports:
        answer = await Serving(app, port).track(messageId=f"m{port}")
        assert answer.status == 200
    await app.stop_accepting()
    assert await app.drain(30.0)
    await app.close()
    await app.close()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            await Serving(app, port).connect()


async def test_transforms_and_observers_are_called(tmp_path: Path) -> None:
    """A transform drops an event, and the observer gets each stored event once."""
    plugins = Plugged()
    app = build(configured(tmp_path), plugins)  # type: ignore[arg-type]
    await app.open()
    sock = listening()
    await app.serve(sock)
    server = Serving(app, sock.getsockname()[1])
    try:
        for message_id, name in (("a", "shown"), ("b", "secret"), ("a", "shown")):
            assert (await server.track(messageId=message_id, event=name)).status == 200
        await eventually(lambda: plugins.told == ["a"])
        assert [event.message_id for event in await server.events()] == ["a"]
    finally:
        await app.close()
    assert plugins.told == ["a"]
