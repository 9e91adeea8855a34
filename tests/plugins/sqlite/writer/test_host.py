# SPDX-License-Identifier: Apache-2.0
"""Whose settings the writer process has, and who can use it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engage.api import StorageUnavailable
from engage.testing import event, identify
from engage.testing.factories import store_all
from engage_plugins.sqlite.writer import client as writer_client
from engage_plugins.sqlite.writer import protocol
from engage_plugins.sqlite.writer.writer import AVAILABLE
from support.writer import make, opened, pid_of

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


async def test_the_settings_of_the_first_server_apply(tmp_path: Path) -> None:
    first = make(tmp_path, identifiers=("email",))
    other = make(tmp_path, identifiers=("nick",))
    async with opened(first), opened(other):
        assert pid_of(first) == pid_of(other)
        await store_all(other, identify("1", "u", traits={"email": "e", "nick": "n"}))
        assert await first.find_users("acme", "email", ["e"]) == {"e": ["u"]}
        assert not await first.find_users("acme", "nick", ["n"])


async def test_a_command_changes_no_settings(tmp_path: Path) -> None:
    server = make(tmp_path, identifiers=("email",))
    async with opened(server), opened(make(tmp_path, identifiers=("nick",))) as copy:
        reading = make(tmp_path, identifiers=("nick",))
        await reading.open(create=False)
        for number, store in enumerate((copy, reading)):
            await store_all(store, identify(str(number), f"u{number}", traits={"email": "e"}))
        assert await server.find_users("acme", "email", ["e"]) == {"e": ["u0", "u1"]}
        await reading.close()


async def test_a_server_takes_over_the_process_of_a_command(tmp_path: Path) -> None:
    async with opened(make(tmp_path, "thread")) as store:
        await store_all(store, event("m"))
    command = make(tmp_path)
    await command.open(create=False)
    await store_all(command, identify("1", "u", traits={"email": "e"}))
    async with opened(make(tmp_path, identifiers=("email",))) as server:
        assert await server.find_users("acme", "email", ["e"]) == {"e": ["u"]}
        assert pid_of(server) == pid_of(command)
    await command.close()


async def test_a_client_of_another_protocol_waits_until_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(make(tmp_path)) as store:
        pid = pid_of(store)
        with monkeypatch.context() as patch:
            patch.setattr(writer_client, "PROTOCOL", protocol.PROTOCOL + 1)
            other = make(tmp_path, timeout=1)
            with pytest.raises(StorageUnavailable, match=f"process {pid} is of another version"):
                await other.open(create=True)
        await store_all(store, event("m"))
        os.kill(pid, signal.SIGKILL)
        await other.open(create=True)
        await other.close()
