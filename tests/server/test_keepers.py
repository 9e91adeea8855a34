# SPDX-License-Identifier: Apache-2.0
"""The console and the helper process are started again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engage.server import keepers
from engage.server.child import Setup
from support.writer import until


class Quick(keepers.Keeper):
    what = "the process"
    kind = "process"
    restart_pause = 0.01
    max_restart_pause = 60.0


@pytest.mark.parametrize(("hung", "often"), [(True, True), (False, False)])
async def test_a_process_that_was_killed_because_it_hung_did_not_die(
    monkeypatch: pytest.MonkeyPatch, hung: bool, often: bool
) -> None:
    """Its replacement never waits longer; that of one that dies again and again does."""
    runs = 0

    async def start(setup: Setup) -> Any:
        nonlocal runs
        runs += 1
        started = asyncio.get_running_loop().create_future()
        started.set_result(True)
        ended = asyncio.sleep(0, -9)
        return SimpleNamespace(
            started=started,
            report=(),
            reason=None,
            hung=hung,
            process=SimpleNamespace(pid=1, wait=lambda: ended),
            writer=SimpleNamespace(close=lambda: None),
        )

    monkeypatch.setattr(keepers, "start_child", start)
    restarts: list[str] = []
    keeper = Quick(SimpleNamespace(), restarts.append)  # type: ignore[arg-type]
    running = asyncio.create_task(keeper.run())
    if often:
        await until(lambda: runs > 12)
    else:
        await asyncio.sleep(0.7)
        assert runs <= 12
    keeper._child = None
    keeper.stop()
    await running
    # It may be stopped between the count of a restart and the restart.
    assert restarts in ([Quick.kind] * (runs - 1), [Quick.kind] * runs)
