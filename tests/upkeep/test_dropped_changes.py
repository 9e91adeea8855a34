# SPDX-License-Identifier: Apache-2.0
"""The log and the metrics show the changes of profiles that a limit dropped."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from engage.monitoring.sampler import LINE_SECONDS
from engage.upkeep.dropped_changes import report_dropped_changes
from support.memory_store import MemoryStore
from support.pipeline import CountingMetrics


async def test_the_first_ones_are_logged_at_once_and_more_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, metrics, now = MemoryStore(), CountingMetrics(), 0.0
    reporting = asyncio.create_task(
        report_dropped_changes(store, metrics, every=0, clock=lambda: now)
    )

    async def logged() -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    assert await logged() == []
    store.dropped_changes = 2
    (line,) = await logged()
    assert line.startswith("2 changes of users, visitors or groups were dropped")
    assert "limits.visitors" in line
    store.dropped_changes += 1
    now = 1.0
    assert await logged() == []
    store.dropped_changes += 1
    now = LINE_SECONDS - 0.1
    assert await logged() == []
    now = LINE_SECONDS
    (line,) = await logged()
    assert line.startswith("2 changes")
    now = 10 * LINE_SECONDS
    assert await logged() == []
    assert metrics.lost == {"profile_change": 4}
    reporting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reporting
